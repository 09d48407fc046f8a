"""The autoscaler keeps the service level on every curve, costs little more than an oracle, and does not flap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_curves import (
    EVERY_S,
    Costs,
    Curve,
    IndexCosts,
    Layers,
    Run,
    bursts,
    flash_crowd,
    oracle_slice_seconds,
    ramp,
    recorded,
    run,
    sine,
    steps,
    then_quiet,
)

from tidegate.errors import ConfigError
from tidegate.layers.autoscaler import (
    MATCHERS_PER_EXIT_POINT,
    PAUSE_MAX_S,
    Autoscaler,
    Counts,
    Hold,
    Law,
    Measurement,
    ServiceLevel,
    SliceLoad,
)
from tidegate.layers.layer import Layer

AP, M, EP = Layer.ACCESS_POINT, Layer.MATCHER, Layer.EXIT_POINT
LEVEL = ServiceLevel(50.0, slices_max={M: 8})
AT_ONCE = replace(LEVEL, grow=Hold(0.0, 1), shrink=Hold(0.0, 1), rest_s=0.0)
SWITCH_S = 6  # a change starts slices, moves subscriptions and pauses for a moment

# For each curve: how long it may be late after a step, the number of changes allowed, and the cost allowed relative to
# the oracle.
CURVES = [
    (steps((600, 2_000), (1200, 20_000), (1200, 5_000), (900, 25_000)), 60, 6, 1.1),
    (ramp(1_000, 28_000, 7200), 0, 12, 1.15),
    (sine(1_000, 28_000, 2 * 3600), 0, 26, 1.15),
    (bursts(4_000, 14_000, every_s=120, burst_s=8, seconds=3600), 15, 0, 1.0),
    (flash_crowd(1_000, 28_000, at_s=300, fades_s=600, seconds=3600), 100, 8, 1.15),
    (recorded(26_000), 0, 12, 1.2),
]


def counts(access_points: int, matchers: int, exit_points: int) -> Counts:
    return {AP: access_points, M: matchers, EP: exit_points}


def measured(now_s: float, shares: dict[Layer, list[float]], handled: float = 1.0, **others: float) -> Measurement:
    """Returns measurements of slices that are so busy and handle this share of the input, otherwise as at low load."""
    values = {"notifications_per_s": 1000.0, "deliveries_per_s": 2000.0, "p99_ms": 10.0, "queue_batches": 0.0} | others
    queue_batches, subscriptions = values.pop("queue_batches"), int(values.pop("subscriptions", 100_000))
    slices = []
    for layer, busy in shares.items():
        handled_per_s = handled * values["notifications_per_s"] / (1 if layer is M else len(busy))
        slices += [
            SliceLoad(f"{layer}-{number}", layer, share, handled_per_s, queue_batches)
            for number, share in enumerate(busy)
        ]
    return Measurement(now_s, subscriptions=subscriptions, slices=tuple(slices), **values)


def even(current: Counts, access_points: float, matchers: float, exit_points: float) -> dict[Layer, list[float]]:
    shares = {AP: access_points, M: matchers, EP: exit_points}
    return {layer: [shares[layer]] * count for layer, count in current.items()}


def serve(curve: Curve, noise: float, level: ServiceLevel = LEVEL, seed: int = 1) -> Run:
    layers = Layers(counts(1, 1, 1), noise=noise)
    layers.rng.seed(seed)
    return run(curve, layers, Autoscaler(level), level)


def excused(curve: Curve, result: Run, late_s: int) -> set[int]:
    """Returns the seconds in which it may be late: for a while after a step, and during a change."""
    after_steps = {second for step in curve.steps for second in range(step, step + late_s + 1)}
    return after_steps.union(*(range(change.at_s, change.at_s + SWITCH_S) for change in result.changes))


# On curves.


@pytest.mark.parametrize("noise", [0.0, 0.05], ids=["exact", "noisy"])
@pytest.mark.parametrize(("curve", "late_s", "changes", "factor"), CURVES, ids=lambda value: str(value))
def test_a_curve_is_served_in_time_calmly_and_cheaply(
    curve: Curve, late_s: int, changes: int, factor: float, noise: float
) -> None:
    result = serve(curve, noise)
    assert set(result.late_s) <= excused(curve, result, late_s)
    assert len(result.changes) <= changes
    assert result.slice_seconds <= factor * oracle_slice_seconds(curve, Costs(), LEVEL)


@pytest.mark.parametrize("curve", [curve for curve, *_ in CURVES], ids=str)
def test_when_the_load_is_gone_so_are_the_slices(curve: Curve) -> None:
    level = replace(LEVEL, slices_min={EP: 1, M: 2}, slices_max={M: 4, EP: 2, AP: 1})
    result = serve(then_quiet(curve, 100, 1500), 0.05, level)
    assert result.counts[-1] == counts(1, 2, 1)
    for each in result.counts[SWITCH_S:]:
        assert all(level.least(layer) <= count <= level.most(layer) for layer, count in each.items())


@pytest.mark.parametrize("matchers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_noisy_load_at_the_edge_changes_once_at_most(matchers: int, seed: int) -> None:
    rate = LEVEL.busy_share_max / Costs().seconds(M, matchers)
    layers = Layers(counts(1, matchers, 1), noise=0.05)
    layers.rng.seed(seed)
    result = run(steps((2 * 3600, rate)), layers, Autoscaler(LEVEL), LEVEL)
    assert len(result.changes) <= 1, [change.why for change in result.changes]


@pytest.mark.parametrize(
    ("curve", "changes"),
    [(ramp(1_000, 12_000, 7200), 6), (sine(1_000, 12_000, 7200), 8), (recorded(12_000), 6)],
    ids=str,
)
def test_an_index_that_does_not_follow_the_law_is_served_as_calmly(curve: Curve, changes: int) -> None:
    layers = Layers(counts(1, 1, 1), costs=IndexCosts(), noise=0.05)
    result = run(curve, layers, Autoscaler(LEVEL), LEVEL)
    assert set(result.late_s) <= excused(curve, result, late_s=0)
    assert len(result.changes) <= changes
    assert result.slice_seconds <= 1.15 * oracle_slice_seconds(curve, IndexCosts(), LEVEL)


def test_what_was_learned_is_used_at_once() -> None:
    """At the second crowd the autoscaler knows the law, so it reaches the right number in one change."""
    curve = steps((300, 3_000), (900, 20_000), (1500, 3_000), (600, 20_000))
    result = serve(curve, 0.0)
    second = [change for change in result.changes if change.at_s >= curve.steps[2]]
    assert [change.after[M] for change in second] == [4]
    assert 20_000 * Costs().seconds(M, 4) <= LEVEL.busy_share_max < 20_000 * Costs().seconds(M, 3)


def test_slow_subscribers_are_no_reason_to_scale() -> None:
    layers = Layers(counts(1, 1, 1), slow_ms=200)
    result = run(steps((900, 4_000)), layers, Autoscaler(LEVEL), LEVEL)
    assert len(result.late_s) == 900
    assert not result.changes
    assert (
        "p99 216 ms is above the goal of 50 ms, but no layer is over 50% busy: subscribers or the disk are slow"
        in (result.sentences[-1])
    )


@pytest.mark.parametrize(("slice_cost", "gain_min"), [(0.0, 0.05), (0.02, 0.05), (0.15, 0.15)])
def test_no_matcher_is_asked_for_that_makes_no_difference(slice_cost: float, gain_min: float) -> None:
    """The work is mostly decoding, and too much for any number of Matchers."""
    costs, level = Costs(decode=40e-6, match=60e-6), ServiceLevel(50.0, slice_cost=slice_cost, slices_max={M: 20})
    layers = Layers(counts(1, 1, 1), costs=costs)
    result = run(steps((300, 5_000), (3000, 19_000)), layers, Autoscaler(level), level)
    seconds = [costs.seconds(M, count) for count in range(1, 21)]
    useful = 1 + sum(1 - after / before >= gain_min for before, after in pairwise(seconds))
    assert layers.counts[M] == useful
    gain = 1 - seconds[useful] / seconds[useful - 1]
    assert f"but one more would take off only {gain:.1%}, less than {gain_min:.0%}" in result.sentences[-1]


# The law.


@given(
    st.floats(0, 1e-3),
    st.floats(1e-6, 1e-3),
    st.sets(st.integers(1, 20), min_size=2, max_size=5),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_the_law_is_found_from_different_numbers_of_matchers(
    a: float, b: float, known: set[int], count: int, other: int
) -> None:
    law = Law()
    for each in known:
        law.learn(each, a + b / each)
    assert law.ratio(count, other) == pytest.approx((a + b / other) / (a + b / count))


@given(st.dictionaries(st.integers(1, 20), st.floats(1e-6, 1e-3), min_size=2), st.integers(1, 19))
def test_whatever_is_measured_more_slices_are_never_busier(seconds: dict[int, float], count: int) -> None:
    law = Law()
    for each, value in seconds.items():
        law.learn(each, value)
    assert law.serial_share is not None
    assert -1e-9 <= law.serial_share <= 1 + 1e-9
    assert count / (count + 1) - 1e-9 <= law.ratio(count, count + 1) <= 1 + 1e-9


def test_with_one_number_known_the_law_expects_the_worse() -> None:
    law = Law()
    law.learn(2, 60e-6)
    assert law.serial_share is None
    assert law.ratio(2, 4) == pytest.approx((0.5 + 0.5 / 4) / (0.5 + 0.5 / 2))
    assert law.ratio(2, 1) == 2


@pytest.mark.parametrize(("subscriptions", "matchers"), [(10_000, 1), (12_000, 1), (20_000, 2)])
def test_the_law_of_other_subscriptions_is_forgotten(subscriptions: int, matchers: int) -> None:
    """Half of the work is serial with 10,000 subscriptions. With twice as many, all of it may be divisible again, and
    one Matcher would be 80 % busy."""
    autoscaler = Autoscaler(AT_ONCE)
    for now_s, count, share in ((0, 1, 0.5), (5, 2, 0.375), (10, 2, 0.375)):
        current = counts(1, count, 1)
        autoscaler.observe(measured(now_s, even(current, 0.4, share, 0.4), subscriptions=10_000), current)
    decision = autoscaler.observe(
        measured(20, even(current, 0.4, 0.4, 0.4), subscriptions=subscriptions), counts(1, 2, 1)
    )
    assert decision.wanted[M] == matchers


def test_nothing_is_learned_from_slices_that_idle() -> None:
    """In small batches a notification takes eight times as long, which does not apply to high load."""
    autoscaler = Autoscaler(AT_ONCE)
    for now_s, count, share, rate in ((0, 1, 0.5, 1000), (5, 1, 0.2, 50), (10, 2, 0.375, 1000), (20, 2, 0.375, 1000)):
        current = counts(1, count, 1)
        autoscaler.observe(measured(now_s, even(current, 0.4, share, 0.4), notifications_per_s=rate), current)
    assert autoscaler.observe(measured(30, even(current, 0.4, 0.4, 0.4)), current).wanted[M] == 1


# Latency.


def test_a_late_layer_that_is_busy_gets_one_more() -> None:
    current = counts(1, 3, 1)
    decision = Autoscaler(AT_ONCE).observe(measured(0, even(current, 0.2, 0.6, 0.55), p99_ms=61), current)
    assert decision.wanted == counts(1, 4, 1)
    assert (
        "Matchers 3 → 4: load 60% per slice, 56% after the change, and p99 61 ms is above the goal of 50 ms"
        in decision.why
    )


@pytest.mark.parametrize(("share", "p99_ms", "matchers"), [(0.45, 20, 3), (0.45, 40, 4), (0.5, 20, 4), (0.11, 200, 1)])
def test_fewer_slices_must_not_make_it_late(share: float, p99_ms: float, matchers: int) -> None:
    """If four Matchers are 45 % busy, three would be 60 % busy, and everything would wait 1.4 times as long. At 50 %
    they would be 67 % busy, too close to the limit. At 11 % one suffices, and latency has other causes."""
    current = counts(1, 4, 1)
    decision = Autoscaler(AT_ONCE).observe(measured(0, even(current, 0.4, share, 0.4), p99_ms=p99_ms), current)
    assert decision.wanted[M] == matchers


def test_without_deliveries_latency_says_nothing() -> None:
    current = counts(1, 3, 1)
    idle = measured(0, even(current, 0.2, 0.6, 0.2), p99_ms=1e6, deliveries_per_s=0)
    assert Autoscaler(AT_ONCE).observe(idle, current).wanted == current


def test_uneven_work_is_told_and_not_scaled() -> None:
    current = counts(1, 1, 4)
    shares: dict[Layer, list[float]] = {AP: [0.2], M: [0.4], EP: [0.1, 0.97, 0.3, 0.2]}
    decision = Autoscaler(LEVEL).observe(measured(0, shares, p99_ms=80), current)
    assert "p99 80 ms is above the goal of 50 ms, and exit-point-1 alone is 97% busy" in decision.why


# More or less work than input.


def test_who_falls_behind_is_given_what_comes_in_needs() -> None:
    current = counts(1, 1, 2)
    decision = Autoscaler(AT_ONCE).observe(
        measured(0, even(current, 0.1, 1.0, 0.3), handled=1 / 3, notifications_per_s=3000, queue_batches=100), current
    )
    assert decision.wanted == counts(1, 4, 3)
    assert "Matchers 1 → 4: load 300% per slice, 188% after the change, limit 70%" in decision.why
    assert "Exit Points 2 → 3: load 90% per slice, 60% after the change, limit 70%" in decision.why


@pytest.mark.parametrize("handled", [1.6, 10.0])
def test_who_catches_up_needs_nobody_and_keeps_all(handled: float) -> None:
    current = counts(1, 2, 1)
    catching_up = measured(0, even(current, 0.1, 1.0, 0.1), handled=handled, queue_batches=100, p99_ms=5000)
    decision = Autoscaler(AT_ONCE).observe(catching_up, current)
    assert decision.wanted == current
    assert f"Matchers have a load of {1 / handled:.0%} per slice, and are catching up" in decision.why


def test_publishers_that_are_held_back_do_not_hide_the_load() -> None:
    """The input is limited to what the Matchers can handle, but they are still too busy."""
    current = counts(1, 4, 1)
    decision = Autoscaler(AT_ONCE).observe(measured(0, even(current, 0.2, 1.0, 0.2), queue_batches=100), current)
    assert decision.wanted[M] == 5


# Bad or missing measurements.


def test_exit_points_that_were_never_measured_follow_the_rule_of_thumb() -> None:
    autoscaler, current = Autoscaler(AT_ONCE), counts(1, 2 * MATCHERS_PER_EXIT_POINT - 2, 1)
    busy = {AP: [0.3], M: [0.75] * current[M]}
    decision = autoscaler.observe(measured(0, busy), current)
    assert decision.wanted[EP] == 2
    assert "Exit Points 1 → 2: one per 4 Matchers until Exit Points are measured" in decision.why
    current = decision.wanted
    for now_s in (10, 20):
        decision = autoscaler.observe(measured(now_s, even(current, 0.3, 0.6, 0.1)), current)
    assert decision.wanted[EP] == 1
    current = decision.wanted
    for now_s in (30, 40):
        assert autoscaler.observe(measured(now_s, busy), current).wanted[EP] == 1


def test_exit_points_that_were_never_measured_are_not_taken_away() -> None:
    current = counts(1, 2, 3)
    assert Autoscaler(AT_ONCE).observe(measured(0, {AP: [0.3], M: [0.6, 0.6]}), current).wanted == current


@pytest.mark.parametrize("handled", [0.0, nan])
def test_slices_that_are_busy_with_nothing_that_comes_in_are_busy(handled: float) -> None:
    current = counts(1, 2, 1)
    decision = Autoscaler(AT_ONCE).observe(measured(0, even(current, 0.2, 0.9, 0.2), handled), current)
    assert decision.wanted == counts(1, 4, 1)


@pytest.mark.parametrize("now_s", [5.0, 4.0, nan])
def test_a_measurement_that_is_not_newer_is_ignored(now_s: float) -> None:
    autoscaler, current = Autoscaler(AT_ONCE), counts(1, 2, 1)
    autoscaler.observe(measured(5, even(current, 0.4, 0.6, 0.4)), current)
    decision = autoscaler.observe(measured(now_s, even(current, 0.4, 0.9, 0.4)), current)
    assert decision.wanted == current
    assert decision.why.startswith("ignored: measured at ")
    assert autoscaler.observe(measured(6, even(current, 0.4, 0.9, 0.4)), current).wanted[M] > 2


def test_silent_slices_keep_a_layer_from_shrinking_and_not_from_growing() -> None:
    current = counts(1, 3, 1)
    quiet: dict[Layer, list[float]] = {AP: [0.1], M: [0.1, 0.1], EP: [0.1]}
    decision = Autoscaler(AT_ONCE).observe(measured(0, quiet), current)
    assert decision.wanted == current
    assert "only 2 of 3 Matchers have reported" in decision.why
    for others in ([0.1, 0.1, nan], [0.1, 0.1, 0.1, 0.1]):
        assert Autoscaler(AT_ONCE).observe(measured(0, {**quiet, M: others}), current).wanted == current
    busy = {**quiet, M: [0.9, 0.9]}
    assert Autoscaler(AT_ONCE).observe(measured(0, busy), current).wanted[M] > 3


def test_nothing_measured_changes_nothing() -> None:
    current = counts(2, 2, 1)
    decision = Autoscaler(AT_ONCE).observe(measured(0, {}, p99_ms=nan, notifications_per_s=nan), current)
    assert decision.wanted == current
    assert "Matchers not measured" in decision.why


def test_a_death_is_no_reason_to_hurry() -> None:
    """After a change of the counts from outside there is a pause, although the survivors are busy with the recovery."""
    autoscaler, before, after = Autoscaler(replace(AT_ONCE, rest_s=30)), counts(1, 3, 1), counts(1, 2, 1)
    autoscaler.observe(measured(0, even(before, 0.4, 0.6, 0.4)), before)
    for now_s in range(5, 35, 5):
        decision = autoscaler.observe(measured(now_s, even(after, 0.4, 1.0, 0.4)), after)
        assert decision.wanted == after
        assert decision.why.startswith("resting ")
    assert autoscaler.observe(measured(40, even(after, 0.4, 1.0, 0.4)), after).wanted[M] > 2


@pytest.mark.parametrize(("pause_s", "grows"), [(PAUSE_MAX_S, True), (PAUSE_MAX_S + 1, False)])
def test_wishes_from_before_a_pause_do_not_count(pause_s: float, grows: bool) -> None:
    autoscaler, current = Autoscaler(replace(AT_ONCE, grow=Hold(pause_s, 2))), counts(1, 1, 1)
    busy = even(current, 0.2, 0.9, 0.2)
    assert autoscaler.observe(measured(0, busy), current).wanted == current
    assert (autoscaler.observe(measured(pause_s, busy), current).wanted != current) == grows


# Holding and resting.


def test_a_wish_must_hold_in_time_and_in_measurements() -> None:
    level, current = replace(AT_ONCE, grow=Hold(10, 3)), counts(1, 1, 1)
    busy = even(current, 0.2, 0.9, 0.2)

    def grows_at(times: Iterable[float]) -> float:
        autoscaler = Autoscaler(level)
        return next((t for t in times if autoscaler.observe(measured(t, busy), current).wanted != current), inf)

    assert grows_at(range(20)) == 10
    assert grows_at(range(0, 60, 5)) == 10
    assert grows_at(range(0, 60, 4)) == 12
    assert grows_at(range(0, 60, 9)) == inf


def test_one_measurement_that_disagrees_is_enough_to_wait() -> None:
    autoscaler, current = Autoscaler(replace(AT_ONCE, shrink=Hold(20, 3))), counts(1, 3, 1)
    for now_s in range(0, 40, 5):
        share = 0.6 if now_s == 15 else 0.1
        decision = autoscaler.observe(measured(now_s, even(current, 0.2, share, 0.2)), current)
        assert decision.wanted == current
    assert autoscaler.observe(measured(40, even(current, 0.2, 0.1, 0.2)), current).wanted[M] == 1


def test_the_more_subscriptions_move_the_longer_the_rest() -> None:
    def rest_s(subscriptions: int) -> float:
        autoscaler, current = Autoscaler(replace(AT_ONCE, rest_s=10)), counts(1, 1, 1)
        wanted = autoscaler.observe(
            measured(0, even(current, 0.2, 0.8, 0.2), subscriptions=subscriptions), current
        ).wanted
        assert wanted == counts(1, 2, 1)
        busy = even(current, 0.2, 0.8, 0.2)
        return next(
            t
            for t in range(1, 200)
            if autoscaler.observe(measured(t, busy, subscriptions=subscriptions), current).wanted != current
        )

    assert rest_s(0) == 10
    assert rest_s(1_000_000) == 10 + 500_000 / 20_000


# Laws for any measurements.

shares = st.floats(0, 1)
some = st.floats(0, 1e6)
slices = st.builds(
    SliceLoad, st.just("slice"), st.sampled_from(Layer), shares | st.just(nan), some | st.just(nan), some
)
measurements = st.builds(
    Measurement,
    now_s=st.just(0.0),
    notifications_per_s=some | st.just(nan),
    deliveries_per_s=some,
    p99_ms=some | st.just(nan),
    subscriptions=st.integers(0, 10**6),
    slices=st.lists(slices, max_size=12).map(tuple),
)
any_counts = st.fixed_dictionaries({layer: st.integers(1, 8) for layer in Layer})
BOUNDED = replace(LEVEL, slices_min={M: 2, EP: 1, AP: 1}, slices_max={M: 6, EP: 3, AP: 2}, grow=Hold(5, 1))


@given(st.lists(st.tuples(st.floats(-5, 40), measurements, any_counts | st.none()), max_size=20))
def test_counts_are_always_within_their_bounds(
    observed: list[tuple[float, Measurement, Counts | None]],
) -> None:
    autoscaler, now_s, current = Autoscaler(replace(BOUNDED, shrink=Hold(5, 1))), 0.0, counts(1, 2, 1)
    for passed_s, measurement, disturbed in observed:
        now_s += passed_s
        current = autoscaler.observe(replace(measurement, now_s=now_s), disturbed or current).wanted
        assert all(BOUNDED.least(layer) <= count <= BOUNDED.most(layer) for layer, count in current.items())


@given(st.lists(st.tuples(st.sampled_from([1.0, 5.0, 12.0]), shares, shares, st.floats(0, 200)), max_size=60))
def test_between_two_changes_there_is_a_rest(observed: list[tuple[float, float, float, float]]) -> None:
    autoscaler, now_s, current = Autoscaler(replace(BOUNDED, shrink=Hold(5, 1))), 0.0, counts(1, 2, 1)
    changed_s = -inf
    for passed_s, matchers, others, p99_ms in observed:
        now_s += passed_s
        measurement = measured(now_s, even(current, others, matchers, others), p99_ms=p99_ms)
        wanted = autoscaler.observe(measurement, current).wanted
        if wanted != current:
            assert now_s - changed_s >= BOUNDED.rest_s
            changed_s, current = now_s, wanted


loads = st.tuples(shares, shares, shares)
circumstances = st.tuples(st.floats(0.2, 3), st.floats(0, 100), st.floats(0, 40))


@settings(max_examples=300)
@given(any_counts, st.lists(st.tuples(any_counts, loads), max_size=4), loads, circumstances, st.floats(1, 4))
def test_a_higher_load_never_gets_fewer_slices(
    current: Counts,
    past: list[tuple[Counts, tuple[float, float, float]]],
    load: tuple[float, float, float],
    circumstance: tuple[float, float, float],
    factor: float,
) -> None:
    """After the same past there is a load or a multiple of it. Slices that have idle time handle more."""
    handled, p99_ms, queue_batches = circumstance

    def wanted(factor: float) -> Counts:
        autoscaler = Autoscaler(replace(AT_ONCE, shrink=Hold(1, 2)))
        for now_s, (other, before) in enumerate(past):
            autoscaler.observe(measured(now_s, even(other, *before), subscriptions=0), other)
        for now_s in (10, 11):
            autoscaler.observe(measured(now_s, even(current, *load), subscriptions=0), current)
        last = measured(12, even(current, *load), handled, p99_ms=p99_ms, queue_batches=queue_batches, subscriptions=0)
        more = tuple(_with_more_to_do(each, factor) for each in last.slices)
        return autoscaler.observe(replace(last, notifications_per_s=1000 * factor, slices=more), current).wanted

    low, high = wanted(1.0), wanted(factor)
    assert all(low[layer] <= high[layer] for layer in Layer)


def _with_more_to_do(load: SliceLoad, factor: float) -> SliceLoad:
    busy_share = min(1.0, factor * load.busy_share)
    grown = busy_share / load.busy_share if load.busy_share else 1.0
    return replace(load, busy_share=busy_share, handled_per_s=load.handled_per_s * grown)


# Explanations for the operator.


def test_sentences_name_the_numbers() -> None:
    autoscaler, current = Autoscaler(LEVEL), counts(1, 2, 1)
    busy = even(current, 0.2, 0.84, 0.3)
    said = []
    for now_s in range(0, 30, EVERY_S):
        decision = autoscaler.observe(measured(now_s, busy, notifications_per_s=41_000), current)
        said.append(decision.why)
        current = decision.wanted
        busy = even(current, 0.2, 0.84 if current[M] == 2 else 0.6, 0.3)
    state = "p99 10 ms (goal 50 ms), 41,000 notifications/s, 2,000 deliveries/s, busy: Access Points 20%, "
    matchers = "Matchers 2 → 4: load 84% per slice, 70% after the change, limit 70%"
    assert said[0] == (
        f"Matchers 2 → 4 if the load stays like this for 10 s and 3 measurements; {state}Matchers 84%, Exit Points 30%"
    )
    assert said[2] == (f"{matchers}; about 50,000 of 100,000 subscriptions move; {state}Matchers 84%, Exit Points 30%")
    assert said[4] == f"resting 28 s more after the last change; {state}Matchers 60%, Exit Points 30%"


def test_sentences_name_the_bounds() -> None:
    current = counts(1, 8, 1)
    full = Autoscaler(LEVEL).observe(measured(0, even(current, 0.2, 0.9, 0.2)), current)
    assert full.wanted == current
    assert full.why.startswith("Matchers have a load of 90% per slice, but 8 is the maximum; ")
    late = Autoscaler(LEVEL).observe(measured(0, even(current, 0.2, 0.6, 0.2), p99_ms=60), current)
    assert late.why.startswith("Matchers have a load of 60% per slice, but 8 is the maximum; p99 60 ms (goal 50 ms)")
    beyond = Autoscaler(LEVEL).observe(measured(0, {}), counts(1, 9, 1))
    assert beyond.why == "Matchers 9 → 8: required by the bounds of the service level"
    calm = counts(1, 1, 1)
    assert Autoscaler(LEVEL).observe(measured(0, even(calm, 0.2, 0.6, 0.2)), calm).why.startswith("nothing to change; ")


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ({"p99_ms": 0}, "0 ms"),
        ({"p99_ms": nan}, "nan ms"),
        ({"busy_share_max": 1.0}, "1.0"),
        ({"slice_cost": -0.1}, "-0.1"),
        ({"rest_s": -1}, "-1 s"),
        ({"rest_s": inf}, "inf s"),
        ({"grow": Hold(-1, 1)}, "-1 s"),
        ({"shrink": Hold(1, 0)}, "0 measurements"),
        ({"slices_min": {M: 0}}, "matcher has a minimum of 0 and a maximum of 8 slices"),
        ({"slices_min": {EP: 3}, "slices_max": {EP: 2}}, "exit-point has a minimum of 3 and a maximum of 2 slices"),
    ],
)
def test_a_service_level_that_cannot_be_is_refused(wrong: dict[str, object], value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServiceLevel(**{"p99_ms": 50.0, **wrong})  # type: ignore[arg-type]
    assert caught.value.code == "C413"
    assert value in caught.value.message
