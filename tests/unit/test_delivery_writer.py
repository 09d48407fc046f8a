"""Delivery frames: every outbox gets each of its notifications once, in order, with the right subscriptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tidegate.frames import HEADER, HEADER_BYTES, Kind, decode_deliver
from tidegate.layers import delivery_writer
from tidegate.layers.batch import Batch, BatchReader
from tidegate.layers.delivery_writer import DeliveryWriter
from tidegate.layers.subscription_table import SubscriptionTable

Received = dict[int, list[tuple[int, frozenset[int], dict[str, Any]]]]


def make_batch(notifications: list[dict[str, Any]], first: int) -> Batch:
    return BatchReader().read_array("a publisher", first, msgspec.msgpack.encode(notifications))


def read_back(frames: Iterator[tuple[int, bytes, int]]) -> Received:
    """Returns what each outbox received. A notification may come in two frames, for different subscriptions."""
    received: Received = {}
    for outbox, frame, count in frames:
        length, kind, _flags, _zero, _sequence = HEADER.unpack_from(frame)
        assert (kind, length) == (Kind.DELIVER, len(frame) - HEADER_BYTES)
        publisher, deliveries = decode_deliver(frame[HEADER_BYTES:])
        assert publisher == "a publisher"
        assert len(deliveries) == count
        mine = received.setdefault(outbox, [])
        for each in deliveries:
            ids = frozenset([each.subscriptions] if isinstance(each.subscriptions, int) else each.subscriptions)
            if mine and mine[-1][0] == each.sequence:
                assert not mine[-1][1] & ids, "a subscription got a notification twice"
                ids |= mine.pop()[1]
            mine.append((each.sequence, ids, each.notification))
    return received


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("output_bytes", [3_000, 1024 * 1024])
def test_each_outbox_gets_what_its_subscriptions_want(
    seed: int, output_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small output buffer makes the writer resume many times, and split wide notifications."""
    monkeypatch.setattr(delivery_writer, "OUTPUT_BYTES", output_bytes)
    rng = random.Random(seed)
    outboxes = rng.choice([1, 3, 100])
    table = SubscriptionTable(1)
    subscriptions = {}
    for client_id in range(rng.choice([1, 10, 300])):
        outbox = rng.randrange(outboxes)
        subscriptions[table.add(outbox, client_id)] = (outbox, client_id)
    for ended in rng.sample(sorted(subscriptions), len(subscriptions) // 5):
        del subscriptions[ended]
        table.hide(ended)
        matched_too_late = ended
    notifications = [{"i": i, "text": "x" * rng.choice([0, 5, 400])} for i in range(rng.choice([1, 7, 60]))]
    matches = [rng.sample(sorted(subscriptions), rng.randint(0, len(subscriptions))) for _ in notifications]

    expected: Received = {}
    for i, (notification, ids) in enumerate(zip(notifications, matches, strict=True)):
        for outbox in sorted({subscriptions[one][0] for one in ids}):
            mine = frozenset(subscriptions[one][1] for one in ids if subscriptions[one][0] == outbox)
            expected.setdefault(outbox, []).append((100 + i, mine, notification))
    if len(subscriptions) > 1:
        matches = [[matched_too_late, *ids] if rng.random() < 0.3 else ids for ids in matches]

    offsets = np.cumsum([0, *map(len, matches)])
    flat = np.array([one for ids in matches for one in ids], np.int64)
    frames = DeliveryWriter(table).frames(make_batch(notifications, 100), offsets, flat, outboxes)
    assert read_back(frames) == expected, f"seed {seed}"


def test_a_place_that_is_used_again_gets_nothing_meant_for_its_predecessor() -> None:
    table = SubscriptionTable(1)
    before = table.add(0, 7)
    table.hide(before)
    table.free(before)
    after = table.add(0, 8)
    assert after != before
    writer = DeliveryWriter(table)
    batch = make_batch([{"a": 1}], 1)
    assert read_back(writer.frames(batch, np.array([0, 1]), np.array([before]), 1)) == {}
    assert read_back(writer.frames(batch, np.array([0, 1]), np.array([after]), 1)) == {
        0: [(1, frozenset({8}), {"a": 1})]
    }
