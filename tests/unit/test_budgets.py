"""Budgets: every charge is returned exactly, no bound is exceeded, and a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidegate.errors import Overloaded, Refusals
from tidegate.filters import Filter
from tidegate.index.packing import pack
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.persistent_query import PersistentQueries
from tidegate.knowledge.question import Result, SparqlQuery
from tidegate.knowledge.question import Shape as ResultShape
from tidegate.knowledge.request_pool import Lane, PoolRequest, PoolSettings, RequestPool
from tidegate.knowledge.terms import ANY_CHANGE, Triple, Uri
from tidegate.layers.connection_point import REBINDS_PENDING_MAX, Bounds, ConnectionPoint
from tidegate.layers.filter_budget import NAME_BYTES, FilterAccount, FilterBudget, Shape
from tidegate.layers.frames import Change, ChangeOk, Outputs
from tidegate.layers.outbox import Outbox, OutboxTotal, Policy
from tidegate.queues.definition import Definition, QueueSettings
from tidegate.queues.queue_budget import QueueBudget

IN_ALL = 60_000
TRIES_MAX = 10_000
A_SESSION = 25_000
NAMES = 6


def until_refused(code: str, attempt: Callable[[int], object]) -> int:
    """Returns the number of the first attempt that is refused with this code."""
    for number in range(TRIES_MAX):
        try:
            attempt(number)
        except Overloaded as error:
            refusal = error
            break
    assert refusal.code == code
    return number


class FilterCharges(RuleBasedStateMachine):
    """Sessions subscribe and unsubscribe, and the budget agrees with a plain list of the live filters."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = FilterBudget(IN_ALL, A_SESSION, NAMES)
        self.accounts = [FilterAccount() for _ in range(4)]
        self.live: list[tuple[int, Filter, Shape, int]] = []

    @rule(
        session=st.integers(0, 3),
        names=st.sets(st.sampled_from("abcdefghij"), min_size=1, max_size=4),
        size=st.integers(1, 900),
    )
    def subscribe(self, session: int, names: set[str], size: int) -> None:
        subscription_filter = Filter.parse(";".join(f"{name}=='{size * 'x'}'" for name in sorted(names)))
        account = self.accounts[session]
        before = (account.bytes, self.budget.bytes, dict(account.names))
        code = ""
        try:
            shape, size_bytes = self.budget.charge(account, subscription_filter, pack(subscription_filter))
            self.live.append((session, subscription_filter, shape, size_bytes))
        except Overloaded as error:
            code = error.code
        assert code in ("", "L620", "L621")
        assert not code or (account.bytes, self.budget.bytes, dict(account.names)) == before

    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        if self.live:
            place = data.draw(st.integers(0, len(self.live) - 1))
            session, _filter, shape, size_bytes = self.live.pop(place)
            self.budget.give_back(self.accounts[session], shape, size_bytes)

    @invariant()
    def agrees_with_the_list(self) -> None:
        for session, account in enumerate(self.accounts):
            theirs = [each for each in self.live if each[0] == session]
            names = {constraint.name for each in theirs for constraint in each[1].constraints}
            assert account.names.keys() == names
            assert account.bytes == sum(each[3] for each in theirs) + NAME_BYTES * len(names)
            assert account.bytes <= A_SESSION
            assert len(names) <= NAMES
        assert self.budget.bytes == sum(account.bytes for account in self.accounts) <= IN_ALL


TestFilterCharges = FilterCharges.TestCase


def test_a_connection_point_gives_back_what_its_sessions_were_charged_once_the_matchers_have_forgotten_it() -> None:
    point = ConnectionPoint(1, "access-point-1", Bounds(filter_bytes_per_session_max=100_000))
    session = point.open_session()
    changes: list[Change] = []

    def send(outputs: Outputs) -> None:
        changes.extend(frame for _address, frame in outputs if isinstance(frame, Change))

    def confirm_all() -> None:
        for change in changes:
            point.on_change_ok("access-point-1", ChangeOk(change.subscription, change.version), 0.0)
        changes.clear()

    for number in range(20):
        text = f"a{number}=='{'x' * 200}'"
        send(point.subscribe(session, number, Filter.parse(text), Policy.DROP_OLDEST))
    confirm_all()
    charged = point.statistics().filter_bytes
    send(point.rebind(session, 3, Filter.parse("b==1")))
    confirm_all()
    assert point.statistics().filter_bytes < charged
    long = Filter.parse(f"a=='{'x' * 3000}'")
    refused_at = until_refused(
        "L620", lambda number: send(point.subscribe(session, 20 + number, long, Policy.DROP_OLDEST))
    )
    assert 0 < refused_at < 20
    assert point.statistics().filter_bytes <= 100_000
    assert point.refusals.counts == {"L620": 1}
    send(point.close_session(session))
    assert point.statistics().filter_bytes > 0, "the Matchers still have the filters"
    confirm_all()
    assert point.statistics().filter_bytes == 0
    assert point.statistics().subscriptions == 0


def test_a_filter_that_is_changed_again_and_again_without_confirmation_is_refused() -> None:
    point = ConnectionPoint(1, "access-point-1", Bounds())
    session = point.open_session()
    point.subscribe(session, 1, Filter.parse("a==0"), Policy.DROP_OLDEST)
    refused_at = until_refused("L623", lambda number: point.rebind(session, 1, Filter.parse(f"a=={number}")))
    assert refused_at == REBINDS_PENDING_MAX
    assert point.refusals.counts == {"L623": 1}


