"""The native listener: frames over TCP, as docs/protocols.md describes them.

All connections read into one buffer, one after the other: what a read brings is copied out of it at once, and only the
beginning of an incomplete frame is kept with its connection. All complete PUBLISH frames of a read become one batch,
whatever the client's frames were. Deliveries and acknowledgements go out once an iteration of the event loop. What may
go wrong: a malformed frame (what was good before it in the read is on its way first, then the connection is closed
with an error), a peer that says nothing (closed after a timeout), a peer that does not read (its outbox fills).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from tidegate.config import Config
from tidegate.errors import FilterError, ProtocolError, TidegateError, Unavailable
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
    Subscribe,
    Unsubscribe,
    Welcome,
    decode_body,
    encode_frame,
    frame_too_long,
)
from tidegate.layers.batch import BatchReader
from tidegate.layers.embedded_host import BrokerHost
from tidegate.layers.frames import (
    DeliveriesWait,
    LayerFrame,
    PublishAcknowledged,
    SessionEnded,
    SubscriptionEnded,
    SubscriptionReady,
    SubscriptionRebound,
    SubscriptionRefused,
)
from tidegate.layers.outbox import Policy
from tidegate.layers.publishers import NOBODY
from tidegate.listeners.gate import check_token
from tidegate.listeners.native_queues import QueueRequests
from tidegate.listeners.rate import RateLimit
from tidegate.queues import LogicalQueues

log = logging.getLogger(__name__)

# A read costs much the same whatever it brings, so it takes several frames of a publisher who is ahead.
READ_BYTES: Final = 256 * 1024
WRITE_BYTES: Final = 256 * 1024
PUBLISHER_CHARACTERS_MAX: Final = 128
# Answers that a peer has not read; one who asks for more without reading is cut off.
ANSWERS_BYTES_MAX: Final = 8 * 1024 * 1024
# How long a closed connection may take to read what was written, the error that closed it last; and to go after that.
CLOSE_S: Final = 10.0
LINGER_S: Final = 1.0


class NativeListener:
    """All native connections of a broker. `status` gives what a STATUS frame is answered with."""

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
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, tls: ssl.SSLContext | None) -> int:
        """Listens; returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: NativeConnection(self), self.config.bind, self.config.native_port, ssl=tls, backlog=1024
        )
        return int(self._server.sockets[0].getsockname()[1])

    def tick(self, now_s: float) -> None:
        """Closes connections that have been silent for too long."""
        for connection in list(self.connections):
            connection.check_silence(now_s)

    async def stop(self, deadline_s: float) -> None:
        """Takes no more, gives subscribers until the deadline to take what waits for them, and closes."""
        if self._server is not None:
            self._server.close()
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
    """One connection: a session of the Connection Point from HELLO on."""

    def __init__(self, listener: NativeListener) -> None:
        self._listener = listener
        self._host = listener.host
        self._point = listener.host.connection_point
        self._config = listener.config
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._partial = PartialFrame()
        self._session = NOBODY
        self._is_welcome = False
        self._publisher = ""
        self._acknowledged = 0
        self._told_acknowledged = 0
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
        # uvloop's transports have the methods, not the class.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)
        self._listener.connections.add(self)
        try:
            self._session = self._host.open_session(self)
        except TidegateError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._transport = None
        self._listener.connections.discard(self)
        self._requests.close()
        self._host.close_session(self._session)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer of all connections: a transport fills it and calls `buffer_updated` before anything else runs."""
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
        self._flush()
        self._requests.on_writable()

    # The Connection Point calls this.

    def on_frame(self, frame: LayerFrame) -> None:
        match frame:
            case DeliveriesWait():
                self._flush_soon()
            case PublishAcknowledged():
                self._acknowledged = frame.sequence
                self._flush_soon()
                if not self._is_reading:
                    self._resume_reading()
            case SubscriptionReady():
                self._send(Kind.SUBSCRIBED, sequence=frame.client_id)
            case SubscriptionRebound():
                self._send(Kind.REBOUND, sequence=frame.client_id)
            case SubscriptionRefused():
                self._refuse_subscription(frame.client_id, frame.error)
            case SubscriptionEnded():
                self._send(Kind.UNSUBSCRIBED, sequence=frame.client_id)
            case SessionEnded():
                self._fail(frame.error)

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

    def check_silence(self, now_s: float) -> None:
        """Silent is who says nothing although we listen; before HELLO, every byte short of it is silence."""
        if not self._is_reading:
            self._resume_reading()
            return
        silent_s = now_s - self._heard_s
        allowed_s = self._config.idle_timeout_s if self._is_welcome else self._config.hello_timeout_s
        if silent_s > allowed_s:
            self._fail(Unavailable("U705", f"nothing was heard for {silent_s:.0f} s", "send PING frames when idle"))

    def stop_reading(self) -> None:
        """What comes from now on is not acknowledged; its publisher sends it again to the next broker."""
        self._is_stopping = True
        self._partial.clear()
        if self._transport is not None and not self._is_closing:
            self._transport.resume_reading()

    def has_deliveries(self) -> bool:
        """Whether something is on its way to the peer: deliveries, or answers about queues."""
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
        """Handles every complete frame; returns how many bytes they had."""
        position = 0
        while len(data) - position >= HEADER_BYTES and not self._is_closing:
            length, kind, _flags, _zero, sequence = HEADER.unpack_from(data, position)
            if not self._is_welcome and kind != Kind.HELLO:
                raise _not_hello(data, kind)
            if length > self._config.frame_bytes_max:
                raise frame_too_long(length, self._config.frame_bytes_max)
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
        if not self._publisher:
            raise ProtocolError("P310", "this connection has named no publisher", "name one in HELLO to publish")
        if not 0 < sequence < 1 << 62:
            raise ProtocolError("P308", f"{sequence} is no sequence of a notification", "count from 1")
        read = self._listener.reader.read_frames(self._publisher, data, position, sequence)
        if read.refusals:
            self._point.count_refused(len(read.refusals))
            self._send(Kind.REFUSE, read.refusals)
        self._host.carry(self._point.submit(self._publisher, read.batches, read.through))
        if read.error is not None:
            raise read.error
        self._slow_down(read.through - sequence + 1)
        return read.position

    def _slow_down(self, notifications: int) -> None:
        wait_s = self._rate.take(notifications, self._loop.time())
        if wait_s > 0:
            self._pause_reading()
            self._loop.call_later(wait_s, self._resume_when_paid)
        elif self._point.is_congested(self._publisher):
            self._pause_reading()

    def _resume_when_paid(self) -> None:
        """Timers and fractions are a little early at times: looks again when some of the debt is left."""
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
                self._host.carry(self._point.unsubscribe(self._session, decode_body(body, Unsubscribe).id))
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
                raise ProtocolError("P301", f"{kind} is no kind of frame that a client sends", "see docs/protocols.md")

    def _hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                "P309",
                f"the client speaks version {hello.version}",
                f"this broker speaks {PROTOCOL_VERSION}: install a client of the same release",
            )
        check_token(hello.token, self._listener.token)
        if len(hello.publisher) > PUBLISHER_CHARACTERS_MAX or self._is_welcome:
            raise ProtocolError(
                "P310",
                f"a second HELLO, or a publisher's name of {len(hello.publisher)} characters",
                f"say HELLO once, with a name of at most {PUBLISHER_CHARACTERS_MAX}, unique for each start of a client",
            )
        if hello.publisher:
            self._acknowledged, outputs = self._point.attach_publisher(self._session, hello.publisher)
            self._told_acknowledged = self._acknowledged
            self._host.carry(outputs)
        self._publisher = hello.publisher
        self._is_welcome = True
        self._heard_s = self._loop.time()
        self._send(
            Kind.WELCOME,
            Welcome(
                PROTOCOL_VERSION,
                self._point.name,
                self._acknowledged,
                self._config.frame_bytes_max,
                self._config.publisher_window_bytes,
            ),
        )

    def _subscribe(self, subscribe: Subscribe) -> None:
        try:
            policy = Policy.parse(subscribe.policy)
            parsed = Filter.parse(subscribe.filter)
            self._host.carry(self._point.subscribe(self._session, subscribe.id, parsed, policy))
        except TidegateError as error:
            self._refuse_subscription(subscribe.id, error)

    def _rebind(self, rebind: Rebind) -> None:
        try:
            self._host.carry(self._point.rebind(self._session, rebind.id, Filter.parse(rebind.filter)))
        except FilterError as error:
            self._refuse_subscription(rebind.id, error)

    def _refuse_subscription(self, client_id: int, error: TidegateError) -> None:
        """A bad subscription ends itself, not the connection with its other subscriptions."""
        self._send(Kind.ERROR, ErrorBody(error.code, error.message, error.remedy, error.column, client_id))

    # Writing.

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Writes acknowledgements, then deliveries while the transport takes them."""
        self._is_flushing = False
        if self._is_closing or self._transport is None:
            return
        if self._acknowledged > self._told_acknowledged:
            self._told_acknowledged = self._acknowledged
            self._send(Kind.ACKNOWLEDGE, sequence=self._acknowledged)
        # A transport whose peer has gone is closing before this connection hears of it.
        while self._is_writable and not self._is_closing and not self._transport.is_closing():
            frames, outputs = self._point.take(self._session, WRITE_BYTES)
            if frames:
                self._transport.write(b"".join(frames))
            self._host.carry(outputs)
            if not frames:
                return

    def _send(self, kind: Kind, body: Any = None, sequence: int = 0) -> None:
        if self._transport is None or self._is_closing or self._transport.is_closing():
            return
        self._transport.write(encode_frame(kind, body, sequence))
        if self._transport.get_write_buffer_size() > ANSWERS_BYTES_MAX:
            log.info("connection cut publisher=%s reason=it does not read its answers", self._publisher or "-")
            self._is_closing = True
            self._transport.abort()

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._is_closing:
            self._is_reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Reads on, unless something else still holds this publisher back."""
        if self._transport is None or self._is_closing or self._is_stopping:
            return
        now_s = self._loop.time()
        is_held_back = self._requests.is_congested or (self._publisher and self._point.is_congested(self._publisher))
        if not self._rate.is_exhausted(now_s) and not is_held_back:
            self._is_reading = True
            self._heard_s = now_s
            self._transport.resume_reading()

    def _fail(self, error: TidegateError) -> None:
        if self._is_closing:
            return
        log.info("connection closed code=%s publisher=%s reason=%s", error.code, self._publisher or "-", error.message)
        self._flush()
        self._send(Kind.ERROR, ErrorBody(error.code, error.message, error.remedy, error.column))
        self._close()

    def _close(self) -> None:
        """Closes when what is written is sent; a peer that does not read it is cut off after a while.

        What still comes is read and dropped until the peer has gone too: with unread bytes the close would be a reset,
        and take from the peer what it has not read yet, such as the error that tells it why."""
        if self._is_closing or self._transport is None:
            return
        self._is_closing = True
        self._requests.close()
        self._host.close_session(self._session)
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()
        self._loop.call_later(LINGER_S, self._abort_if_sent)
        self._loop.call_later(CLOSE_S, self.abort)

    def _abort_if_sent(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size() == 0:
            self._transport.abort()


def _not_hello(data: bytes, kind: int) -> ProtocolError:
    if data[:4] in (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE"):
        return ProtocolError("P312", "this is the native port, and it got an HTTP request", "use the HTTP port, 7271")
    return ProtocolError("P301", f"the first frame is of kind {kind}", "begin with HELLO; see docs/protocols.md")
