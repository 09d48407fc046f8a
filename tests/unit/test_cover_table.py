"""The budget of covers: a table never miscounts, and at the bound only publishers above their share lose covers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.queues.covers import Run
from tidegate.queues.stores.cover_table import COVER_BYTES, INTERVAL_BYTES, CoverBudget, CoverTable

ONE = COVER_BYTES + INTERVAL_BYTES


def run(publisher: int, low: int, high: int | None = None) -> Run:
    high = low if high is None else high
    return Run(publisher.to_bytes(24, "big"), 0, range(low, high + 1), low, high)


def charged(table: CoverTable, publishers: int) -> int:
    found = [bounds for n in range(publishers) if (bounds := table.get(run(n, 0).key)) is not None]
    return sum(COVER_BYTES + len(bounds) // 2 * INTERVAL_BYTES for bounds in found)


steps = st.tuples(st.sampled_from(["grow", "forget", "replace", "clear"]), st.integers(0, 2), st.integers(0, 4))


@given(st.lists(st.tuples(steps, st.integers(0, 60)), max_size=60), st.integers(1, 20))
def test_a_budget_is_the_sum_of_what_its_tables_hold(script: list[tuple[tuple[str, int, int], int]], room: int) -> None:
    budget = CoverBudget(room * ONE)
    tables = [CoverTable(budget) for _ in range(3)]
    for (action, number, publisher), place in script:
        table = tables[number]
        match action:
            case "grow":
                table.grow(run(publisher, 2 * place))
            case "forget":
                table.forget_surplus()
            case "replace":
                table.replace({run(publisher, 0).key: [place, place, place + 5, place + 9]})
            case "clear":
                table.replace({})
        assert [each.bytes for each in tables] == [charged(each, 5) for each in tables]
        assert budget.bytes == sum(each.bytes for each in tables)
        assert budget.holders == sum(len(each) > 0 for each in tables)


def test_at_the_bound_the_table_above_its_share_forgets_its_least_recently_used() -> None:
    budget = CoverBudget(10 * ONE)
    large, small = CoverTable(budget), CoverTable(budget)
    for publisher in range(9):
        large.grow(run(publisher, 1))
    small.grow(run(0, 1))
    assert large.forget_surplus() == small.forget_surplus() == []
    small.grow(run(1, 1))
    assert small.forget_surplus() == [], "it has less than its share"
    large.grow(run(0, 2))
    assert large.forget_surplus() == [run(1, 1).key], "the first was used again"
    assert budget.bytes == budget.bytes_max


def test_tables_together_take_at_most_twice_the_budget() -> None:
    budget = CoverBudget(10 * ONE)
    tables = [CoverTable(budget) for _ in range(10)]
    for table in tables:
        for publisher in range(50):
            table.grow(run(publisher, 1))
            table.forget_surplus()
            assert budget.bytes <= 2 * budget.bytes_max
