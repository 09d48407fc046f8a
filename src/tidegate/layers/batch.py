"""A batch: consecutive notifications of one publisher, as the bytes that came from its socket.

It is what moves through the layers. `data` is what was read; `starts` and `stops` say where each notification (a
MessagePack map) lies in it. No layer makes Python objects of notifications, and none copies them before the
Connection Point writes them into delivery frames.

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
from tidegate.layers import scan_kernel
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
        """The notifications that come after this one of the publisher, which may be none."""
        return self if sequence < self.first else self.part(sequence + 1 - self.first)

    def part(self, start: int, stop: int | None = None) -> Batch:
        """Some of its notifications, over the same bytes."""
        return Batch(self.publisher, self.first + start, self.data, self.starts[start:stop], self.stops[start:stop])

    def notifications(self) -> Iterator[dict[str, Any]]:
        """The notifications as mappings: for indexes and listeners that need objects."""
        data = memoryview(self.data)
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            yield _decode(data[start:stop])


class FramesRead(msgspec.Struct):
    """What was read: up to `position` in the data and up to sequence `through`, some of it refused. With an `error`
    the connection must be closed, once the batches before it are on their way."""

    position: int
    batches: list[Batch]
    refusals: list[Refusal]
    through: int
    error: ProtocolError | None


class BatchReader:
    """Turns PUBLISH frames into batches; owns the scratch arrays of the scan, so there is one a thread."""

    def __init__(self) -> None:
        self._found = np.empty((3, BATCH_NOTIFICATIONS_MAX), np.int64)
        self._names = np.empty((2, ATTRIBUTES_MAX), np.int64)

    def read_frames(self, publisher: str, data: bytes, position: int, sequence: int) -> FramesRead:
        """Reads the PUBLISH frames from `position` on, of which the first is complete and starts with `sequence`."""
        view = scan_kernel.as_array(data)
        after, count, status = scan_kernel.scan_frames(view, position, len(data), sequence, self._found, self._names)
        error = None
        if status == scan_kernel.MALFORMED:
            error = _malformed()
        elif after == position:
            # A complete frame was there and was not taken: it has more notifications than a batch may have.
            error = _too_many()
        batches, refusals = self._accepted(publisher, data, sequence, count)
        return FramesRead(after, batches, refusals, sequence + count - 1, error)

    def read_array(self, publisher: str, sequence: int, body: bytes) -> Batch:
        """Reads one MessagePack array of notifications, all or nothing: NotificationError for the first bad one."""
        view = scan_kernel.as_array(body)
        count = scan_kernel.scan_maps(view, 0, len(body), self._found, self._names, 0)
        if count == scan_kernel.MALFORMED:
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
    """The sentence for the sender, made by the same rules in Python from the one notification that broke them."""
    try:
        check(_decode(data))
    except NotificationError as error:
        return Refusal(sequence, error.code, error.message, error.remedy)
    except (msgspec.DecodeError, RecursionError):
        pass  # too deep for a decoder: the kernel's reason is enough
    if reason == scan_kernel.N_TWICE:
        return Refusal(sequence, "N210", "an attribute occurs twice", "give each attribute one value")
    return Refusal(sequence, f"N{reason}", "the notification breaks the rules", "see docs/filters.md")


def _malformed() -> ProtocolError:
    return ProtocolError(
        "P304", "a PUBLISH frame is not an array of maps in MessagePack", "encode notifications as [map, map, …]"
    )


def _too_many() -> ProtocolError:
    return ProtocolError("P305", f"over {BATCH_NOTIFICATIONS_MAX} notifications in one batch", "send smaller batches")
