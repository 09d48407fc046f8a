"""Directory: who lives, where, and what the coordinators have decided. It lies in ZooKeeper, and is small.

| path | what | how long |
|---|---|---|
| slices/LAYER/n-NUMBER | endpoint of a slice; its name is LAYER-NUMBER, never used again | as long as its process |
| leader | name and endpoint of the coordinator | as long as its process |
| state | the coordinators' state (`reconfiguration.State`) | for good |
| wanted | how many slices of each layer there should be, and which are to be replaced | for good |

No notification and no subscription passes here. ZooKeeper's threads keep what they are told of every change, and tell
the event loop that there was one: so a step of the coordinator, which everybody looks at, costs each of them one read.

What may go wrong here: the connection is lost. While ZooKeeper is away everything flows, and nothing is changed; calls
wait for it. If it is back and the session has not lasted, others take this process for dead, and it must not go on:
`on_expired` is told, and ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.retry import KazooRetry

from tidegate.errors import ConfigError, Unavailable
from tidegate.layers.reconfiguration import State

log = logging.getLogger(__name__)
# It would say several times a second that ZooKeeper is away; what matters is said here, once.
logging.getLogger("kazoo").setLevel(logging.CRITICAL)

LAYERS: Final = ("access-point", "matcher", "exit-point", "connection-point")
SESSION_S: Final = 4.0
CONNECT_S: Final = 10.0
RETRY_S: Final = 0.2
DEFAULT_ROOT: Final = "/tidegate"

T = TypeVar("T")


class Wanted(msgspec.Struct, frozen=True):
    """What an operator asks for. `replaced` are slices that others shall stand in for."""

    access_points: int = 1
    matchers: int = 1
    exit_points: int = 1
    replaced: frozenset[str] = frozenset()
    is_buffered: bool = False


class Leader(msgspec.Struct, frozen=True):
    name: str
    endpoint: str


class Directory:
    """`on_change` is called in the event loop whenever something may have changed; `look` then says what there is."""

    def __init__(self, address: str, on_change: Callable[[], None], on_expired: Callable[[], None]) -> None:
        hosts, self._root = parse_address(address)
        self._is_closing = False
        # Often enough that a session outlives a ZooKeeper that starts anew.
        again = {"max_tries": -1, "delay": RETRY_S, "backoff": 1, "max_jitter": 0.2, "max_delay": 2 * RETRY_S}
        self._client = KazooClient(hosts=hosts, timeout=SESSION_S, connection_retry=again)
        self._retry = KazooRetry(**again, ignore_expire=False, interrupt=lambda: self._is_closing)
        self._address = address
        self._on_change = on_change
        self._on_expired = on_expired
        self._loop = asyncio.get_running_loop()
        self._version = -1
        # As last told by ZooKeeper: what the nodes hold, which slices there are, and where.
        self._data: dict[str, bytes | None] = {}
        self._nodes: dict[str, list[str]] = {}
        self._endpoints: dict[tuple[str, str], str] = {}

    async def open(self) -> None:
        try:
            await asyncio.to_thread(self._client.start, CONNECT_S)
        except KazooTimeoutError:
            raise Unavailable(
                "U730", f"no ZooKeeper answers at {self._address}", "start one, or give its address: zk://host:2181"
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
        """A name of one's own, as long as this process lives."""
        # Not tried again: whether the first try has made a name would not be known.
        path = await asyncio.to_thread(
            self._client.create, f"{self._root}/slices/{layer}/n-", endpoint.encode(), ephemeral=True, sequence=True
        )
        return _name(layer, path.rpartition("/")[2])

    async def members(self) -> dict[str, str]:
        """The endpoints of all slices that live."""
        nodes = [(layer, node) for layer, nodes in self._nodes.items() for node in nodes]
        if any(node not in self._endpoints for node in nodes):
            await self._call(self._find_endpoints, nodes)
        self._endpoints = {node: self._endpoints[node] for node in nodes if node in self._endpoints}
        return {_name(*node): endpoint for node, endpoint in self._endpoints.items()}

    async def look_again(self) -> None:
        """At who lives, without waiting to be told."""
        for layer in LAYERS:
            self._nodes[layer] = await self._call(self._client.get_children, f"{self._root}/slices/{layer}")

    async def lead(self, leader: Leader) -> bool:
        """Whether this one is the coordinator from now on, as long as its process lives."""
        try:
            await self._call(
                self._client.create, f"{self._root}/leader", msgspec.msgpack.encode(leader), ephemeral=True
            )
        except NodeExistsError:
            data, _stat = await self._call(self._client.get, f"{self._root}/leader")
            return bool(data == msgspec.msgpack.encode(leader))  # a try whose answer was lost
        return True

    def leader(self) -> Leader | None:
        return self._known("leader", Leader)

    def state(self) -> State | None:
        return self._known("state", State)

    def wanted(self) -> Wanted | None:
        return self._known("wanted", Wanted)

    async def want(self, wanted: Wanted) -> None:
        await self._call(self._put, f"{self._root}/wanted", msgspec.msgpack.encode(wanted))

    # For the coordinator, which may wait: nothing passes through its process.

    def load(self) -> State:
        """Remembers the version that `replace` compares with."""
        try:
            data, stat = self._again(self._client.get, f"{self._root}/state")
        except NoNodeError:
            self._client.create(f"{self._root}/state", msgspec.msgpack.encode(State.first()))
            return self.load()
        self._version = stat.version
        state: State = msgspec.msgpack.decode(data, type=State)
        return state

    def replace(self, state: State) -> bool:
        encoded = msgspec.msgpack.encode(state)
        try:
            stat = self._again(self._client.set, f"{self._root}/state", encoded, self._version)
        except BadVersionError:
            data, stat = self._again(self._client.get, f"{self._root}/state")
            if data != encoded:
                return False
            # A try whose answer was lost has stored it.
        self._version = stat.version
        return True

    # Inside.

    async def _call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return await asyncio.to_thread(self._again, function, *arguments, **options)

    def _again(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Until the connection is not lost meanwhile."""
        found: T = self._retry.copy()(function, *arguments, **options)
        return found

    def _known(self, name: str, shape: type[T]) -> T | None:
        data = self._data.get(name)
        return msgspec.msgpack.decode(data, type=shape) if data is not None else None

    def _put(self, path: str, data: bytes) -> None:
        try:
            self._client.set(path, data)
        except NoNodeError:
            self._client.create(path, data)

    def _find_endpoints(self, nodes: list[tuple[str, str]]) -> None:
        for layer, node in nodes:
            if (layer, node) not in self._endpoints:
                try:
                    data, _stat = self._client.get(f"{self._root}/slices/{layer}/{node}")
                except NoNodeError:
                    continue  # gone since
                self._endpoints[layer, node] = data.decode()

    def _watch_children(self, layer: str) -> None:
        def on_change(nodes: list[str]) -> None:
            self._nodes[layer] = nodes
            self._tell()

        self._client.ChildrenWatch(f"{self._root}/slices/{layer}")(on_change)

    def _watch_data(self, name: str) -> None:
        def on_change(data: bytes | None, _stat: Any) -> None:
            self._data[name] = data
            self._tell()

        self._client.DataWatch(f"{self._root}/{name}")(on_change)

    def _tell(self) -> None:
        if not self._is_closing:
            self._loop.call_soon_threadsafe(self._on_change)

    def _on_state(self, state: str) -> None:
        if self._is_closing:
            return
        if state == KazooState.SUSPENDED:
            log.warning("ZooKeeper at %s is away: everything flows on, and nothing is changed", self._address)
        elif state == KazooState.CONNECTED:
            log.warning("ZooKeeper at %s is back", self._address)
        else:
            self._loop.call_soon_threadsafe(self._on_expired)


def parse_address(address: str) -> tuple[str, str]:
    """(hosts, root) of zk://host:port,host:port/root."""
    parts = urlsplit(address)
    if parts.scheme != "zk" or not parts.netloc:
        raise ConfigError(
            "C450", f"{address!r} is no address of a ZooKeeper", "write zk://host:2181 or zk://host:2181/root"
        )
    return parts.netloc, parts.path.rstrip("/") or DEFAULT_ROOT


def _name(layer: str, node: str) -> str:
    return f"{layer}-{int(node.removeprefix('n-')) + 1}"
