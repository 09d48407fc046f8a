"""A batch: consecutive notifications of one publisher, as the bytes that came from its socket.

Batches move through the layers by reference. `data` holds the bytes as read; `starts` and `stops` give the range of
each notification (a MessagePack map) in them. No layer makes Python objects of notifications, and none copies them
before the Connection Point writes them into delivery frames.

Invariant: notification i has publisher sequence `first + i`, and has passed the rules of `tidegate.notification`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import NotificationError, ProtocolError
from tidegate.frames import Refusal
from tidegate.kernels import scan_kernel
from tidegate.kernels.msgpack_kernel import MALFORMED
from tidegate.notification import ATTRIBUTES_MAX, check

BATCH_NOTIFICATIONS_MAX = 4096

_NOTHING: Final = np.empty(0, np.int64)
_decode = msgspec.msgpack.Decoder().decode


class Batch(msgspec.Struct, gc=False):
    publisher: str
    first: int
    data: bytes | memoryview
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def last(self) -> int:
        return self.first + len(self.starts) - 1

    @property
    def size_bytes(self) -> int:
        return int(self.stops[-1]) - int(self.starts[0])

    def after(self, sequence: int) -> Batch:
        """Returns the part of the batch after this publisher sequence, which may be empty."""
        return self if sequence < self.first else self.part(sequence + 1 - self.first)

    def part(self, start: int, stop: int | None = None) -> Batch:
        """Returns some of the notifications as a batch over the same bytes."""
        return Batch(self.publisher, self.first + start, self.data, self.starts[start:stop], self.stops[start:stop])

    def notifications(self) -> Iterator[dict[str, Any]]:
        """Decodes the notifications into mappings, for indexes and listeners that need objects."""
        data = memoryview(self.data)
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            yield _decode(data[start:stop])


class FramesRead(msgspec.Struct):
    """The result of a read: it ended at `position` in the data and at sequence `through`. If there is an `error`, the
    caller submits the batches before it and then closes the connection."""

    position: int
    batches: list[Batch]
    refusals: list[Refusal]
    through: int
    error: ProtocolError | None


class BatchReader:
    """Turns PUBLISH frames into batches. It owns the scratch arrays of the scan, so each thread needs its own."""

    def __init__(self) -> None:
        self._found = np.empty((3, BATCH_NOTIFICATIONS_MAX), np.int64)
        self._names = np.empty((2, ATTRIBUTES_MAX), np.int64)

    def read_frames(self, publisher: str, data: bytes, position: int, sequence: int) -> FramesRead:
        """Reads the PUBLISH frames from `position` on. The first must be complete, and starts with `sequence`."""
        view = scan_kernel.as_array(data)
        after, count, status = scan_kernel.scan_frames(view, position, len(data), sequence, self._found, self._names)
        error = None
        if status == MALFORMED:
            error = _malformed()
        elif after == position:
            # The scan left a complete frame unread: it has more notifications than a batch may have.
            error = _too_many()
        batches, refusals = self._accepted(publisher, data, sequence, count)
        return FramesRead(after, batches, refusals, sequence + count - 1, error)

    def read_array(self, publisher: str, sequence: int, body: bytes) -> Batch:
        """Reads one MessagePack array of notifications. Raises NotificationError for the first invalid one, and then
        accepts none of them."""
        view = scan_kernel.as_array(body)
        count = scan_kernel.scan_maps(view, 0, len(body), self._found, self._names, 0)
        if count == MALFORMED:
            raise _malformed()
        if count < 0:
            raise _too_many()
        batches, refusals = self._accepted(publisher, body, sequence, count)
        if refusals:
            refusal = refusals[0]
            place = f"notification {refusal.sequence - sequence} of {count}: " if count > 1 else ""
            raise NotificationError(refusal.code, place + refusal.message, refusal.remedy)
        return batches[0] if batches else Batch(publisher, sequence, body, _NOTHING, _NOTHING)

    def _accepted(self, publisher: str, data: bytes, sequence: int, count: int) -> tuple[list[Batch], list[Refusal]]:
        found = self._found
        starts, stops = found[scan_kernel.START, :count].copy(), found[scan_kernel.STOP, :count].copy()
        whole = Batch(publisher, sequence, data, starts, stops)
        refused = found[scan_kernel.REFUSED, :count].nonzero()[0].tolist()
        if not refused:
            return ([whole] if count else []), []
        # Refused notifications leave holes in the sequence, so each run between them is a batch of its own.
        runs = [whole.part(before + 1, after) for before, after in pairwise([-1, *refused, count])]
        reasons = found[scan_kernel.REFUSED]
        refusals = [_refusal(sequence + i, int(reasons[i]), data[starts[i] : stops[i]]) for i in refused]
        return [run for run in runs if len(run)], refusals


def _refusal(sequence: int, reason: int, data: bytes) -> Refusal:
    """Explains to the sender what is wrong with a notification. The kernel only has a number, so this checks the one
    invalid notification again by the same rules in Python."""
    try:
        check(_decode(data))
    except NotificationError as error:
        return Refusal(sequence, error.code, error.message, error.remedy)
    except (msgspec.DecodeError, RecursionError):
        pass  # too deep for a decoder: the kernel's reason is enough
    if reason == scan_kernel.N_TWICE:
        return Refusal(sequence, "N210", "an attribute occurs twice", "give each attribute one value")
    return Refusal(sequence, f"N{reason}", "the notification is invalid", "see docs/filters.md")


def _malformed() -> ProtocolError:
    return ProtocolError(
        "P304", "a PUBLISH frame is not a MessagePack array of maps", "encode each notification as a map in one array"
    )


def _too_many() -> ProtocolError:
    return ProtocolError(
        "P305", f"a batch has more than {BATCH_NOTIFICATIONS_MAX} notifications", "send smaller batches"
    )
