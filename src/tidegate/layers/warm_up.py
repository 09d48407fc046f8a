"""Loads every kernel once, on tiny data, so that no first notification waits for a compiler."""

from __future__ import annotations

import msgspec
import numpy as np

from tidegate.frames import Kind, encode_frame
from tidegate.layers.batch import BatchReader
from tidegate.layers.delivery_writer import DeliveryWriter
from tidegate.layers.subscription_table import SubscriptionTable


def warm_up() -> None:
    reader = BatchReader()
    reader.read_array("warm-up", 1, msgspec.msgpack.encode([{"a": 1}]))
    batch = reader.read_frames("warm-up", encode_frame(Kind.PUBLISH, [{"a": 1}], 1), 0, 1).batches[0]
    table = SubscriptionTable(connection_point=1)
    ids = np.array([table.add(outbox=0, client_id=1)], np.int64)
    list(DeliveryWriter(table).frames(batch, np.array([0, 1], np.int64), ids, 1))


if __name__ == "__main__":
    warm_up()
