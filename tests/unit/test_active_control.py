"""Active control: the tests show every error of the printed algorithms and its repair. No hint of a broker and no clock
can make a client wait too long."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.client.control import (
    NO_HINTS,
    ActiveControl,
    BackoffKind,
    BackoffSettings,
    Control,
    Detection,
    DetectionSettings,
    FirstValue,
    Hints,
    IntervalSettings,
    SequenceGaps,
    Strategy,
    Variation,
)
from tidegate.client.control.adaptive import AdaptiveInterval, Check, new_interval
from tidegate.client.control.backoff import Collision, RandomBackoff, longest_backoff_s, new_backoff
from tidegate.client.control.congestion import CongestionDetector
from tidegate.client.control.estimates import interval_before_decrease_s
from tidegate.client.control.hints import MISSING
from tidegate.client.control.variation import vary_s
from tidegate.errors import ConfigError

DAY_S = 86_400.0
CALM_S, SLOW_S = 0.006, 0.8
WIDE = IntervalSettings(interval_s_min=1e-6, interval_s_max=1e9)


def middle() -> float:
    return 0.5


def collision(**known: Any) -> Collision:
    return replace(Collision(interval_s=4.0, adaptive_s=1.0, excess_s=0.0, average_s=0.006), **known)


def calm(losses: int = 0) -> Check:
    return Check(losses, 0.0, is_congested=False, response_s=CALM_S)


def service_s(random: Random) -> float:
    """Draws a service time like the broker's: at least half the mean of 4 ms, exponential above."""
    return 0.002 + random.expovariate(500)


# The adaptive strategy.


@given(st.lists(st.integers(0, 3), max_size=60), st.floats(1.1, 8), st.floats(0.01, 5))
def test_the_adaptive_interval_is_equation_3_within_its_bounds(found: list[int], alpha: float, delta_s: float) -> None:
    settings = IntervalSettings(alpha=alpha, delta_s=delta_s)
    interval, expected_s = new_interval(settings), settings.first_s
    for losses in found:
        expected_s = expected_s / alpha if losses else expected_s + delta_s
        expected_s = min(settings.interval_s_max, max(settings.interval_s_min, expected_s))
        assert interval.on_check(calm(losses), middle) == interval.interval_s == expected_s


def settled(strategy: Strategy) -> tuple[AdaptiveInterval, float]:
    """Returns a strategy that has settled on 0.05 episodes per second, and its T."""
    settings = replace(WIDE, strategy=strategy, prior_episodes_per_s=0.05, prior_s=1e12)
    expected_s = interval_before_decrease_s(0.05, settings.alpha, settings.delta_s)
    return AdaptiveInterval(replace(settings, first_s=expected_s / settings.alpha)), expected_s


def test_algorithm_2_as_printed_is_stuck_below_what_it_expects() -> None:
    printed, expected_s = settled(Strategy.ESTIMATES_PRINTED)
    for _ in range(50):
        printed.on_check(calm(), middle)
    assert printed.interval_s == pytest.approx(expected_s / 2)


def test_algorithm_2_repaired_jumps_to_what_it_expects_and_probes_up_to_its_double() -> None:
    repaired, expected_s = settled(Strategy.ESTIMATES)
    assert repaired.on_check(calm(), middle) == pytest.approx(expected_s)
    assert repaired.on_check(calm(), middle) == pytest.approx(expected_s + 0.5)
    for _ in range(50):
        repaired.on_check(calm(), middle)
    assert repaired.interval_s == pytest.approx(2 * expected_s)


@pytest.mark.parametrize("strategy", [Strategy.ADAPTIVE, Strategy.ESTIMATES, Strategy.ESTIMATES_PRINTED])
def test_losses_of_a_congested_check_do_not_shorten_the_interval(strategy: Strategy) -> None:
    congested = Check(losses=3, elapsed_s=1.0, is_congested=True, response_s=SLOW_S)
    frozen = new_interval(IntervalSettings(strategy))
    assert frozen.on_check(congested, middle) == 4.0
    printed = new_interval(IntervalSettings(strategy, is_frozen_by_congestion=False))
    assert printed.on_check(congested, middle) == 2.0


