"""The transport of a peer's connection: its methods never raise, whatever the peer does.

A peer may reset its connection at any moment, and the broker may not notice: it does not read a connection that is held
back. So every call on a socket may fail. Such a failure concerns one connection only. This module, and no other, turns
it into a lost connection, which the protocol learns from `connection_lost` as usual. If the exception propagated, it
would stop the carrier of the layers' frames, and with it the broker. Only OSErrors are absorbed; any other exception is
a bug and propagates.

Every protocol of a listener gets a PeerTransport in `connection_made`, and calls `lost` in `connection_lost`. It must
not write inside `resume_writing`, only in the next iteration of the event loop: an asyncio transport that fails there
reports its loss twice. What may go wrong: when the connection is closed, the peer does not read the bytes that are
left. It is cut off if nothing moves for `CLOSE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Any, Final

from tidegate.listeners.connections import Place

log = logging.getLogger(__name__)

CLOSE_S: Final = 10.0
# Writes passed to a TLS connection whose peer has closed its side, as long as that may not have been read yet. asyncio
# logs a warning for each further one.
LATE_WRITES_MAX: Final = 4
# TCP states by Linux's numbers, as the first byte of TCP_INFO reports them.
TCP_ESTABLISHED: Final = 1
TCP_CLOSE: Final = 7
TCP_CLOSE_WAIT: Final = 8


class PeerTransport(asyncio.Transport):
    """Forwards calls to a transport of asyncio or uvloop, and ignores them once the connection is closing."""

    def __init__(self, transport: asyncio.Transport, place: Place) -> None:
        super().__init__()
        self._transport = transport
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._is_ending = False
        self._is_reading = True
        self._late_writes = 0
        self._tls_socket = transport.get_extra_info("socket") if transport.get_extra_info("sslcontext") else None
        self._close_timer: asyncio.TimerHandle | None = None

    # The protocol calls these, besides the methods of every transport.

    @property
    def is_surplus(self) -> bool:
        """Whether the connection is above `connections_max` and must be refused."""
        return self._place.is_surplus

    def lost(self) -> None:
        """Gives the connection's place back. Call it in `connection_lost`."""
        self._place.give_back()
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None

    def cut(self) -> None:
        """Aborts the connection because its peer sends or reads nothing, and counts it as cut."""
        # A connection that is already closing counts only if it still waits for its peer to read.
        if not self._transport.is_closing() or self._close_timer is not None:
            self._place.count_cut()
        self.abort()

    def count_cut(self) -> None:
        """Counts as cut a connection that its protocol closes with an error because the peer sends nothing."""
        self._place.count_cut()

    def continue_ending(self) -> None:
        """Shuts down the sending side if `write_eof` was called and everything is sent. Call it in `resume_writing`."""
        if self._is_ending:
            self._loop.call_soon(self._end)

    # Writing.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_ending or self._transport.is_closing() or self._is_tcp_lost():
            return
        try:
            self._transport.write(data)
        except OSError as error:
            self._lose(error)

    def write_eof(self) -> None:
        """Shuts down the sending side once everything is sent.

        An asyncio transport with unsent bytes would do so later by itself, and let a failure escape to the event
        loop. So its `write_eof` is called only when nothing is left to send: with a buffer limit of 0 the transport
        calls `resume_writing` at that moment."""
        if self._is_ending or self._transport.is_closing():
            return
        self._is_ending = True
        self._do(self._transport.set_write_buffer_limits, 0)
        self._end()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._transport.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if not self._transport.is_closing():
            self._do(self._transport.set_write_buffer_limits, high, low)

    # Reading.

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._is_reading = False
        if not self._transport.is_closing():
            self._do(self._transport.pause_reading)

    def resume_reading(self) -> None:
        self._is_reading = True
        if not self._transport.is_closing():
            self._do(self._transport.resume_reading)

    # The end.

    def is_closing(self) -> bool:
        if (
            not self._transport.is_closing()
            and self._tls_socket is not None
            and _tcp_state(self._tls_socket) == TCP_CLOSE
        ):
            self.abort()  # nothing else would detect the loss while the connection is neither read nor written
        return self._transport.is_closing()

    def close(self) -> None:
        if self._transport.is_closing():
            return
        unsent_bytes = self._transport.get_write_buffer_size()
        self._do(self._transport.close)
        if unsent_bytes and self._close_timer is None:
            self._schedule_close_check(unsent_bytes)

    def abort(self) -> None:
        try:
            self._transport.abort()
        except OSError as error:
            log.debug("aborting a connection failed: %s", error)

    # Everything else.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        try:
            return self._transport.get_extra_info(name, default)
        except OSError:
            return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def _is_tcp_lost(self) -> bool:
        """Returns whether bytes written to a TLS transport could not be sent any more.

        A TLS transport does not report that the TCP connection below it is lost, or that the peer has closed its
        side. It drops later writes with a warning, and waits forever for its earlier bytes to be sent."""
        if self._tls_socket is None:
            return False
        state = _tcp_state(self._tls_socket)
        if state == TCP_CLOSE_WAIT:
            if self._close_timer is None:
                self._close_timer = self._loop.call_later(CLOSE_S, self.cut)
            self._late_writes += 1
            return not self._is_reading or self._late_writes > LATE_WRITES_MAX
        return state == TCP_CLOSE

    def _end(self) -> None:
        if not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self._do(self._transport.write_eof)

    def _do(self, act: Any, *arguments: Any) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        log.info("connection lost reason=%s", error)
        self.abort()

    def _schedule_close_check(self, unsent_bytes: int) -> None:
        self._close_timer = self._loop.call_later(CLOSE_S, self._check_close, unsent_bytes)

    def _check_close(self, unsent_bytes: int) -> None:
        """Cuts off a closing connection unless its peer reads something in every `CLOSE_S`."""
        left_bytes = self._transport.get_write_buffer_size()
        if left_bytes < unsent_bytes:
            self._schedule_close_check(left_bytes)
        else:
            log.info("connection cut reason=the peer does not read the remaining bytes")
            self.cut()


def _tcp_state(tls_socket: Any) -> int:
    """Returns the state of a TCP connection. Systems other than Linux do not report it: returns TCP_ESTABLISHED."""
    if sys.platform != "linux":
        return TCP_ESTABLISHED
    try:
        return int(tls_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
    except OSError:
        return TCP_CLOSE
