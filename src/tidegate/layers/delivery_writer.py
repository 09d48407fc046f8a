"""Writes delivery frames: a batch and its matches in, one frame for each outbox out.

The thin Python side of `deliver_kernel`: it owns the kernel's scratch arrays and its output buffer, and cuts a batch
into steps that fit the buffer. So a notification that 100,000 subscriptions want costs time, not memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.layers import deliver_kernel
from tidegate.layers.batch import Batch
from tidegate.layers.scan_kernel import as_array
from tidegate.layers.subscription_table import SubscriptionTable
from tidegate.notification import NOTIFICATION_BYTES_MAX

OUTPUT_BYTES: Final = 1024 * 1024
assert OUTPUT_BYTES > 2 * NOTIFICATION_BYTES_MAX

Integers = NDArray[np.int64]


class DeliveryWriter:
    """One a Connection Point; not for use by two threads at once."""

    def __init__(self, table: SubscriptionTable) -> None:
        self._table = table
        self._out = np.empty(OUTPUT_BYTES, np.uint8)
        self._make_scratch(64)

    def frames(self, batch: Batch, offsets: Integers, ids: Integers, outboxes: int) -> Iterator[tuple[int, bytes, int]]:
        """(outbox, frame, notifications in it), in the order of the batch for each outbox; outboxes are numbered
        below `outboxes`."""
        if outboxes > len(self._counts):
            self._make_scratch(2 * outboxes)
        publisher = as_array(msgspec.msgpack.encode(batch.publisher))
        frame_bytes = deliver_kernel.FRAME_HEADER + 1 + len(publisher) + 5
        sizes = batch.stops - batch.starts
        begin, data = 0, as_array(batch.data)
        while begin < len(batch):
            each = int(sizes[begin]) + frame_bytes + deliver_kernel.ITEM_BYTES + deliver_kernel.ID_BYTES
            most = OUTPUT_BYTES // each
            if offsets[begin + 1] - offsets[begin] > most:
                yield from self._wide(batch.part(begin, begin + 1), ids[offsets[begin] : offsets[begin + 1]], most)
                begin += 1
                continue
            end, touched = self._plan(batch, offsets, ids, begin, frame_bytes)
            yield from self._write(data, batch, offsets, ids, begin, end, publisher, touched)
            begin = end

    def _wide(self, batch: Batch, ids: Integers, most: int) -> Iterator[tuple[int, bytes, int]]:
        """One notification with more matches than fit the output: some subscriptions at a time."""
        for start in range(0, len(ids), most):
            some = ids[start : start + most]
            yield from self.frames(batch, np.array([0, len(some)]), some, len(self._counts))

    def _plan(self, batch: Batch, offsets: Integers, ids: Integers, begin: int, frame_bytes: int) -> tuple[int, int]:
        return deliver_kernel.plan(
            batch.starts, batch.stops, offsets, ids, begin, self._table.id_of, self._table.outbox_of,
            self._counts, self._sizes, self._heads, self._touched, frame_bytes, OUTPUT_BYTES,
        )  # fmt: skip

    def _write(
        self, data: NDArray[np.uint8], batch: Batch, offsets: Integers, ids: Integers, begin: int, end: int,
        publisher: NDArray[np.uint8], touched: int,
    ) -> Iterator[tuple[int, bytes, int]]:  # fmt: skip
        deliver_kernel.write(
            data, batch.starts, batch.stops, offsets, ids, begin, end, batch.first, publisher,
            self._table.id_of, self._table.outbox_of, self._table.client_id_of,
            self._counts, self._sizes, self._cursors, self._heads, self._touched, touched, self._out, self._frames,
        )  # fmt: skip
        for outbox, start, stop, count in self._frames[:touched].tolist():
            yield outbox, self._out[start:stop].tobytes(), count

    def _make_scratch(self, outboxes: int) -> None:
        self._counts = np.zeros(outboxes, np.int64)
        self._sizes = np.zeros(outboxes, np.int64)
        self._cursors = np.zeros(outboxes, np.int64)
        self._heads = np.full(outboxes, -1, np.int64)
        self._touched = np.zeros(outboxes, np.int64)
        self._frames = np.zeros((outboxes, 4), np.int64)
