"""Persistent queries: questions that stay open, and exactly what changes in their results.

Every committed change of the graph comes here as its delta. An index of the masks of all open questions finds those
that it may concern, so that a change costs a few look-ups, however many questions are open. For a
question of masks the delta already is the answer. Any other is asked again, once for all who have the same, and its
rows before and after are compared; a question whose masks are unknown is asked after every change. SPARQL may take
long: whoever drives this asks what `on_change` says, and gives the results to `on_answer`, before the next change.

Law: the first result, and the rows that each indication adds and removes, make the result at the last change taken.
There is one indication a change, numbered 1, 2, 3, …, and none for a change that leaves the result as it is. Whoever is
slow to take indications gets several changes in one: rows that came and went in between are not in it, and `merged`
tells how many more changes it stands for. A subscription that has lost its connection goes on collecting; when it comes
back with the number it saw last, it gets what it missed as one indication, or the whole result anew if that is too
long ago to be known.

It reads no clock and no socket. What may go wrong: a question that fails when it is asked again, such as one whose
result has grown too large, which ends its subscriptions and concerns no others; a CONSTRUCT or DESCRIBE, whose blank
nodes are others every time (K116); more subscriptions than there may be (L650, L651); a subscription that nobody knows
(K117).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from tidegate.errors import KnowledgeError, Overloaded, TidegateError
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.mask_index import MaskIndex
from tidegate.knowledge.question import Question, Result, Row, Shape, SparqlQuery
from tidegate.knowledge.terms import Mask, Triple
from tidegate.notification import Value

log = logging.getLogger(__name__)

SUBSCRIPTIONS_MAX: Final = 100_000
SUBSCRIPTIONS_PER_OWNER_MAX: Final = 10_000
# How many indications are kept for those who come back, and how many changes wait apart before they are merged.
INDICATIONS_KEPT: Final = 64
CHANGES_APART_MAX: Final = 16
# Of a text in a notification.
INDEXED_CHARACTERS_MAX: Final = 512

Ask: TypeAlias = Callable[[Question], Result]
MasksOf: TypeAlias = Callable[[Question], tuple[Mask, ...] | None]


class Difference(msgspec.Struct, frozen=True):
    """How a multiset of rows became another one."""

    added: tuple[Row, ...]
    removed: tuple[Row, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class Indication(msgspec.Struct, frozen=True):
    """What a subscription is told: `merged` changes more than one are in it."""

    sequence: int
    difference: Difference
    merged: int = 0


class Concern(msgspec.Struct, frozen=True):
    """Whom a change concerns: the subscriptions that have something to take, or are known no more, and the queries
    that are to be asked again."""

    told: list[str]
    to_ask: list[SparqlQuery]


class Resumption(msgspec.Struct, frozen=True):
    """How a subscription goes on: with what it missed, if anything; or from a whole result, at `sequence`."""

    sequence: int
    missed: Indication | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class PersistentQueriesStatistics:
    subscriptions: int
    queries: int
    deltas: int
    asked: int  # again, because a delta concerned them
    indications: int
    merged: int


@dataclass(slots=True, eq=False)
class _OpenQuery:
    """One question, shared by all who ask it. `rows` is its present result, but of masks, where the delta is enough."""

    question: Question
    head: Result
    rows: Counter[Row]
    masks: tuple[Mask, ...] | None
    subscriptions: dict[str, _Subscription] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Subscription:
    """`waiting` are the changes that were not taken yet; they are shared with all who have the same question. `changes`
    counts them, and those before them that undid each other."""

    owner: str
    query: _OpenQuery
    sequence: int = 0
    changes: int = 0
    waiting: list[Difference] = field(default_factory=list)
    kept: deque[Indication] = field(default_factory=lambda: deque(maxlen=INDICATIONS_KEPT))


class PersistentQueries:
    """All open questions to one graph. `ask`, and what is given to `on_answer`, must be of the graph as it is after the
    last delta given to `on_change`."""

    def __init__(
        self,
        ask: Ask,
        masks_of: MasksOf,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
        subscriptions_per_owner_max: int = SUBSCRIPTIONS_PER_OWNER_MAX,
    ) -> None:
        self._ask = ask
        self._masks_of = masks_of
        self._subscriptions_max = subscriptions_max
        self._subscriptions_per_owner_max = subscriptions_per_owner_max
        self._index = MaskIndex[_OpenQuery]()
        self._queries: dict[Question, _OpenQuery] = {}
        self._awaited: dict[SparqlQuery, None] = {}
        self._subscriptions: dict[str, _Subscription] = {}
        self._subscriptions_of_owner: dict[str, dict[str, None]] = {}
        self._to_ask_again = 0  # of the open questions, how many are not of masks
        self._deltas = self._asked = self._indications = self._merged = 0

    def subscribe(
        self, subscription_id: str, owner: str, question: Question, first: Result | None = None, sequence: int = 0
    ) -> Result:
        """Opens a question under an id that nobody else has; its first result, which may be known already. Indications
        are numbered on from `sequence`."""
        assert subscription_id not in self._subscriptions, subscription_id
        self.check_room(owner)
        query = self._queries.get(question) or self._open(question, first or self._ask(question))
        self._subscriptions[subscription_id] = query.subscriptions[subscription_id] = _Subscription(
            owner, query, sequence
        )
        self._subscriptions_of_owner.setdefault(owner, {})[subscription_id] = None
        return self._result(query)

    @property
    def is_awaiting(self) -> bool:
        """Whether queries that the last change concerns have not been answered yet."""
        return bool(self._awaited)

    @property
    def are_masks(self) -> bool:
        """Whether the deltas alone answer all open questions, so that none is ever asked again."""
        return self._to_ask_again == 0

    def is_open(self, question: Question) -> bool:
        return question in self._queries

    def check_room(self, owner: str) -> None:
        """Overloaded when there is no room for one more."""
        if len(self._subscriptions) >= self._subscriptions_max:
            raise Overloaded(
                "L650", f"there are {self._subscriptions_max} subscriptions", "end some, or come back later"
            )
        if len(self._subscriptions_of_owner.get(owner, ())) >= self._subscriptions_per_owner_max:
            raise Overloaded(
                "L651", f"{owner[:40]!r} has {self._subscriptions_per_owner_max} subscriptions", "end some of them"
            )

    def unsubscribe(self, subscription_id: str) -> None:
        """KnowledgeError when there is no such subscription."""
        subscription = self._known(subscription_id)
        del self._subscriptions[subscription_id]
        theirs = self._subscriptions_of_owner[subscription.owner]
        del theirs[subscription_id]
        if not theirs:
            del self._subscriptions_of_owner[subscription.owner]
        query = subscription.query
        del query.subscriptions[subscription_id]
        if not query.subscriptions:
            self._close(query)

    def subscriptions_of(self, owner: str) -> list[str]:
        return list(self._subscriptions_of_owner.get(owner, ()))

    def on_change(self, delta: Delta) -> Concern:
        assert not self._awaited, "a change before the answers to the last one"
        told: list[str] = []
        if not delta:
            return Concern(told, [])
        self._deltas += 1
        for query, concerning in self._concerned(delta).items():
            if isinstance(query.question, SparqlQuery):
                self._awaited[query.question] = None
            elif isinstance(query.question, tuple):
                told += _tell(query, _matched(query.question, concerning))
            else:
                told += self._ask_again(query)
        return Concern(told, list(self._awaited))

    def on_answer(self, question: SparqlQuery, answer: Result | TidegateError) -> list[str]:
        """The subscriptions that have something to take, or are known no more, as their question has no answer."""
        self._awaited.pop(question, None)
        query = self._queries.get(question)
        if query is None:  # closed meanwhile
            return []
        self._asked += 1
        return self._end(query, answer) if isinstance(answer, TidegateError) else _tell(query, _replace(query, answer))

    def take(self, subscription_id: str) -> Indication | None:
        """The next indication: all changes that wait. None when there is nothing to tell."""
        subscription = self._known(subscription_id)
        difference = _composed(subscription.waiting)
        subscription.waiting = []
        if not difference:
            return None
        subscription.sequence += 1
        taken = Indication(subscription.sequence, difference, subscription.changes - 1)
        subscription.changes = 0
        subscription.kept.append(taken)
        self._indications += 1
        self._merged += taken.merged
        return taken

    def resume(self, subscription_id: str, last_sequence: int) -> Resumption:
        """Goes on after the indication that the subscriber saw last. What was missed has the next number after it."""
        subscription = self._known(subscription_id)
        self.take(subscription_id)  # joins what waits to what was sent, and perhaps not seen
        missed = [indication for indication in subscription.kept if indication.sequence > last_sequence]
        if last_sequence > subscription.sequence or len(missed) != subscription.sequence - last_sequence:
            subscription.kept.clear()
            return Resumption(subscription.sequence, result=self._result(subscription.query))
        difference = _composed([indication.difference for indication in missed])
        changes = sum(1 + indication.merged for indication in missed)
        subscription.sequence = last_sequence + bool(difference)
        while subscription.kept and subscription.kept[-1].sequence > last_sequence:
            subscription.kept.pop()
        if not difference:
            return Resumption(last_sequence)
        subscription.kept.append(Indication(subscription.sequence, difference, changes - 1))
        return Resumption(subscription.sequence, missed=subscription.kept[-1])

    def skip(self, subscription_id: str) -> None:
        """Leaves out a number: nobody can go on from the one before it."""
        self._known(subscription_id).sequence += 1

    def question_of(self, subscription_id: str) -> Question:
        return self._known(subscription_id).query.question

    def sequence_of(self, subscription_id: str) -> int:
        return self._known(subscription_id).sequence

    def result_of(self, subscription_id: str) -> Result:
        """The present result of an open question."""
        return self._result(self._known(subscription_id).query)

    def statistics(self) -> PersistentQueriesStatistics:
        return PersistentQueriesStatistics(
            subscriptions=len(self._subscriptions),
            queries=len(self._queries),
            deltas=self._deltas,
            asked=self._asked,
            indications=self._indications,
            merged=self._merged,
        )

    def _known(self, subscription_id: str) -> _Subscription:
        if subscription_id not in self._subscriptions:
            raise KnowledgeError("K117", f"there is no subscription {subscription_id[:60]!r}", "subscribe again")
        return self._subscriptions[subscription_id]

    def _open(self, question: Question, result: Result) -> _OpenQuery:
        if isinstance(question, SparqlQuery) and result.shape is Shape.TRIPLES:
            raise KnowledgeError("K116", "a CONSTRUCT or DESCRIBE cannot stay open", "subscribe to a SELECT")
        rows = Counter() if isinstance(question, tuple) else Counter(result.rows)
        query = _OpenQuery(question, result.with_rows([]), rows, self._masks_of(question))
        self._index.add(query, query.masks)
        self._queries[question] = query
        self._to_ask_again += not isinstance(question, tuple)
        return query

    def _close(self, query: _OpenQuery) -> None:
        del self._queries[query.question]
        self._to_ask_again -= not isinstance(query.question, tuple)
        self._index.remove(query, query.masks)

    def _result(self, query: _OpenQuery) -> Result:
        if isinstance(query.question, tuple):
            return self._ask(query.question)
        return query.head.with_rows(list(query.rows.elements()))

    def _concerned(self, delta: Delta) -> dict[_OpenQuery, tuple[list[Triple], list[Triple]]]:
        """The open questions that a delta may concern, with the added and removed triples that the index found."""
        concerned: dict[_OpenQuery, tuple[list[Triple], list[Triple]]] = {}
        for side, triples in enumerate((delta.added, delta.removed)):
            for triple in triples:
                for query in self._index.find(triple):
                    concerned.setdefault(query, ([], []))[side].append(triple)
        return concerned

    def _ask_again(self, query: _OpenQuery) -> list[str]:
        self._asked += 1
        try:
            return _tell(query, _replace(query, self._ask(query.question)))
        except KnowledgeError as error:
            return self._end(query, error)

    def _end(self, query: _OpenQuery, error: TidegateError) -> list[str]:
        log.warning("a persistent query is ended, as it cannot be answered any more: %s", error)
        told = list(query.subscriptions)
        for subscription_id in told:
            self.unsubscribe(subscription_id)
        return told


def notification_of(triple: Triple, change: str, characters_max: int) -> dict[str, Value]:
    """A changed triple as a notification, for filters; longer texts are cut."""
    return {
        "s": triple.subject.text[:characters_max],
        "p": triple.predicate.text[:characters_max],
        "o": triple.object.text[:characters_max],
        "change": change,
        "graph": triple.graph[:characters_max],
    }


def _matched(masks: tuple[Mask, ...], concerning: tuple[list[Triple], list[Triple]]) -> Difference:
    """Once a triple, whichever of the masks match it."""
    added, removed = (
        tuple(triple for triple in dict.fromkeys(found) if any(mask.matches(triple) for mask in masks))
        for found in concerning
    )
    return Difference(added, removed)


def _replace(query: _OpenQuery, result: Result) -> Difference:
    rows = Counter(result.rows)
    difference = Difference(tuple((rows - query.rows).elements()), tuple((query.rows - rows).elements()))
    query.rows = rows
    return difference


def _tell(query: _OpenQuery, difference: Difference) -> list[str]:
    if not difference:
        return []
    for subscription in query.subscriptions.values():
        _wait(subscription, difference)
    return list(query.subscriptions)


def _wait(subscription: _Subscription, difference: Difference) -> None:
    subscription.changes += 1
    subscription.waiting.append(difference)
    if len(subscription.waiting) > CHANGES_APART_MAX:
        subscription.waiting = [_composed(subscription.waiting)]


def _composed(differences: list[Difference]) -> Difference:
    """Several differences, one after another, as one."""
    if len(differences) == 1:
        return differences[0]
    net: Counter[Row] = Counter()
    for difference in differences:
        net.update(difference.added)
        net.subtract(difference.removed)
    return Difference(tuple((+net).elements()), tuple((-net).elements()))