def test_an_interval_without_losses_stays_below_what_the_application_accepts() -> None:
    for strategy in (Strategy.ADAPTIVE, Strategy.ESTIMATES):
        interval = new_interval(IntervalSettings(strategy, interval_s_max=12.0))
        assert max(interval.on_check(calm(), middle) for _ in range(500)) == 12.0


def test_steps_1_and_2() -> None:
    random = Random(1)
    assert new_interval(IntervalSettings(Strategy.NONE)).on_check(calm(), middle) == math.inf
    assert {new_interval(IntervalSettings(Strategy.FIXED)).on_check(calm(k), middle) for k in range(3)} == {4.0}
    interval = new_interval(IntervalSettings(Strategy.RANDOM))
    drawn = [interval.on_check(calm(), random.random) for _ in range(4000)]
    assert 2.0 <= min(drawn) < 2.1
    assert 5.9 < max(drawn) <= 6.0
    assert fmean(drawn) == pytest.approx(4, rel=0.03)


def test_the_gradient_asks_less_of_a_slow_broker_and_more_of_a_fast_one() -> None:
    interval = new_interval(IntervalSettings(Strategy.GRADIENT))
    for _ in range(200):
        interval.on_check(calm(), middle)
    fast_s = interval.interval_s
    for _ in range(15):
        interval.on_check(Check(0, 1.0, is_congested=True, response_s=SLOW_S), middle)
    slow_s = interval.interval_s
    interval.on_check(Check(0, 1.0, is_congested=True, response_s=None), middle)
    assert 0.25 <= fast_s < 1 < slow_s < interval.interval_s < 30


# Detection.


def alarms(settings: DetectionSettings, rounds: int = 20_000) -> float:
    """Returns the share of false alarms for a broker whose queues are empty."""
    random, detector = Random(3), CongestionDetector(settings)
    return fmean(
        detector.on_response(processing_s + 0.002, processing_s, None)
        for processing_s in (service_s(random) for _ in range(rounds))
    )


def detection(kind: Detection, **settings: float) -> DetectionSettings:
    return DetectionSettings(kind, network_s=0.002, **settings)


def test_the_printed_condition_takes_a_third_of_a_calm_system_for_congested() -> None:
    assert alarms(detection(Detection.LIGHT_PRINTED, average_factor=1.0)) == pytest.approx(1 / math.e, abs=0.04)
    assert alarms(detection(Detection.LIGHT)) < 0.05


def test_rigorous_by_the_mean_takes_long_queries_for_congestion() -> None:
    assert 0.1 < alarms(detection(Detection.RIGOROUS_MEAN)) < 0.5
    assert alarms(detection(Detection.RIGOROUS)) == 0


def test_rigorous_finds_the_queues_that_it_does_not_accept() -> None:
    detector = CongestionDetector(detection(Detection.RIGOROUS))
    assert not detector.on_response(0.0079, 0.004, None)
    assert detector.on_response(0.0081, 0.004, None)


def test_an_average_of_all_samples_learns_congestion_and_one_of_calm_ones_does_not() -> None:
    polluted, clean = (CongestionDetector(detection(kind)) for kind in (Detection.LIGHT_PRINTED, Detection.LIGHT))
    for detector in (polluted, clean):
        for _ in range(50):
            detector.on_response(CALM_S, None, None)
    found = [(polluted.on_response(SLOW_S, None, None), clean.on_response(SLOW_S, None, None)) for _ in range(100)]
    assert found[0] == (True, True)
    assert found[-1] == (False, True)


def test_light_learns_a_change_that_stays() -> None:
    detector = CongestionDetector(detection(Detection.LIGHT))
    detector.on_response(CALM_S, None, None)
    found = [detector.on_response(5 * CALM_S, None, None) for _ in range(400)]
    assert found[0]
    assert not found[-1]


