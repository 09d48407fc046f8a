"""Persistent queries: open questions whose subscribers receive exactly the changes of the result.

Every committed change of the graph arrives here as its delta. An index of masks finds the open questions that the delta
may concern. A change thus costs a few look-ups, however many questions are open. For a question of masks, the delta
already contains the answer. Any other question becomes stale, and the driver of this class evaluates it again, in
parallel to changes and once for all its subscribers. It calls `begin` when it sends the evaluation, and `on_answer`
with the result. The rows before and after are compared. All changes between two evaluations of a question become one
indication.

Invariant: the first result, plus the rows that each indication adds, minus those it removes, is the result as of some
later change. Once the question is no longer stale, it is the current result. Indications are numbered 1, 2, 3, …; if
the result does not change, there is none. `merged` counts the changes that an indication covers beyond the first:
several changes waited for one evaluation, or the subscriber was slow to take them. A subscription without a connection
continues to collect changes. A client that resumes with the number that it saw last receives one indication with
everything it missed. If the broker no longer has those changes, the client receives the whole result.

This module has no clock and no socket. What may go wrong: an evaluation fails, for example because it takes too long or
the result has grown too large; this ends the subscriptions of the question with that error, and affects no others. A
CONSTRUCT or DESCRIBE, whose blank nodes differ every time (K116); too many subscriptions (L650, L651); too many rows in
all results together (L656); an unknown subscription (K117).
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from tidegate.errors import KnowledgeError, Overloaded, TidegateError
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.mask_index import MaskIndex
from tidegate.knowledge.question import Question, Result, Row, Shape, SparqlQuery
from tidegate.knowledge.terms import Masks, Triple
from tidegate.knowledge.wql import WqlQuery
from tidegate.notification import Value

log = logging.getLogger(__name__)

SUBSCRIPTIONS_MAX: Final = 100_000
SUBSCRIPTIONS_PER_OWNER_MAX: Final = 10_000
# Total rows in the current results of all open SPARQL and WQL queries, which are kept to compute differences.
RESULT_ROWS_MAX: Final = 1_000_000
# Indications that each subscription keeps for a client that resumes, and pending changes before they are merged.
INDICATIONS_KEPT: Final = 64
PENDING_CHANGES_MAX: Final = 16
# The broker remembers why it ended a subscription, for this many of the latest ones.
REASONS_KEPT: Final = 10_000

EvaluatedQuestion: TypeAlias = SparqlQuery | WqlQuery
FindTriples: TypeAlias = Callable[[Masks], Result]
MasksOf: TypeAlias = Callable[[Question], Masks]


class Difference(msgspec.Struct, frozen=True):
    """The difference between two results, as multisets of rows."""

    added: tuple[Row, ...]
    removed: tuple[Row, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class Indication(msgspec.Struct, frozen=True):
    """A numbered change of a result, as a subscriber receives it. It covers one change of the graph and `merged` more.

    `held_s` is how long a change waited because the client had used up its evaluation budget, or 0 if none did.
    """

    sequence: int
    difference: Difference
    merged: int = 0
    held_s: float = 0.0


class Concern(msgspec.Struct, frozen=True):
    """The effect of a change: the subscriptions with an indication to take, and the questions that became stale."""

    notified: list[str]
    stale: list[EvaluatedQuestion]


class Resumption(msgspec.Struct, frozen=True):
    """How a subscription resumes: with the indication that it missed, if any, or with the whole result as of
    `sequence`."""

    sequence: int
    missed: Indication | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class PersistentQueriesStatistics:
    subscriptions: int
    queries: int
    deltas: int
    stale: int  # questions that a change concerns and that have not been evaluated since
    asked: int  # evaluations caused by changes
    indications: int
    merged: int


@dataclass(slots=True, eq=False)
class _OpenQuery:
    """One question, shared by all its subscriptions.

    `concerned` counts the changes that concern it, and `rows` is its result after the first `applied` of them. A
    question of masks needs no rows, because the delta is enough. `head` is None until the first evaluation. The
    question stays open while it has subscriptions, or while `opening` counts clients that are about to subscribe.
    """

    question: Question
    masks: Masks
    head: Result | None = None
    rows: Counter[Row] = field(default_factory=Counter)
    concerned: int = 0
    applied: int = 0
    opening: int = 0
    subscriptions: dict[str, _Subscription] = field(default_factory=dict)


class Evaluation(msgspec.Struct, frozen=True):
    """A running evaluation. Its result includes the first `concerned` changes that concern the question."""

    query: _OpenQuery
    concerned: int


@dataclass(slots=True, eq=False)
class _Subscription:
    """One subscriber of a question.

    `waiting` holds the changes that it has not taken yet; all subscriptions of the question share these objects.
    `changes` counts them, and earlier ones that cancelled each other out.
    """

    owner: str
    query: _OpenQuery
    sequence: int = 0
    changes: int = 0
    held_s: float = 0.0
    waiting: list[Difference] = field(default_factory=list)
    kept: deque[Indication] = field(default_factory=lambda: deque(maxlen=INDICATIONS_KEPT))


class PersistentQueries:
    """All open questions to one graph.

    `find` must answer from the graph as of the last delta passed to `on_change`. An evaluation must see the graph as of
    the call of `begin`.
    """

    def __init__(
        self,
        find: FindTriples,
        masks_of: MasksOf,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
        subscriptions_per_owner_max: int = SUBSCRIPTIONS_PER_OWNER_MAX,
        rows_max: int = RESULT_ROWS_MAX,
        on_closed: Callable[[EvaluatedQuestion], None] | None = None,
    ) -> None:
        self._find = find
        self._masks_of = masks_of
        self._on_closed = on_closed
        self._subscriptions_max = subscriptions_max
        self._subscriptions_per_owner_max = subscriptions_per_owner_max
        self._rows_max = rows_max
        self._rows = 0
        self._index = MaskIndex[_OpenQuery]()
        self._queries: dict[Question, _OpenQuery] = {}
        self._subscriptions: dict[str, _Subscription] = {}
        self._subscriptions_of_owner: dict[str, dict[str, None]] = {}
        self._reasons: OrderedDict[str, TidegateError] = OrderedDict()
        self._deltas = self._asked = self._indications = self._merged = 0

    def open(self, owner: str, question: EvaluatedQuestion) -> Evaluation | None:
        """Starts to open a question that must be evaluated. Returns None if its current result is already known.

        The caller must finish with `subscribe_open` or `end_opening`.
        """
        self.check_room(owner)
        query = self._queries.get(question) or self._add(question)
        query.opening += 1
        if query.head is not None and query.applied == query.concerned:
            return None
        return Evaluation(query, query.concerned)

    def end_opening(self, question: EvaluatedQuestion) -> None:
        """Ends the opening that `open` started, and closes the question if it has no subscriptions."""
        query = self._queries[question]
        query.opening -= 1
        self._close_unused(query)

    def subscribe_open(
        self, subscription_id: str, owner: str, question: EvaluatedQuestion, sequence: int = 0
    ) -> tuple[Result, bool]:
        """Subscribes to a question that `open` started and whose result is known. Returns that result, and whether the
        question is already stale."""
        query = self._queries[question]
        assert query.head is not None, "it must be evaluated before"
        try:
            self._subscribe(subscription_id, owner, query, sequence)
        finally:
            self.end_opening(question)
        return query.head.with_rows(list(query.rows.elements())), query.applied < query.concerned

    def subscribe(self, subscription_id: str, owner: str, masks: Masks, sequence: int = 0) -> Result:
        """Subscribes to a question of masks under a unique id. Returns its first result. The number of its first
        indication is `sequence` + 1."""
        self.check_room(owner)
        result = self._find(masks)
        query = self._queries.get(masks) or self._add(masks)
        query.head = result.with_rows([])
        self._subscribe(subscription_id, owner, query, sequence)
        return result

    def check_room(self, owner: str) -> None:
        """Raises Overloaded when the owner, or the broker, has its maximum of subscriptions."""
        if len(self._subscriptions) >= self._subscriptions_max:
            raise Overloaded(
                "L650", f"{self._subscriptions_max} subscriptions exist already", "end some, or retry later"
            )
        if len(self._subscriptions_of_owner.get(owner, ())) >= self._subscriptions_per_owner_max:
            raise Overloaded(
                "L651", f"{owner[:40]!r} already has {self._subscriptions_per_owner_max} subscriptions", "end some"
            )

    def unsubscribe(self, subscription_id: str) -> None:
        """Ends a subscription. Raises KnowledgeError if it does not exist, or the error that ended it before."""
        subscription = self._known(subscription_id)
        del self._subscriptions[subscription_id]
        theirs = self._subscriptions_of_owner[subscription.owner]
        del theirs[subscription_id]
        if not theirs:
            del self._subscriptions_of_owner[subscription.owner]
        query = subscription.query
        del query.subscriptions[subscription_id]
        self._close_unused(query)

    def subscriptions_of(self, owner: str) -> list[str]:
        return list(self._subscriptions_of_owner.get(owner, ()))

    def owners_of(self, question: EvaluatedQuestion, owners_max: int) -> list[str]:
        """Returns at most `owners_max` of the clients that keep a question open; none once it is closed."""
        query = self._queries.get(question)
        subscriptions = () if query is None else itertools.islice(query.subscriptions.values(), owners_max)
        return list(dict.fromkeys(subscription.owner for subscription in subscriptions))

    def on_change(self, delta: Delta) -> Concern:
        """Passes a delta to the subscriptions of masks, and marks the other questions that it concerns as stale."""
        notified: list[str] = []
        stale: list[EvaluatedQuestion] = []
        if not delta:
            return Concern(notified, stale)
        self._deltas += 1
        for query, concerning in self._concerned(delta).items():
            if isinstance(query.question, Masks):
                notified += _notify(query, _matched(query.question, concerning))
            else:
                query.concerned += 1
                if query.subscriptions:
                    stale.append(query.question)
        return Concern(notified, stale)

    def begin(self, question: EvaluatedQuestion) -> Evaluation | None:
        """Starts an evaluation. Returns None if the question is no longer stale, or has no subscriptions."""
        query = self._queries.get(question)
        if query is None or not query.subscriptions or (query.head is not None and query.applied == query.concerned):
            return None
        self._asked += 1
        return Evaluation(query, query.concerned)

    def is_stale(self, question: EvaluatedQuestion) -> bool:
        """Reports whether a question with subscriptions has changes that its last evaluation does not include."""
        query = self._queries.get(question)
        return query is not None and bool(query.subscriptions) and query.applied < query.concerned

    def on_answer(self, evaluation: Evaluation, answer: Result | TidegateError, held_s: float = 0.0) -> list[str]:
        """Applies the result of an evaluation. Returns the subscriptions that have an indication to take or have ended.

        They end when the evaluation failed, or when its result exceeds the budget of rows. A result that is older than
        the known one is ignored.
        """
        query = evaluation.query
        if self._queries.get(query.question) is not query:  # it was closed during the evaluation
            return []
        if isinstance(answer, TidegateError):
            return self._end(query, answer)
        try:
            return self._apply(evaluation, answer, held_s)
        except Overloaded as error:
            return self._end(query, error)

    def on_first_answer(self, evaluation: Evaluation, result: Result) -> list[str]:
        """Applies the result of an evaluation that `open` requested. Returns the earlier subscriptions of the question
        that now have an indication to take. Raises Overloaded when the result exceeds the budget of rows."""
        if isinstance(evaluation.query.question, SparqlQuery) and result.shape is Shape.TRIPLES:
            raise KnowledgeError("K116", "a CONSTRUCT or DESCRIBE cannot stay open", "subscribe to a SELECT or ASK")
        return self._apply(evaluation, result, 0.0)

    def take(self, subscription_id: str) -> Indication | None:
        """Returns all pending changes as the next indication, or None if the result is unchanged."""
        subscription = self._known(subscription_id)
        difference = _composed(subscription.waiting)
        subscription.waiting = []
        if not difference:
            return None
        subscription.sequence += 1
        taken = Indication(subscription.sequence, difference, subscription.changes - 1, subscription.held_s)
        subscription.changes, subscription.held_s = 0, 0.0
        subscription.kept.append(taken)
        self._indications += 1
        self._merged += taken.merged
        return taken

    def resume(self, subscription_id: str, last_sequence: int) -> Resumption:
        """Resumes after the last indication that the subscriber saw. Missed changes become one indication with the next
        number."""
        subscription = self._known(subscription_id)
        self.take(subscription_id)  # adds pending changes to the indications that were sent but perhaps not received
        # If an indication after `last_sequence` is no longer kept, or the number was never sent, only the whole result
        # is safe.
        missed = [indication for indication in subscription.kept if indication.sequence > last_sequence]
        if last_sequence > subscription.sequence or len(missed) != subscription.sequence - last_sequence:
            subscription.kept.clear()
            return Resumption(subscription.sequence, result=self._result(subscription.query))
        difference = _composed([indication.difference for indication in missed])
        changes = sum(1 + indication.merged for indication in missed)
        subscription.sequence = last_sequence + bool(difference)
        # The merged indication replaces the missed ones, so that numbers stay consecutive if the client resumes again.
        while subscription.kept and subscription.kept[-1].sequence > last_sequence:
            subscription.kept.pop()
        if not difference:
            return Resumption(last_sequence)
        subscription.kept.append(Indication(subscription.sequence, difference, changes - 1))
        return Resumption(subscription.sequence, missed=subscription.kept[-1])

    def skip(self, subscription_id: str) -> None:
        """Skips a number, so that no client can resume from the previous one."""
        self._known(subscription_id).sequence += 1

    def question_of(self, subscription_id: str) -> Question:
        return self._known(subscription_id).query.question

    def sequence_of(self, subscription_id: str) -> int:
        return self._known(subscription_id).sequence

    def head_of(self, subscription_id: str) -> Result:
        """Returns the shape and variables of a question's result, without rows."""
        head = self._known(subscription_id).query.head
        assert head is not None, "it has a subscription"
        return head

    def result_of(self, subscription_id: str) -> Result:
        """Returns the known result of an open question."""
        return self._result(self._known(subscription_id).query)

    def statistics(self) -> PersistentQueriesStatistics:
        return PersistentQueriesStatistics(
            subscriptions=len(self._subscriptions),
            queries=len(self._queries),
            stale=sum(query.applied < query.concerned for query in self._queries.values()),
            deltas=self._deltas,
            asked=self._asked,
            indications=self._indications,
            merged=self._merged,
        )

    def _known(self, subscription_id: str) -> _Subscription:
        if subscription_id in self._subscriptions:
            return self._subscriptions[subscription_id]
        if (reason := self._reasons.get(subscription_id)) is not None:
            raise reason
        raise KnowledgeError("K117", f"the subscription {subscription_id[:60]!r} does not exist", "subscribe again")

    def _add(self, question: Question) -> _OpenQuery:
        query = _OpenQuery(question, self._masks_of(question))
        self._index.add(query, query.masks)
        self._queries[question] = query
        return query

    def _check_rows(self, new: int) -> None:
        if self._rows + new > self._rows_max:
            raise Overloaded(
                "L656",
                f"the results of open queries have {self._rows} rows, and this one would add {new}",
                f"at most {self._rows_max} are allowed: end some queries, or ask for fewer rows",
            )

    def _subscribe(self, subscription_id: str, owner: str, query: _OpenQuery, sequence: int) -> None:
        assert subscription_id not in self._subscriptions, subscription_id
        self.check_room(owner)
        self._reasons.pop(subscription_id, None)
        self._subscriptions[subscription_id] = query.subscriptions[subscription_id] = _Subscription(
            owner, query, sequence
        )
        self._subscriptions_of_owner.setdefault(owner, {})[subscription_id] = None

    def _close_unused(self, query: _OpenQuery) -> None:
        if not query.subscriptions and not query.opening:
            self._rows -= len(query.rows)
            del self._queries[query.question]
            self._index.remove(query, query.masks)
            if self._on_closed is not None and not isinstance(query.question, Masks):
                self._on_closed(query.question)

    def _result(self, query: _OpenQuery) -> Result:
        if isinstance(query.question, Masks):
            return self._find(query.question)
        assert query.head is not None, "it has a subscription"
        return query.head.with_rows(list(query.rows.elements()))

    def _concerned(self, delta: Delta) -> dict[_OpenQuery, tuple[list[Triple], list[Triple]]]:
        """Returns the open questions that a delta may concern, with the added and removed triples found for each."""
        concerned: dict[_OpenQuery, tuple[list[Triple], list[Triple]]] = {}
        for side, triples in enumerate((delta.added, delta.removed)):
            for triple in triples:
                for query in self._index.find(triple):
                    concerned.setdefault(query, ([], []))[side].append(triple)
        return concerned

    def _apply(self, evaluation: Evaluation, result: Result, held_s: float) -> list[str]:
        query = evaluation.query
        if query.head is not None and evaluation.concerned <= query.applied:
            return []
        rows = Counter(result.rows)
        self._check_rows(len(rows) - len(query.rows))
        self._rows += len(rows) - len(query.rows)
        before, query.rows = query.rows, rows
        changes, query.applied = evaluation.concerned - query.applied, evaluation.concerned
        if query.head is None:
            query.head = result.with_rows([])
            return []
        difference = Difference(tuple((rows - before).elements()), tuple((before - rows).elements()))
        return _notify(query, difference, changes, held_s)

    def _end(self, query: _OpenQuery, error: TidegateError) -> list[str]:
        log.warning("a persistent query was ended because it can no longer be answered: %s", error)
        notified = list(query.subscriptions)
        for subscription_id in notified:
            self.unsubscribe(subscription_id)
            self._reasons[subscription_id] = error
            if len(self._reasons) > REASONS_KEPT:
                self._reasons.popitem(last=False)
        return notified


