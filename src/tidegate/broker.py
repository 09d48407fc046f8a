"""Puts one broker together from a configuration: the layers, the listeners around them, and an orderly end.

    listeners ─► Connection Point ─► Access Point ─► Matcher ─► Exit Point ─► Connection Point ─► listeners
                                                                        └─► queue point ─► logical queues ─► listeners

On SIGTERM or SIGINT it stops taking notifications, gives the subscribers `drain_s` to take what was acknowledged, and
ends. A mistake of ours inside a layer ends it as well, with an error: a broker that goes on would break its promises.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import secrets
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.cluster.embedded_cluster import EmbeddedCluster
from tidegate.cluster.probed_host import ProbedHost
from tidegate.config import Config
from tidegate.errors import ConfigError
from tidegate.filters import Filter
from tidegate.layers.connection_point import Bounds
from tidegate.layers.warm_up import warm_up
from tidegate.listeners.http import HttpListener
from tidegate.listeners.native import NativeListener
from tidegate.metrics import make_registry
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import Definition
from tidegate.queues.store import Store
from tidegate.queues.stores.lmdb_store import LmdbStore
from tidegate.rates import RecentRates
from tidegate.semantic_broker import SemanticBroker

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
BINDINGS_LOOK_S: Final = 0.02
COMPILING_SHOWS_AFTER_S: Final = 1.5
OTHER_FILES: Final = 256
COLLECT_AFTER_OBJECTS: Final = 50_000


# How a host is made, from bounds, a clock, and who is told of a failure.
MakeHost: TypeAlias = Callable[[Bounds, Callable[[], float], Callable[[Exception], None]], ProbedHost]


class Ready(msgspec.Struct, frozen=True):
    """Where a broker listens, once it does. Without a knowledge base there is no SSAP."""

    native: str
    http: str
    ssap: str = ""


class Broker:
    """One broker process. `run` serves until `stop` is called or a signal comes."""

    def __init__(self, config: Config, token: str | None, make_host: MakeHost | None = None) -> None:
        self._config = config
        self._started_s = time.time()
        self._incarnation = secrets.token_hex(4)
        self._host = (make_host or EmbeddedCluster)(_bounds(config), time.monotonic, self._fail)
        self._host.token = token
        self._queues = LogicalQueues(_queue_store(config))
        self._queues.on_change = self._bind
        self._queues.until_in_force = self._until_bound
        self._feeder = self._host.use_feeder(self._queues)
        self._semantic = SemanticBroker(config, token, self._host, self._incarnation) if config.ssap_port >= 0 else None
        self._rates = RecentRates(time.monotonic())
        self._native = NativeListener(self._host, self._queues, config, token, self.status)
        self._http = HttpListener(
            self._host,
            self._queues,
            config,
            token,
            self._incarnation,
            self.status,
            make_registry(self._host.statistics, self._semantic.statistics if self._semantic else None),
            self._host.scale,
            self._rates,
        )
        self._stopping = asyncio.Event()
        self._failure: Exception | None = None
        self._addresses: Ready | None = None

    async def run(self, on_ready: Callable[[Ready], None]) -> None:
        try:
            await self._serve(on_ready)
        except BaseExceptionGroup as group:
            # A task group wraps what ends it; whoever starts a broker wants the one error with its cure.
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
            await self._until_bound()
            named = await self._semantic.open() if self._semantic is not None else None
            native_port = await self._listen(self._native.start(tls), "native_port", self._config.native_port)
            http_port = await self._listen(self._http.start(tasks, named), "http_port", self._config.http_port)
            ssap_port = None
            if self._semantic is not None:
                ssap_port = await self._listen(self._semantic.start(tls), "ssap_port", self._config.ssap_port)
            ticking = tasks.create_task(self._tick())
            self._addresses = self._ready(native_port, http_port, ssap_port)
            self._host.address = self._addresses.native
            on_ready(self._addresses)
            await self._stopping.wait()
            await self._shut_down()
            ticking.cancel()

    async def _until_bound(self) -> None:
        """Until the layers, which may be elsewhere, know of all queues that are bound now."""
        wanted = self._host.queue_point.pending_changes
        while wanted & self._host.queue_point.pending_changes and not self._stopping.is_set():
            await asyncio.sleep(BINDINGS_LOOK_S)

    def stop(self) -> None:
        self._stopping.set()

    def end(self, error: Exception | None) -> None:
        """For a reason that is not its own."""
        self._failure = self._failure or error
        self.stop()

    def status(self) -> dict[str, Any]:
        """Configuration, epoch and load, as `GET /v1/layers` and `tidegate top` show them."""
        return {
            "broker": self._incarnation,
            "uptime_s": round(time.time() - self._started_s, 3),
            **({"addresses": msgspec.structs.asdict(self._addresses)} if self._addresses is not None else {}),
            **self._host.status(),
            **self._host.scaling(),
            "load": {layer: asdict(statistics) for layer, statistics in self._host.statistics().items()},
            "queues": self._queues.activity(),
            **({"knowledge": self._semantic.status()} if self._semantic is not None else {}),
        }

    def _bind(self, queue: str, definition: Definition | None, is_heard: bool) -> None:
        text = definition.settings.filter if definition is not None else None
        if text is not None and is_heard and self._config.coordinator:
            self._feeder.follow(queue)
        self._host.bind(queue, Filter.parse(text) if text is not None else None)

    def _fail(self, error: Exception) -> None:
        log.critical("a layer has failed, the broker ends: %r", error)
        self._failure = error
        self.stop()

    async def _listen(self, starting: Any, setting: str, port: int) -> int:
        try:
            return int(await starting)
        except OSError as error:
            raise ConfigError(
                "C409",
                f"cannot listen on {self._config.bind}:{port}: {error.strerror or error}",
                f"choose another {setting}, 0 for any free one; is a broker running already?",
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
            self._look_at_rates(time.monotonic())
            if self._semantic is not None:
                self._semantic.tick(now_s)

    def _look_at_rates(self, now_s: float) -> None:
        if self._rates.is_due(now_s):
            edge = self._host.connection_point.statistics()
            self._rates.observe(now_s, time.time(), edge.accepted, edge.delivered)

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


def serve(config: Config, token: str | None, on_ready: Callable[[Ready], None]) -> None:
    """Runs a broker in this process until a signal ends it."""
    logging.basicConfig(
        stream=sys.stderr, level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    _tls_context(config)
    _allow_open_files(2 * config.connections_max + OTHER_FILES)
    prepare_kernels()
    _collect_rarely()

    async def main() -> None:
        if not config.coordinator:
            await Broker(config, token).run(on_ready)
            return
        from tidegate.cluster.broker_host import BrokerLink  # ZooKeeper's client is an extra: tidegate[cluster]

        async with BrokerLink(config.coordinator, config.bind) as link:
            broker = Broker(config, token, link.make_host)
            link.on_end = broker.end
            await broker.run(on_ready)

    _run(main())


def prepare_kernels() -> None:
    """Loads the compiled kernels; compiles them on the first start, and says so when it takes long."""
    notice = threading.Timer(
        COMPILING_SHOWS_AFTER_S,
        lambda: print("compiling the kernels, once on this machine: about 90 s", file=sys.stderr, flush=True),
    )
    notice.start()
    try:
        warm_up()
    finally:
        notice.cancel()


def _run(main: Any) -> None:
    """With uvloop where it is installed (the extra `fast`), with asyncio's own loop otherwise."""
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
        block_s=config.block_s,
        publishers_max=config.publishers_max,
        publisher_window_bytes=config.publisher_window_bytes,
        window_bytes=config.window_bytes,
        sessions_max=config.connections_max,
        subscriptions_max=config.subscriptions_max,
        subscriptions_per_session_max=config.subscriptions_per_connection_max,
    )


def _queue_store(config: Config) -> Store:
    if config.queue_store == "lmdb":
        return LmdbStore(Path(config.data))
    from tidegate.queues.stores.redis_store import RedisStore  # its client is an extra: tidegate[redis]

    return RedisStore(config.queue_store)


def _collect_rarely() -> None:
    """What a batch makes lives as long as the batch: looking for cycles among it after every 700 objects took a fifth
    of the time of a range read. What the start has made stays for good, and is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)


def _allow_open_files(wanted: int) -> None:
    """As many connections as the settings allow need as many open files: the soft limit is often 1024."""
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
            "give a certificate and its key, both in PEM",
        ) from error
    return context
