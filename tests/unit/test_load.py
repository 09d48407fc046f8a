"""The load that is computed from the reports of the slices."""

from __future__ import annotations

from math import isnan

import pytest

from tidegate.hosts.load import DELAYS_S, Delays, Rates, delay_percentile, measure
from tidegate.layers.frames import Load
from tidegate.layers.layer import Layer, layer_of


def test_rates_are_of_the_time_between_two_reports() -> None:
    rates = Rates.between(Load(10.0, 1.0, 100, deliveries=50), Load(12.0, 2.5, 500, deliveries=250))
    assert rates == Rates(0.75, 200.0, 100.0)


def test_a_report_that_comes_again_or_of_another_process_says_nothing() -> None:
    assert Rates.between(Load(10.0, 1.0, 100), Load(10.0, 1.0, 100)) is None
    assert Rates.between(Load(10.0, 1.0, 100), Load(11.0, 0.1, 3)) is None


def test_delays_are_known_to_a_quarter() -> None:
    delays = Delays()
    for number in range(1, 1001):
        delays.add(number / 1000)
    after = {"connection-point-1": Load(1.0, 1.0, 1, delays=delays.counts)}
    for share in (0.5, 0.9, 0.99):
        assert share <= delay_percentile({}, after, share) <= share * 1.25
    assert delay_percentile({}, after, 1.0) >= 1.0


def test_delays_before_the_first_report_do_not_count() -> None:
    delays = Delays()
    delays.add(5.0)
    before = {"connection-point-1": Load(1.0, 1.0, 1, delays=delays.counts)}
    assert isnan(delay_percentile(before, before, 0.99))
    delays.add(0.01)
    after = {"connection-point-1": Load(2.0, 1.0, 2, delays=delays.counts)}
    assert delay_percentile(before, after, 0.99) < 0.013


def test_a_delay_beyond_all_is_the_longest_known() -> None:
    delays = Delays()
    delays.add(1e9)
    after = {"connection-point-1": Load(2.0, 1.0, 2, delays=delays.counts)}
    assert delay_percentile({}, after, 0.5) == DELAYS_S[-1]


def test_a_measurement_adds_up_what_comes_in_and_who_waits_for_whom() -> None:
    before = {
        "connection-point-1": Load(0.0, 0.0, 0),
        "connection-point-3": Load(0.0, 0.0, 0),
        "access-point-1": Load(0.0, 0.0, 0),
        "matcher-1": Load(0.0, 0.0, 0),
        "exit-point-1": Load(0.0, 0.0, 0),
    }
    after = {
        "connection-point-1": Load(2.0, 0.2, 1000, deliveries=500, subscriptions=7),
        "connection-point-3": Load(2.0, 0.2, 600, deliveries=100),
        "access-point-1": Load(2.0, 0.4, 1600, unacknowledged_batches=30),
        "matcher-1": Load(2.0, 1.8, 1500, subscriptions=70),
        "matcher-2": Load(2.0, 1.8, 1500, subscriptions=30),
        "exit-point-1": Load(2.0, 0.6, 1400, incomplete_batches=12, unacknowledged_batches=5),
    }
    measured = measure(before, after, 9.0)
    assert (measured.notifications_per_s, measured.deliveries_per_s, measured.subscriptions) == (800.0, 300.0, 100)
    assert measured.p99_ms == 0.0
    assert {each.name: (each.layer, each.queue_batches) for each in measured.slices} == {
        "access-point-1": (Layer.ACCESS_POINT, 0),
        "matcher-1": (Layer.MATCHER, 12),
        "exit-point-1": (Layer.EXIT_POINT, 13),
    }
    assert [each.busy_share for each in measured.slices] == pytest.approx([0.2, 0.3, 0.9])


def test_layers_are_known_by_name() -> None:
    assert layer_of("matcher-12") is Layer.MATCHER
    assert layer_of("connection-point-1") is None
