"""Leases compared with a plain model: each message is in exactly one place, and a receipt is valid during its lease."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.queues.leases import Leases

GROUPS = st.sampled_from(["", "", "red", "blue"])
SECONDS = st.sampled_from([0.0, 1.0, 5.0, 100.0])


class LeasesAgainstAModel(RuleBasedStateMachine):
    """The model has (delivery, deadline, is owned) of leased messages, a set of released ones, and lists of those that
    wait behind their group."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.now_s = 0.0
        self.next = 1
        self.held: dict[int, tuple[int, float, bool]] = {}
        self.again: set[int] = set()
        self.behind: dict[str, list[int]] = {}
        self.group: dict[int, str] = {}
        self.delivered: dict[int, int] = {}

    def holds(self, group: str) -> bool:
        return any(self.group[sequence] == group for sequence in self.held)

    def grant(self, sequence: int, visibility_s: float) -> None:
        deadline_s = self.now_s + visibility_s
        delivery = self.leases.grant(sequence, self.group[sequence], deadline_s)
        self.delivered[sequence] = self.delivered.get(sequence, 0) + 1
        assert delivery == self.delivered[sequence]
        self.held[sequence] = (delivery, deadline_s, True)

    def end(self, sequence: int) -> None:
        del self.held[sequence]
        group = self.group[sequence]
        if group and not self.holds(group):
            self.again |= set(self.behind.pop(group, []))

    @rule(group=GROUPS, visibility_s=SECONDS)
    def take_a_new_message(self, group: str, visibility_s: float) -> None:
        sequence, self.next = self.next, self.next + 1
        self.group[sequence] = group
        assert self.leases.is_group_held(group) == bool(group and self.holds(group))
        if group and self.holds(group):
            self.leases.set_behind(sequence, group)
            self.behind.setdefault(group, []).append(sequence)
        else:
            self.grant(sequence, visibility_s)

    @rule(count=st.integers(1, 5), visibility_s=SECONDS)
    def take_new_messages_at_once(self, count: int, visibility_s: float) -> None:
        sequences = range(self.next, self.next + count)
        self.next += count
        self.leases.grant_first(sequences, self.now_s + visibility_s)
        for sequence in sequences:
            self.group[sequence] = ""
            self.delivered[sequence] = 1
            self.held[sequence] = (1, self.now_s + visibility_s, True)

    @precondition(lambda self: self.again)
    @rule(visibility_s=SECONDS, is_granted=st.booleans())
    def take_one_again(self, visibility_s: float, is_granted: bool) -> None:
        sequence = self.leases.pop_again()
        assert sequence == min(self.again)
        group = self.group[sequence]
        if is_granted and not (group and self.holds(group)):
            self.again.remove(sequence)
            self.grant(sequence, visibility_s)
        else:
            self.leases.defer(sequence)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=SECONDS, what=st.sampled_from(["extend", "release", "give back", "delete"]))
    def settle(self, data: st.DataObject, seconds: float, what: str) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        delivery, _deadline_s, is_owned = self.held[sequence]
        assert self.leases.is_held(sequence, delivery) == is_owned
        assert not self.leases.is_held(sequence, delivery + 1)
        if not is_owned:
            return
        if what == "extend":
            self.leases.extend(sequence, self.now_s + seconds)
            self.held[sequence] = (delivery, self.now_s + seconds, True)
        elif what == "release" and seconds:
            self.leases.release(sequence, self.now_s, seconds)
            self.held[sequence] = (delivery, self.now_s + seconds, False)
        elif what == "delete":
            self.leases.forget(sequence)
            self.end(sequence)
        else:
            if what == "release":
                self.leases.release(sequence, self.now_s, 0.0)
            else:
                self.leases.give_back(sequence)
                self.delivered[sequence] -= 1
            self.end(sequence)
            self.again.add(sequence)

    @rule(seconds=SECONDS)
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        over = [sequence for sequence, (_, deadline_s, _) in self.held.items() if deadline_s <= self.now_s]
        assert self.leases.expire(self.now_s) == len(over)
        for sequence in over:
            self.end(sequence)
            self.again.add(sequence)

    @rule()
    def end_all(self) -> None:
        assert self.leases.expire_all() == len(self.held)
        for sequence in list(self.held):
            self.end(sequence)
            self.again.add(sequence)

    @rule(data=st.data())
    def delete_below(self, data: st.DataObject) -> None:
        below = data.draw(st.integers(0, self.next))
        self.leases.forget_below(below)
        self.behind = {
            group: kept
            for group, sequences in self.behind.items()
            if (kept := [sequence for sequence in sequences if sequence >= below])
        }
        for sequence in [sequence for sequence in self.held if sequence < below]:
            self.end(sequence)
        self.again = {sequence for sequence in self.again if sequence >= below}

    @invariant()
    def every_message_is_in_one_place(self) -> None:
        behind = sum(len(sequences) for sequences in self.behind.values())
        assert self.leases.held == len(self.held)
        assert self.leases.unavailable == len(self.held) + behind
        first_s = min((deadline_s for _, deadline_s, _ in self.held.values()), default=float("inf"))
        assert self.leases.next_deadline_s == first_s


TestLeases = LeasesAgainstAModel.TestCase


def test_deadlines_of_leases_that_ended_early_do_not_pile_up() -> None:
    leases = Leases()
    for sequence in range(100_000):
        leases.grant(sequence, "", 1e9 + sequence)
        leases.forget(sequence)
    assert len(leases._deadlines) < 3000