def notification_of(triple: Triple, change: str, characters_max: int) -> dict[str, Value]:
    """Returns a changed triple as a notification, for filters. Longer texts are truncated."""
    return {
        "s": triple.subject.text[:characters_max],
        "p": triple.predicate.text[:characters_max],
        "o": triple.object.text[:characters_max],
        "change": change,
        "graph": triple.graph[:characters_max],
    }


def _matched(masks: Masks, concerning: tuple[list[Triple], list[Triple]]) -> Difference:
    """Returns the triples that match the masks; each triple once, even if several masks match it."""
    added, removed = (tuple(triple for triple in dict.fromkeys(found) if masks.match(triple)) for found in concerning)
    return Difference(added, removed)


def _notify(query: _OpenQuery, difference: Difference, changes: int = 1, held_s: float = 0.0) -> list[str]:
    if not difference:
        return []
    for subscription in query.subscriptions.values():
        _add_pending(subscription, difference, changes, held_s)
    return list(query.subscriptions)


def _add_pending(subscription: _Subscription, difference: Difference, changes: int, held_s: float) -> None:
    subscription.changes += changes
    subscription.held_s = max(subscription.held_s, held_s)
    subscription.waiting.append(difference)
    if len(subscription.waiting) > PENDING_CHANGES_MAX:
        subscription.waiting = [_composed(subscription.waiting)]


def _composed(differences: list[Difference]) -> Difference:
    """Merges consecutive differences into one."""
    if len(differences) == 1:
        return differences[0]
    net: Counter[Row] = Counter()
    for difference in differences:
        net.update(difference.added)
        net.subtract(difference.removed)
    return Difference(tuple((+net).elements()), tuple((-net).elements()))
