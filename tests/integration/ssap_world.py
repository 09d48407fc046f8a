"""A knowledge base behind an SSAP listener, on an event loop in a thread; and KPs with blocking sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from xml.etree import ElementTree

from tidegate.knowledge.graph import Graph
from tidegate.knowledge.knowledge_base import KnowledgeBase
from tidegate.knowledge.request_pool import PoolSettings
from tidegate.knowledge.sparql_workers import SparqlLimits
from tidegate.listeners.ssap import SsapListener

TIMEOUT_S = 60
END = b"</SSAP_message>"
T = TypeVar("T")


class SsapWorld:
    def __init__(
        self,
        settings: PoolSettings | None = None,
        resume_s: float = 60.0,
        rows_max: int = 1000,
        limits: SparqlLimits | None = None,
    ) -> None:
        self.graph = Graph(rows_max=rows_max)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.knowledge = KnowledgeBase(self.graph, settings, resume_s=resume_s, limits=limits)
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(TIMEOUT_S)

    async def _start(self) -> int:
        self.listener = SsapListener(self.knowledge)
        return await self.listener.start("127.0.0.1", 0)

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function on the thread of the event loop, and returns its result."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT_S)

    def tick(self, later_s: float) -> None:
        self.call(lambda: self.listener.tick(self.loop.time() + later_s))

    def stop_listener(self) -> None:
        asyncio.run_coroutine_threadsafe(self.listener.stop(), self.loop).result(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_listener()
        asyncio.run_coroutine_threadsafe(self.knowledge.stop(), self.loop).result(TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self.loop.close()


class Listening(Protocol):
    """An object with a port of SSAP."""

    @property
    def port(self) -> int: ...


class Kp:
    """A connection of a KP."""

    def __init__(
        self,
        world: Listening,
        name: str = "KP1",
        receive_bytes: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.socket.settimeout(TIMEOUT_S)
        try:
            self.socket.connect(("127.0.0.1", world.port))
        except OSError:
            self.socket.close()
            raise
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def message(self, kind: str, *parameters: str, transaction_id: int = 1) -> bytes:
        return (
            f"<SSAP_message><node_id>{self.name}</node_id><space_id>X</space_id><transaction_type>{kind}"
            "</transaction_type><message_type>REQUEST</message_type>"
            f"<transaction_id>{transaction_id}</transaction_id>{''.join(parameters)}</SSAP_message>"
        ).encode()

    def send(self, kind: str, *parameters: str, transaction_id: int = 1) -> None:
        self.socket.sendall(self.message(kind, *parameters, transaction_id=transaction_id))

    def ask(self, kind: str, *parameters: str) -> Any:
        self.send(kind, *parameters)
        return self.read()

    def read(self) -> ElementTree.Element:
        """Returns the next message, read up to its end tag as clients do."""
        while END not in self._data:
            received = self.socket.recv(65536)
            if not received:
                raise EOFError(self._data)
            self._data += received
        message, self._data = self._data.split(END, 1)
        return ElementTree.fromstring(message.lstrip() + END)

    def read_to_end(self) -> bytes:
        while received := self.socket.recv(65536):
            self._data += received
        return self._data


def parameter(message: ElementTree.Element, name: str) -> ElementTree.Element:
    (found,) = (each for each in message.iter("parameter") if each.get("name") == name)
    return found


def text_of(message: ElementTree.Element, name: str) -> str:
    return parameter(message, name).text or ""


def status(message: ElementTree.Element) -> str:
    return text_of(message, "status")


def triples_of(message: ElementTree.Element, name: str) -> set[tuple[str, str, str]]:
    return {
        (each.findtext("subject", ""), each.findtext("predicate", ""), each.findtext("object", ""))
        for each in parameter(message, name).iter("triple")
    }


def graph_of(name: str, *triples: tuple[str, str, str], kind: str = "literal") -> str:
    """Returns a parameter with triples whose objects are all of one kind."""
    written = "".join(
        f'<triple><subject type = "uri">{s}</subject><predicate>{p}</predicate><object type = "{kind}">{o}</object>'
        "</triple>"
        for s, p, o in triples
    )
    return f'<parameter name = "{name}" encoding = "RDF-M3"><triple_list>{written}</triple_list></parameter>'


def replaced(value: str) -> str:
    """Returns the parameters of an UPDATE that gives s another p."""
    wildcard = "http://www.nokia.com/NRC/M3/sib#any"
    return graph_of("insert_graph", ("s", "p", value)) + graph_of("remove_graph", ("s", "p", wildcard), kind="uri")


def masks(*triples: tuple[str, str, str]) -> str:
    return '<parameter name = "type">RDF-M3</parameter>' + graph_of("query", *triples, kind="uri")


def sparql(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<parameter name = "type">sparql</parameter><parameter name = "query">{escaped}</parameter>'
