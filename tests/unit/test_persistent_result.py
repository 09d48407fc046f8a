"""The changes of a persistent query add up to its result, whatever is lost, and every loss is reported once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tidegate.client.persistent_result import Change, Finding, PersistentResult
from tidegate.client.persistent_transport import Checked, Indicated, Opened

ROWS = st.integers(0, 3)
# A row to insert or delete; whether its indication is lost; whether a check, and a cut of the connection, follow.
STEPS = st.lists(st.tuples(st.booleans(), ROWS, st.booleans(), st.booleans(), st.booleans()), max_size=30)


class Broker:
    """Has a result of numbers, each once, and keeps the last indications for a client that resumes."""

    def __init__(self, kept: int) -> None:
        self.rows: set[int] = set()
        self.sequence = 0
        self.kept_max = kept
        self.kept: list[Indicated] = []

    def change(self, row: int, *, is_insert: bool) -> Indicated | None:
        if is_insert == (row in self.rows):
            return None
        self.rows ^= {row}
        self.sequence += 1
        indicated = Indicated(self.sequence, [row] if is_insert else [], [] if is_insert else [row])
        self.kept = ([*self.kept, indicated])[-self.kept_max :] if self.kept_max else []
        return indicated

    def open(self, subscription: str, sequence: int) -> tuple[Opened, list[Indicated]]:
        missed = [indicated for indicated in self.kept if indicated.sequence > sequence]
        if subscription and len(missed) == self.sequence - sequence:
            return Opened("s", sequence), missed
        return Opened("s", self.sequence, sorted(self.rows)), []


class Client:
    """Composes the changes, and opens the query again after each loss."""

    def __init__(self, broker: Broker) -> None:
        self.rows: Counter[int] = Counter()
        self.lost = self.reported = 0
        self._broker = broker
        self._result = PersistentResult(is_resumable=True)
        self.open()

    def open(self) -> None:
        opened, missed = self._broker.open(self._result.subscription, self._result.sequence)
        self._note(self._result.on_opened(opened))
        for indicated in missed:
            assert not self.indicate(indicated), "nothing is lost of what a resumed query is sent"

    def indicate(self, indicated: Indicated) -> int:
        finding = self._result.on_indicated(indicated)
        self._note(finding)
        return finding.losses

    def check(self, checked: Checked) -> int:
        self._result.on_asked()
        losses = self._result.on_checked(checked)
        self.lost += losses
        return losses

    def _note(self, finding: Finding) -> None:
        self.lost += finding.losses
        if finding.change is not None:
            self.reported += finding.change.lost
            self.rows.subtract(finding.change.removed)
            assert all(count >= 0 for count in self.rows.values()), "only rows of the result are removed"
            self.rows.update(finding.change.added)


@given(STEPS, st.integers(0, 4), st.booleans())
def test_after_a_check_the_changes_add_up_to_the_result(
    steps: list[tuple[bool, int, bool, bool, bool]], kept: int, has_numbers: bool
) -> None:
    broker = Broker(kept)
    client = Client(broker)
    for is_insert, row, is_lost, is_checked, is_cut in steps:
        indicated = broker.change(row, is_insert=is_insert)
        if indicated is not None and not is_lost and client.indicate(indicated):
            client.open()
        if is_checked:
            checked = Checked(1, broker.sequence) if has_numbers else Checked(1, None, sorted(broker.rows))
            if client.check(checked):
                client.open()
            assert +client.rows == Counter(broker.rows)
        if is_cut:
            client.open()
            assert +client.rows == Counter(broker.rows)


@given(STEPS)
def test_every_loss_is_reported_by_a_change_once(steps: list[tuple[bool, int, bool, bool, bool]]) -> None:
    broker = Broker(kept=0)
    client = Client(broker)
    dropped = 0
    for is_insert, row, is_lost, _, _ in steps:
        indicated = broker.change(row, is_insert=is_insert)
        if indicated is not None and is_lost:
            dropped += 1
        elif indicated is not None and client.indicate(indicated):
            client.open()
    if client.check(Checked(1, broker.sequence)):
        client.open()
    assert client.lost == dropped
    assert client.reported <= dropped, "a loss that a later indication has undone needs no change"


def test_a_result_that_cannot_be_resumed_reports_its_losses_with_the_next_change() -> None:
    result = PersistentResult(is_resumable=False)
    assert result.on_opened(Opened("", 0)) == (0, None)
    assert result.on_indicated(Indicated(1, ["a"])) == (0, Change(1, ["a"]))
    assert result.on_checked(Checked(1, 3)) == 2
    assert result.on_indicated(Indicated(5, ["b"])) == (1, Change(5, ["b"], lost=3))
    assert result.on_indicated(Indicated(5, ["b"])) == (0, None), "it was received before"


def test_results_are_compared_only_if_nothing_arrived_since_the_check_was_sent() -> None:
    result = PersistentResult(is_resumable=True)
    result.on_opened(Opened("s", 0, []))
    result.on_asked()
    result.on_indicated(Indicated(1, ["a"]))
    assert result.on_checked(Checked(1, None, [])) == 0
    result.on_asked()
    assert result.on_checked(Checked(2, None, [])) == 1
