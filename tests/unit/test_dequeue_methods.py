"""The four dequeue methods with a plain model of physical queues: which requests they send to the store, and when.

The tests drive a request as the controller does. The store is a list of counts, and the tests control the time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tidegate.queues.conventional import Conventional
from tidegate.queues.method import TRIES_MAX, DequeueMethod, Park, Reply, Request, Step, Try
from tidegate.queues.pms import PeriodicalMonitoring
from tidegate.queues.rds import SLEEP_S_MIN, RetryScheduling
from tidegate.queues.wakeup import Wakeup

WAIT_S = 10.0
LINGER_S = 0.02


def make_request(now_s: float = 0.0, *, most: int = 100, least: int = 1, wait_s: float = WAIT_S) -> Request:
    return Request(most, least, now_s + wait_s)


def rds(sleep_s: float = 0.5, *, is_adaptive: bool = False, on_first_miss: bool = True) -> RetryScheduling:
    return RetryScheduling(4, 0, sleep_s, is_adaptive=is_adaptive, parks_on_first_miss=on_first_miss)


@dataclass
class Back:
    """Physical queues with counts, and the tries that were made on them."""

    method: DequeueMethod
    counts: list[int]
    tries: list[int] = field(default_factory=list)

    def go(self, request: Request, step: Step, now_s: float) -> Park | Reply:
        """Takes steps until the request is parked or answered."""
        while isinstance(step, Try):
            self.tries.append(step.physical)
            request.tries += 1
            got = min(self.counts[step.physical], request.wants)
            self.counts[step.physical] -= got
            request.got += got
            step = self.method.on_result(request, step.physical, got, self.counts[step.physical], now_s)
        return step

    def ask(self, request: Request, now_s: float = 0.0) -> Park | Reply:
        return self.go(request, self.method.on_request(request, now_s), now_s)

    def ask_again(self, request: Request, now_s: float) -> Park | Reply:
        return self.go(request, self.method.on_time(request, now_s), now_s)

    def bring(self, physical: int, messages: int, now_s: float) -> list[tuple[Request, float]]:
        self.counts[physical] += messages
        return self.method.on_ready(physical, self.counts[physical], now_s)


class TestConventional:
    def test_tries_three_queues_in_turn_and_answers_with_nothing(self) -> None:
        back = Back(Conventional(10, 0), [0] * 10)
        assert isinstance(back.ask(make_request()), Reply)
        assert isinstance(back.ask(make_request()), Reply)
        assert back.tries == [0, 1, 2, 3, 4, 5]

    def test_stops_when_it_has_enough(self) -> None:
        back, request = Back(Conventional(10, 0), [0, 200, 0] + [0] * 7), make_request()
        assert isinstance(back.ask(request), Reply)
        assert (back.tries, request.got) == ([0, 1], 100)

    def test_tries_no_queue_twice_when_there_are_few(self) -> None:
        back = Back(Conventional(2, 1), [0, 0])
        back.ask(make_request())
        assert back.tries == [1, 0]


class TestPms:
    def test_tries_the_fullest_as_they_were_counted(self) -> None:
        back = Back(PeriodicalMonitoring(4, 0, 0.5), [5, 30, 0, 10])
        back.method.on_counts(back.counts, 0.0)
        request = make_request()
        assert isinstance(back.ask(request), Reply)
        assert (back.tries, request.got) == ([1, 3, 0], 45)

    def test_does_not_ask_the_store_when_the_count_found_nothing(self) -> None:
        back = Back(PeriodicalMonitoring(4, 0, 0.5), [0, 7, 0, 0])
        assert isinstance(back.ask(make_request()), Reply)
        assert back.tries == []

    def test_misses_where_another_was_faster_and_does_not_go_there_again(self) -> None:
        back = Back(PeriodicalMonitoring(4, 0, 0.5), [0, 0, 0, 0])
        back.method.on_counts([0, 7, 0, 0], 0.0)
        assert isinstance(back.ask(make_request()), Reply)
        assert isinstance(back.ask(make_request()), Reply)
        assert back.tries == [1]


class TestRds:
    def test_a_miss_sleeps_and_is_tried_again(self) -> None:
        back, request = Back(rds(0.5), [0, 0, 0, 0]), make_request()
        assert back.ask(request) == Park(0.5)
        assert back.tries == [0]
        back.counts[1] = 3
        assert isinstance(back.ask_again(request, 0.5), Reply)
        assert request.got == 3

    def test_may_try_all_before_it_sleeps(self) -> None:
        back = Back(rds(on_first_miss=False), [0, 0, 0, 0])
        assert isinstance(back.ask(make_request()), Park)
        assert back.tries == [0, 1, 2]

    def test_never_sleeps_beyond_its_deadline_and_then_answers(self) -> None:
        back, request = Back(rds(60.0), [0] * 4), make_request(wait_s=2.0)
        assert back.ask(request) == Park(2.0)
        assert isinstance(back.ask_again(request, 2.0), Reply)

    def test_adapts_its_sleep(self) -> None:
        method = rds(5.0, is_adaptive=True)
        back = Back(method, [1000] * 4)
        for _ in range(50):
            back.ask(make_request())
            back.counts[:] = [1000] * 4
        assert method.sleep_s == SLEEP_S_MIN
        back.counts[:] = [0] * 4
        for _ in range(50):
            back.ask(make_request())
        assert method.sleep_s == pytest.approx(5.0)


class TestWakeup:
    def test_asks_nothing_of_the_store_before_messages_come(self) -> None:
        back, request = Back(Wakeup(4, 0, LINGER_S), [0] * 4), make_request()
        assert back.ask(request) == Park(WAIT_S)
        assert back.tries == []
        assert back.bring(2, 5, 1.0) == [(request, 0.0)]
        assert isinstance(back.ask_again(request, 1.0), Reply)
        assert (back.tries, request.got) == ([2], 5)

    def test_the_one_who_waited_longest_is_served_first_and_only_as_many_as_needed(self) -> None:
        back = Back(Wakeup(4, 0, LINGER_S), [0] * 4)
        first, second = make_request(), make_request()
        back.ask(first)
        back.ask(second, 0.1)
        assert back.bring(0, 100, 1.0) == [(first, 0.0)]

    def test_waits_for_a_minimum_but_not_longer_than_it_may_linger(self) -> None:
        back, request = Back(Wakeup(4, 0, LINGER_S), [0] * 4), make_request(least=10)
        back.ask(request)
        assert back.bring(0, 4, 1.0) == [(request, 1.02)]
        assert back.ask_again(request, 1.01) == Park(1.02)
        assert back.tries == []
        assert isinstance(back.ask_again(request, 1.02), Reply)
        assert request.got == 4

    def test_a_minimum_that_is_there_is_served_at_once(self) -> None:
        back, request = Back(Wakeup(4, 0, LINGER_S), [0] * 4), make_request(least=10)
        back.ask(request)
        back.bring(0, 4, 1.0)
        assert back.bring(1, 6, 1.005) == [(request, 0.0)]
        assert isinstance(back.ask_again(request, 1.005), Reply)
        assert request.got == 10

    def test_tops_up_from_other_queues_that_have_some(self) -> None:
        back = Back(Wakeup(4, 0, LINGER_S), [0] * 4)
        for physical, count in enumerate((30, 20, 10, 5)):
            back.bring(physical, count, 0.0)
        request = make_request()
        assert isinstance(back.ask(request, 1.0), Reply)
        assert (len(back.tries), request.got) == (TRIES_MAX, 60)

    def test_answers_with_nothing_at_its_deadline(self) -> None:
        back, request = Back(Wakeup(4, 0, LINGER_S), [0] * 4), make_request(wait_s=3.0)
        back.ask(request)
        assert isinstance(back.ask_again(request, 3.0), Reply)

    def test_what_another_controller_took_is_not_asked_for_again(self) -> None:
        back, request = Back(Wakeup(4, 0, LINGER_S), [0] * 4), make_request()
        back.ask(request)
        back.bring(0, 5, 1.0)
        back.counts[0] = 0
        assert back.ask_again(request, 1.0) == Park(WAIT_S)
        assert back.tries == [0]

    def test_a_request_that_goes_leaves_its_messages_to_the_next(self) -> None:
        back = Back(Wakeup(4, 0, LINGER_S), [0] * 4)
        first, second = make_request(), make_request()
        back.ask(first)
        back.ask(second)
        back.bring(0, 5, 1.0)
        assert [request for request, _ in back.method.on_gone(first)] == [second]


class WakeupWorld:
    """Requests, messages and departures in the order of a seed, and a clock that calls parked requests."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        count = self.rng.randint(1, 5)
        self.back = Back(Wakeup(count, 0, LINGER_S), [0] * count)
        self.parked: dict[Request, float] = {}
        self.now_s = 0.0

    def step(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.001, 0.03])
        self.rng.choice([self.ask, self.ask, self.bring, self.bring, self.leave])()
        self.serve_who_is_due()

    def ask(self) -> None:
        most = self.rng.randint(1, 50)
        request = make_request(self.now_s, most=most, least=self.rng.randint(1, most), wait_s=5.0)
        self.settle(request, self.back.ask(request, self.now_s))

    def bring(self) -> None:
        physical = self.rng.randrange(len(self.back.counts))
        self.told(self.back.bring(physical, self.rng.randint(1, 30), self.now_s))

    def leave(self) -> None:
        if self.parked:
            gone = self.rng.choice(list(self.parked))
            del self.parked[gone]
            self.told(self.back.method.on_gone(gone))

    def settle(self, request: Request, step: Park | Reply) -> None:
        if isinstance(step, Park):
            self.parked[request] = step.until_s
        else:
            self.parked.pop(request, None)
            self.told(self.back.method.on_gone(request))

    def told(self, woken: list[tuple[Request, float]]) -> None:
        for request, at_s in woken:
            self.parked[request] = min(self.parked[request], at_s)

    def serve_who_is_due(self) -> None:
        while due := [request for request, at_s in self.parked.items() if at_s <= self.now_s]:
            self.settle(due[0], self.back.ask_again(due[0], self.now_s))


@pytest.mark.parametrize("seed", range(60))
def test_a_wakeup_is_never_lost(seed: int) -> None:
    """While messages wait, a request tries the store as soon as they have lingered. If nothing else happens, messages
    or requests are soon used up."""
    world = WakeupWorld(seed)
    for _ in range(400):
        world.step()
        if sum(world.back.counts) and world.parked:
            assert min(world.parked.values()) <= world.now_s + LINGER_S
    for _ in range(1000):
        world.now_s += 0.001
        world.serve_who_is_due()
    assert not sum(world.back.counts) or not world.parked
