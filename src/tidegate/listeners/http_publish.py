"""`POST /v1/notifications`: JSON in, a batch of bytes out, and the answer when it is acknowledged.

A body is taken whole or not at all. With the headers `Tidegate-Publisher` and `Tidegate-Sequence` (that of the first
notification) a request can be sent again safely. Without them the request belongs to one of a few anonymous
publishers, chosen by its connection, so requests of one connection stay in order.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final
from zlib import crc32

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from tidegate.config import Config
from tidegate.errors import BadInput, NotificationError, Overloaded, ProtocolError, TidegateError, Unavailable
from tidegate.layers.batch import BATCH_NOTIFICATIONS_MAX, Batch, BatchReader
from tidegate.layers.embedded_host import BrokerHost
from tidegate.layers.frames import LayerFrame, PublishAcknowledged, SessionEnded
from tidegate.listeners.json_response import json_response
from tidegate.listeners.rate import RateLimit
from tidegate.notification import PAYLOAD, check

ANONYMOUS_PUBLISHERS: Final = 16
CLIENTS_REMEMBERED_MAX: Final = 10_000
PUBLISHER_CHARACTERS_MAX: Final = 128
SEQUENCE_DIGITS_MAX: Final = len(str(1 << 62))
_PAYLOAD_KEY: Final = f'"{PAYLOAD}"'.encode()


class TooLarge(BadInput):
    """A body over the limit."""

    status = 413


class HttpPublisher:
    """The endpoint, and the publishers that have requests under way."""

    def __init__(self, host: BrokerHost, config: Config, incarnation: str) -> None:
        self._host = host
        self._point = host.connection_point
        self._config = config
        self._reader = BatchReader()
        self._sessions: dict[str, PublisherSession] = {}
        # Kept here, not asked of the Connection Point: it may forget an idle publisher, and its numbers must go on.
        self._anonymous_name = f"http-{incarnation}"
        self._anonymous = {f"{self._anonymous_name}-{lane}": 0 for lane in range(ANONYMOUS_PUBLISHERS)}
        self._rates: OrderedDict[str, RateLimit] = OrderedDict()
        self._is_stopping = False

    async def publish(self, request: Request) -> Response:
        """The endpoint."""
        body = await read_body(request, self._config.body_bytes_max)
        if self._is_stopping:
            raise Unavailable("U702", "the broker is shutting down", "send it again in a moment")
        notifications = parse_notifications(body)
        self._check_rate(request, len(notifications))
        publisher, first = self._identity(request, request.headers)
        if self._point.is_congested(publisher):
            raise Overloaded(
                "L605", "slow subscribers hold up the broker", "come back after the given time", retry_after_s=1.0
            )
        batches = self._encode(publisher, first, notifications)
        await self._submit(publisher, batches, first + len(notifications) - 1)
        return json_response({"accepted": len(notifications)})

    def stop(self) -> None:
        """Takes no more; requests that wait for their acknowledgement still get it."""
        self._is_stopping = True

    def _identity(self, request: Request, headers: Headers) -> tuple[str, int]:
        """(publisher, sequence of the first notification)."""
        name, sequence = headers.get("tidegate-publisher"), headers.get("tidegate-sequence")
        if name is None and sequence is None:
            lane = crc32(str(request.client).encode()) % ANONYMOUS_PUBLISHERS
            name = f"{self._anonymous_name}-{lane}"
            return name, self._anonymous[name] + 1
        if not name or len(name) > PUBLISHER_CHARACTERS_MAX or sequence is None or not sequence.isascii():
            raise ProtocolError(
                "P313",
                f"Tidegate-Publisher is {name!r} and Tidegate-Sequence is {sequence!r}",
                "give both for a request that may be sent again, or none",
            )
        if not sequence.isdigit() or len(sequence) > SEQUENCE_DIGITS_MAX or not 0 < int(sequence) < 1 << 62:
            raise ProtocolError("P308", f"{sequence[:40]!r} is no sequence of a notification", "count from 1")
        return name, int(sequence)

    def _check_rate(self, request: Request, notifications: int) -> None:
        if not self._config.rate_notifications_s:
            return
        client = request.client.host if request.client else ""
        rate = self._rates.get(client) or RateLimit(self._config.rate_notifications_s)
        self._rates[client] = rate
        self._rates.move_to_end(client)
        if len(self._rates) > CLIENTS_REMEMBERED_MAX:
            self._rates.popitem(last=False)
        now_s = asyncio.get_running_loop().time()
        wait_s = rate.take(0, now_s)
        if wait_s > 0:
            limit = self._config.rate_notifications_s
            raise Overloaded("L606", f"over {limit:g} notifications a second", "slow down", retry_after_s=wait_s)
        rate.take(notifications, now_s)

    def _encode(self, publisher: str, first: int, notifications: list[Any]) -> list[Batch]:
        try:
            return encode_batches(self._reader, publisher, first, notifications)
        except NotificationError:
            self._point.count_refused(len(notifications))
            raise

    async def _submit(self, publisher: str, batches: list[Batch], through: int) -> None:
        session = self._session_of(publisher)
        session.requests += 1
        if publisher in self._anonymous:
            self._anonymous[publisher] = through
        try:
            self._host.carry(self._point.submit(publisher, batches, through))
            if self._point.acknowledged(publisher) < through:
                await session.wait(through, self._config.request_timeout_s)
        finally:
            session.requests -= 1
            if not session.requests:
                self._close(session)

    def _session_of(self, publisher: str) -> PublisherSession:
        session = self._sessions.get(publisher)
        if session is None or session.is_ended:
            session = PublisherSession(self._host, publisher)
            self._sessions[publisher] = session
        return session

    def _close(self, session: PublisherSession) -> None:
        session.close()
        if self._sessions.get(session.publisher) is session:
            del self._sessions[session.publisher]


class PublisherSession:
    """The requests of one publisher that are under way. They have a session of their own: a client that takes over
    the publisher's name ends this one, and the requests of other publishers go on."""

    def __init__(self, host: BrokerHost, publisher: str) -> None:
        self.publisher = publisher
        self.requests = 0
        self.is_ended = False
        self._host = host
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._session = host.open_session(self)
        try:
            _acknowledged, outputs = host.connection_point.attach_publisher(self._session, publisher)
        except TidegateError:
            self.close()
            raise
        host.carry(outputs)

    def on_frame(self, frame: LayerFrame) -> None:
        if isinstance(frame, PublishAcknowledged):
            for sequence, future in self._waiting:
                if sequence <= frame.sequence and not future.done():
                    future.set_result(None)
        elif isinstance(frame, SessionEnded):
            self.is_ended = True
            for _sequence, future in self._waiting:
                if not future.done():
                    future.set_exception(frame.error)

    async def wait(self, through: int, timeout_s: float) -> None:
        """A subscriber blocks: wait for the acknowledgement, within the time a request may take."""
        entry = (through, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1]
        except TimeoutError:
            raise Unavailable(
                "U703",
                "the notifications were taken, but are not acknowledged yet",
                "send them again with the same Tidegate-Publisher and Tidegate-Sequence",
            ) from None
        finally:
            self._waiting.remove(entry)

    def close(self) -> None:
        self._host.close_session(self._session)


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body, or TooLarge as soon as it is known to be."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > bytes_max:
        raise _too_large(int(announced), bytes_max)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise _too_large(len(body), bytes_max)
    return bytes(body)


