"""Directory: who lives, where, and what the coordinators have decided. It lies in ZooKeeper, and is small.

| path | what | how long |
|---|---|---|
| slices/LAYER/n-NUMBER | endpoint of a slice; its name is LAYER-NUMBER, never used again | as long as its process |
| leader | name and endpoint of the coordinator | as long as its process |
| state | the coordinators' state (`reconfiguration.State`) | for good |
| wanted | how many slices of each layer there should be, and which are to be replaced | for good |

No notification and no subscription passes here. ZooKeeper's threads tell the event loop what has changed; every call
here is short and blocks only a thread.

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

from tidegate.errors import ConfigError, Unavailable
from tidegate.layers.reconfiguration import State

log = logging.getLogger(__name__)

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
        self._client = KazooClient(
            hosts=hosts,
            timeout=SESSION_S,
            connection_retry=again,
            command_retry=again | {"ignore_expire": False, "interrupt": lambda: self._is_closing},
        )
        self._address = address
        self._on_change = on_change
        self._on_expired = on_expired
        self._loop = asyncio.get_running_loop()
        self._version = -1

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
            self._watch_children(f"{self._root}/slices/{layer}")
        for name in ("leader", "state", "wanted"):
            self._watch_data(f"{self._root}/{name}")

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
        return await self._call(self._members)

    async def lead(self, leader: Leader) -> bool:
        """Whether this one is the coordinator from now on, as long as its process lives."""
        try:
            await self._call(
                self._client.create, f"{self._root}/leader", msgspec.msgpack.encode(leader), ephemeral=True
            )
        except NodeExistsError:
            return await self.leader() == leader  # a try whose answer was lost
        return True

    async def leader(self) -> Leader | None:
        return await self._get("leader", Leader)

    async def state(self) -> State | None:
        return await self._get("state", State)

    async def wanted(self) -> Wanted | None:
        return await self._get("wanted", Wanted)

    async def want(self, wanted: Wanted) -> None:
        await self._call(self._put, f"{self._root}/wanted", msgspec.msgpack.encode(wanted))

    # For the coordinator, which may wait: nothing passes through its process.

    def load(self) -> State:
        """Remembers the version that `replace` compares with."""
        try:
            data, stat = self._client.retry(self._client.get, f"{self._root}/state")
        except NoNodeError:
            self._client.create(f"{self._root}/state", msgspec.msgpack.encode(State.first()))
            return self.load()
        self._version = stat.version
        state: State = msgspec.msgpack.decode(data, type=State)
        return state

    def replace(self, state: State) -> bool:
        encoded = msgspec.msgpack.encode(state)
        try:
            stat = self._client.retry(self._client.set, f"{self._root}/state", encoded, self._version)
        except BadVersionError:
            data, stat = self._client.retry(self._client.get, f"{self._root}/state")
            if data != encoded:
                return False
            # A try whose answer was lost has stored it.
        self._version = stat.version
        return True

    # Inside.

    async def _call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Again when the connection is lost meanwhile."""
        found: T = await asyncio.to_thread(self._client.retry, function, *arguments, **options)
        return found

    async def _get(self, name: str, shape: type[T]) -> T | None:
        try:
            data, _stat = await self._call(self._client.get, f"{self._root}/{name}")
        except NoNodeError:
            return None
        return msgspec.msgpack.decode(data, type=shape)

    def _put(self, path: str, data: bytes) -> None:
        try:
            self._client.set(path, data)
        except NoNodeError:
            self._client.create(path, data)

    def _members(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for layer in LAYERS:
            for node in self._client.get_children(f"{self._root}/slices/{layer}"):
                try:
                    data, _stat = self._client.get(f"{self._root}/slices/{layer}/{node}")
                except NoNodeError:
                    continue  # gone since
                found[_name(layer, node)] = data.decode()
        return found

    def _watch_children(self, path: str) -> None:
        self._client.ChildrenWatch(path)(lambda _children: self._tell())

    def _watch_data(self, path: str) -> None:
        self._client.DataWatch(path)(lambda _data, _stat: self._tell())

    def _tell(self) -> None:
        if not self._is_closing:
            self._loop.call_soon_threadsafe(self._on_change)

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST and not self._is_closing:
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