def test_light_does_not_see_a_congestion_that_was_there_before_it_and_mediate_does() -> None:
    light, mediate = (CongestionDetector(detection(kind)) for kind in (Detection.LIGHT, Detection.MEDIATE))
    assert not any(light.on_response(SLOW_S, None, None) for _ in range(50))
    assert all(mediate.on_response(SLOW_S, None, None) for _ in range(50))


def test_mediate_takes_the_delay_of_the_broker_as_its_limit() -> None:
    detector = CongestionDetector(detection(Detection.MEDIATE))
    assert detector.on_response(0.3, None, None)
    assert not detector.on_response(0.3, None, 0.299)
    assert not detector.on_response(0.3, None, None), "it is remembered"
    assert detector.on_response(0.3, None, 0.297)
    assert detector.excess_s(0.4) == pytest.approx(0.4 - 0.299)
    assert detector.excess_s(0.1) == 0


@pytest.mark.parametrize("lie", [-1.0, math.nan, math.inf, DAY_S, None])
@pytest.mark.parametrize("kind", [Detection.RIGOROUS, Detection.RIGOROUS_MEAN, Detection.MEDIATE])
def test_lies_about_times_count_as_missing(kind: Detection, lie: float | None) -> None:
    detector = CongestionDetector(detection(kind))
    assert not detector.on_response(0.0619, lie, lie)
    assert detector.on_response(0.0621, lie, lie)


# Backoff.


def test_algorithm_3_by_the_letter_never_backs_off() -> None:
    """In lines 3 to 13, t[j] and t[j - 1] differ: line 13 does not multiply the value that line 4 sets."""
    t = [0.0]
    for j in range(1, 20):
        t.append(0.0)
        if t[j] == 0:
            t[j] = 0.1
        t[j] = min(t[j - 1] * 2, 60.0)
    assert set(t) == {0.0}
    repaired = new_backoff(BackoffSettings())
    assert all(repaired.on_collision(collision(), middle) > 0 for _ in range(20))


def test_the_printed_backoff_is_bounded_by_what_is_far_too_short() -> None:
    random, printed = Random(1), new_backoff(BackoffSettings(BackoffKind.PRINTED))
    waits_s = [printed.on_collision(collision(average_s=CALM_S), random.random) for _ in range(1000)]
    assert max(waits_s) < 0.1, "against queues that drain in seconds"
    assert min(waits_s) >= 0
    printed.on_calm(1.0)
    assert printed.backoff_s == 0


def test_the_repaired_backoff_starts_at_its_first_value_and_grows_from_the_second_collision_on() -> None:
    backoff = RandomBackoff(BackoffSettings(first_value=FirstValue.MINIMUM))
    grown = [backoff.on_collision(collision(), middle) for _ in range(8)]
    assert grown == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    backoff.on_calm(1.0)
    assert backoff.backoff_s == 0
    assert backoff.on_collision(collision(), middle) == pytest.approx(0.1)


def first_value_s(first_value: FirstValue, known: Collision) -> float:
    backoff = RandomBackoff(BackoffSettings(first_value=first_value))
    backoff.on_calm(3.0)
    for excess_s in (0.0, 0.4):
        backoff.on_collision(collision(excess_s=excess_s), middle)
    backoff.on_calm(3.0)
    return backoff.on_collision(known, middle)


def test_first_values_are_what_they_are_made_of() -> None:
    known = collision(adaptive_s=1.2, excess_s=0.7, pace_s=2.0)
    assert first_value_s(FirstValue.MINIMUM, known) == pytest.approx(0.1)
    assert first_value_s(FirstValue.INTERVALS, known) == pytest.approx(3.0 - 1.2)
    assert first_value_s(FirstValue.SUCCESS, known) == pytest.approx(0.2), "the mean that ended it, not a draw"
    assert first_value_s(FirstValue.RATE, known) == pytest.approx(2.0 - 1.2)
    assert first_value_s(FirstValue.EXCESS, known) == pytest.approx(1.4)


