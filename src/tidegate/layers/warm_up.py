"""Loads every kernel once, on tiny data, so that no first notification waits for a compiler."""

from __future__ import annotations

import msgspec
import numpy as np

from tidegate.filters import Constraint, Filter, Operator
from tidegate.frames import Kind, encode_frame
from tidegate.layers.batch import Batch, BatchReader
from tidegate.layers.delivery_writer import DeliveryWriter
from tidegate.layers.index import SubscriptionIndex
from tidegate.layers.index.packing import pack
from tidegate.layers.subscription_table import SubscriptionTable


def warm_up() -> None:
    reader = BatchReader()
    reader.read_array("warm-up", 1, msgspec.msgpack.encode([{"a": 1}]))
    batch = reader.read_frames("warm-up", encode_frame(Kind.PUBLISH, [{"a": 1}], 1), 0, 1).batches[0]
    table = SubscriptionTable(connection_point=1)
    ids = np.array([table.add(outbox=0, client_id=1)], np.int64)
    list(DeliveryWriter(table).frames(batch, np.array([0, 1], np.int64), ids, 1))
    _warm_up_index(batch, encode_frame(Kind.PUBLISH, [{"a": 1}], 1))


def _warm_up_index(batch: Batch, frame: bytes) -> None:
    """Enough distinct filters that the index grows every one of its arrays and tables, and a plan that is under way."""
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
