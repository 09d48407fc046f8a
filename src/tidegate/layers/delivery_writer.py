"""Delivery writer: turns a batch and its matches into one delivery frame for each outbox.

This is the thin Python side of `deliver_kernel`. It owns the kernel's scratch arrays and its output buffer, and cuts a
batch into steps that fit the buffer. A notification that matches 100,000 subscriptions costs time, not memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.kernels.scan_kernel import as_array
from tidegate.layers import deliver_kernel
from tidegate.layers.batch import Batch
from tidegate.layers.subscription_table import SubscriptionTable
from tidegate.notification import NOTIFICATION_BYTES_MAX

OUTPUT_BYTES: Final = 1024 * 1024
assert OUTPUT_BYTES > 2 * NOTIFICATION_BYTES_MAX

Integers = NDArray[np.int64]


class DeliveryWriter:
    """Each Connection Point has one. Not safe for use by two threads at once."""

    def __init__(self, table: SubscriptionTable) -> None:
        self._table = table
        self._out = np.empty(OUTPUT_BYTES, np.uint8)
        # A notification with more matches than this does not fit the output, so the links are never longer.
        self._links = np.empty(OUTPUT_BYTES // deliver_kernel.ITEM_BYTES, np.int64)
        self._make_scratch(64)

    def frames(self, batch: Batch, offsets: Integers, ids: Integers, outboxes: int) -> Iterator[tuple[int, bytes, int]]:
        """Yields (outbox, frame, notifications in it), for each outbox in the order of the batch. Every outbox number
        is below `outboxes`."""
        if outboxes > len(self._outboxes):
            self._make_scratch(2 * outboxes)
        data, publisher = as_array(batch.data), as_array(msgspec.msgpack.encode(batch.publisher))
        offsets, ids = _read_only(offsets), _read_only(ids)
        begin = 0
        while begin < len(batch):
            end, written = deliver_kernel.write_frames(
                data, batch.starts, batch.stops, offsets, ids, begin, batch.first, publisher,
                self._table.rows, self._outboxes, self._links, self._out, self._frames,
            )  # fmt: skip
            for outbox, start, stop, count in self._frames[:written].tolist():
                yield outbox, self._out[start:stop].tobytes(), count
            if end == begin:
                yield from self._frames_in_parts(batch.part(begin, begin + 1), ids[offsets[begin] : offsets[begin + 1]])
                end += 1
            begin = end

    def _frames_in_parts(self, batch: Batch, ids: Integers) -> Iterator[tuple[int, bytes, int]]:
        """Writes one notification that has more matches than fit the output, some subscriptions at a time."""
        kernel = deliver_kernel
        frame_bytes = kernel.FRAME_HEADER + kernel.BODY_BYTES + len(msgspec.msgpack.encode(batch.publisher))
        each = int(batch.stops[0] - batch.starts[0]) + kernel.ITEM_BYTES + frame_bytes + kernel.ID_BYTES
        most = OUTPUT_BYTES // each
        for start in range(0, len(ids), most):
            some = ids[start : start + most]
            yield from self.frames(batch, np.array([0, len(some)]), some, len(self._outboxes))

    def _make_scratch(self, outboxes: int) -> None:
        self._outboxes = np.zeros((outboxes, deliver_kernel.OUTBOX_COLUMNS), np.int64)
        self._outboxes[:, deliver_kernel.HEAD] = -1
        self._frames = np.zeros((outboxes, deliver_kernel.FRAME_COLUMNS), np.int64)


def _read_only(numbers: Integers) -> Integers:
    """Returns a read-only view, as arrays from another process are. Numba compiles a kernel for each kind of array, so
    one kind avoids a second compilation."""
    if not numbers.flags.writeable:
        return numbers
    numbers = numbers.view()
    numbers.flags.writeable = False
    return numbers
