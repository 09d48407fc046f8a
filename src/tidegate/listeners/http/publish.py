"""`POST /v1/notifications`: turns JSON into batches, submits them, and answers once they are acknowledged.

A body is accepted as a whole or not at all. With the headers `Tidegate-Publisher` and `Tidegate-Sequence` (the sequence
of the first notification), a client can safely send a request again. With `Tidegate-Publisher-Key`, nobody else can use
the publisher's sequence numbers. A request without these headers belongs to one of `ANONYMOUS_PUBLISHERS` publishers,
chosen by its connection, so that the requests of one connection stay in order.

What may go wrong: an invalid body or notification; a rate limit, slow subscribers or full queues (429); no
acknowledgement in time (U703).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final
from zlib import crc32

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from tidegate.config import Config
from tidegate.errors import NotificationError, Overloaded, ProtocolError, TidegateError, Unavailable
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.hosts.session import Session
from tidegate.layers.batch import BATCH_NOTIFICATIONS_MAX, Batch, BatchReader
from tidegate.layers.session_events import PublishAcknowledged, SessionEnded, SessionEvent, refused_by_queue
from tidegate.listeners.http.body import read_body
from tidegate.listeners.http.json_keys import refuse_duplicate_keys
from tidegate.listeners.http.json_response import json_response
from tidegate.listeners.rate import RateLimit
from tidegate.notification import PAYLOAD, check
from tidegate.security.publisher_key import NAME_CHARACTERS_MAX, make_key, whole_name

ANONYMOUS_PUBLISHERS: Final = 16
CLIENTS_REMEMBERED_MAX: Final = 10_000
QUEUES_NAMED: Final = 3
PUBLISHER: Final = "Tidegate-Publisher"
SEQUENCE: Final = "Tidegate-Sequence"
KEY: Final = "Tidegate-Publisher-Key"
PUBLISHER_HEADERS: Final = (PUBLISHER, SEQUENCE, KEY)
SEQUENCE_DIGITS_MAX: Final = len(str(1 << 62))
_PAYLOAD_KEY: Final = f'"{PAYLOAD}"'.encode()


class HttpPublisher:
    """The endpoint, and the sessions of publishers with pending requests. `holding_back` returns the names of full
    queues that hold back publishers."""

    def __init__(
        self, host: BrokerHost, config: Config, incarnation: str, holding_back: Callable[[], list[str]]
    ) -> None:
        self._host = host
        self._holding_back = holding_back
        self._config = config
        self._reader = BatchReader()
        self._sessions: dict[str, PublisherSession] = {}
        # The last sequence of each anonymous publisher. The Connection Point may forget an idle publisher, but its
        # sequence must not start again.
        key = make_key()
        self._lanes = [whole_name(f"http-{incarnation}-{lane}", key) for lane in range(ANONYMOUS_PUBLISHERS)]
        self._anonymous = dict.fromkeys(self._lanes, 0)
        self._rates: OrderedDict[str, RateLimit] = OrderedDict()
        self._is_stopping = False

    async def publish(self, request: Request) -> Response:
        """Handles `POST /v1/notifications`."""
        body = await read_body(request, self._config.body_bytes_max)
        if self._is_stopping:
            raise Unavailable("U702", "the broker is shutting down", "send it again in a moment")
        notifications = parse_notifications(body)
        self._check_rate(request, len(notifications))
        publisher, first = self._identity(request, request.headers)
        if self._host.is_congested(publisher):
            raise self._host.refusals.note(self._congested())
        batches = self._encode(publisher, first, notifications)
        host = request.client.host if request.client else ""
        await self._submit(publisher, host, batches, first + len(notifications) - 1)
        return json_response({"accepted": len(notifications)})

    def _congested(self) -> Overloaded:
        if names := self._holding_back():
            shown = ", ".join(map(repr, names[:QUEUES_NAMED]))
            why = f"full queues hold up the broker: {shown}{' and others' if len(names) > QUEUES_NAMED else ''}"
        else:
            why = "slow subscribers hold up the broker"
        return Overloaded("L605", why, "retry after the given time", retry_after_s=1.0)

    def stop(self) -> None:
        """Refuses new requests. Pending requests still get their acknowledgement."""
        self._is_stopping = True

    def _identity(self, request: Request, headers: Headers) -> tuple[str, int]:
        """Returns the publisher and the sequence of the first notification."""
        name, sequence, key = (headers.get(each) for each in PUBLISHER_HEADERS)
        if name is None and sequence is None and key is None:
            name = self._lanes[crc32(str(request.client).encode()) % ANONYMOUS_PUBLISHERS]
            return name, self._anonymous[name] + 1
        if not name or len(name) > NAME_CHARACTERS_MAX or sequence is None or not sequence.isascii():
            raise ProtocolError(
                "P313",
                f"Tidegate-Publisher is {name!r} and Tidegate-Sequence is {sequence!r}",
                "send both headers with a request that you may have to repeat, or neither",
            )
        if not sequence.isdigit() or len(sequence) > SEQUENCE_DIGITS_MAX or not 0 < int(sequence) < 1 << 62:
            raise ProtocolError(
                "P308", f"Tidegate-Sequence {sequence[:40]!r} is invalid", "number your notifications from 1"
            )
        return whole_name(name, key or ""), int(sequence)

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
        # Taking nothing reports the debt without adding to it: a refused request costs no tokens.
        wait_s = rate.take(0, now_s)
        if wait_s > 0:
            limit = self._config.rate_notifications_s
            raise self._host.refusals.note(
                Overloaded(
                    "L606",
                    f"the client exceeds {limit:g} notifications per second",
                    "publish more slowly",
                    retry_after_s=wait_s,
                )
            )
        rate.take(notifications, now_s)

    def _encode(self, publisher: str, first: int, notifications: list[Any]) -> list[Batch]:
        try:
            return encode_batches(self._reader, publisher, first, notifications)
        except NotificationError:
            self._host.count_refused(len(notifications))
            raise

    async def _submit(self, publisher: str, host: str, batches: list[Batch], through: int) -> None:
        session = self._session_of(publisher, host)
        session.requests += 1
        if publisher in self._anonymous:
            self._anonymous[publisher] = through
        try:
            session.submit(batches, through)
            if session.acknowledged < through:
                await session.wait(through, self._config.request_timeout_s)
            _check_refused(session, batches, through)
        finally:
            session.requests -= 1
            if not session.requests:
                self._close(session)

    def _session_of(self, publisher: str, host: str) -> PublisherSession:
        session = self._sessions.get(publisher)
        if session is None or session.is_ended:
            session = PublisherSession(self._host, publisher, host)
            self._sessions[publisher] = session
        return session

    def _close(self, session: PublisherSession) -> None:
        session.close()
        if self._sessions.get(session.publisher) is session:
            del self._sessions[session.publisher]


class PublisherSession(Session):
    """The pending requests of one publisher.

    Each publisher has a session of its own: if another client takes over the publisher's name, only this session ends,
    and the requests of other publishers continue."""

    def __init__(self, host: BrokerHost, publisher: str, peer_host: str) -> None:
        super().__init__(host, self)
        self.requests = 0
        self.is_ended = False
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.open()
        try:
            self.attach_publisher(publisher, peer_host)
        except TidegateError:
            self.close()
            raise

    def on_event(self, event: SessionEvent) -> None:
        if isinstance(event, PublishAcknowledged):
            for sequence, future in self._waiting:
                if sequence <= event.sequence and not future.done():
                    future.set_result(None)
        elif isinstance(event, SessionEnded):
            self.is_ended = True
            for _sequence, future in self._waiting:
                if not future.done():
                    future.set_exception(event.error)

    async def wait(self, through: int, timeout_s: float) -> None:
        """Waits for the acknowledgement, which a blocking subscriber may delay. Raises U703 after `timeout_s`."""
        entry = (through, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1]
        except TimeoutError:
            raise Unavailable(
                "U703",
                "the notifications were accepted, but not acknowledged in time",
                "send them again with the same Tidegate-Publisher and Tidegate-Sequence",
            ) from None
        finally:
            self._waiting.remove(entry)


def _check_refused(session: Session, batches: list[Batch], through: int) -> None:
    """Raises Overloaded if a full queue did not store some of the notifications, even if the request is a duplicate."""
    first = batches[0].first if batches else through
    if refused := session.refused(first, through):
        error = refused_by_queue(refused[0].queue)
        count, total = sum(each.last - each.first + 1 for each in refused), through - first + 1
        place = f"{min(count, total)} of {total} notifications, from [{refused[0].first - first}] on: "
        raise Overloaded(
            error.code,
            (place if total > 1 else "") + error.message,
            error.remedy,
            retry_after_s=error.retry_after_s,
        )


def parse_notifications(body: bytes) -> list[Any]:
    """Returns the notifications of a body, which is one object or an array of objects, with payloads as bytes."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            "P314", f"the body is not JSON: {error}", 'send an object such as {"NO2": 212}, or an array of objects'
        ) from error
    notifications = parsed if isinstance(parsed, list) else [parsed]
    if set(map(type, notifications)) != {dict}:
        raise ProtocolError(
            "P315",
            "the body is not an object or an array of objects",
            'send an object such as {"NO2": 212}, or an array of objects',
        )
    refuse_duplicate_keys(body, parsed)
    if _PAYLOAD_KEY in body:
        _decode_payloads(notifications)
    return notifications