@pytest.mark.parametrize("first_value", FirstValue)
def test_a_first_value_that_would_not_be_positive_is_the_minimum(first_value: FirstValue) -> None:
    backoff = RandomBackoff(BackoffSettings(first_value=first_value))
    assert backoff.on_collision(collision(adaptive_s=9.0, pace_s=2.0), middle) == pytest.approx(0.1)


def test_the_longest_backoff_is_what_serves_everybody_twice() -> None:
    assert longest_backoff_s(MISSING, 0.1, 5.0) == 5.0
    assert longest_backoff_s(2.4, 0.1, 5.0) == 4.8
    assert longest_backoff_s(0.0, 0.1, 5.0) == 0.1


@pytest.mark.parametrize("variation", Variation)
def test_what_is_drawn_has_the_mean_and_is_never_negative(variation: Variation) -> None:
    random = Random(4)
    drawn = [vary_s(2.0, variation, random.random) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(2, rel=0.02)
    assert 0 <= min(drawn) < 0.5
    assert 3.5 < max(drawn) <= 4


def test_a_normal_variation_as_printed_would_be_negative() -> None:
    """The variation is N(t · seed) around t, with a seed of 1."""
    random = Random(4)
    assert min(0.1 + random.gauss(0, 0.1) for _ in range(1000)) < 0


def test_full_jitter_doubles_its_span() -> None:
    jitter = new_backoff(BackoffSettings(BackoffKind.FULL_JITTER))
    spans = [2 * jitter.on_collision(collision(), middle) for _ in range(40)]
    assert spans[:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
    assert spans[-1] == 5.0
    jitter.on_calm(1.0)
    assert 2 * jitter.on_collision(collision(), middle) == pytest.approx(0.2)


# Losses by sequence numbers.


class Broker:
    """One subscription at a broker that keeps its notifications in order, may merge waiting ones, and knows which
    decisions every message carries."""

    def __init__(self, *, is_conflating: bool) -> None:
        self.sequence = 0
        self.waiting: list[set[int]] = []
        self._answered = 0
        self._is_conflating = is_conflating

    def decide(self, *, is_dropped: bool) -> None:
        self.sequence += 1
        if self._is_conflating and self.waiting:
            self.waiting[0].add(self.sequence)
        elif not is_dropped:
            self.waiting.append({self.sequence})

    def respond(self) -> set[int]:
        carried = {decision for each in self.waiting for decision in each if decision > self._answered}
        self._answered = self.sequence
        if self._is_conflating:
            self.waiting.clear()
        return carried


@given(st.booleans(), st.lists(st.sampled_from(["decide", "drop", "arrive", "lose", "respond"]), max_size=80))
def test_gaps_are_the_decisions_of_which_nothing_came(is_conflating: bool, happenings: list[str]) -> None:
    broker, gaps = Broker(is_conflating=is_conflating), SequenceGaps()
    arrived, counted, seen = set[int](), 0, 0
    for happening in happenings:
        if happening in ("decide", "drop"):
            broker.decide(is_dropped=happening == "drop")
            continue
        if happening == "respond":
            sequence, carried = broker.sequence, broker.respond()
        elif broker.waiting:
            carried = broker.waiting.pop(0)
            sequence = max(carried)
        else:
            continue
        if happening != "lose":
            counted += gaps.on_message(sequence, len(carried))
            arrived |= carried
            seen = max(seen, sequence)
            assert counted == len(set(range(1, seen + 1)) - arrived)


def test_a_notification_that_comes_after_a_response_with_its_news_is_no_loss() -> None:
    gaps = SequenceGaps()
    assert gaps.on_message(1, 1) == 0
    assert gaps.on_message(4, 2) == 1, "two wait to be sent, one is lost"
    assert gaps.on_message(3, 1) == gaps.on_message(4, 1) == 0
    assert gaps.on_message(5, 1) == 0


def test_after_a_reconnection_results_are_compared() -> None:
    gaps = SequenceGaps()
    gaps.on_message(7, 7)
    assert gaps.restart(3, is_different=True) == 1
    assert gaps.on_message(4, 1) == 0
    assert gaps.restart(9, is_different=False) == 0


# All together.


def asked(control: Control = Control(), now_s: float = 100.0) -> ActiveControl:  # noqa: B008
    machine = ActiveControl(control, middle, now_s)
    assert machine.on_due(now_s)
    return machine


def test_a_calm_response_waits_for_the_interval_and_a_congested_one_for_the_backoff_too() -> None:
    machine = asked()
    machine.on_response(NO_HINTS, 100.0 + CALM_S)
    assert machine.wait_s(100.0 + CALM_S) == pytest.approx(4.5)
    machine = asked()
    machine.on_response(NO_HINTS, 100.0 + SLOW_S)
    excess_s = SLOW_S - 0.07
    assert machine.wait_s(100.0 + SLOW_S) == pytest.approx(4.5 + 2 * excess_s)
    assert machine.statistics().detections == 1


def test_after_a_failure_only_the_backoff_is_waited() -> None:
    machine = asked()
    machine.on_refusal(None, 100.002)
    assert machine.wait_s(100.002) == pytest.approx(0.1)
    printed = asked(Control(is_backoff_alone_after_failure=False))
    printed.on_refusal(None, 100.002)
    assert printed.wait_s(100.002) == pytest.approx(4.5 + 0.1)
    assert printed.statistics().failures == printed.statistics().detections == 1


def test_a_client_without_backoff_waits_for_its_interval_after_a_failure() -> None:
    machine = asked(Control(backoff=BackoffSettings(BackoffKind.NONE)))
    machine.on_refusal(None, 100.002)
    assert machine.wait_s(100.002) == pytest.approx(4.5), "and does not ask again at once"


def test_failures_are_no_samples_of_the_average() -> None:
    control = Control(detection=DetectionSettings(Detection.LIGHT))
    machine = asked(control)
    machine.on_response(NO_HINTS, 100.0 + CALM_S)
    for _ in range(20):
        now_s = machine.due_s
        assert machine.on_due(now_s)
        machine.on_timeout(now_s + 9.0)
    now_s = machine.due_s
    assert machine.on_due(now_s)
    machine.on_response(NO_HINTS, now_s + 3 * CALM_S)
    assert machine.statistics().detections == 21, "three times the average is still far above it"


@pytest.mark.parametrize("kind", [each for each in BackoffKind if each is not BackoffKind.NONE])
def test_a_client_whose_first_requests_are_all_refused_does_not_ask_at_once(kind: BackoffKind) -> None:
    machine = ActiveControl(Control(backoff=BackoffSettings(kind)), Random(2).random, 0.0)
    waits_s = []
    for _ in range(100):
        now_s = machine.due_s
        assert machine.on_due(now_s)
        machine.on_refusal(None, now_s)
        waits_s.append(machine.wait_s(now_s))
    assert fmean(waits_s) > 1


def test_a_timeout_backs_off_by_its_excess() -> None:
    machine = asked()
    machine.on_timeout(101.0)
    assert machine.statistics().rbt_s == pytest.approx(2 * (1.0 - 0.07))


def test_a_slot_and_a_time_to_come_back_are_waited_for_at_least() -> None:
    machine = asked()
    machine.on_response(Hints(slot_s=9.0), 100.0 + CALM_S)
    assert machine.wait_s(100.0 + CALM_S) == pytest.approx(9.0)
    machine = asked()
    machine.on_response(Hints(slot_s=0.01), 100.0 + CALM_S)
    assert machine.wait_s(100.0 + CALM_S) == pytest.approx(4.5)
    machine = asked()
    machine.on_refusal(3.0, 100.002)
    assert machine.wait_s(100.002) >= 3.0


def test_losses_shorten_the_interval_once() -> None:
    machine = asked()
    machine.on_losses(2)
    machine.on_response(NO_HINTS, 100.0 + CALM_S)
    assert machine.statistics().ast_s == 2.0
    assert machine.on_due(machine.due_s)
    machine.on_response(NO_HINTS, 110.0)
    assert machine.statistics().ast_s == 2.5
    assert machine.statistics().losses == 2


def test_a_notification_stands_for_a_check() -> None:
    machine = asked()
    machine.on_response(NO_HINTS, 100.0)
    machine.on_notification(103.0)
    assert not machine.on_due(104.5)
    assert machine.due_s == pytest.approx(103.0 + 5.0)
    assert machine.on_due(108.0), "none has come since"
    assert machine.statistics().restarts == 1


@pytest.mark.parametrize(("spread_s", "later_s"), [(3.0, 1.5), (0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (DAY_S, 15.0)])
def test_checks_that_one_notification_has_put_off_are_spread(spread_s: float, later_s: float) -> None:
    machine = asked()
    machine.on_response(NO_HINTS, 100.0)
    machine.on_notification(103.0, spread_s)
    assert not machine.on_due(104.5)
    assert machine.due_s == pytest.approx(103.0 + 5.0 + later_s)


def test_the_gap_that_a_notification_has_shown_counts_at_its_check() -> None:
    machine = asked()
    machine.on_response(NO_HINTS, 100.0)
    machine.on_losses(1)
    machine.on_notification(104.0)
    assert not machine.on_due(104.5)
    assert machine.due_s == pytest.approx(104.0 + 2.25)


def test_without_the_restart_notifications_change_nothing() -> None:
    machine = asked(Control(is_restarted_by_notifications=False))
    machine.on_response(NO_HINTS, 100.0)
    machine.on_notification(103.0)
    assert machine.on_due(104.5)


def test_an_announcement_is_fetched_within_the_spread_of_the_broker() -> None:
    machine = asked()
    machine.on_response(NO_HINTS, 100.0)
    machine.on_announcement(2.4, 101.0)
    assert machine.due_s == pytest.approx(102.2)
    machine.on_announcement(2.4, 101.5)
    assert machine.due_s == pytest.approx(102.2), "the next one does not put it off"
    machine.on_announcement(None, 102.0)
    assert machine.due_s == pytest.approx(102.0), "at once in calm"
    assert machine.on_due(102.0)
    machine.on_announcement(2.4, 102.1)
    assert machine.due_s == math.inf, "the response that is under way has it"


def test_a_fetch_takes_the_place_of_the_check_and_of_what_notifications_have_put_off() -> None:
    machine = asked()
    machine.on_response(NO_HINTS, 100.0)
    machine.on_notification(103.0)
    machine.on_announcement(9.0, 104.0)
    assert machine.due_s == 108.5, "within the spread, although a check was due before"
    assert machine.on_due(108.5)


def test_step_1_asks_only_when_told_to_fetch() -> None:
    machine = ActiveControl(Control(interval=IntervalSettings(Strategy.NONE)), middle, 0.0)
    assert machine.wait_s(0.0) == math.inf
    machine.on_notification(1.0)
    machine.on_announcement(0.0, 2.0)
    assert machine.on_due(2.0)
    machine.on_response(NO_HINTS, 2.0 + CALM_S)
    assert machine.wait_s(3.0) == math.inf


hints_s = st.none() | st.floats(-1, 100) | st.sampled_from([math.nan, math.inf, -math.inf, DAY_S, 1e308, -0.0])
controls = st.builds(
    Control,
    interval=st.builds(IntervalSettings, st.sampled_from([each for each in Strategy if each is not Strategy.NONE])),
    detection=st.builds(DetectionSettings, st.sampled_from(Detection)),
    backoff=st.builds(
        BackoffSettings,
        st.sampled_from(BackoffKind).filter(lambda kind: kind is not BackoffKind.PRINTED),
        st.sampled_from(FirstValue),
        st.sampled_from(Variation),
    ),
    is_restarted_by_notifications=st.booleans(),
    is_backoff_alone_after_failure=st.booleans(),
)
WAIT_S_MAX = 1.5 * 30 + 2 * 30


@given(controls, st.lists(st.tuples(st.integers(0, 6), hints_s, st.floats(-4000, 4000)), max_size=50), st.integers())
def test_no_hint_and_no_clock_makes_a_client_wait_too_long(
    control: Control, happenings: list[tuple[int, float | None, float]], seed: int
) -> None:
    """Events come in any order with any hints, and the clock jumps by up to an hour each time."""
    now_s = 1000.0
    machine = ActiveControl(control, Random(seed).random, now_s)
    for kind, hint_s, jump_s in happenings:
        now_s += jump_s
        if kind == 0:
            machine.on_notification(now_s)
        elif kind == 1:
            machine.on_announcement(hint_s, now_s)
        elif kind == 2:
            machine.on_losses(1)
        elif machine.is_asking and kind == 3:
            machine.on_response(Hints(hint_s, hint_s, hint_s, hint_s), now_s)
        elif machine.is_asking and kind == 4:
            machine.on_refusal(hint_s, now_s)
        elif machine.is_asking and kind == 5:
            machine.on_timeout(now_s)
        elif not machine.is_asking:
            machine.on_due(now_s)
        if not machine.is_asking:
            assert 0 <= machine.wait_s(now_s) <= WAIT_S_MAX
    statistics = machine.statistics()
    assert 0.25 <= statistics.ast_s <= 30
    assert 0 <= statistics.rbt_s <= 30
    assert statistics.failures <= statistics.detections <= statistics.requests


def test_a_clock_that_jumps_back_a_day_delays_a_check_by_its_own_wait() -> None:
    machine = asked(now_s=DAY_S)
    machine.on_response(NO_HINTS, DAY_S)
    assert machine.wait_s(0.0) == pytest.approx(4.5)
    machine.on_notification(DAY_S)
    assert not machine.on_due(10.0)
    assert machine.wait_s(10.0) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: IntervalSettings(alpha=1), "C460: alpha is 1; use 1.01 to 1000, such as 2"),
        (lambda: IntervalSettings(delta_s=0), "C460: delta is 0; use seconds above 0"),
        (
            lambda: IntervalSettings(interval_s_min=9, interval_s_max=8),
            "C461: check intervals are from 9 s to 8 s; use",
        ),
        (lambda: IntervalSettings(interval_s_max=math.nan), "C461: check intervals are from 0.25 s to nan s"),
        (lambda: IntervalSettings(first_s=31), "C461: the first check interval is 31 s; use 0.25 s to 30 s"),
        (lambda: IntervalSettings(forgetting_s=0), "C461: forgetting_s is 0; use more than 0"),
        (lambda: DetectionSettings(network_s=-1), "C462: the network's time for detecting congestion is -1; use"),
        (lambda: DetectionSettings(delay_s_default=0), "C462: the default delay"),
        (
            lambda: DetectionSettings(queue_share=1),
            "C462: the share in queues .* is 1; use more than 0 and less than 1",
        ),
        (lambda: DetectionSettings(average_weight=1), "C462: the weight of the average"),
        (lambda: DetectionSettings(average_factor=0.5), "C462: the factor of the average .* is 0.5; use 1 or more"),
        (lambda: BackoffSettings(beta=1), "C463: beta of the backoff is 1; use more than 1, such as 2"),
        (
            lambda: BackoffSettings(backoff_s_min=0),
            "C463: the shortest backoff of the backoff is 0; use seconds above 0",
        ),
        (lambda: BackoffSettings(backoff_s_max=0.05), "C463: the longest backoff of the backoff is 0.05; use 0.1 s"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_cure(wrong: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        wrong()
