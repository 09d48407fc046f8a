"""Builds one broker from a configuration: the layers, the listeners around them, and an orderly shutdown.

    listeners ─► Connection Point ─► Access Point ─► Matcher ─► Exit Point ─► Connection Point ─► listeners
                                                                        └─► queue point ─► logical queues ─► listeners

On SIGTERM or SIGINT the broker stops accepting notifications, gives subscribers `drain_s` seconds to take what was
acknowledged, and exits. A bug inside a layer also stops the broker, with an error: if it continued, it would break its
delivery guarantees.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import resource
import secrets
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from tidegate.broker.knowledge import SemanticBroker
from tidegate.broker.log_lines import log_to_stderr
from tidegate.broker.warm_up import warm_up
from tidegate.client import connect
from tidegate.cluster.embedded_cluster import EmbeddedCluster
from tidegate.cluster.probe import Probe, open_probe
from tidegate.cluster.scaling import Scaling
from tidegate.config import Config
from tidegate.errors import ConfigError, Refusals
from tidegate.filters import Filter
from tidegate.layers.connection_point import Bounds
from tidegate.listeners.connections import ConnectionStatistics
from tidegate.listeners.http.metrics import make_registry
from tidegate.listeners.http.rates import RecentRates
from tidegate.listeners.http.server import HttpListener
from tidegate.listeners.native import NativeListener
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import Definition
from tidegate.queues.store import Store
from tidegate.queues.stores.lmdb_store import LmdbStore
from tidegate.queues.upkeep import maintain_queues
from tidegate.security.private_files import make_new_files_private

if TYPE_CHECKING:
    from tidegate.cluster.broker_host import ClusterHost

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
BINDINGS_POLL_S: Final = 0.02
COMPILE_NOTICE_AFTER_S: Final = 1.5
LISTENERS: Final = 3
OTHER_FILES: Final = 256
COLLECT_AFTER_OBJECTS: Final = 50_000
REFUSALS_LOGGED_S: Final = 10.0


# Creates the host from its bounds, a clock, and a callback that receives a failure of a layer.
MakeHost: TypeAlias = Callable[
    [Bounds, Callable[[], float], Callable[[Exception], None]], "EmbeddedCluster | ClusterHost"
]


class Ready(msgspec.Struct, frozen=True):
    """The addresses on which a broker listens. `ssap` is empty when the broker has no knowledge base."""

    native: str
    http: str
    ssap: str = ""


class Broker:
    """One broker process. `run` serves until `stop` is called or a signal arrives."""

    def __init__(
        self, config: Config, token: str | None, make_host: MakeHost | None = None, *, redis_password: str = ""
    ) -> None:
        self._config = config
        self._started_s = time.time()
        self._incarnation = secrets.token_hex(4)
        self._token = token
        self._host = (make_host or EmbeddedCluster)(_bounds(config), time.monotonic, self._fail)
        self._scaling = Scaling(self._host.layers, self._open_probe)
        self._queues = LogicalQueues(
            _queue_store(config, redis_password), config.queues_bytes_max, config.queue_attribute_names_max
        )
        self._queues.on_change = self._bind
        self._queues.until_in_force = self._wait_until_bound
        self._feeder = self._host.use_feeder(self._queues)
        self._semantic = SemanticBroker(config, token, self._host, self._incarnation) if config.ssap_port >= 0 else None
        self._rates = RecentRates(time.monotonic())
        self._refusals_logged_s = 0.0
        self._native = NativeListener(self._host, self._queues, config, token, self.status)
        self._http = HttpListener(
            self._host,
            self._queues,
            config,
            token,
            self._incarnation,
            self.status,
            make_registry(
                self._statistics,
                self._connections,
                self._semantic.statistics if self._semantic else None,
                [refusals.counts for refusals in self._refusals()],
                self._queues,
            ),
            self._scale,
            self._rates,
        )
        self._stopping = asyncio.Event()
        self._failure: Exception | None = None
        self._addresses: Ready | None = None

    async def run(self, on_ready: Callable[[Ready], None]) -> None:
        try:
            await self._serve(on_ready)
        except BaseExceptionGroup as group:
            # A task group wraps the error that ends it. The caller needs that one error, which carries its remedy.
            raise group.exceptions[0] from None
        if self._failure is not None:
            raise self._failure

    async def _serve(self, on_ready: Callable[[Ready], None]) -> None:
        tls = _tls_context(self._config)
        await self._queues.open()
        try:
            await self._serve_queues(on_ready, tls)
        finally:
            await self._queues.close()

    async def _serve_queues(self, on_ready: Callable[[Ready], None], tls: ssl.SSLContext | None) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._stop_on_signals()
            await self._wait_until_bound()
            named = await self._semantic.open() if self._semantic is not None else None
            native_port = await self._listen(self._native.start(tls), "native_port", self._config.native_port)
            http_port = await self._listen(self._http.start(tasks, tls, named), "http_port", self._config.http_port)
            ssap_port = None
            if self._semantic is not None:
                ssap_port = await self._listen(self._semantic.start(tls), "ssap_port", self._config.ssap_port)
            ticking = [tasks.create_task(self._tick()), tasks.create_task(maintain_queues(self._queues))]
            self._addresses = self._ready(native_port, http_port, ssap_port)
            self._host.address = self._addresses.native
            on_ready(self._addresses)
            await self._stopping.wait()
            await self._shut_down()
            for task in ticking:
                task.cancel()

    async def _wait_until_bound(self) -> None:
        """Waits until the layers, which may run in other processes, know all queues that are bound now."""
        wanted = self._host.queue_point.pending_changes
        while wanted & self._host.queue_point.pending_changes and not self._stopping.is_set():
            await asyncio.sleep(BINDINGS_POLL_S)

    def stop(self) -> None:
        self._stopping.set()

    def end(self, error: Exception | None) -> None:
        """Stops the broker because of an outside failure, which `run` then raises."""
        self._failure = self._failure or error
        self.stop()

    def status(self) -> dict[str, Any]:
        """Returns configuration, epoch and load, as `GET /v1/layers` and `tidegate top` show them."""
        return {
            "broker": self._incarnation,
            "uptime_s": round(time.time() - self._started_s, 3),
            **({"addresses": msgspec.structs.asdict(self._addresses)} if self._addresses is not None else {}),
            **self._host.status(),
            **self._scaling.status(),
            "load": {layer: asdict(statistics) for layer, statistics in self._host.statistics().items()},
            "queues": self._queues.activity(),
            "queue_alarms": self._queues.alarms(),
            **({"knowledge": self._semantic.status()} if self._semantic is not None else {}),
        }

    async def _scale(self, counts: Mapping[str, int]) -> dict[str, Any]:
        return (await self._scaling.change(lambda wanted: msgspec.structs.replace(wanted, **counts))).to_dict()

    def _open_probe(self) -> AbstractAsyncContextManager[Probe | None]:
        return open_probe(
            lambda: connect(self._host.address, name="tidegate-probe", token=self._token),
            lambda error: log.warning("changing the layers without a probe: %s", error),
        )

    def _connections(self) -> dict[str, ConnectionStatistics]:
        """Returns the connection statistics of each listener."""
        listeners = {"native": self._native.places.statistics(), "http": self._http.places.statistics()}
        return listeners | ({"ssap": self._semantic.connections()} if self._semantic is not None else {})

    def _statistics(self) -> dict[str, Any]:
        """Returns the statistics of the layers and of all queues together, for metrics."""
        return {**self._host.statistics(), "queues": self._queues.totals()}

    def _bind(self, queue: str, definition: Definition | None, is_heard: bool) -> None:
        text = definition.settings.filter if definition is not None else None
        if text is not None and is_heard and self._config.coordinator:
            self._feeder.follow(queue)
        self._host.bind(queue, Filter.parse(text) if text is not None else None)

    def _fail(self, error: Exception) -> None:
        log.critical("a layer failed; stopping the broker: %r", error)
        self._failure = error
        self.stop()

    async def _listen(self, starting: Any, setting: str, port: int) -> int:
        try:
            return int(await starting)
        except OSError as error:
            raise ConfigError(
                "C409",
                f"cannot listen on {self._config.bind}:{port}: {error.strerror or error}",
                f"is another broker already running? choose another {setting}, or 0 for any free port",
            ) from error

    def _ready(self, native_port: int, http_port: int, ssap_port: int | None) -> Ready:
        host = f"[{self._config.bind}]" if ":" in self._config.bind else self._config.bind
        scheme, web = ("tidegate+tls", "https") if self._config.tls_cert else ("tidegate", "http")
        return Ready(
            f"{scheme}://{host}:{native_port}",
            f"{web}://{host}:{http_port}",
            f"ssap://{host}:{ssap_port}" if ssap_port is not None else "",
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._host.tick()
            now_s = asyncio.get_running_loop().time()
            self._native.tick(now_s)
            self._sample_rates(time.monotonic())
            self._log_refusals(now_s)
            if self._semantic is not None:
                self._semantic.tick(now_s)

    def _sample_rates(self, now_s: float) -> None:
        if self._rates.is_due(now_s):
            edge = self._host.connection_point.statistics()
            self._rates.observe(now_s, time.time(), edge.accepted, edge.delivered)

    def _refusals(self) -> list[Refusals]:
        refusals = [self._host.refusals, self._queues.refusals]
        return [*refusals, self._semantic.refusals] if self._semantic is not None else refusals

    def _log_refusals(self, now_s: float) -> None:
        """Logs one line for each error code every `REFUSALS_LOGGED_S`, so that operators see which bound is reached."""
        if now_s < self._refusals_logged_s + REFUSALS_LOGGED_S:
            return
        self._refusals_logged_s = now_s
        for refusals in self._refusals():
            for code, (count, message) in refusals.take_recent().items():
                log.warning("refused code=%s count=%d last=%s", code, count, message)

    def _stop_on_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)

    async def _shut_down(self) -> None:
        log.info("shutting down drain_s=%g", self._config.drain_s)
        deadline_s = asyncio.get_running_loop().time() + self._config.drain_s
        await self._queues.stop()
        if self._semantic is not None:
            await self._semantic.stop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._native.stop(deadline_s))
            tasks.create_task(self._http.stop())
        await self._feeder.close(deadline_s)
        if self._semantic is not None:
            await self._semantic.flush()
        log.info("stopped")


def serve(config: Config, token: str | None, redis_password: str, on_ready: Callable[[Ready], None]) -> None:
    """Runs a broker in this process until a signal stops it."""
    make_new_files_private()
    log_to_stderr(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    _log_crashes(config)
    _tls_context(config)
    _allow_open_files(LISTENERS * config.connections_max + OTHER_FILES)
    prepare_kernels()
    _collect_rarely()

    async def main() -> None:
        if not config.coordinator:
            await Broker(config, token, redis_password=redis_password).run(on_ready)
            return
        from tidegate.cluster.broker_host import BrokerLink  # ZooKeeper's client is an extra: tidegate[cluster]

        async with BrokerLink(config.coordinator, config.bind) as link:
            broker = Broker(config, token, link.make_host, redis_password=redis_password)
            link.on_end = broker.end
            await broker.run(on_ready)

    _run(main())


def prepare_kernels() -> None:
    """Loads the compiled kernels. The first start compiles them, and prints a notice if that takes long."""
    notice = threading.Timer(
        COMPILE_NOTICE_AFTER_S,
        lambda: print("compiling the kernels: about 90 s, only once on this machine", file=sys.stderr, flush=True),
    )
    notice.start()
    try:
        warm_up()
    finally:
        notice.cancel()


def _run(main: Any) -> None:
    """Runs the coroutine on uvloop if it is installed (the extra `fast`), otherwise on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def _bounds(config: Config) -> Bounds:
    return Bounds(
        outbox_notifications_max=config.outbox_notifications_max,
        outbox_bytes_max=config.outbox_bytes_max,
        outboxes_bytes_max=config.outboxes_bytes_max,
        block_s=config.block_s,
        publishers_max=config.publishers_max,
        publishers_bytes_max=config.publishers_bytes_max,
        publisher_window_bytes=config.publisher_window_bytes,
        window_bytes=config.window_bytes,
        sessions_max=config.connections_max,
        subscriptions_max=config.subscriptions_max,
        subscriptions_per_session_max=config.subscriptions_per_connection_max,
        filter_bytes_max=config.subscriptions_bytes_max,
        filter_bytes_per_session_max=config.subscriptions_per_connection_bytes_max,
        names_per_session_max=config.attribute_names_per_connection_max,
    )