def encode_batches(reader: BatchReader, publisher: str, first: int, notifications: list[Any]) -> list[Batch]:
    """Returns the notifications as validated batches. Raises NotificationError for the first invalid one, with its
    index."""
    starts = range(0, len(notifications), BATCH_NOTIFICATIONS_MAX)
    parts = (notifications[start : start + BATCH_NOTIFICATIONS_MAX] for start in starts)
    try:
        return [
            reader.read_array(publisher, first + start, msgspec.msgpack.encode(part))
            for start, part in zip(starts, parts, strict=True)
        ]
    # MessagePack cannot encode integers over 64 bits or very deep nesting. Both break the rules for notifications too,
    # so the loop below finds the notification and reports why it is invalid.
    except (NotificationError, OverflowError, RecursionError):
        for index, notification in enumerate(notifications):
            with _with_index(index, notifications):
                check(notification)
                reader.read_array(publisher, first, msgspec.msgpack.encode([notification]))
        raise


def _decode_payloads(notifications: list[dict[str, Any]]) -> None:
    for index, notification in enumerate(notifications):
        if isinstance(text := notification.get(PAYLOAD), str):
            with _with_index(index, notifications):
                notification[PAYLOAD] = _decode_payload(text)


def _decode_payload(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise NotificationError("N209", "the payload is not base64", "encode its bytes as base64") from None


@contextlib.contextmanager
def _with_index(index: int, notifications: list[Any]) -> Iterator[None]:
    """Adds the index of the notification to a NotificationError, unless the request has only one."""
    try:
        yield
    except NotificationError as error:
        if len(notifications) == 1:
            raise
        place = f"notification [{index}] of {len(notifications)}: "
        raise NotificationError(error.code, place + error.message, error.remedy) from None
