"""The acceptor of a listener: accepts TCP connections, counts them, and performs the TLS handshake if TLS is on.

asyncio's own servers report a connection only after its TLS handshake, and never report a failed handshake, so neither
could be counted. Here a connection has a place (`connections`) as soon as the operating system accepts it. Its
handshake may take `handshake_s`; then its protocol gets a `PeerTransport`.

What may go wrong: the process has no file descriptors left (it logs this and accepts nothing for `ACCEPT_RETRY_S`), a
peer leaves before it is accepted, a handshake fails or takes too long (counted).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final, cast

from tidegate.listeners.connections import Connections, Place
from tidegate.listeners.peer_transport import PeerTransport

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
# Connections accepted in one iteration of the event loop. The rest wait for the next one, so that others are served.
ACCEPTED_TOGETHER_MAX: Final = 64
ACCEPT_RETRY_S: Final = 1.0
# After 60 s without traffic the operating system probes the peer every 10 s; after 6 unanswered probes the connection
# is lost.
KEEP_ALIVE_OPTIONS: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))


class Acceptor:
    """Accepts connections for one listener. `make_protocol` returns the protocol of a new connection, whose
    `connection_made` gets a PeerTransport."""

    def __init__(
        self, connections: Connections, handshake_s: float, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._connections = connections
        self._handshake_s = handshake_s
        self._make_protocol = make_protocol
        self._tls: ssl.SSLContext | None = None
        self._listening: list[socket.socket] = []
        self._arriving: set[asyncio.Task[None]] = set()

    async def listen(self, bind: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Starts listening and returns the port."""
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._listening = await _bind(bind, port)
        for listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)
        return int(self._listening[0].getsockname()[1])

    def close(self) -> None:
        """Stops accepting and drops connections that are still in their handshake. Established connections stay."""
        for listening in self._listening:
            self._loop.remove_reader(listening)
            listening.close()
        self._listening.clear()
        for task in self._arriving:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_TOGETHER_MAX):
            try:
                accepted, _address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError as error:
                log.warning("accepting no connections for %g s: %s", ACCEPT_RETRY_S, error)
                self._loop.remove_reader(listening)
                self._loop.call_later(ACCEPT_RETRY_S, self._accept_again, listening)
                return
            self._admit(accepted)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    def _admit(self, accepted: socket.socket) -> None:
        place = self._connections.take()
        if place is None:
            accepted.close()
            return
        _enable_keep_alive(accepted)
        # Not in a TaskGroup: the event loop reports arrivals to a callback, and a handshake that fails must fail alone.
        task = self._loop.create_task(self._connect(accepted, place))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _connect(self, accepted: socket.socket, place: Place) -> None:
        arrival = _Arrival(self._make_protocol, place)
        try:
            await self._loop.connect_accepted_socket(
                lambda: arrival,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s if self._tls is not None else None,
            )
        except OSError as error:
            self._connections.handshakes_failed += 1
            log.info("handshake failed reason=%s", error)
        finally:
            if not arrival.has_arrived:
                place.give_back()


class _Arrival(asyncio.Protocol):
    """Passes a connection to its own protocol as soon as it is established."""

    def __init__(self, make_protocol: Callable[[], asyncio.BaseProtocol], place: Place) -> None:
        self._make_protocol = make_protocol
        self._place = place
        self.has_arrived = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.has_arrived = True
        # uvloop's transports have the methods of asyncio.Transport but are not instances of it.
        established = cast(asyncio.Transport, transport)
        protocol = self._make_protocol()
        established.set_protocol(protocol)
        protocol.connection_made(PeerTransport(established, self._place))


def _enable_keep_alive(accepted: socket.socket) -> None:
    """Turns on TCP keep-alive, which detects peers that vanished without closing, such as after a power failure."""
    with contextlib.suppress(OSError):  # the peer has left already; its protocol will notice
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE_OPTIONS:
            if hasattr(socket, name):
                accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Returns a listening socket for each address of the host, all with one port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            # Name the protocol explicitly: asyncio sets TCP_NODELAY only on sockets that it recognizes as TCP.
            sockets.append(socket.socket(family, kind, protocol))
            sockets[-1].setblocking(False)
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            sockets[-1].bind((address[0], chosen))
            sockets[-1].listen(BACKLOG)
    except OSError:
        for opened in sockets:
            opened.close()
        raise
    return sockets
