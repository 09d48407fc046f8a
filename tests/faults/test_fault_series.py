"""A short series of faults under load: acknowledged notifications are stored once and in order.

`make faults` runs a long series. A failure prints the seed: TIDEGATE_TEST_SEED=… repeats the choices, as far as a busy
machine allows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fault_series import BEGIN, END, Figures, Planned, Series, write_page
from fault_worlds import Fault, OneBroker, TwoBrokers, World
from ledger_checker import ROWS, check, is_kept
from seeds import SEED

# With two publishers, this is more than the number of single messages that a queue remembers.
BURSTS = {OneBroker: 120_000, TwoBrokers: 60_000}
CHOSEN: dict[type[World], list[Planned]] = {
    OneBroker: [
        Planned(Fault("pause", "broker"), is_deep=False),
        Planned(Fault("clock", "broker"), is_deep=False),
        Planned(Fault("cut", "publishers"), is_deep=True),
        Planned(Fault("kill", "broker"), is_deep=True),
    ],
    TwoBrokers: [
        Planned(Fault("pause", "broker"), is_deep=True),
        Planned(Fault("pause", "exit-point"), is_deep=False),
        Planned(Fault("kill", "redis"), is_deep=False),
    ],
}


@pytest.mark.crash
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [OneBroker, TwoBrokers])
def test_whatever_happens_what_was_acknowledged_is_kept_once_and_in_order(kind: type[World]) -> None:
    print(f"TIDEGATE_TEST_SEED={SEED}")
    series = Series(SEED, BURSTS[kind])
    verdict = series.run_world(kind, CHOSEN[kind])
    assert verdict["acknowledged"] > BURSTS[kind] // 10
    assert is_kept(verdict), (verdict, SEED)
    assert not series.figures.troubles, SEED


@pytest.fixture
def ledgers(tmp_path: Path) -> Path:
    """Returns the ledgers of two publishers with five acknowledgements each, and of a reader that has read all in
    order."""
    for name in ("publisher-0", "publisher-1"):
        (tmp_path / f"{name}.ledger").write_text("1.0 0 0 0.0\n2.0 5 3 0.5\n3.0 5 5 1.0\n")
    (tmp_path / "reader.names").write_text("publisher-1\npublisher-0\n")
    return tmp_path


def write_rows(directory: Path, rows: list[tuple[int, int, int, int, int, int]]) -> None:
    np.array(rows, ROWS).tofile(directory / "reader.ledger")


GOOD = [(0, 1, publisher, 1 + 2 * n + publisher, n + 1, n + 1) for n in range(5) for publisher in range(2)]


class TestTheChecker:
    """The checker detects every kind of fault. A harness that reports nothing might not be checking."""

    def test_it_accepts_what_is_right(self, ledgers: Path) -> None:
        write_rows(ledgers, GOOD)
        verdict = check(ledgers)
        assert is_kept(verdict)
        assert (verdict["acknowledged"], verdict["longest_gap_s"], verdict["deepest_window"]) == (10, 1.0, 5)

    def test_a_message_that_is_missing_is_lost(self, ledgers: Path) -> None:
        write_rows(ledgers, GOOD[:4] + GOOD[5:])
        assert check(ledgers)["lost"] == 1

    def test_a_second_place_in_the_queue_is_a_double(self, ledgers: Path) -> None:
        write_rows(ledgers, [*GOOD, (0, 1, 0, 99, 3, 3)])
        verdict = check(ledgers)
        assert (verdict["doubled"], verdict["redelivered"], verdict["disordered"]) == (1, 0, 0)

    def test_a_second_delivery_from_the_same_place_is_none(self, ledgers: Path) -> None:
        write_rows(ledgers, [*GOOD, (0, 2, *GOOD[3][2:])])
        verdict = check(ledgers)
        assert (verdict["doubled"], verdict["redelivered"]) == (0, 1)
        assert is_kept(verdict)

    def test_a_lower_sequence_behind_a_higher_one_is_out_of_order(self, ledgers: Path) -> None:
        swapped = [(*row[:3], {1: 3, 3: 1}.get(row[3], row[3]), *row[4:]) for row in GOOD]
        write_rows(ledgers, swapped)
        assert check(ledgers)["disordered"] == 1

    def test_another_body_is_altered(self, ledgers: Path) -> None:
        write_rows(ledgers, [*GOOD[:-1], (*GOOD[-1][:5], 77)])
        assert check(ledgers)["altered"] == 1


def test_the_figures_of_a_page_are_replaced_and_its_text_stays(tmp_path: Path, ledgers: Path) -> None:
    write_rows(ledgers, GOOD)
    figures = Figures("5eed")
    figures.faults["a world", Fault("kill", "broker")] += 2
    figures.add("a world", check(ledgers))
    figures.add("a world", check(ledgers))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, figures, "make faults")
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n`make faults`")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| a world | 2 | 20 | 0 | 0 | 0 | 0 | 0 | 5 | 1.0 s |" in text
