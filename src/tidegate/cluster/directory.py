"""Directory: the live slices, their endpoints, and the coordinators' decisions. It is small and stored in ZooKeeper.

| path | content | lifetime |
|---|---|---|
| slices/LAYER/n-NUMBER | endpoint of a slice; its name is LAYER-(NUMBER + 1), never used again | its process |
| leader | name and endpoint of the coordinator | its process |
| state | the coordinators' state (`reconfiguration.State`) | permanent |
| wanted | the wanted number of slices of each layer, and the slices to be replaced | permanent |

No notification and no subscription passes here. The client's ZooKeeper threads store the news of every change and wake
the event loop. A step of the coordinator, which every process watches, therefore costs each of them one read.

What may go wrong here: the connection is lost. While ZooKeeper is unavailable, notifications flow but the configuration
cannot change; calls wait. If the session has expired when ZooKeeper returns, the others have declared this process
dead, and it must end: the directory calls `on_expired`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.retry import KazooRetry

from tidegate.cluster.planning import Wanted
from tidegate.errors import ConfigError, Unavailable
from tidegate.layers.layer import Layer
from tidegate.layers.reconfiguration import State

log = logging.getLogger(__name__)
# Kazoo would log several times a second that ZooKeeper is unavailable; this module logs it once.
logging.getLogger("kazoo").setLevel(logging.CRITICAL)

LAYERS: Final = (*Layer, "connection-point")
SESSION_S: Final = 4.0
CONNECT_S: Final = 10.0
RETRY_S: Final = 0.2
DEFAULT_ROOT: Final = "/tidegate"

T = TypeVar("T")


class Leader(msgspec.Struct, frozen=True):
    name: str
    endpoint: str


class Directory:
    """Calls `on_change` in the event loop whenever something may have changed, and `wait_change` returns. `members`,
    `leader`, `state` and `wanted` then return the news."""

    def __init__(self, address: str, on_change: Callable[[], None], on_expired: Callable[[], None]) -> None:
        hosts, self._root = parse_address(address)
        self._is_closing = False
        # Reconnects often enough that a session outlives a restart of ZooKeeper.
        again = {"max_tries": -1, "delay": RETRY_S, "backoff": 1, "max_jitter": 0.2, "max_delay": 2 * RETRY_S}
        self._client = KazooClient(hosts=hosts, timeout=SESSION_S, connection_retry=again)
        self._retry = KazooRetry(**again, ignore_expire=False, interrupt=lambda: self._is_closing)
        self._address = address
        self._on_change = on_change
        self._on_expired = on_expired
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._version = -1
        # The last news from ZooKeeper: the nodes' data, the registered slices, and their endpoints.
        self._data: dict[str, bytes | None] = {}
        self._nodes: dict[str, list[str]] = {}
        self._endpoints: dict[tuple[str, str], str] = {}

    async def open(self) -> None:
        try:
            await asyncio.to_thread(self._client.start, CONNECT_S)
        except KazooTimeoutError:
            raise Unavailable(
                "U730", f"ZooKeeper at {self._address} does not answer", "start it, or give its address: zk://host:2181"
            ) from None
        self._client.add_listener(self._on_state)
        for layer in LAYERS:
            await self._call(self._client.ensure_path, f"{self._root}/slices/{layer}")
            await asyncio.to_thread(self._watch_children, layer)
        for name in ("leader", "state", "wanted"):
            await asyncio.to_thread(self._watch_data, name)

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.to_thread(self._client.stop)
        await asyncio.to_thread(self._client.close)

    async def register(self, layer: str, endpoint: str) -> str:
        """Registers a slice and returns its new name, which is valid as long as this process lives."""
        # No retry: after a lost reply, it would be unknown whether the first attempt has registered a name.
        path = await asyncio.to_thread(
            self._client.create, f"{self._root}/slices/{layer}/n-", endpoint.encode(), ephemeral=True, sequence=True
        )
        return _name(layer, path.rpartition("/")[2])

    async def members(self) -> dict[str, str]:
        """Returns the endpoints of all live slices by name."""
        nodes = [(layer, node) for layer, nodes in self._nodes.items() for node in nodes]
        if any(node not in self._endpoints for node in nodes):
            await self._call(self._find_endpoints, nodes)
        self._endpoints = {node: self._endpoints[node] for node in nodes if node in self._endpoints}
        return {_name(*node): endpoint for node, endpoint in self._endpoints.items()}

    async def refresh_members(self) -> None:
        """Reads the list of live slices now, without waiting for the watches."""
        for layer in LAYERS:
            self._nodes[layer] = await self._call(self._client.get_children, f"{self._root}/slices/{layer}")

    async def lead(self, leader: Leader) -> bool:
        """Tries to become the leading coordinator, and returns whether it is. It leads as long as its process lives."""
        path, encoded = f"{self._root}/leader", msgspec.msgpack.encode(leader)
        while True:
            with contextlib.suppress(NodeExistsError):
                await self._call(self._client.create, path, encoded, ephemeral=True)
                return True
            # The former leader's node may expire between the two calls. Then this coordinator tries again.
            with contextlib.suppress(NoNodeError):
                data, _stat = await self._call(self._client.get, path)
                return bool(data == encoded)  # an earlier attempt succeeded, but its reply was lost

    def leader(self) -> Leader | None:
        return self._known("leader", Leader)

    def state(self) -> State | None:
        return self._known("state", State)

    def wanted(self) -> Wanted:
        return self._known("wanted", Wanted) or Wanted()

    async def want(self, wanted: Wanted) -> None:
        await self._call(self._put, f"{self._root}/wanted", msgspec.msgpack.encode(wanted))

    async def wait_change(self) -> None:
        """Waits for the next change. A caller that has just looked misses none: changes arrive in the event loop."""
        self._changed.clear()
        await self._changed.wait()

    # Blocking calls for the coordinator: no notification passes through its process, so it may wait.

    def load(self) -> State:
        """Returns the stored state, and records its version for `replace` to compare with."""
        try:
            data, stat = self._with_retries(self._client.get, f"{self._root}/state")
        except NoNodeError:
            self._client.create(f"{self._root}/state", msgspec.msgpack.encode(State.first()))
            return self.load()
        self._version = stat.version
        state: State = msgspec.msgpack.decode(data, type=State)
        return state

    def replace(self, state: State) -> bool:
        encoded = msgspec.msgpack.encode(state)
        try:
            stat = self._with_retries(self._client.set, f"{self._root}/state", encoded, self._version)
        except BadVersionError:
            data, stat = self._with_retries(self._client.get, f"{self._root}/state")
            if data != encoded:
                return False
            # An earlier attempt has stored it, but its reply was lost.
        self._version = stat.version
        return True

    # Inside.

    async def _call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return await asyncio.to_thread(self._with_retries, function, *arguments, **options)

    def _with_retries(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Calls a function, and retries until a call completes without losing the connection."""
        found: T = self._retry.copy()(function, *arguments, **options)
        return found

    def _known(self, name: str, shape: type[T]) -> T | None:
        data = self._data.get(name)
        return msgspec.msgpack.decode(data, type=shape) if data is not None else None

    def _put(self, path: str, data: bytes) -> None:
        try:
            self._client.set(path, data)
        except NoNodeError:
            try:
                self._client.create(path, data)
            except NodeExistsError:  # another process has just created it
                self._client.set(path, data)

    def _find_endpoints(self, nodes: list[tuple[str, str]]) -> None:
        for layer, node in nodes:
            if (layer, node) not in self._endpoints:
                try:
                    data, _stat = self._client.get(f"{self._root}/slices/{layer}/{node}")
                except NoNodeError:
                    continue  # the slice has left since
                self._endpoints[layer, node] = data.decode()

    def _watch_children(self, layer: str) -> None:
        def on_change(nodes: list[str]) -> None:
            self._nodes[layer] = nodes
            self._notify()

        self._client.ChildrenWatch(f"{self._root}/slices/{layer}")(on_change)

    def _watch_data(self, name: str) -> None:
        def on_change(data: bytes | None, _stat: Any) -> None:
            self._data[name] = data
            self._notify()

        self._client.DataWatch(f"{self._root}/{name}")(on_change)

    def _notify(self) -> None:
        if not self._is_closing:
            self._loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        self._changed.set()
        self._on_change()

    def _on_state(self, state: str) -> None:
        if self._is_closing:
            return
        if state == KazooState.SUSPENDED:
            log.warning("ZooKeeper at %s is unavailable: notifications flow, but no layer can change", self._address)
        elif state == KazooState.CONNECTED:
            log.warning("ZooKeeper at %s is available again", self._address)
        else:
            self._loop.call_soon_threadsafe(self._on_expired)


def parse_address(address: str) -> tuple[str, str]:
    """Returns (hosts, root) of an address like zk://host:port,host:port/root."""
    parts = urlsplit(address)
    if parts.scheme != "zk" or not parts.netloc:
        raise ConfigError(
            "C450", f"{address!r} is not a ZooKeeper address", "write zk://host:2181 or zk://host:2181/root"
        )
    return parts.netloc, parts.path.rstrip("/") or DEFAULT_ROOT


def _name(layer: str, node: str) -> str:
    return f"{layer}-{int(node.removeprefix('n-')) + 1}"
