"""Publishing: notifications are numbered, collected into batches, and kept until the broker acknowledges them.

A batch is sent when the event loop is otherwise idle, or when it is full; never by a timer. So a single notification
leaves at once, and many travel in large frames. Frames that are unacknowledged when the link breaks are sent again
under the same numbers, and the broker delivers them once. At most about `window_bytes` are unacknowledged: beyond that
`publish` waits, so a program cannot outrun its broker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tidegate.client.link import Link, LinkOptions, not_open
from tidegate.errors import NotificationError, Overloaded, TidegateError
from tidegate.frames import HEADER_BYTES, Kind, Refusal, Welcome, decode_body, join_maps, publish_frame
from tidegate.notification import check

BATCH_NOTIFICATIONS: Final = 256
BATCH_BYTES: Final = 64 * 1024
REFUSALS_REMEMBERED_MAX: Final = 1000
# The suggested retry time for notifications that a full queue did not store; REFUSE frames carry none.
RETRY_AFTER_S: Final = 2.0


def _plain(value: Any) -> Any:
    """Converts values that notifications may hold but msgspec cannot encode: mappings, floats of other libraries."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a value of a notification")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


@dataclass(frozen=True)
class PublisherStatistics:
    """`sent` counts notifications; one that is sent again counts once."""

    sent: int
    acknowledged: int
    refused: int
    unacknowledged_bytes: int
    reconnections: int


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `publish`: its ranges of sequences, as first and last of each in order, and the refusals among them.

    A refusal arrives before the acknowledgement that covers it, and may cover many notifications."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    refusals: dict[int, Refusal] = field(default_factory=dict)

    def owned(self, refusal: Refusal) -> int:
        """Records the part of a refusal that concerns this call. Returns the number of its notifications."""
        count = 0
        for first, last in self.ranges:
            begin, end = max(first, refusal.sequence), min(last, refusal.last or refusal.sequence)
            if begin <= end:
                self.refusals[begin] = msgspec.structs.replace(refusal, sequence=begin, last=end)
                count += end - begin + 1
        return count

    def raise_if_refused(self) -> None:
        if self.refusals:
            total = sum(last - first + 1 for first, last in self.ranges)
            raise _refused(self.refusals, f" of {total}" if total > 1 else "")