def parse_notifications(body: bytes) -> list[Any]:
    """One object or an array of objects, as a list; payloads as bytes."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            "P314", f"the body is not JSON: {error}", 'send {"NO2": 212} or an array of such'
        ) from error
    notifications = parsed if isinstance(parsed, list) else [parsed]
    if not notifications or not all(isinstance(notification, dict) for notification in notifications):
        raise ProtocolError(
            "P315", "the body is not an object or an array of objects", 'send {"NO2": 212} or an array of such'
        )
    if _PAYLOAD_KEY in body:
        _decode_payloads(notifications)
    return notifications


def encode_batches(reader: BatchReader, publisher: str, first: int, notifications: list[Any]) -> list[Batch]:
    """The batches, all of them checked; NotificationError for the first bad notification, with its index."""
    starts = range(0, len(notifications), BATCH_NOTIFICATIONS_MAX)
    parts = (notifications[start : start + BATCH_NOTIFICATIONS_MAX] for start in starts)
    try:
        return [
            reader.read_array(publisher, first + start, msgspec.msgpack.encode(part))
            for start, part in zip(starts, parts, strict=True)
        ]
    # What MessagePack cannot carry, an integer over 64 bits or lists in lists, breaks the rules as well.
    except (NotificationError, OverflowError, RecursionError):
        for index, notification in enumerate(notifications):
            with _naming(index, notifications):
                check(notification)
                reader.read_array(publisher, first, msgspec.msgpack.encode([notification]))
        raise


def _decode_payloads(notifications: list[dict[str, Any]]) -> None:
    for index, notification in enumerate(notifications):
        if isinstance(text := notification.get(PAYLOAD), str):
            with _naming(index, notifications):
                notification[PAYLOAD] = _decode_payload(text)


def _decode_payload(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise NotificationError("N209", "the payload is not base64", "encode its bytes as base64") from None


@contextlib.contextmanager
def _naming(index: int, notifications: list[Any]) -> Iterator[None]:
    """Says in an error which of many notifications it is about."""
    try:
        yield
    except NotificationError as error:
        if len(notifications) == 1:
            raise
        place = f"notification [{index}] of {len(notifications)}: "
        raise NotificationError(error.code, place + error.message, error.remedy) from None


def _too_large(size: int, bytes_max: int) -> TooLarge:
    return TooLarge("P316", f"the body has {size} bytes", f"send at most {bytes_max} in one request")