def _queue_store(config: Config, redis_password: str) -> Store:
    if config.queue_store == "lmdb":
        return LmdbStore(
            Path(config.data),
            is_required=config.require_store,
            covers_bytes_max=config.queue_publishers_bytes_max,
        )
    from tidegate.queues.stores.redis_store import RedisStore  # its client is an extra: tidegate[redis]

    return RedisStore(config.queue_store, redis_password)


def _log_crashes(config: Config) -> None:
    """Prints a Python traceback when a signal kills the process.

    Truncating a file that LMDB has mapped raises SIGBUS. The traceback then names the caller of LMDB.
    """
    if config.queue_store == "lmdb":
        log.info(
            "queues are stored in %s; after a crash with SIGBUS, run: tidegate queue verify",
            Path(config.data).absolute(),
        )
    faulthandler.enable()


def _collect_rarely() -> None:
    """Makes the garbage collector run rarely, and skip all objects that exist after startup.

    Objects of a batch live as long as the batch. Searching them for cycles after every 700 objects took a fifth of the
    time of a range read. Objects from startup live as long as the process, so they are frozen.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)


def _allow_open_files(wanted: int) -> None:
    """Raises the limit of open files, as far as the hard limit allows.

    Every connection needs an open file, and the default soft limit is often 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tls_context(config: Config) -> ssl.SSLContext | None:
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "C410",
            f"tls_cert {config.tls_cert!r} and tls_key {config.tls_key!r} cannot be used: {error}",
            "name a certificate and its private key, both in PEM format",
        ) from error
    return context
