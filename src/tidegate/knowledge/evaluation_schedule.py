"""Schedules the re-evaluation of open questions: clients take turns, each within a time budget.

A change makes questions stale. Stale questions wait here until an evaluator takes them. Further changes cost nothing
meanwhile, because one evaluation covers all of them. Each client may use `share` seconds of evaluation per second, and
saves up to `saved_s_max`. A client that has used up its budget waits until it has time again, so expensive questions
are evaluated less often. Clients take turns, one question at a time, so no client waits for all questions of another.

Several clients may keep the same question open. The client with the most time left pays for the evaluation.

One evaluator runs quick questions and another one the slow ones, classified by the duration of their last evaluation.
A quick question therefore waits for quick ones only.

The schedule has no clock and starts no process: its driver passes in the time, runs the turns that `start` returns, and
reports their duration. What may go wrong: a client's budget is too small for its questions. Its indications are then
late, and each reports how long it was held.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from tidegate.knowledge.persistent_query import EvaluatedQuestion

# The payer of a question is chosen among at most this many of its clients, which bounds the cost of the choice.
PAYERS_MAX: Final = 16
RETRY_S: Final = 1.0
SAVED_S_MIN: Final = 0.01  # the time that a client without budget must save before its next turn
CLIENTS_KEPT_MIN: Final = 1024


class Pace(StrEnum):
    """The evaluator that a question is assigned to."""

    QUICK = "quick"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class EvaluationBudget:
    """The budget of each client. A question whose evaluation takes at most `quick_s` counts as quick."""

    share: float = 0.25
    saved_s_max: float = 1.0
    quick_s: float = 0.05


class Turn(msgspec.Struct, frozen=True):
    """A question to evaluate now. `held_s` is how long it waited because its client had no time left."""

    question: EvaluatedQuestion
    pace: Pace
    client: str
    held_s: float


@dataclass(frozen=True, slots=True)
class EvaluationStatistics:
    waiting: int
    running: int
    held: int  # evaluations that waited because their client had no time left
    seconds: float  # the total duration of all evaluations


@dataclass(slots=True, eq=False)
class _Waiting:
    """A stale question, filed under the client that pays for it."""

    question: EvaluatedQuestion
    since_s: float
    client: str
    is_held: bool = False


@dataclass(slots=True, eq=False)
class _Client:
    saved_s: float
    at_s: float
    waiting: dict[Pace, OrderedDict[EvaluatedQuestion, _Waiting]] = field(
        default_factory=lambda: {pace: OrderedDict() for pace in Pace}
    )

    def has_work(self) -> bool:
        return any(self.waiting.values())


class EvaluationSchedule:
    """The state machine of the schedule. It runs at most one evaluation per pace at a time.

    `owners_of` returns up to a given number of the clients that keep a question open, and none once it is closed.
    """

    def __init__(
        self, owners_of: Callable[[EvaluatedQuestion, int], list[str]], budget: EvaluationBudget | None = None
    ) -> None:
        self._owners_of = owners_of
        self._budget = budget or EvaluationBudget()
        self._clients: dict[str, _Client] = {}
        self._clients_kept = CLIENTS_KEPT_MIN
        self._waiting: dict[EvaluatedQuestion, _Waiting] = {}
        self._running: dict[Pace, EvaluatedQuestion] = {}
        self._slow: set[EvaluatedQuestion] = set()
        # For each pace, a client with stale questions is either in `_turns`, or in `_sleeping` until it has time again.
        self._turns: dict[Pace, OrderedDict[str, None]] = {pace: OrderedDict() for pace in Pace}
        self._sleeping: list[tuple[float, int, str, Pace]] = []
        self._sleepers: set[tuple[str, Pace]] = set()
        self._numbers = itertools.count()
        self._held = 0
        self._seconds = 0.0

    def on_stale(self, question: EvaluatedQuestion, now_s: float) -> None:
        """Queues a stale question, unless it is waiting already."""
        if question not in self._waiting:
            self._file(question, now_s)

    def start(self, now_s: float) -> list[Turn]:
        """Returns a turn for each idle evaluator, as far as clients have stale questions and time left."""
        self._wake(now_s)
        turns = (self._next(pace, now_s) for pace in Pace if pace not in self._running)
        return [turn for turn in turns if turn is not None]

    def wait_s(self, now_s: float) -> float | None:
        """Returns the seconds until `start` may have a new turn, or None when no client waits for time."""
        return max(0.0, self._sleeping[0][0] - now_s) if self._sleeping else None

    def on_evaluated(self, turn: Turn, took_s: float, is_stale: bool, now_s: float) -> None:
        """Charges the client for an evaluation. A question that became stale again meanwhile is queued again."""
        self._end_turn(turn)
        self._seconds += took_s
        client = self._client(turn.client, now_s)
        client.saved_s -= took_s
        self.on_measured(turn.question, took_s)
        if is_stale:
            self.on_stale(turn.question, now_s)
        elif not self._owners_of(turn.question, 1):
            self.on_closed(turn.question)

    def on_failed(self, turn: Turn, now_s: float) -> None:
        """Retries a question after `RETRY_S`, when its evaluation failed for a reason outside the question."""
        self._end_turn(turn)
        if turn.question not in self._waiting and self._owners_of(turn.question, 1):
            waiting = self._waiting[turn.question] = _Waiting(turn.question, now_s, turn.client)
            self._client(turn.client, now_s).waiting[turn.pace][turn.question] = waiting
            self._turns[turn.pace].pop(turn.client, None)
            self._sleep(turn.client, turn.pace, now_s + RETRY_S)

    def on_measured(self, question: EvaluatedQuestion, took_s: float) -> None:
        """Records whether a question is quick."""
        if took_s > self._budget.quick_s:
            self._slow.add(question)
        else:
            self._slow.discard(question)

    def on_closed(self, question: EvaluatedQuestion) -> None:
        """Removes a question that no client keeps open."""
        self._slow.discard(question)
        if (waiting := self._waiting.pop(question, None)) is not None:
            for questions in self._clients[waiting.client].waiting.values():
                questions.pop(question, None)

    def statistics(self) -> EvaluationStatistics:
        return EvaluationStatistics(len(self._waiting), len(self._running), self._held, self._seconds)

    def _pace_of(self, question: EvaluatedQuestion) -> Pace:
        return Pace.SLOW if question in self._slow else Pace.QUICK

    def _file(self, question: EvaluatedQuestion, now_s: float) -> None:
        owners = self._owners_of(question, PAYERS_MAX)
        if not owners:
            return
        payer = max(owners, key=lambda owner: self._saved_s(owner, now_s))
        pace = self._pace_of(question)
        is_held = (payer, pace) in self._sleepers
        waiting = self._waiting[question] = _Waiting(question, now_s, payer, is_held)
        self._client(payer, now_s).waiting[pace][question] = waiting
        if not is_held:
            self._turns[pace][payer] = None

    def _next(self, pace: Pace, now_s: float) -> Turn | None:
        turns = self._turns[pace]
        while turns:
            name, _ = turns.popitem(last=False)
            client = self._client(name, now_s)
            questions = client.waiting[pace]
            if not questions:
                continue
            # The cost of an evaluation is known only afterwards, so a budget may become negative. The client then waits
            # until it has paid this back.
            if client.saved_s <= 0:
                for waiting in questions.values():
                    waiting.is_held = True
                self._sleep(name, pace, now_s + (SAVED_S_MIN - client.saved_s) / self._budget.share)
                continue
            question, waiting = questions.popitem(last=False)
            del self._waiting[question]
            if questions:
                turns[name] = None
            self._running[pace] = question
            self._held += waiting.is_held
            return Turn(question, pace, name, now_s - waiting.since_s if waiting.is_held else 0.0)
        return None

    def _end_turn(self, turn: Turn) -> None:
        assert self._running[turn.pace] == turn.question, "one evaluation at a time"
        del self._running[turn.pace]

    def _sleep(self, name: str, pace: Pace, until_s: float) -> None:
        if (name, pace) not in self._sleepers:
            self._sleepers.add((name, pace))
            heapq.heappush(self._sleeping, (until_s, next(self._numbers), name, pace))

    def _wake(self, now_s: float) -> None:
        while self._sleeping and self._sleeping[0][0] <= now_s:
            _, _, name, pace = heapq.heappop(self._sleeping)
            self._sleepers.discard((name, pace))
            self._turns[pace][name] = None

    def _saved_s(self, name: str, now_s: float) -> float:
        client = self._clients.get(name)
        if client is None:
            return self._budget.saved_s_max
        return min(self._budget.saved_s_max, client.saved_s + (now_s - client.at_s) * self._budget.share)

    def _client(self, name: str, now_s: float) -> _Client:
        """Returns a client with its budget brought up to date."""
        saved_s = self._saved_s(name, now_s)
        client = self._clients.get(name)
        if client is None:
            self._forget_idle_clients(now_s)
            client = self._clients[name] = _Client(saved_s, now_s)
        client.saved_s, client.at_s = saved_s, now_s
        return client

    def _forget_idle_clients(self, now_s: float) -> None:
        """Forgets idle clients with a full budget, because unknown clients start with a full budget anyway."""
        if len(self._clients) < self._clients_kept:
            return
        for name, client in list(self._clients.items()):
            is_sleeping = any((name, pace) in self._sleepers for pace in Pace)
            if not client.has_work() and not is_sleeping and self._saved_s(name, now_s) >= self._budget.saved_s_max:
                del self._clients[name]
        self._clients_kept = max(CLIENTS_KEPT_MIN, 2 * len(self._clients))
