"""The lanes of the small broker: whom they serve and when, with a clock that the test controls."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tidegate.errors import Overloaded
from tidegate.knowledge.request_pool import Load
from tidegate_lab.control.request_pool import Parameters
from tidegate_lab.control.small_broker import Lanes

ONE_LANE = Parameters(clients=8, lanes=1, query_s=4.0, notification_s=1.0, entries_per_client=1.0)


class Clock:
    """A replacement of the event loop, which is late when the test wants it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._calls, (at_s, len(self._calls), call, given))

    def run_until(self, end_s: float, late_s: float = 0.0) -> None:
        while self._calls and self._calls[0][0] + late_s <= end_s:
            at_s, _, call, given = heapq.heappop(self._calls)
            self.now_s = max(self.now_s, at_s + late_s)
            call(*given)
        self.now_s = end_s


class Steady(Random):
    """A random source with which every service takes its mean time."""

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


def lanes_of(parameters: Parameters, rng: Random | None = None) -> Lanes:
    return Lanes(parameters, rng or Steady())


class Told:
    """Records who was served, and when."""

    def __init__(self, clock: Clock) -> None:
        self.served: list[tuple[str, float]] = []
        self.loads: list[Load] = []
        self._clock = clock

    def query(self, name: str) -> Callable[[Load | Overloaded], None]:
        def answer(load: Load | Overloaded) -> None:
            if isinstance(load, Overloaded):
                self.served.append((f"{name} refused", self._clock.now_s))
            else:
                self.loads.append(load)
                self.served.append((name, self._clock.now_s))

        return answer

    def notice(self, name: str) -> Callable[[], None]:
        return lambda: self.served.append((name, self._clock.now_s))


def test_first_come_is_first_served_each_after_its_time(clock: Clock) -> None:
    lanes, told = lanes_of(ONE_LANE), Told(clock)
    lane = lanes.each[0]
    lanes.put_query(lane, told.query("q1"))
    lane.put_notice(told.notice("n1"))
    clock.run_until(1.0)
    lanes.put_query(lane, told.query("q2"))
    clock.run_until(20.0)
    assert told.served == [("q1", 4.0), ("n1", 5.0), ("q2", 9.0)]
    assert [(load.processing_s, load.waiting_s) for load in told.loads] == [(4.0, 0.0), (4.0, 4.0)]


def test_a_late_event_loop_takes_nothing_from_what_a_lane_can_serve(clock: Clock) -> None:
    lanes, told = lanes_of(replace(ONE_LANE, entries_per_client=20.0), Random(1)), Told(clock)
    for number in range(100):
        lanes.put_query(lanes.each[0], told.query(str(number)))
    clock.run_until(2000.0, late_s=3.0)
    assert len(told.loads) == 100
    for before, after in zip(told.loads, told.loads[1:], strict=False):
        assert after.waiting_s == pytest.approx(before.waiting_s + before.processing_s)


def test_a_full_lane_refuses_and_tells_when_to_come_back(clock: Clock) -> None:
    lanes, told = lanes_of(ONE_LANE), Told(clock)
    lane = lanes.each[0]
    for number in range(10):
        lanes.put_query(lane, told.query(str(number)))
    assert told.served == [("9 refused", 0.0)]  # one is served, eight wait
    assert lanes.is_full(lane)
    clock.run_until(4.0)
    assert not lanes.is_full(lane)
    lane.put_notice(told.notice("n"))
    assert lanes.is_full(lane)
    conflating = lanes_of(replace(ONE_LANE, is_conflating=True))
    for _ in range(20):
        conflating.each[0].put_notice(told.notice("n"))
    assert not conflating.is_full(conflating.each[0])


def test_notices_are_preferred_so_many_times(clock: Clock) -> None:
    lanes, told = lanes_of(replace(ONE_LANE, notifications_per_request=2)), Told(clock)
    lane = lanes.each[0]
    for number in range(3):
        lanes.put_query(lane, told.query(f"q{number}"))
    for number in range(5):
        lane.put_notice(told.notice(f"n{number}"))
    clock.run_until(100.0)
    assert [name for name, _ in told.served] == ["q0", "n0", "n1", "q1", "n2", "n3", "q2", "n4"]


def test_codel_refuses_what_has_waited_when_all_have(clock: Clock) -> None:
    given = replace(ONE_LANE, entries_per_client=10.0, codel_target_s=1.0, codel_interval_s=10.0)
    lanes, told = lanes_of(given), Told(clock)
    for number in range(12):
        lanes.put_query(lanes.each[0], told.query(str(number)))
    clock.run_until(100.0)
    refused = [name for name, _ in told.served if name.endswith("refused")]
    assert refused
    assert told.served[0] == ("0", 4.0)
    patient = lanes_of(replace(given, codel_target_s=0.0))
    for number in range(12):
        patient.put_query(patient.each[0], told.query(f"p{number}"))
    clock.run_until(200.0)
    assert "p11" in [name for name, _ in told.served]


def test_only_the_first_query_after_a_change_is_slow_where_answers_are_kept(clock: Clock) -> None:
    lanes, told = lanes_of(replace(ONE_LANE, has_cache=True, cached_query_s=0.5)), Told(clock)
    for name in ("a", "b", "c"):
        lanes.put_query(lanes.each[0], told.query(name))
    clock.run_until(10.0)
    lanes.on_change(8)
    lanes.put_query(lanes.each[0], told.query("d"))
    clock.run_until(20.0)
    assert [load.processing_s for load in told.loads] == [4.0, 0.5, 0.5, 4.0]


def test_everything_is_slower_for_a_while(clock: Clock) -> None:
    lanes, told = lanes_of(replace(ONE_LANE, slow_from_s=5.0, slow_until_s=15.0, slow_factor=3.0)), Told(clock)
    lanes.zero_s = 0.0
    for name in ("a", "b", "c", "d"):
        lanes.put_query(lanes.each[0], told.query(name))
    clock.run_until(100.0)
    assert [load.processing_s for load in told.loads] == [4.0, 4.0, 12.0, 4.0]


def test_slots_follow_each_other_and_are_given_when_wanted(clock: Clock) -> None:
    lanes, told = lanes_of(replace(ONE_LANE, is_giving_slots=True, is_giving_spread=True)), Told(clock)
    for name in ("a", "b", "c"):
        lanes.put_query(lanes.each[0], told.query(name))
    clock.run_until(100.0)
    appointed = [at_s + load.interval_s for (_, at_s), load in zip(told.served, told.loads, strict=True)]
    gap_s = ONE_LANE.query_s / ONE_LANE.load_share
    assert appointed[1] - appointed[0] >= gap_s - 1e-9
    assert appointed[2] - appointed[1] >= gap_s - 1e-9
    assert lanes.spread_s == pytest.approx(ONE_LANE.clients * gap_s)
    plain = lanes_of(ONE_LANE)
    plain.put_query(plain.each[0], told.query("plain"))
    clock.run_until(200.0)
    assert told.loads[-1].interval_s == 0.0
    assert plain.spread_s == 0.0
