"""Runs every kernel once on tiny data, so that the first notification never waits for the compiler."""

from __future__ import annotations

import msgspec
import numpy as np

from tidegate.cluster.wire import decode, encode
from tidegate.filters import Constraint, Filter, Operator
from tidegate.frames import HEADER_BYTES, Kind, encode_frame
from tidegate.index import SubscriptionIndex
from tidegate.index.packing import check_entries, pack
from tidegate.layers.batch import Batch, BatchReader
from tidegate.layers.delivery_writer import DeliveryWriter
from tidegate.layers.frames import Submit
from tidegate.layers.subscription_table import SubscriptionTable
from tidegate.storage import lmdb_pages


def warm_up() -> None:
    reader = BatchReader()
    reader.read_array("warm-up", 1, msgspec.msgpack.encode([{"a": 1}]))
    batch = reader.read_frames("warm-up", encode_frame(Kind.PUBLISH, [{"a": 1}], 1), 0, 1).batches[0]
    decode(Submit.number, memoryview(encode(Submit(batch)))[HEADER_BYTES:])
    check_entries([pack(_distinct_filter(1))])
    table = SubscriptionTable(connection_point=1)
    ids = np.array([table.add(outbox=0, client_id=1)], np.int64)
    list(DeliveryWriter(table).frames(batch, np.array([0, 1], np.int64), ids, 1))
    _warm_up_index(batch, encode_frame(Kind.PUBLISH, [{"a": 1}], 1))
    lmdb_pages.warm_up()


def _warm_up_index(batch: Batch, frame: bytes) -> None:
    """Warms up the index, with enough distinct filters to grow all its arrays and tables, also in the middle of a
    plan."""
    index = SubscriptionIndex()
    ids = np.arange(600)
    index.add_packed(ids, b"".join(pack(_distinct_filter(number)) for number in ids.tolist()))
    index.plan()
    index.maintain(300)
    index.match_batch(batch)
    index.match_frames(frame)
    index.filter_of(1)
    index.maintain(300)
    index.remove_many(ids)


def _distinct_filter(number: int) -> Filter:
    interval = Constraint(f"a{number}", Operator.RANGE, (number, number + 1))
    return Filter((interval, Constraint("b", Operator.EQUAL, (number, f"text {number}"))))


if __name__ == "__main__":
    warm_up()