def queue(name: str, physical_queues: int = 1, text: str | None = None) -> Definition:
    return Definition(name, QueueSettings(physical_queues=physical_queues, filter=text))


def test_queues_are_charged_by_their_physical_queues_and_names_and_give_everything_back() -> None:
    budget = QueueBudget(bytes_max=1_000_000, names_max=5)

    def make(number: int) -> None:
        budget.check(queue(f"wide{number}", 64))
        budget.charge(queue(f"wide{number}", 64))

    made = [f"wide{number}" for number in range(until_refused("L622", make))]
    assert 4 < len(made) < 8
    budget.check(queue(made[0], 64))  # an unchanged queue needs no more
    budget.check(queue("narrow", 1))
    budget.charge(queue("narrow", 1, "a;b;c;d"))
    budget.check(queue("narrow", 1, "v;w;x;y;z"))  # replaces four names by five
    with pytest.raises(Overloaded, match=r"L621.*queue_attribute_names_max"):
        budget.check(queue("another", 1, "e;f"))
    budget.charge(queue("another", 1, "a;b"))
    budget.give_back("narrow")
    assert budget.names == 2
    for name in (*made, "another", "never made"):
        budget.give_back(name)
    assert (budget.bytes, budget.names) == (0, 0)


def test_refusals_are_counted_by_code_and_told_once() -> None:
    refusals = Refusals()
    for number in range(3):
        assert refusals.note(Overloaded("L602", f"number {number}", "wait")).code == "L602"
    assert refusals.take_recent() == {"L602": (3, "number 2")}
    assert refusals.take_recent() == {}
    assert refusals.counts == {"L602": 3}


def change(ticket: int, kp: str, size_bytes: int) -> PoolRequest:
    return PoolRequest(ticket, Lane.CHANGES, kp, size_bytes=size_bytes)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 120)), max_size=60))
def test_requests_to_the_knowledge_base_that_wait_are_bounded_by_bytes(asked: list[tuple[str, int]]) -> None:
    pool = RequestPool(PoolSettings(requests_bytes_max=100, requests_per_kp_bytes_max=60))
    taken: dict[int, tuple[str, int]] = {}
    for ticket, (kp, size_bytes) in enumerate(asked):
        all_bytes = [size for _name, size in taken.values()]
        theirs = [size for name, size in taken.values() if name == kp]
        expected = ""
        if all_bytes and sum(all_bytes) + size_bytes > 100:
            expected = "L652"
        elif theirs and sum(theirs) + size_bytes > 60:
            expected = "L653"
        code = ""
        try:
            pool.on_request(change(ticket, kp, size_bytes), 0.0)
            taken[ticket] = (kp, size_bytes)
        except Overloaded as error:
            code = error.code
        assert code == expected
    while started := pool.start(0.0):
        for request in started:
            pool.on_done(request.ticket, None, 0.0)
    pool.on_request(change(1000, "a", 100), 0.0)  # all charges were returned


def test_the_rows_of_open_queries_are_bounded_and_one_that_grows_beyond_is_ended() -> None:
    queries = PersistentQueries(lambda _masks: result(0), lambda _question: ANY_CHANGE, rows_max=100)

    def result(rows: int) -> Result:
        return Result(ResultShape.SOLUTIONS, [(Uri(f"{number}"),) for number in range(rows)], ("x",))

    def subscribe(text: str, rows: int) -> None:
        evaluation = queries.open("kp", SparqlQuery(text))
        assert evaluation is not None
        try:
            queries.on_first_answer(evaluation, result(rows))
        except Overloaded:
            queries.end_opening(SparqlQuery(text))
            raise
        queries.subscribe_open(text, "kp", SparqlQuery(text))

    def grow(text: str, rows: int) -> list[str]:
        queries.on_change(Delta((Triple(Uri("s"), Uri("p"), Uri("o")),)))
        evaluation = queries.begin(SparqlQuery(text))
        assert evaluation is not None
        return queries.on_answer(evaluation, result(rows))

    subscribe("one", 60)
    subscribe("two", 30)
    with pytest.raises(Overloaded, match="L656"):
        subscribe("three", 11)
    assert grow("two", 40) == ["two"]
    assert queries.take("two") is not None
    assert grow("two", 41) == ["two"]
    assert queries.statistics().subscriptions == 1, "a query that has grown too large was not ended"
    subscribe("three", 11)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.booleans()), max_size=200))
def test_outboxes_together_hold_at_most_twice_their_bound_and_count_what_they_hold(
    steps: list[tuple[int, int, bool]],
) -> None:
    total = OutboxTotal(200)
    outboxes = [Outbox(number, Policy.DROP_OLDEST, 1000, 10_000, total) for number in range(4)]
    for number, size_bytes, is_put in steps:
        outbox = outboxes[number]
        if is_put:
            outbox.put(bytes(size_bytes), 1)
            while outbox.is_full and outbox.notifications > 1:
                outbox.take()
        else:
            outbox.take()
        assert total.bytes == sum(each.bytes for each in outboxes)
        assert total.bytes <= 2 * 200 + 4 * 50
        if outbox.bytes <= total.share_bytes:
            assert not outbox.is_full
    for outbox in outboxes:
        outbox.close()
    assert (total.bytes, total.outboxes) == (0, 0)