class Publisher:
    def __init__(self, options: LinkOptions, name: str, key: str) -> None:
        self.name = name
        self._link = Link(options, name, self, key)
        self._loop = asyncio.get_running_loop()
        self._sequence = 0
        self._acknowledged = 0
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._is_flush_due = False
        self._frames: deque[tuple[int, bytes]] = deque()
        self._frames_bytes = 0
        self._window_bytes = BATCH_BYTES
        self._frame_bytes_max = BATCH_BYTES
        # (last sequence, future of the call that waits for it). Sequences only grow, so futures complete from the left.
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._calls: set[_Call] = set()
        # Refusals of notifications from `publish_soon`; `flush` raises them.
        self._refusals: dict[int, Refusal] = {}
        self._refused = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._error: TidegateError | None = None

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self._link.start(tasks)

    async def publish(self, notifications: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Publishes notifications and waits until all are acknowledged. Raises NotificationError if the broker refused
        one, and Overloaded (L611) if a full queue did not store one; the others were published."""
        call = _Call()
        if isinstance(notifications, Mapping):
            await self._finish(call, self._append(notifications, call))
        else:
            await self._finish(call, self._append_many(notifications, call))

    async def publish_encoded(self, first: int, maps: Sequence[bytes]) -> None:
        """Publishes encoded notifications under numbers from `first` on, which must be above all earlier ones."""
        call = _Call()
        await self._finish(call, self._append_encoded(first, maps, call))

    async def publish_soon(self, notification: Mapping[str, Any]) -> None:
        """Publishes a notification as soon as the window has room. `flush` waits for the acknowledgements."""
        await self._append(notification, None)

    async def flush(self) -> None:
        """Waits until everything published so far is acknowledged. Raises the refusals of `publish_soon`, if any."""
        self._send_batch()
        await self._wait_for_acknowledgement(self._sequence)
        if self._refusals:
            refusals, self._refusals = self._refusals, {}
            raise _refused(refusals)

    def close(self) -> None:
        self._link.close()
        self.on_failed(not_open())

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(
            self._sequence, self._acknowledged, self._refused, self._frames_bytes, self._link.reconnections
        )

    # The link calls these.

    def on_welcome(self, welcome: Welcome) -> None:
        self._window_bytes = welcome.window_bytes
        self._frame_bytes_max = welcome.frame_bytes_max
        for refusal in welcome.refused:
            self._on_refused(refusal)
        self._on_acknowledged(welcome.acknowledged)
        for _last, frame in self._frames:
            self._link.write(frame)
        self._flush_soon()

    def on_frame(self, kind: int, sequence: int, body: memoryview) -> None:
        if kind == Kind.ACKNOWLEDGE:
            self._on_acknowledged(sequence)
        elif kind == Kind.REFUSE:
            for refusal in decode_body(body, list[Refusal]):
                self._on_refused(refusal)

    def on_failed(self, error: TidegateError) -> None:
        self._error = error
        self._has_room.set()
        for _last, future in self._waiters:
            if not future.done():
                future.set_exception(error)
        self._waiters.clear()

    def on_writable(self) -> None:
        self._flush_soon()

    # Internals.

    async def _finish(self, call: _Call, appending: Coroutine[Any, Any, None]) -> None:
        self._calls.add(call)
        try:
            await appending
            if call.ranges:
                await self._wait_for_acknowledgement(call.ranges[-1][1])
        finally:
            self._calls.discard(call)
        call.raise_if_refused()

    async def _append(self, notification: Mapping[str, Any], call: _Call | None) -> None:
        encoded = _encode_one(notification, self._frame_bytes_max)
        if not self._has_room.is_set() or self._error is not None:
            await self._wait_for_room()
        if self._batch_bytes + len(encoded) > BATCH_BYTES:
            self._send_batch()
        self._sequence += 1
        if call is not None:
            call.ranges.append((self._sequence, self._sequence))
        self._batch.append(encoded)
        self._batch_bytes += len(encoded)
        if len(self._batch) >= BATCH_NOTIFICATIONS or self._batch_bytes >= BATCH_BYTES:
            self._send_batch()
        else:
            self._flush_soon()

    async def _append_many(self, notifications: Sequence[Mapping[str, Any]], call: _Call) -> None:
        """Appends a list in batches, because encoding a whole batch is faster than encoding single notifications."""
        for start in range(0, len(notifications), BATCH_NOTIFICATIONS):
            part = notifications[start : start + BATCH_NOTIFICATIONS]
            body = _encode_many(part)
            if body is None or len(body) > BATCH_BYTES * 4:
                # Appending singly splits a batch that is too large, or raises for the invalid notification.
                for notification in part:
                    await self._append(notification, call)
                continue
            await self._wait_for_room()
            self._send_batch()
            first, self._sequence = self._sequence + 1, self._sequence + len(part)
            call.ranges.append((first, self._sequence))
            self._send(self._sequence, publish_frame(first, body))

    async def _append_encoded(self, first: int, maps: Sequence[bytes], call: _Call) -> None:
        assert first > self._sequence, (first, self._sequence)
        self._send_batch()
        self._sequence = first - 1
        for encoded in maps:
            _check_size(encoded, self._frame_bytes_max)
        start = 0
        while start < len(maps):
            stop, size = start + 1, len(maps[start])
            while stop < min(len(maps), start + BATCH_NOTIFICATIONS) and size + len(maps[stop]) <= BATCH_BYTES:
                size += len(maps[stop])
                stop += 1
            await self._wait_for_room()
            part_first, self._sequence = self._sequence + 1, self._sequence + stop - start
            call.ranges.append((part_first, self._sequence))
            self._send(self._sequence, publish_frame(part_first, join_maps(list(maps[start:stop]))))
            start = stop

    async def _wait_for_room(self) -> None:
        while not self._has_room.is_set():
            await self._has_room.wait()
        if self._error is not None:
            raise self._error

    async def _wait_for_acknowledgement(self, last: int) -> None:
        if last <= self._acknowledged:
            return
        if self._error is not None:
            raise self._error
        future = self._loop.create_future()
        self._waiters.append((last, future))
        await future

    def _flush_soon(self) -> None:
        if not self._is_flush_due and self._batch:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_when_writable)

    def _flush_when_writable(self) -> None:
        """Sends the batch if the transport has room. Otherwise the batch grows until there is room or it is full."""
        self._is_flush_due = False
        if self._link.is_writable:
            self._send_batch()

    def _send_batch(self) -> None:
        if not self._batch:
            return
        maps, self._batch = self._batch, []
        self._batch_bytes = 0
        self._send(self._sequence, publish_frame(self._sequence - len(maps) + 1, join_maps(maps)))

    def _send(self, last: int, frame: bytes) -> None:
        self._frames.append((last, frame))
        self._frames_bytes += len(frame)
        if self._frames_bytes >= self._window_bytes:
            self._has_room.clear()
        self._link.write(frame)

    def _on_acknowledged(self, sequence: int) -> None:
        self._acknowledged = max(self._acknowledged, sequence)
        while self._frames and self._frames[0][0] <= self._acknowledged:
            _last, frame = self._frames.popleft()
            self._frames_bytes -= len(frame)
        if self._frames_bytes < self._window_bytes:
            self._has_room.set()
        while self._waiters and self._waiters[0][0] <= self._acknowledged:
            _last, future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)

    def _on_refused(self, refusal: Refusal) -> None:
        """Passes a refusal to the calls that it concerns. Acknowledged sequences were reported before."""
        first, last = max(refusal.sequence, self._acknowledged + 1), refusal.last or refusal.sequence
        if first > last:
            return
        refusal = msgspec.structs.replace(refusal, sequence=first, last=last)
        owned = sum(call.owned(refusal) for call in self._calls)
        self._refused += last - first + 1
        if owned <= last - first:
            self._refusals[first] = refusal
        if len(self._refusals) > REFUSALS_REMEMBERED_MAX:
            del self._refusals[next(iter(self._refusals))]


def _refused(refusals: dict[int, Refusal], of: str = "") -> TidegateError:
    """Returns the first refusal as an exception, with the number of all refused notifications."""
    first = refusals[min(refusals)]
    count = sum((each.last or each.sequence) - each.sequence + 1 for each in refusals.values())
    place = f"{count}{of} notifications refused, the first: " if of or count > 1 else ""
    if first.code.startswith("L"):
        return Overloaded(first.code, place + first.message, first.remedy, retry_after_s=RETRY_AFTER_S)
    return NotificationError(first.code, place + first.message, first.remedy)


def _encode_one(notification: Mapping[str, Any], frame_bytes_max: int) -> bytes:
    # The test for dict comes first: isinstance with Mapping takes nearly as long as the encoding.
    if type(notification) is not dict and not isinstance(notification, Mapping):
        raise NotificationError("N215", f"{notification!r:.40} is not a notification", 'publish mappings: {"NO2": 212}')
    try:
        encoded = _encode(notification)
    except (TypeError, OverflowError, UnicodeEncodeError):
        check(notification)
        raise
    _check_size(encoded, frame_bytes_max)
    return encoded


def _check_size(encoded: bytes, frame_bytes_max: int) -> None:
    if len(encoded) + HEADER_BYTES + 8 > frame_bytes_max:
        raise NotificationError(
            "N211",
            f"the notification has {len(encoded)} bytes",
            f"shrink it: the broker accepts frames of at most {frame_bytes_max}",
        )


def _encode_many(notifications: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Returns notifications as an encoded array, or None if one of them cannot be encoded. Encoding them singly then
    finds the invalid one."""
    if set(map(type, notifications)) != {dict}:
        return None
    try:
        return _encode(notifications)
    except (TypeError, OverflowError, UnicodeEncodeError):
        return None
