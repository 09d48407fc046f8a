"""The schedule of evaluations: every stale query gets its turn, and no client gets more than its share of time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tidegate.knowledge.evaluation_schedule import RETRY_S, EvaluationBudget, EvaluationSchedule, Pace, Turn
from tidegate.knowledge.persistent_query import EvaluatedQuestion
from tidegate.knowledge.question import SparqlQuery

BUDGET = EvaluationBudget(share=0.25, saved_s_max=1.0, quick_s=0.05)


def clients_of(owners: dict[str, list[str]]) -> set[str]:
    return {client for clients in owners.values() for client in clients}


class World:
    """Evaluators of known cost, with a simulated clock."""

    def __init__(self, owners: dict[str, list[str]], costs_s: dict[str, float]) -> None:
        self.owners = owners
        self.costs_s = costs_s
        self.now_s = 0.0
        self.schedule = EvaluationSchedule(self.owners_of, BUDGET)
        self.running: list[tuple[float, Turn]] = []
        self.evaluated: list[tuple[float, str]] = []
        self.used_s: dict[str, float] = dict.fromkeys(clients_of(owners), 0.0)
        self.stale_since_s: dict[str, float] = {}
        for name, cost_s in costs_s.items():
            self.schedule.on_measured(SparqlQuery(name), cost_s)

    def owners_of(self, question: EvaluatedQuestion, owners_max: int) -> list[str]:
        assert isinstance(question, SparqlQuery)
        return self.owners.get(question.text, [])[:owners_max]

    def change(self, *names: str) -> None:
        for name in names:
            self.stale_since_s.setdefault(name, self.now_s)
            self.schedule.on_stale(SparqlQuery(name), self.now_s)
        self._start()

    def run_until(self, until_s: float) -> None:
        while True:
            self._start()
            wait_s = self.schedule.wait_s(self.now_s)
            times_s = [end_s for end_s, _ in self.running]
            times_s += [] if wait_s is None else [self.now_s + max(wait_s, 1e-6)]
            next_s = min(times_s, default=until_s)
            if next_s >= until_s:
                self.now_s = until_s
                return
            self.now_s = next_s
            for ended in [each for each in self.running if each[0] <= self.now_s]:
                self.running.remove(ended)
                self._end(ended[1])

    def _start(self) -> None:
        for turn in self.schedule.start(self.now_s):
            assert isinstance(turn.question, SparqlQuery)
            self.stale_since_s.pop(turn.question.text, None)
            self.running.append((self.now_s + self.costs_s[turn.question.text], turn))

    def _end(self, turn: Turn) -> None:
        assert isinstance(turn.question, SparqlQuery)
        name = turn.question.text
        self.evaluated.append((self.now_s, name))
        self.used_s[turn.client] += self.costs_s[name]
        self.schedule.on_evaluated(turn, self.costs_s[name], name in self.stale_since_s, self.now_s)


def test_changes_that_wait_for_an_evaluation_are_one() -> None:
    world = World({"q": ["a"]}, {"q": 0.01})
    for _ in range(100):
        world.change("q")
    world.run_until(1.0)
    # The first change is evaluated immediately. All others wait until that ends, and share one evaluation.
    assert len(world.evaluated) == 2
    assert world.schedule.statistics().waiting == 0


def test_a_client_uses_no_more_than_its_share_and_its_questions_have_their_turns() -> None:
    questions = [f"q{number}" for number in range(20)]
    world = World({name: ["greedy"] for name in questions}, dict.fromkeys(questions, 0.5))
    for second in range(200):
        world.change(*questions)
        world.run_until(second + 1.0)
    most_s = BUDGET.saved_s_max + BUDGET.share * 200 + 0.5
    assert world.used_s["greedy"] <= most_s
    turns = Counter(name for _, name in world.evaluated)
    assert max(turns.values()) - min(turns[name] for name in questions) <= 1
    assert world.schedule.statistics().held > 0


def test_an_expensive_client_holds_up_no_other() -> None:
    """A quick query waits only for quick ones. A slow query waits for at most one query of each other client."""
    slow = [f"slow{number}" for number in range(20)]
    owners = {name: ["greedy"] for name in slow} | {"quick": ["modest"], "sometimes": ["patient"]}
    costs_s = dict.fromkeys(slow, 0.9) | {"quick": 0.001, "sometimes": 0.2}
    world = World(owners, costs_s)
    for step in range(100):
        world.change(*slow, "quick", *(["sometimes"] if step % 10 == 0 else []))
        changed_s = world.now_s
        world.run_until(step + 1.0)
        (told_s,) = (at_s for at_s, name in world.evaluated if name == "quick" and at_s > changed_s)
        assert told_s - changed_s <= 2 * 0.001 + 1e-9
        if step % 10 == 0:
            world.run_until(step + 1.0 + 0.9)
            assert [name for at_s, name in world.evaluated if name == "sometimes" and at_s > changed_s]
            world.now_s = step + 1.0


def test_who_shares_a_question_with_an_expensive_client_is_told_as_if_alone() -> None:
    world = World({"shared": ["greedy", "modest"], "own": ["greedy"]}, {"shared": 0.1, "own": 0.9})
    for _ in range(10):
        world.change("own")
        world.run_until(world.now_s + 1.0)
    world.change("shared")
    began_s = world.now_s
    world.run_until(began_s + 1.1)
    assert [at_s for at_s, name in world.evaluated if name == "shared" and at_s > began_s]
    assert world.used_s["modest"] > 0


def test_a_question_that_was_held_says_so_and_one_that_was_not_does_not() -> None:
    world = World({"q": ["a"]}, {"q": 0.9})
    (turn,) = _started(world, "q")
    assert turn.held_s == 0.0
    world.schedule.on_evaluated(turn, 3.0, False, 0.0)
    assert _started(world, "q") == []
    wait_s = world.schedule.wait_s(0.0)
    assert wait_s is not None
    # A query that becomes stale while its client waits is held too.
    world.owners["r"], world.costs_s["r"] = ["a"], 0.9
    world.schedule.on_measured(SparqlQuery("r"), 0.9)
    world.schedule.on_stale(SparqlQuery("r"), 1.0)
    (turn,) = world.schedule.start(wait_s)
    assert (turn.question, turn.held_s) == (SparqlQuery("q"), wait_s)
    world.schedule.on_evaluated(turn, 0.0, False, wait_s)
    (turn,) = world.schedule.start(wait_s)
    assert (turn.question, turn.held_s) == (SparqlQuery("r"), wait_s - 1.0)


def test_a_closed_question_is_forgotten_and_a_failed_one_comes_again() -> None:
    world = World({"q": ["a"], "r": ["a"]}, {"q": 0.9, "r": 0.001})
    for name in ("q", "r"):
        world.schedule.on_stale(SparqlQuery(name), 0.0)
    world.schedule.on_closed(SparqlQuery("q"))
    (turn,) = world.schedule.start(0.0)
    assert (turn.question, turn.pace) == (SparqlQuery("r"), Pace.QUICK)
    world.schedule.on_failed(turn, 0.0)
    assert world.schedule.start(RETRY_S / 2) == []
    assert [again.question for again in world.schedule.start(RETRY_S)] == [SparqlQuery("r")]


@pytest.mark.parametrize("seed", range(10))
def test_every_stale_question_is_evaluated_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"q{number}" for number in range(12)]
    owners = {name: rng.sample(["a", "b", "c", "d"], rng.randint(1, 3)) for name in names}
    world = World(owners, {name: rng.choice([0.001, 0.02, 0.2, 0.9]) for name in names})
    changed_s: dict[str, float] = {}
    for _ in range(200):
        changed = rng.sample(names, rng.randint(1, 4))
        changed_s |= dict.fromkeys(changed, world.now_s)
        world.change(*changed)
        world.run_until(world.now_s + rng.random())
    world.run_until(world.now_s + 1000.0)
    evaluated_s = {name: at_s for at_s, name in world.evaluated}
    assert all(evaluated_s[name] >= at_s for name, at_s in changed_s.items()), f"seed {seed}"
    assert (world.schedule.statistics().waiting, world.schedule.statistics().running) == (0, 0)


def _started(world: World, name: str) -> list[Turn]:
    world.schedule.on_stale(SparqlQuery(name), world.now_s)
    return world.schedule.start(world.now_s)
