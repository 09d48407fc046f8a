"""A link: one TCP connection to the broker that reconnects automatically.

It sends Hello, pings when idle, and detects a peer that has gone silent. After a loss it tries each known broker at
once, beginning with the next. If none answers, it waits for a random time that doubles up to a bound, in addition to
the longest time that a refusing broker asks for. Its user is called for each new connection and each frame, and must
resend what matters. The link retries after `Unavailable` and `Overloaded`; every other error of the broker is final.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final, Protocol, cast

from tidegate.client.address import Address
from tidegate.client.control import BackoffSettings, FirstValue, RetryPace
from tidegate.errors import (
    BadInput,
    ConflictingQueue,
    NoSuchQueue,
    NotAllowed,
    Overloaded,
    QueueError,
    TidegateError,
    Unavailable,
)
from tidegate.frames import (
    FRAME_BYTES_MAX,
    ErrorBody,
    Hello,
    Kind,
    PartialFrame,
    Welcome,
    decode_body,
    encode_frame,
    split_frames,
)

# A broker writes up to 256 KiB at once: a subscriber that was busy reads several of these in one call.
READ_BYTES: Final = 1024 * 1024
WRITE_BYTES: Final = 256 * 1024
PING_S: Final = 15.0
SILENCE_S: Final = 45.0
# These are means; the waits are random, so that the clients of a restarted broker do not all connect at once.
RECONNECT_BACKOFF: Final = BackoffSettings(first_value=FirstValue.MINIMUM, backoff_s_min=0.025, backoff_s_max=2.5)
GOODBYE_S: Final = 1.0

# The exception for a broker's error code: by the whole code if listed, else by its first letter.
_ERROR_OF_CODE: Final[dict[str, type[TidegateError]]] = {
    "A": NotAllowed,
    "Q": QueueError,
    "Q901": NoSuchQueue,
    "Q904": ConflictingQueue,
    "U": Unavailable,
}


class LinkUser(Protocol):
    """The callbacks of a link. `on_failed` reports a final error; the link has ended by then."""

    def on_welcome(self, welcome: Welcome) -> None: ...
    def on_frame(self, kind: int, sequence: int, body: memoryview) -> None: ...
    def on_failed(self, error: TidegateError) -> None: ...
    def on_writable(self) -> None: ...


@dataclass(frozen=True)
class LinkOptions:
    """How to reach the broker. `connect_timeout_s` bounds all attempts for the first connection together. After a loss
    it bounds each round over the addresses, and rounds are repeated forever."""

    addresses: tuple[Address, ...]
    token: str = ""
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 5.0


class Link:
    def __init__(self, options: LinkOptions, publisher: str, user: LinkUser, key: str = "") -> None:
        self._options = options
        self._publisher = publisher
        self._key = key
        self._user = user
        self._protocol: _LinkProtocol | None = None
        self._keeping_up: asyncio.Task[None] | None = None
        self._is_closing = False
        self._last_failure = "no answer"
        self._turn = 0  # index of the broker in use, or of the one to try next
        self.reconnections = 0

    @property
    def is_writable(self) -> bool:
        return self._protocol is not None and self._protocol.is_writable

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Waits until the link is connected for the first time. A task then keeps it connected."""
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                protocol = await self._connect_with_retries()
        except TimeoutError:
            raise _no_answer(self._options.addresses, self._last_failure) from None
        if self._is_closing:
            protocol.abort()
            raise not_open()
        self._keeping_up = tasks.create_task(self._keep_up(protocol))

    def write(self, data: bytes) -> None:
        """Writes a frame. Does nothing while the link is down: in `on_welcome` the user resends what matters."""
        if self._protocol is not None:
            self._protocol.write(data)

    def pause_reading(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_reading()

    def resume_reading(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_reading()

    def close(self) -> None:
        self._is_closing = True
        if self._protocol is not None:
            self._protocol.say_goodbye()
        elif self._keeping_up is not None:
            self._keeping_up.cancel()  # it is trying to reconnect, which is no longer needed

    async def _keep_up(self, protocol: _LinkProtocol) -> None:
        try:
            while True:
                await self._watch(protocol)
                self._protocol = None
                if self._is_closing:
                    return
                _raise_if_final(protocol.error)
                self._turn += 1
                protocol = await self._connect_with_retries()
                self.reconnections += 1
        except TidegateError as error:
            self._user.on_failed(error)

    async def _watch(self, protocol: _LinkProtocol) -> None:
        """Waits until the connection is lost. Pings meanwhile, and aborts it if the peer has gone silent."""
        while not protocol.is_lost.is_set():
            try:
                async with asyncio.timeout(PING_S):
                    await protocol.is_lost.wait()
            except TimeoutError:
                protocol.ping()

    async def _connect_with_retries(self) -> _LinkProtocol:
        pace = RetryPace(settings=RECONNECT_BACKOFF)
        while True:
            # The next round asks all brokers again, so it must not begin before the time of any of them.
            retry_after_s = 0.0
            for _ in self._options.addresses:
                try:
                    return await self._connect_next()
                except (Unavailable, Overloaded, OSError) as error:
                    self._last_failure = str(error) or "no answer"
                    self._turn += 1
                    if isinstance(error, Overloaded):
                        retry_after_s = max(retry_after_s, error.retry_after_s)
            await asyncio.sleep(pace.on_refusal(retry_after_s))

    async def _connect_next(self) -> _LinkProtocol:
        addresses = self._options.addresses
        address = addresses[self._turn % len(addresses)]
        try:
            async with asyncio.timeout(self._options.connect_timeout_s / len(addresses)):
                return await self._connect(address)
        except ssl.SSLCertVerificationError as error:
            raise NotAllowed(
                "A505",
                f"the certificate of {address} is not trusted: {error.verify_message}",
                "pass a TLS context that trusts its authority",
            ) from error

    async def _connect(self, address: Address) -> _LinkProtocol:
        options = self._options
        loop = asyncio.get_running_loop()
        tls = options.tls or ssl.create_default_context() if address.is_tls else None
        _transport, protocol = await loop.create_connection(
            lambda: _LinkProtocol(self._user), address.host, address.port, ssl=tls
        )
        protocol.write(encode_frame(Kind.HELLO, Hello(publisher=self._publisher, token=options.token, key=self._key)))
        try:
            welcome = await protocol.welcomed()
        except BaseException:
            protocol.abort()
            raise
        self._protocol = protocol
        self._user.on_welcome(welcome)
        return protocol


class _LinkProtocol(asyncio.BufferedProtocol):
    """The bytes of one TCP connection."""

    def __init__(self, user: LinkUser) -> None:
        self.is_lost = asyncio.Event()
        self.is_writable = False
        self.error: TidegateError | None = None
        self._user = user
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._partial = PartialFrame()
        self._is_paused = False
        self._heard_s = self._loop.time()

    async def welcomed(self) -> Welcome:
        return await self._welcome

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def ping(self) -> None:
        """Sends a ping. Aborts first if the peer has sent nothing for SILENCE_S while we were reading."""
        if not self._is_paused and self._loop.time() - self._heard_s > SILENCE_S:
            self.abort()
        self.write(encode_frame(Kind.PING))

    def pause_reading(self) -> None:
        self._is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._heard_s = self._loop.time()
            self._transport.resume_reading()

    def say_goodbye(self) -> None:
        """Closes after all written bytes are sent, or after GOODBYE_S if the broker does not read."""
        self.write(encode_frame(Kind.GOODBYE))
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(GOODBYE_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport, but do not inherit from it.
        self._transport = cast(asyncio.Transport, transport)
        self.is_writable = True
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.is_writable = False
        self.is_lost.set()
        if not self._welcome.done():
            lost = self.error or Unavailable("U704", "the connection was lost", "the client reconnects by itself")
            self._welcome.set_exception(lost)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self._user.on_writable()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._partial.room() or self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_s = self._loop.time()
        data = self._partial.take(self._buffer, nbytes)
        if not data:
            return
        consumed = 0
        try:
            for kind, sequence, start, consumed in split_frames(data, FRAME_BYTES_MAX):
                self._take(kind, sequence, data[start:consumed])
        except BadInput as error:
            self.error = error
            self.abort()
        else:
            self._partial.keep(data[consumed:])

    def _take(self, kind: int, sequence: int, body: memoryview) -> None:
        if kind == Kind.WELCOME:
            self._welcome.set_result(decode_body(body, Welcome))
        elif kind == Kind.ERROR:
            error: ErrorBody = decode_body(body, ErrorBody)
            if error.subscription is None:
                self.error = to_exception(error)
            else:
                self._user.on_frame(kind, sequence, body)
        elif kind == Kind.CLOSING:
            self.error = Unavailable("U702", "the broker is shutting down", "the client reconnects by itself")
        elif kind != Kind.PONG:
            self._user.on_frame(kind, sequence, body)


def _raise_if_final(error: TidegateError | None) -> None:
    # L603 reports a disconnection by the policy `disconnect`. A program that chose it expects the error, not a retry.
    if error is not None and (not isinstance(error, (Unavailable, Overloaded)) or error.code == "L603"):
        raise error


def to_exception(error: ErrorBody) -> TidegateError:
    """Returns the exception for a broker's error, chosen by its code."""
    if error.code.startswith("L"):
        retry_after_s = error.retry_after_s if error.retry_after_s is not None else 1.0
        return Overloaded(error.code, error.message, error.remedy, retry_after_s=retry_after_s)
    shape = _ERROR_OF_CODE.get(error.code) or _ERROR_OF_CODE.get(error.code[:1], BadInput)
    return shape(error.code, error.message, error.remedy, column=error.column)


def not_open() -> Unavailable:
    return Unavailable("U706", "the connection is not open", "use it inside: async with connect(…) as broker")


def _no_answer(addresses: tuple[Address, ...], why: str) -> Unavailable:
    places = " or ".join(map(str, addresses))
    return Unavailable("U701", f"no broker answers at {places} ({why})", "start one with: tidegate serve")
