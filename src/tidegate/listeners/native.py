"""The native listener: frames over TCP, as docs/protocols.md describes them.

All connections share one read buffer. The bytes of each read are copied out at once, and a connection keeps only the
start of an incomplete frame. All complete PUBLISH frames of a read become one batch, whatever their sizes.
Acknowledgements and deliveries are written once per iteration of the event loop.

What may go wrong: a malformed frame (the valid frames before it are submitted, then the connection is closed with an
error), an idle peer (closed after a timeout), a peer that does not read (its outbox fills).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from tidegate.config import Config
from tidegate.errors import FilterError, Overloaded, ProtocolError, TidegateError, Unavailable
from tidegate.filters import Filter
from tidegate.frames import (
    HEADER,
    HEADER_BYTES,
    PROTOCOL_VERSION,
    ErrorBody,
    Hello,
    Kind,
    PartialFrame,
    Rebind,
    Refusal,
    Subscribe,
    Unsubscribe,
    Welcome,
    decode_body,
    encode_frame,
    frame_too_long,
)
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.hosts.session import Session
from tidegate.layers.batch import BatchReader
from tidegate.layers.frames import Refused
from tidegate.layers.outbox import Policy
from tidegate.layers.session_events import (
    DeliveriesWait,
    PublishAcknowledged,
    PublishRefused,
    SessionEnded,
    SessionEvent,
    SubscriptionEnded,
    SubscriptionReady,
    SubscriptionRebound,
    SubscriptionRefused,
    refused_by_queue,
)
from tidegate.listeners.acceptor import Acceptor
from tidegate.listeners.connections import Connections
from tidegate.listeners.gate import check_token
from tidegate.listeners.native_queues import QueueRequests
from tidegate.listeners.peer_transport import PeerTransport
from tidegate.listeners.rate import RateLimit
from tidegate.queues import LogicalQueues
from tidegate.security.publisher_key import whole_name

log = logging.getLogger(__name__)

# A read costs about the same whatever its size, so one read should take several frames from a busy publisher.
READ_BYTES: Final = 256 * 1024
WRITE_BYTES: Final = 256 * 1024
# The largest first frame. Its token is not checked yet, so the bound is small; names, a key and a token fit easily.
HELLO_BYTES_MAX: Final = 4096
# Answers waiting for a peer to read them. A peer that keeps sending requests without reading is cut off here.
ANSWERS_BYTES_MAX: Final = 8 * 1024 * 1024
# After a close: the connection is aborted after LINGER_S if everything is sent, and cut off after CLOSE_S otherwise.
CLOSE_S: Final = 10.0
LINGER_S: Final = 1.0


class NativeListener:
    """Accepts and owns all native connections of a broker. `status` returns the body of a STATUS_REPLY."""

    def __init__(
        self,
        host: BrokerHost,
        queues: LogicalQueues,
        config: Config,
        token: str | None,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self.host = host
        self.queues = queues
        self.config = config
        self.token = token
        self.status = status
        self.reader = BatchReader()
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.connections: set[NativeConnection] = set()
        self.places = Connections(config.connections_max)
        self.tasks: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(self.places, config.hello_timeout_s, lambda: NativeConnection(self))

    async def start(self, tls: ssl.SSLContext | None) -> int:
        """Starts listening and returns the port."""
        return await self._acceptor.listen(self.config.bind, self.config.native_port, tls)

    def tick(self, now_s: float) -> None:
        """Closes connections that have been idle for too long."""
        for connection in list(self.connections):
            connection.close_if_idle(now_s)

    async def stop(self, deadline_s: float) -> None:
        """Stops accepting and reading, gives subscribers until the deadline to take their deliveries, then closes."""
        self._acceptor.close()
        for connection in list(self.connections):
            connection.stop_reading()
        loop = asyncio.get_running_loop()
        while any(connection.has_deliveries() for connection in self.connections) and loop.time() < deadline_s:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.say_goodbye()
        lingers_until_s = min(deadline_s, loop.time() + LINGER_S)
        while self.connections and loop.time() < lingers_until_s:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()


class NativeConnection(asyncio.BufferedProtocol):
    """One native connection, which is one session.

    An error of the peer closes this connection only, after an ERROR frame that explains it."""

    def __init__(self, listener: NativeListener) -> None:
        self._listener = listener
        self._host = listener.host
        self._config = listener.config
        self._loop = asyncio.get_running_loop()
        self._transport: PeerTransport | None = None
        self._partial = PartialFrame()
        self._session = Session(listener.host, self)
        self._is_welcome = False
        self._acknowledged = 0
        self._owes_acknowledgement = False
        self._is_writable = True
        self._is_reading = True
        self._is_flushing = False
        self._is_closing = False
        self._is_stopping = False
        self._rate = RateLimit(listener.config.rate_notifications_s)
        self._heard_s = self._loop.time()
        self._requests = QueueRequests(listener.queues, self, listener.tasks, listener.config.publisher_window_bytes)

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(PeerTransport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)
        self._listener.connections.add(self)
        try:
            if self._transport.is_surplus:
                raise self._listener.places.refusal()
            self._session.open()
        except TidegateError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.lost()
        self._transport = None
        self._listener.connections.discard(self)
        self._requests.close()
        self._session.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer that all connections share.

        Sharing is safe: a transport fills the buffer and calls `buffer_updated` before anything else runs."""
        return self._listener.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_stopping or self._is_closing:
            return
        if self._is_welcome:
            self._heard_s = self._loop.time()
        data = self._partial.add(self._listener.read_buffer[:nbytes])
        if not data:
            return
        try:
            consumed = self._take_frames(data)
        except TidegateError as error:
            self._partial.clear()
            self._fail(error)
        else:
            self._partial.keep(memoryview(data)[consumed:])

    def pause_writing(self) -> None:
        self._is_writable = False
        self._requests.on_paused()

    def resume_writing(self) -> None:
        self._is_writable = True
        if not self._is_closing:
            self._loop.call_soon(self._continue_writing)
        elif self._transport is not None:
            self._transport.continue_ending()

    # The session calls this.

    def on_event(self, event: SessionEvent) -> None:
        match event:
            case DeliveriesWait():
                self._flush_soon()
            case PublishAcknowledged():
                self._acknowledged = event.sequence
                self._owes_acknowledgement = True
                self._flush_soon()
                if not self._is_reading:
                    self._resume_reading()
            case PublishRefused():
                self._send(Kind.REFUSE, _refusals(event.refused))
            case SubscriptionReady():
                self._send(Kind.SUBSCRIBED, sequence=event.client_id)
            case SubscriptionRebound():
                self._send(Kind.REBOUND, sequence=event.client_id)
            case SubscriptionRefused():
                self._refuse_subscription(event.client_id, event.error)
            case SubscriptionEnded():
                self._send(Kind.UNSUBSCRIBED, sequence=event.client_id)
            case SessionEnded():
                self._fail(event.error)

    # Queue requests call these.

    @property
    def is_writable(self) -> bool:
        return self._is_writable

    def answer(self, kind: Kind, body: Any, sequence: int) -> bool:
        if self._transport is None or self._is_closing:
            return False
        self._send(kind, body, sequence)
        return not self._is_closing

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def on_room(self) -> None:
        if not self._is_reading:
            self._resume_reading()

    # The listener calls these.

    def close_if_idle(self, now_s: float) -> None:
        """Closes the connection if its peer has sent nothing for too long while we were reading.

        Until HELLO is complete its bytes do not count, so a peer cannot stay by sending them one at a time."""
        if not self._is_reading:
            self._resume_reading()
            return
        silent_s = now_s - self._heard_s
        allowed_s = self._config.idle_timeout_s if self._is_welcome else self._config.hello_timeout_s
        if silent_s > allowed_s and self._transport is not None and not self._is_closing:
            self._transport.count_cut()
            self._fail(
                Unavailable("U705", f"the client sent nothing for {silent_s:.0f} s", "send PING frames while idle")
            )

    def stop_reading(self) -> None:
        """Drops whatever the peer sends from now on. It is not acknowledged, so a publisher sends it again to the next
        broker."""
        self._is_stopping = True
        self._partial.clear()
        if self._transport is not None and not self._is_closing:
            self._transport.resume_reading()

    def has_deliveries(self) -> bool:
        """Returns whether the peer has deliveries or answers about queues still to receive."""
        assert self._transport is not None
        self._flush()
        return self._requests.is_busy or not self._is_writable or self._transport.get_write_buffer_size() > 0

    def say_goodbye(self) -> None:
        self._send(Kind.CLOSING)
        self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Reading.

    def _take_frames(self, data: bytes) -> int:
        """Handles every complete frame and returns their size in bytes."""
        position = 0
        while len(data) - position >= HEADER_BYTES and not self._is_closing:
            length, kind, _flags, _zero, sequence = HEADER.unpack_from(data, position)
            if not self._is_welcome and kind != Kind.HELLO:
                raise _not_hello(data, kind)
            length_max = self._config.frame_bytes_max if self._is_welcome else HELLO_BYTES_MAX
            if length > length_max:
                raise frame_too_long(length, length_max)
            if position + HEADER_BYTES + length > len(data):
                break
            if kind == Kind.PUBLISH:
                position = self._publish(data, position, sequence)
            else:
                start = position + HEADER_BYTES
                position = start + length
                self._control(kind, sequence, memoryview(data)[start:position])
        return position

    def _publish(self, data: bytes, position: int, sequence: int) -> int:
        publisher = self._session.publisher
        if not publisher:
            raise ProtocolError("P310", "this connection has no publisher name", "name the publisher in HELLO")
        if not 0 < sequence < 1 << 62:
            raise ProtocolError("P308", f"the sequence {sequence} is invalid", "number your notifications from 1")
        read = self._listener.reader.read_frames(publisher, data, position, sequence)
        if read.refusals:
            self._host.count_refused(len(read.refusals))
            self._send(Kind.REFUSE, read.refusals)
        self._session.submit(read.batches, read.through)
        if read.error is not None:
            raise read.error
        self._slow_down(read.through - sequence + 1)
        return read.position

    def _slow_down(self, notifications: int) -> None:
        wait_s = self._rate.take(notifications, self._loop.time())
        if wait_s > 0:
            self._pause_reading()
            self._loop.call_later(wait_s, self._resume_when_paid)
        elif self._host.is_congested(self._session.publisher):
            self._pause_reading()

    def _resume_when_paid(self) -> None:
        """Resumes reading once the rate limit's debt is paid. A timer may fire slightly early: then it is set again."""
        wait_s = self._rate.take(0, self._loop.time())
        if wait_s > 0:
            self._loop.call_later(wait_s, self._resume_when_paid)
        else:
            self._resume_reading()

    def _control(self, kind: int, sequence: int, body: memoryview) -> None:
        match kind:
            case Kind.HELLO:
                self._hello(decode_body(body, Hello))
            case Kind.SUBSCRIBE:
                self._subscribe(decode_body(body, Subscribe))
            case Kind.UNSUBSCRIBE:
                self._session.unsubscribe(decode_body(body, Unsubscribe).id)
            case Kind.REBIND:
                self._rebind(decode_body(body, Rebind))
            case Kind.PING:
                self._send(Kind.PONG)
            case Kind.STATUS:
                self._send(Kind.STATUS_REPLY, self._listener.status())
            case Kind.GOODBYE:
                self._close()
            case Kind.ENQUEUE | Kind.DEQUEUE | Kind.SETTLE | Kind.QUEUE_CALL | Kind.CANCEL:
                self._requests.on_frame(kind, sequence, body)
                if self._requests.is_congested:
                    self._pause_reading()
            case _:
                raise ProtocolError(
                    "P301", f"a client cannot send frames of kind {kind}", "see docs/protocols.md for the kinds"
                )

    def _hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                "P309",
                f"the client uses version {hello.version} of the protocol, this broker uses {PROTOCOL_VERSION}",
                "install a client of the same release as the broker",
            )
        check_token(hello.token, self._listener.token)
        if self._is_welcome:
            raise ProtocolError("P310", "this connection has already sent HELLO", "send HELLO once per connection")
        publisher = whole_name(hello.publisher, hello.key)
        if publisher:
            self._session.attach_publisher(publisher, self._peer_host())
            self._acknowledged = self._session.acknowledged
        self._is_welcome = True
        self._heard_s = self._loop.time()
        self._send(
            Kind.WELCOME,
            Welcome(
                PROTOCOL_VERSION,
                self._host.name,
                self._acknowledged,
                self._config.frame_bytes_max,
                self._config.publisher_window_bytes,
                _refusals(self._session.refused(1, self._acknowledged)),
            ),
        )

    def _peer_host(self) -> str:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if peer else ""

    def _subscribe(self, subscribe: Subscribe) -> None:
        try:
            policy = Policy.parse(subscribe.policy)
            self._session.subscribe(subscribe.id, Filter.parse(subscribe.filter), policy)
        except TidegateError as error:
            self._refuse_subscription(subscribe.id, error)

    def _rebind(self, rebind: Rebind) -> None:
        try:
            self._session.rebind(rebind.id, Filter.parse(rebind.filter))
        except (FilterError, Overloaded) as error:
            self._refuse_subscription(rebind.id, error)

    def _refuse_subscription(self, client_id: int, error: TidegateError) -> None:
        """Reports an invalid subscription. The connection and its other subscriptions continue."""
        self._send(Kind.ERROR, ErrorBody(error.code, error.message, error.remedy, error.column, client_id))

    # Writing.

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _continue_writing(self) -> None:
        self._flush()
        if self._is_writable and not self._is_closing:
            self._requests.on_writable()

    def _flush(self) -> None:
        """Writes the pending acknowledgement, then deliveries while the transport accepts them."""
        self._is_flushing = False
        if self._is_closing or self._transport is None:
            return
        if self._owes_acknowledgement:
            self._owes_acknowledgement = False
            self._send(Kind.ACKNOWLEDGE, sequence=self._acknowledged)
        while self._is_writable and not self._is_closing and not self._transport.is_closing():
            if not self._session.take(WRITE_BYTES, self._write_deliveries):
                return

    def _write_deliveries(self, frames: list[bytes]) -> None:
        assert self._transport is not None
        self._transport.write(b"".join(frames))

    def _send(self, kind: Kind, body: Any = None, sequence: int = 0) -> None:
        if self._transport is None or self._is_closing or self._transport.is_closing():
            return
        self._transport.write(encode_frame(kind, body, sequence))
        if self._transport.get_write_buffer_size() > ANSWERS_BYTES_MAX:
            log.info(
                "connection cut publisher=%s reason=the peer does not read its answers", self._session.publisher or "-"
            )
            self._is_closing = True
            self._transport.cut()

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._is_closing:
            self._is_reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Resumes reading, unless the rate limit, congestion or queue requests still hold the peer back."""
        if self._transport is None or self._is_closing or self._is_stopping:
            return
        now_s = self._loop.time()
        publisher = self._session.publisher
        is_held_back = self._requests.is_congested or (publisher and self._host.is_congested(publisher))
        if not self._rate.is_exhausted(now_s) and not is_held_back:
            self._is_reading = True
            self._heard_s = now_s
            self._transport.resume_reading()

    def _fail(self, error: TidegateError) -> None:
        if self._is_closing:
            return
        publisher = self._session.publisher or "-"
        log.info("connection closed code=%s publisher=%s reason=%s", error.code, publisher, error.message)
        self._flush()
        self._send(Kind.ERROR, ErrorBody(error.code, error.message, error.remedy, error.column))
        self._close()

    def _close(self) -> None:
        """Closes once everything written is sent; a peer that does not read it is cut off after `CLOSE_S`.

        Until the peer closes too, its bytes are read and dropped. Closing a socket with unread bytes resets the
        connection, and the peer could lose the error that explains the close."""
        if self._is_closing or self._transport is None:
            return
        self._is_closing = True
        self._requests.close()
        self._session.close()
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
        self._loop.call_later(LINGER_S, self._abort_if_sent)
        self._loop.call_later(CLOSE_S, self._cut)

    def _abort_if_sent(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size() == 0:
            self._transport.abort()

    def _cut(self) -> None:
        if self._transport is not None:
            self._transport.cut()


def _refusals(refused: list[Refused]) -> list[Refusal]:
    """Returns what full queues did not store, as REFUSE reports it to the publisher."""
    refusals = []
    for each in refused:
        error = refused_by_queue(each.queue)
        last = each.last if each.last > each.first else None
        refusals.append(Refusal(each.first, error.code, error.message, error.remedy, last))
    return refusals


def _not_hello(data: bytes, kind: int) -> ProtocolError:
    if data[:4] in (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE"):
        return ProtocolError(
            "P312", "an HTTP request arrived on the native port", "use the HTTP port, which is 7271 by default"
        )
    return ProtocolError(
        "P301", f"the first frame has kind {kind}, not HELLO", "send HELLO first; see docs/protocols.md"
    )
