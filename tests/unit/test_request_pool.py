"""The request pool compared with a plain model: every request is answered once, in order, and never with stale data."""

from __future__ import annotations

import random

import pytest

from tidegate.errors import Overloaded
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.question import Result, Shape
from tidegate.knowledge.request_pool import (
    STABLE_WAIT_S,
    Answered,
    Lane,
    PoolRequest,
    PoolSettings,
    RequestPool,
)
from tidegate.knowledge.terms import ANY_CHANGE, Literal, Mask, Masks, Triple, Uri

PREDICATES = ["p", "q", "r"]


def changed(predicate: str) -> Delta:
    return Delta(added=(Triple(Uri("s"), Uri(predicate), Literal("x")),))


def query(ticket: int, key: object = None, **more: object) -> PoolRequest:
    return PoolRequest(ticket, Lane.QUERIES, **({"kp": "KP", "key": key} | more))  # type: ignore[arg-type]


class World:
    """Drives a pool at random. The graph is a version per predicate. The answer to a query about predicates is their
    versions when it began to run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = RequestPool(PoolSettings(query_workers=2, requests_max=30, requests_per_kp_max=12, answers_max=3))
        self.now_s = 0.0
        self.versions = dict.fromkeys(PREDICATES, 0)
        self.running: dict[int, object] = {}
        self.waiting: dict[int, tuple[PoolRequest, float, dict[str, int]]] = {}
        self.tickets = 0
        self.evaluations = self.refused = 0

    def step(self) -> None:
        self.now_s += self.random.random()
        what = self.random.random()
        if what < 0.55:
            self.ask()
        elif what < 0.65:
            predicate = self.random.choice(PREDICATES)
            self.versions[predicate] += 1
            self.pool.on_change(changed(predicate))
        elif self.running:
            self.finish(self.random.choice(list(self.running)))
        for request in self.pool.start(self.now_s):
            self.evaluations += 1
            self.running[request.ticket] = dict(self.versions)
        assert sum(1 for ticket in self.running if self.request_of(ticket).lane is Lane.QUERIES) <= 2
        assert sum(1 for ticket in self.running if self.request_of(ticket).lane is Lane.CHANGES) <= 1

    def request_of(self, ticket: int) -> PoolRequest:
        return self.waiting[ticket][0]

    def ask(self) -> None:
        self.tickets += 1
        about = self.random.choice([("p",), ("q",), ("p", "r"), None])
        masks = ANY_CHANGE if about is None else Masks(tuple(Mask(predicate=Uri(name)) for name in about))
        kp = f"KP{self.random.randint(0, 3)}"
        if self.random.random() < 0.2:
            request = PoolRequest(self.tickets, Lane.CHANGES, kp)
        else:
            request = query(self.tickets, self.random.choice([about or "all", None]), kp=kp, masks=masks)
        theirs = sum(1 for waiting, _, _ in self.waiting.values() if waiting.kp == kp)
        in_lane = sum(1 for waiting, _, _ in self.waiting.values() if waiting.lane is request.lane)
        has_room = theirs < 12 and in_lane < 30
        try:
            answered = self.pool.on_request(request, self.now_s)
        except Overloaded:
            assert not has_room
            self.refused += 1
            return
        self.waiting[request.ticket] = (request, self.now_s, dict(self.versions))
        if answered is None:
            assert has_room
        else:
            self.receive(answered)

    def finish(self, ticket: int) -> None:
        if self.random.random() < 0.1:
            del self.running[ticket]
            for failed in self.pool.on_failed(ticket, self.now_s):
                del self.waiting[failed]
            return
        for answered in self.pool.on_done(ticket, self.running.pop(ticket), self.now_s):
            self.receive(answered)

    def receive(self, answered: Answered) -> None:
        request, arrived_s, versions = self.waiting.pop(answered.ticket)
        masks = request.masks
        about = PREDICATES if masks.is_everything else [mask.predicate.text for mask in masks.patterns]  # type: ignore[union-attr]
        assert all(answered.answer[name] >= versions[name] for name in about), "an answer from before the question"
        load = answered.load
        assert load.delay_s == load.processing_s + load.waiting_s
        assert 0 <= load.delay_s <= self.now_s - arrived_s + load.processing_s
        assert load.interval_s > 0


@pytest.mark.parametrize("seed", range(60))
def test_every_request_is_answered_once_and_never_with_what_is_outdated(seed: int) -> None:
    world = World(seed)
    for _ in range(600):
        world.step()
    while world.running:
        world.finish(next(iter(world.running)))
        for request in world.pool.start(world.now_s):
            world.running[request.ticket] = dict(world.versions)
    assert world.waiting == {}
    statistics = world.pool.statistics(0.0)
    assert all(lane.waiting == lane.running == 0 for lane in statistics.lanes.values())
    assert statistics.answers <= 3
    assert statistics.joined
    assert statistics.cached
    assert sum(lane.refused for lane in statistics.lanes.values()) == world.refused


def test_what_takes_long_is_no_congestion_and_what_waits_long_is() -> None:
    pool = RequestPool(PoolSettings(query_workers=1))
    for ticket in range(2):
        pool.on_request(query(ticket, str(ticket)), 0.0)
    alone, after_it = (pool.on_done(pool.start(at_s)[0].ticket, "", at_s + 2.0)[0].load for at_s in (0.0, 2.0))
    assert alone.delay_s_max == 2.0 + STABLE_WAIT_S
    assert alone.delay_s <= alone.delay_s_max
    assert after_it.delay_s_max is not None
    assert after_it.delay_s > after_it.delay_s_max


def test_a_thousand_who_ask_the_same_cost_one_evaluation() -> None:
    pool = RequestPool()
    for ticket in range(1000):
        assert (
            pool.on_request(query(ticket, "same", kp=f"KP{ticket}", masks=Masks((Mask(predicate=Uri("p")),))), 0.0)
            is None
        )
    (request,) = pool.start(1.0)
    answered = pool.on_done(request.ticket, "answer", 3.0)
    assert sorted(each.ticket for each in answered) == list(range(1000))
    assert {(each.answer, each.load.processing_s, each.load.waiting_s) for each in answered} == {("answer", 2.0, 1.0)}
    # Each has its own slot.
    assert len({each.load.interval_s for each in answered}) == 1000
    later = pool.on_request(query(1000, "same"), 4.0)
    assert later is not None
    assert later.answer == "answer"
    pool.on_change(changed("q"))
    assert pool.on_request(query(1001, "same"), 5.0) is not None
    pool.on_change(changed("p"))
    assert pool.on_request(query(1002, "same"), 6.0) is None


def test_a_change_forgets_the_answers_whose_masks_it_matches_and_no_others() -> None:
    rng = random.Random(3)
    terms: list[Uri | Literal] = [Uri("a"), Uri("b"), Literal("a"), Literal("c")]
    for _ in range(300):
        pool = RequestPool()
        masks = [
            tuple(
                Mask(rng.choice([None, Uri("a"), Uri("b")]), rng.choice([None, Uri("p")]), rng.choice([None, *terms]))
                for _ in range(rng.randint(1, 2))
            )
            for _ in range(6)
        ]
        for ticket, of_query in enumerate(masks):
            pool.on_request(query(ticket, ticket, masks=Masks(of_query)), 0.0)
            for request in pool.start(0.0):
                pool.on_done(request.ticket, "answer", 0.0)
        triple = Triple(rng.choice([Uri("a"), Uri("b")]), rng.choice([Uri("p"), Uri("q")]), rng.choice(terms))
        pool.on_change(Delta(removed=(triple,)))
        for ticket, of_query in enumerate(masks):
            is_known = pool.on_request(query(100 + ticket, ticket, masks=Masks(of_query)), 1.0) is not None
            if any(mask.matches(triple) for mask in of_query):
                assert not is_known
            elif not any(mask.object is not None and mask.object.text == triple.object.text for mask in of_query):
                assert is_known


def test_nobody_joins_a_query_that_began_before_a_change() -> None:
    pool = RequestPool(PoolSettings(query_workers=2))
    pool.on_request(query(1, "same"), 0.0)
    assert [request.ticket for request in pool.start(0.0)] == [1]
    pool.on_change(changed("p"))
    pool.on_request(query(2, "same"), 0.0)
    assert [request.ticket for request in pool.start(0.0)] == [2]
    assert [answered.ticket for answered in pool.on_done(1, "old", 1.0)] == [1]
    assert [answered.ticket for answered in pool.on_done(2, "new", 1.0)] == [2]
    cached = pool.on_request(query(3, "same"), 2.0)
    assert cached is not None
    assert cached.answer == "new"


def test_lanes_are_first_come_first_served_and_service_goes_before_customers() -> None:
    pool = RequestPool(PoolSettings(query_workers=1))
    for ticket in range(6):
        pool.on_request(query(ticket, is_service=ticket in (3, 5)), 0.0)
    pool.on_request(PoolRequest(6, Lane.CHANGES, "KP"), 0.0)
    order = []
    while started := pool.start(0.0):
        for request in started:
            order.append(request.ticket)
            pool.on_done(request.ticket, None, 0.0)
    assert [ticket for ticket in order if ticket != 6] == [3, 5, 0, 1, 2, 4]
    assert order.index(6) <= 1, "a change does not wait for queries"


def test_a_service_hurries_what_customers_wait_for() -> None:
    pool = RequestPool(PoolSettings(query_workers=1))
    for ticket, key in enumerate(("a", "b", "c")):
        pool.on_request(query(ticket, key), 0.0)
    pool.on_request(query(3, "c", is_service=True), 0.0)
    (request,) = pool.start(0.0)
    assert request.key == "c"
    assert sorted(answered.ticket for answered in pool.on_done(request.ticket, "x", 0.0)) == [2, 3]
    order = []
    while started := pool.start(0.0):
        order += [request.key for request in started]
        pool.on_done(started[0].ticket, "x", 0.0)
    assert order == ["a", "b"]


def test_the_interval_grows_with_the_backlog_and_with_notifications() -> None:
    def interval_s(waiting: int, notifying_s: float) -> float:
        pool = RequestPool(PoolSettings(query_workers=1))
        pool.on_notified(notifying_s, 0.0)
        for ticket in range(1 + waiting):
            pool.on_request(query(ticket), 0.0)
        (request,) = pool.start(0.0)
        return pool.on_done(request.ticket, None, 0.01)[0].load.interval_s

    assert interval_s(0, 0.0) < interval_s(100, 0.0) < interval_s(900, 0.0)
    assert interval_s(0, 0.0) < interval_s(0, 5.0)


def test_a_refusal_says_which_limit_and_when_to_come_back() -> None:
    pool = RequestPool(PoolSettings(requests_max=3, requests_per_kp_max=2))
    pool.on_request(query(1, kp="one"), 0.0)
    pool.on_request(query(2, kp="one"), 0.0)
    with pytest.raises(Overloaded, match="L653") as refused:
        pool.on_request(query(3, kp="one"), 0.0)
    assert refused.value.retry_after_s > 0
    pool.on_request(query(4, kp="two"), 0.0)
    with pytest.raises(Overloaded, match="L652"):
        pool.on_request(query(5, kp="two"), 0.0)
    pool.on_request(PoolRequest(6, Lane.CHANGES, "two"), 0.0)


def test_fetches_spread_by_how_many_are_told() -> None:
    pool = RequestPool()
    assert pool.spread_s(1, Lane.QUERIES) == 0.0
    assert 0 < pool.spread_s(100, Lane.QUERIES) < pool.spread_s(1000, Lane.QUERIES)


def test_the_statistics_tell_the_next_appointment_and_give_it_to_nobody() -> None:
    pool = RequestPool()
    for ticket in range(1, 4):
        foretold = [pool.statistics(2.0).lanes[Lane.SPARQL].interval_s for _ in range(2)]
        pool.on_request(PoolRequest(ticket, Lane.SPARQL, "kp"), 2.0)
        pool.start(2.0)
        (answered,) = pool.on_done(ticket, None, 2.0)
        assert foretold[0] == foretold[1] >= answered.load.interval_s > 0


def test_fetches_spread_by_what_those_of_their_lane_take() -> None:
    pool = RequestPool()
    pool.on_request(PoolRequest(1, Lane.SPARQL, "kp"), 0.0)
    pool.start(0.0)
    pool.on_done(1, None, 10.0)
    assert pool.spread_s(100, Lane.SPARQL) > 10 * pool.spread_s(100, Lane.QUERIES)


def test_the_answers_that_are_kept_have_a_bound_of_rows() -> None:
    pool = RequestPool(PoolSettings(answer_rows_max=10))

    def ask(ticket: int, key: str, rows: int) -> bool:
        """Whether it was answered from the cache."""
        if pool.on_request(query(ticket, key, masks=Masks()), 0.0) is not None:
            return True
        pool.start(0.0)
        pool.on_done(ticket, Result(Shape.NODES, [Uri("x")] * rows), 0.0)
        return False

    assert [ask(1, "a", 4), ask(2, "b", 4), ask(3, "a", 4)] == [False, False, True]
    assert not ask(4, "c", 4)
    assert ask(5, "a", 4), "the one that was not used for longest has gone"
    assert not ask(6, "b", 4)
    assert [ask(7, "huge", 11), ask(8, "huge", 11)] == [False, False]
    assert pool.statistics(0.0).answers == 2
