"""The simulation of the request pool equals, event for event, a plain loop around the clients' real state machines. It
obeys its laws for any parameters, and shows the effects it was made to show.

The figures of the last part are results of seeded runs, not timings, so they are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_request_pool import RequestPool

from tidegate.client.control import (
    BackoffKind,
    BackoffSettings,
    Control,
    Detection,
    DetectionSettings,
    FirstValue,
    IntervalSettings,
    Strategy,
    Variation,
)
from tidegate.client.control import adaptive as client_adaptive
from tidegate.client.control import backoff as client_backoff
from tidegate.client.control import congestion as client_congestion
from tidegate_lab.control import request_pool_kernel as kernel
from tidegate_lab.control.request_pool import (
    Case,
    Outcome,
    Parameters,
    after_capacity_drop,
    capacity_drop,
    impatient_clients,
    many_clients,
    new_model,
    simulate,
    simulate_many,
    slide_show,
    slide_show_cached,
    slide_show_small_pool,
    steady_overload,
    table_of,
)

SCENARIOS: list[Callable[[], Parameters]] = [
    slide_show,
    slide_show_cached,
    slide_show_small_pool,
    steady_overload,
    capacity_drop,
    after_capacity_drop,
    many_clients,
    impatient_clients,
]
COUNTS = {
    "events": kernel.EVENTS,
    "requests": kernel.REQUESTS,
    "refused": kernel.REFUSED,
    "timed out": kernel.TIMED_OUT,
    "served": kernel.SERVED,
    "wasted": kernel.WASTED,
    "merged": kernel.MERGED,
    "dropped": kernel.DROPPED,
    "lost": kernel.LOST,
    "probes refused": kernel.PROBES_REFUSED,
    "false alarms": kernel.FALSE_ALARMS,
    "missed": kernel.MISSED,
}
QUICK = IntervalSettings(first_s=0.5, interval_s_min=0.05, interval_s_max=3.0, delta_s=0.1)
PLAIN = Control(
    interval=replace(QUICK, is_frozen_by_congestion=False),
    detection=DetectionSettings(network_s=0.002),
    backoff=BackoffSettings(BackoffKind.NONE),
    is_restarted_by_notifications=False,
    is_backoff_alone_after_failure=False,
)
FULL = Control(interval=QUICK, detection=DetectionSettings(network_s=0.002))


def with_full_broker(parameters: Parameters) -> Parameters:
    return replace(
        parameters, is_giving_slots=True, is_giving_spread=True, is_conflating=True, notifications_per_request=12
    )


def small(parameters: Parameters) -> Parameters:
    """Returns parameters with few clients and a proportionally slower broker."""
    slower = replace(parameters, query_s=0.08, cached_query_s=0.02, notification_s=0.02, probes_per_s=1.0)
    return replace(slower, clients=40, lanes=2, warm_up_s=2.0, measured_s=10.0, slow_from_s=4.0, slow_until_s=6.0)


def with_backoff(kind: BackoffKind, first_value: FirstValue = FirstValue.EXCESS) -> Control:
    return replace(PLAIN, backoff=BackoffSettings(kind, first_value))


def with_strategy(strategy: Strategy) -> Control:
    return replace(PLAIN, interval=replace(QUICK, strategy=strategy))


def with_detection(detection: Detection, factor: float = 2.0) -> Control:
    detects = DetectionSettings(detection, network_s=0.002, average_factor=factor)
    return replace(PLAIN, detection=detects, backoff=BackoffSettings())


S2, FETCH = small(steady_overload()), small(replace(slide_show(), update_every_s=1.0))
CROSS_CHECKS = {
    **{f"strategy {each}": (S2, with_strategy(each)) for each in Strategy},
    **{f"detection {each}": (S2, with_detection(each)) for each in Detection},
    **{f"backoff {each}": (S2, with_backoff(each)) for each in BackoffKind},
    **{f"first value {each}": (S2, with_backoff(BackoffKind.REPAIRED, each)) for each in FirstValue},
    "as printed": (
        S2,
        replace(with_detection(Detection.LIGHT_PRINTED, 1.0), backoff=BackoffSettings(BackoffKind.PRINTED)),
    ),
    "normal variation": (S2, replace(PLAIN, backoff=BackoffSettings(variation=Variation.NORMAL))),
    "frozen by congestion": (S2, replace(PLAIN, interval=QUICK)),
    "restarted by notifications": (S2, replace(FULL, backoff=BackoffSettings(BackoffKind.NONE))),
    "restarted at fixed intervals": (S2, replace(FULL, interval=replace(QUICK, strategy=Strategy.FIXED))),
    "estimates that are sure of losses that do not come": (
        replace(S2, query_s=0.01, notification_s=0.005, network_loss=0.0),
        replace(PLAIN, interval=replace(QUICK, strategy=Strategy.ESTIMATES, prior_episodes_per_s=2.0, prior_s=100.0)),
    ),
    "success again and again": (
        replace(FETCH, update_every_s=3.0, measured_s=30.0),
        with_backoff(BackoffKind.REPAIRED, FirstValue.SUCCESS),
    ),
    "no hints": (replace(S2, is_hinting=False), FULL),
    "small pool": (replace(S2, entries_per_client=0.3), PLAIN),
    "small pool, backoff alone": (replace(S2, entries_per_client=0.3), FULL),
    "slots": (replace(S2, is_giving_slots=True), PLAIN),
    "conflating": (replace(S2, is_conflating=True), PLAIN),
    "conflating a small pool": (replace(S2, is_conflating=True, entries_per_client=0.2), FULL),
    "preferred notifications": (replace(S2, notifications_per_request=3), PLAIN),
    "CoDel": (replace(S2, codel_target_s=0.2, codel_interval_s=0.4), FULL),
    "CoDel and timeouts": (replace(S2, codel_target_s=0.2, codel_interval_s=0.4, timeout_s=0.7), PLAIN),
    "token bucket": (replace(S2, token_every_s=0.6), FULL),
    "timeouts": (replace(S2, timeout_s=0.4), PLAIN),
    "timeouts with backoff": (replace(S2, timeout_s=0.4), FULL),
    "no bystanders": (replace(S2, probes_per_s=0.0), PLAIN),
    "fetch": (FETCH, PLAIN),
    "fetch without checks": (FETCH, with_strategy(Strategy.NONE)),
    "fetch within the backoff": (FETCH, FULL),
    "fetch from a cache": (replace(FETCH, has_cache=True), FULL),
    "fetch within the spread": (replace(FETCH, is_giving_spread=True), FULL),
    "everything": (with_full_broker(S2), FULL),
    "everything, fetched": (with_full_broker(FETCH), FULL),
}


def compare(parameters: Parameters, control: Control, seed: int) -> int:
    """Compares the simulation with the plain loop, event for event, and returns the number of events."""
    model = new_model(parameters, control)
    state = kernel.new_state(model, seed, parameters.join_within_s, parameters.run_s)
    plain = RequestPool(parameters, control, seed)
    while plain.next_at_s() <= parameters.run_s:
        now_s = plain.next_at_s()
        plain.step()
        kernel.run_until(model, state, now_s)
        clients_due_s = state.timers.heap["due_s"][state.timers.place]
        assert [*clients_due_s.tolist(), *state.due_s.tolist()] == plain.due_s, f"seed {seed}, at {now_s}"
    counted = {what: int(state.counts[place]) for what, place in COUNTS.items()}
    assert counted == {what: plain.counts[what] for what in COUNTS}
    kernel.account_all(model, state, parameters.run_s)
    plain.account_all(parameters.run_s)
    np.testing.assert_allclose(state.clients["stale_s"], [client.stale_s for client in plain.clients], rtol=1e-9)
    assert state.broker["age_s2"][0] == pytest.approx(plain.age_s2)
    assert state.broker["busy_s"][0] == pytest.approx(plain.busy_s)
    assert state.clients["known"].tolist() == [client.known for client in plain.clients]
    machines = [client.machine.statistics() for client in plain.clients]
    assert state.clients["interval_s"].tolist() == [machine.ast_s for machine in machines]
    assert state.clients["backoff_s"].tolist() == [machine.rbt_s for machine in machines]
    assert int(state.counts[kernel.LOSSES]) == sum(machine.losses for machine in machines)
    assert int(state.counts[kernel.RESTARTS]) == sum(machine.restarts for machine in machines)
    assert int(state.counts[kernel.DETECTIONS]) == sum(machine.detections for machine in machines)
    return counted["events"]


@pytest.mark.parametrize("name", CROSS_CHECKS)
def test_is_event_for_event_a_plain_loop_around_the_real_machines(name: str) -> None:
    assert compare(*CROSS_CHECKS[name], seed=11) > 300


def test_a_setting_has_the_number_of_its_place() -> None:
    """The model numbers settings by their places; laws and kernel know them by name."""
    modules = {Strategy: client_adaptive, Detection: client_congestion, FirstValue: client_backoff, Variation: kernel}
    for kind, module in modules.items():
        assert [getattr(module, member.name) for member in kind] == list(range(len(kind)))
    backoffs = {BackoffKind.NONE: kernel.NO_BACKOFF} | {
        kind: getattr(kernel, kind.name) for kind in BackoffKind if kind is not BackoffKind.NONE
    }
    assert [backoffs[kind] for kind in BackoffKind] == list(range(len(BackoffKind)))


def test_the_laws_of_the_kernel_are_the_functions_of_the_product() -> None:
    compiled = [law for law in vars(kernel).values() if hasattr(law, "py_func") and law.__module__ != kernel.__name__]
    assert len(compiled) > 15
    for law in compiled:
        assert law.py_func is getattr(sys.modules[law.__module__], law.__name__)
        assert law.__module__.startswith(("tidegate.client.control.", "tidegate.knowledge.pace"))


@st.composite
def some_cases(draw: st.DrawFn) -> tuple[Parameters, Control]:
    parameters = Parameters(
        clients=draw(st.integers(4, 30)),
        lanes=draw(st.integers(1, 4)),
        query_s=draw(st.floats(1e-3, 0.2)),
        probes_per_s=draw(st.floats(0, 5)),
        notification_s=draw(st.floats(1e-3, 0.1)),
        entries_per_client=draw(st.floats(1, 2)),
        network_loss=draw(st.floats(0, 0.9)),
        update_every_s=draw(st.floats(0.2, 4)),
        is_update_random=draw(st.booleans()),
        is_fetched=draw(st.booleans()),
        has_cache=draw(st.booleans()),
        slow_from_s=draw(st.floats(0, 4)),
        slow_until_s=draw(st.floats(0, 4)),
        timeout_s=draw(st.sampled_from([math.inf, 0.5])),
        is_hinting=draw(st.booleans()),
        is_giving_slots=draw(st.booleans()),
        is_giving_spread=draw(st.booleans()),
        is_conflating=draw(st.booleans()),
        notifications_per_request=draw(st.integers(0, 12)),
        codel_target_s=draw(st.sampled_from([0.0, 0.05])),
        token_every_s=draw(st.sampled_from([0.0, 0.5])),
        warm_up_s=draw(st.floats(0, 2)),
        measured_s=4.0,
    )
    control = Control(
        replace(QUICK, strategy=draw(st.sampled_from(Strategy)), is_frozen_by_congestion=draw(st.booleans())),
        DetectionSettings(draw(st.sampled_from(Detection))),
        BackoffSettings(
            draw(st.sampled_from(BackoffKind)), draw(st.sampled_from(FirstValue)), draw(st.sampled_from(Variation))
        ),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    return parameters, control


anything = given(some_cases(), st.integers(0, 2**32))


@settings(max_examples=25)
@anything
def test_is_that_loop_at_any_parameters(case: tuple[Parameters, Control], seed: int) -> None:
    parameters, control = case
    compare(replace(parameters, warm_up_s=0.0, measured_s=2.0), control, seed)


@anything
def test_measures_are_within_their_bounds(case: tuple[Parameters, Control], seed: int) -> None:
    parameters, control = case
    # Requests from before the measured time that are refused within it would make the share larger than 1.
    outcome = simulate(replace(parameters, warm_up_s=0.0), control, seed)
    for field in fields(Outcome):
        value = getattr(outcome, field.name)
        if "share" in field.name or field.name in ("notification_loss", "fairness"):
            assert math.isnan(value) or 0 <= value <= 1 + 1e-9, field.name
    assert outcome.utilisation <= 1
    assert outcome.age_s <= parameters.measured_s
    if not math.isnan(outcome.response_p50_s):
        assert parameters.round_trip_s < outcome.response_p50_s <= outcome.response_p99_s <= outcome.response_p999_s
    if not math.isnan(outcome.dropped_share):
        assert outcome.dropped_share <= outcome.notification_loss


@anything
def test_nothing_is_lost_in_the_heap_or_in_the_rings(case: tuple[Parameters, Control], seed: int) -> None:
    parameters, control = case
    model = new_model(parameters, control)
    state = kernel.new_state(model, seed, parameters.join_within_s, parameters.run_s)
    kernel.run_until(model, state, parameters.run_s)
    counts, (heap, places) = state.counts, state.timers
    assert sorted(heap["client"].tolist()) == list(range(heap.size))
    assert heap["client"][places].tolist() == list(range(parameters.clients))
    order = list(zip(heap["due_s"].tolist(), heap["client"].tolist(), strict=True))
    assert all(order[(place - 1) // 4] < order[place] for place in range(1, heap.size))
    asking = int((state.clients["phase"] == kernel.ASKS).sum())
    assert counts[kernel.REQUESTS] == counts[kernel.SERVED] + counts[kernel.REFUSED] + counts[kernel.TIMED_OUT] + asking
    assert int(counts[kernel.NOTIFIED]) == parameters.clients * int(state.broker["version"][0])


@settings(max_examples=20)
@anything
def test_a_seed_is_one_outcome(case: tuple[Parameters, Control], seed: int) -> None:
    assert repr(simulate(*case, seed)) == repr(simulate(*case, seed))


def test_another_seed_is_another_outcome() -> None:
    assert simulate(S2, FULL, 1) != simulate(S2, FULL, 2)


def test_policies_meet_the_same_updates() -> None:
    def updates(control: Control) -> list[float]:
        model = new_model(S2, control)
        state = kernel.new_state(model, 5, S2.join_within_s, S2.run_s)
        kernel.run_until(model, state, S2.run_s)
        return [float(at_s) for at_s in state.updated_at_s if math.isfinite(at_s)]

    assert len(updates(PLAIN)) > 5
    assert updates(PLAIN) == updates(FULL) == updates(with_strategy(Strategy.NONE))


def test_whole_numbers_for_times_compile_nothing_anew() -> None:
    simulate(S2, PLAIN, 1)
    compiled = len(kernel.run_until.signatures)
    simulate(replace(S2, query_s=1, warm_up_s=2, measured_s=3, join_within_s=0), PLAIN, 1)
    assert len(kernel.run_until.signatures) == compiled


def test_a_sweep_in_chunks_is_the_same_sweep() -> None:
    cases = [Case(S2, control, seed) for control in (PLAIN, FULL) for seed in range(2)]
    outcomes = simulate_many(cases)
    assert outcomes == simulate_many(cases[:1]) + simulate_many(cases[1:])
    table = table_of(cases, outcomes)
    expected = ["seed", *asdict(S2)]
    assert table.column_names[: len(expected)] == expected
    assert table.column_names[-len(fields(Outcome)) :] == [field.name for field in fields(Outcome)]
    assert table["stale_share"].to_pylist() == [outcome.stale_share for outcome in outcomes]
    assert table["strategy"].to_pylist() == ["adaptive"] * 4
    assert table["backoff"].to_pylist() == ["none", "none", "repaired", "repaired"]


def test_settings_of_the_three_parts_have_distinct_names() -> None:
    """Settings that replace their whole part are exempt."""
    kinds = (Parameters, Control, IntervalSettings, DetectionSettings, BackoffSettings, Outcome)
    names = ["backoff" if field.name == "kind" else field.name for kind in kinds for field in dataclasses.fields(kind)]
    assert {name for name in names if names.count(name) > 1} == {"detection", "backoff"}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_run(scenario: Callable[[], Parameters]) -> None:
    outcome = simulate(replace(scenario(), measured_s=50.0), replace(FULL, interval=IntervalSettings()), 1)
    assert 0 < outcome.stale_share < 1
    assert outcome.events > 10_000


# The intended effects: the goals of the full design, and the steps of the papers.


def over_seeds(parameters: Parameters, control: Control, measure: str) -> float:
    return fmean(getattr(outcome, measure) for outcome in (simulate(parameters, control, seed) for seed in range(1, 6)))


AST = Control(
    IntervalSettings(first_s=1.0, is_frozen_by_congestion=False),
    DetectionSettings(network_s=0.002),
    BackoffSettings(BackoffKind.NONE),
    is_restarted_by_notifications=False,
    is_backoff_alone_after_failure=False,
)
RBT = replace(
    AST, interval=IntervalSettings(first_s=1.0), backoff=BackoffSettings(), is_backoff_alone_after_failure=True
)
DESIGN = replace(RBT, is_restarted_by_notifications=True)
OVERLOAD = steady_overload()


def test_checks_make_an_overloaded_broker_worse_than_none() -> None:
    never = replace(AST, interval=IntervalSettings(Strategy.NONE))
    assert over_seeds(OVERLOAD, AST, "stale_share") > 1.3 * over_seeds(OVERLOAD, never, "stale_share")
    assert over_seeds(OVERLOAD, AST, "notification_loss") > 3 * over_seeds(OVERLOAD, never, "notification_loss")


def test_the_repaired_backoff_takes_a_fifth_of_the_staleness_away() -> None:
    assert over_seeds(OVERLOAD, RBT, "stale_share") <= 0.8 * over_seeds(OVERLOAD, AST, "stale_share")
    assert over_seeds(OVERLOAD, RBT, "response_p50_s") <= 0.35 * over_seeds(OVERLOAD, AST, "response_p50_s")


def test_the_full_design_halves_staleness_and_has_no_queues() -> None:
    helped = with_full_broker(OVERLOAD)
    assert over_seeds(helped, DESIGN, "stale_share") <= 0.55 * over_seeds(OVERLOAD, AST, "stale_share")
    assert over_seeds(helped, DESIGN, "response_p50_s") <= 0.02 * over_seeds(OVERLOAD, AST, "response_p50_s")


def test_the_spread_spares_bystanders_of_a_burst() -> None:
    burst = replace(slide_show(), measured_s=60.0)
    spread = replace(burst, is_giving_spread=True)
    assert over_seeds(spread, AST, "bystander_p99_s") <= 0.35 * over_seeds(burst, AST, "bystander_p99_s")
    assert over_seeds(spread, AST, "stale_share") <= over_seeds(burst, AST, "stale_share") + 0.02


def test_impatient_clients_without_backoff_make_the_broker_work_in_vain() -> None:
    impatient = replace(impatient_clients(), measured_s=60.0)
    assert over_seeds(impatient, AST, "wasted_share") > 0.8
    assert over_seeds(impatient, RBT, "wasted_share") < 0.2
