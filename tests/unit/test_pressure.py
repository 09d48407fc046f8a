"""A full queue blocks its publishers for its `block_s`, then overflows until it has caught up. Queues that are read do
not expire."""

from __future__ import annotations

import logging

import pytest

from tidegate.layers.frames import Refused
from tidegate.layers.publishers import REFUSED_RANGES_MAX, Publisher
from tidegate.messages import Level
from tidegate.queues.definition import parse_settings
from tidegate.queues.last_read import WATCH_S_MAX, LastRead
from tidegate.queues.pressure import Pressure
from tidegate.queues.statistics import fill_ratio

WEEK_S = 7 * 86_400.0


def test_it_holds_back_for_block_s_after_the_last_progress_and_then_overflows() -> None:
    pressure = Pressure("q")
    assert not pressure.on_full(10.0, 5.0)
    assert pressure.is_holding_back
    assert pressure.fill_ratio == 1.0
    assert pressure.holding_back_s(12.0) == 2.0
    pressure.on_stored(14.0)
    assert not pressure.is_holding_back
    assert not pressure.on_full(15.0, 5.0)
    assert not pressure.on_full(19.9, 5.0)
    assert pressure.on_full(20.0, 5.0)
    assert pressure.is_overflowing
    assert not pressure.is_holding_back
    assert pressure.held_back_s == 9.0


def test_it_overflows_until_a_whole_batch_fits() -> None:
    pressure = Pressure("q")
    assert pressure.on_full(0.0, 0.0)
    pressure.on_stored(1.0)
    assert pressure.on_full(1.0, 60.0)
    pressure.on_overflow(3, is_refused=True)
    pressure.on_overflow(2, is_refused=False)
    pressure.on_caught_up()
    assert not pressure.on_full(2.0, 60.0)
    assert (pressure.notifications_refused, pressure.notifications_dropped) == (3, 2)


def test_the_log_tells_once_that_it_comes_near_its_bound_and_when_it_is_calm_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    pressure = Pressure("q")
    for ratio in (0.79, 0.81, 0.99, 0.75, 0.85, 0.6, 0.1):
        pressure.on_fill(ratio)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "queue 'q' is 81 % full",
        "queue 'q' is down to 60 % full",
    ]


def test_a_queue_that_is_full_many_times_a_second_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    pressure = Pressure("q")
    for look in range(1000):
        pressure.on_full(look / 100, 5.0)
        pressure.on_stored(look / 100 + 0.005)
    assert len(caplog.records) == 2
    assert pressure.held_back_s == pytest.approx(5.0)


def test_a_queue_that_drops_its_oldest_is_meant_to_be_full() -> None:
    pressure = Pressure("q")
    pressure.on_fill(1.0, is_ring=True)
    assert (pressure.fill_ratio, pressure.is_near) == (1.0, False)


@pytest.mark.parametrize(("is_divided", "ratio"), [(False, 0.5), (True, 0.9)])
def test_the_fullest_physical_queue_counts_where_each_has_its_part_of_the_bound(is_divided: bool, ratio: float) -> None:
    settings = parse_settings({"messages_max": 20, "bytes_max": 1000, "physical_queues": 2})
    levels = [Level(9, 10, 9, 0, None, 1, 10), Level(1, 10, 1, 0, None, 1, 2)]
    assert fill_ratio(settings, levels, is_divided=is_divided) == ratio


def test_a_queue_expires_when_it_is_unread_by_both_clocks() -> None:
    last = LastRead(seen_s=0.0)
    last.on_noted(1000.0, at=1000.0 + 2 * WEEK_S)
    assert not last.has_expired(WEEK_S, 1000.0 + 2 * WEEK_S, WATCH_S_MAX - 1), "the broker has only just come up"
    assert last.has_expired(WEEK_S, 1000.0 + 2 * WEEK_S, WATCH_S_MAX)
    assert not last.has_expired(WEEK_S, 1000.0 + WEEK_S, WATCH_S_MAX), "another broker may not have noted its reader"
    last.on_read(1000.0 + 2 * WEEK_S, WATCH_S_MAX)
    assert not last.has_expired(WEEK_S, 1000.0 + 2 * WEEK_S + 1, WATCH_S_MAX + 1)


def test_a_queue_that_nobody_has_ever_read_counts_from_when_it_was_first_seen() -> None:
    last = LastRead(seen_s=0.0)
    last.on_noted(None, at=5000.0)
    assert last.at == 5000.0
    assert last.must_be_noted(WEEK_S)


def test_a_publisher_remembers_what_was_refused_in_ranges_and_forgets_the_oldest() -> None:
    publisher = Publisher("p")
    assert publisher.refused(1, 100) == []
    publisher.refuse([Refused("q", 5, 9)])
    publisher.refuse([Refused("q", 10, 12), Refused("other", 1, 1)])
    assert publisher.refused(1, 100) == [Refused("q", 5, 12), Refused("other", 1, 1)]
    assert publisher.refused(6, 7) == [Refused("q", 6, 7)]
    publisher.refuse([Refused("q", 100 + 2 * n, 100 + 2 * n) for n in range(REFUSED_RANGES_MAX)])
    assert publisher.refused(1, 50) == []
    assert len(publisher.refused(1, 1 << 60)) == REFUSED_RANGES_MAX
