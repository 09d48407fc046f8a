"""Persistent queries with names: they are kept until somebody drops them, whoever is connected, and outlive the broker.

While nobody takes what changes in its result, the changes are merged, as for any subscription. What is written down, in
one file a name, is the question, the number of the last indication that was taken, and a digest of the result it led
to. After a restart, a subscriber that has seen this indication goes on from it if the result is still the same, and
otherwise begins anew with the whole result. It is written before the indication is sent: a broker that is killed in
between costs its subscriber a whole result, never a change.

The digest is the sum of the hashes of the rows, so that an indication changes it by what it adds and removes.

What may go wrong: a name that is none (K125), that stands for another question (K126), or that nobody has given (K127);
too many names (L655). A file that cannot be read, or whose question cannot be asked any more, is logged and left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from tidegate.errors import KnowledgeError, Overloaded, TidegateError
from tidegate.knowledge.knowledge_base import KnowledgeBase, SubscribeJob
from tidegate.knowledge.persistent_query import Indication, Resumption
from tidegate.knowledge.question import Question, Row, SparqlQuery
from tidegate.knowledge.terms import Literal, Mask, Uri

log = logging.getLogger(__name__)

NAMES_MAX: Final = 1000
NEVER_SEEN: Final = -1
DIGEST_BITS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_PARAMETERS: Final = ("query", "s", "p", "o")
_PREFIX: Final = "named "

_encode = msgspec.json.Encoder().encode


class NoSuchName(KnowledgeError):
    status = 404


class ConflictingName(KnowledgeError):
    status = 409


class _Kept(msgspec.Struct):
    """What is written down of a name."""

    question: dict[str, str]
    sequence: int
    digest: str


class NamedQueries:
    """All names of a broker. `owner` is whose quota of subscriptions they count in."""

    def __init__(self, directory: Path, knowledge: KnowledgeBase, owner: str = "named") -> None:
        self._directory = directory
        self.knowledge = knowledge
        self._owner = owner
        self._digests: dict[str, int] = {}
        self._questions: dict[str, dict[str, str]] = {}
        self._beginning = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._questions)

    def questions(self) -> dict[str, dict[str, str]]:
        """By their names: the `query` of each, or the parts of its mask."""
        return dict(sorted(self._questions.items()))

    async def open(self) -> None:
        """Opens the questions again that were kept."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(self._directory.glob("*.json")):
            try:
                await self._reopen(file.stem, msgspec.json.decode(file.read_bytes(), type=_Kept))
            except (OSError, msgspec.MsgspecError, TidegateError) as error:
                log.warning("the persistent query in %s is not opened again: %s", file, error)

    async def begin(self, name: str, parameters: Mapping[str, str]) -> str:
        """The id of a named subscription; it is made if nobody has, and a question is given."""
        _check_name(name)
        async with self._beginning:
            await self._begin(name, parameters)
        return subscription_id(name)

    async def _begin(self, name: str, parameters: Mapping[str, str]) -> None:
        given = {each: parameters[each] for each in _PARAMETERS if each in parameters}
        if name in self._questions:
            if given and given != self._questions[name]:
                raise ConflictingName(
                    "K126", f"{name!r} stands for another question", "leave the question out, or choose another name"
                )
        elif not given:
            raise NoSuchName("K127", f"no persistent query has the name {name!r}", "give its question as well")
        elif len(self._questions) >= NAMES_MAX:
            raise Overloaded("L655", f"there are {NAMES_MAX} named persistent queries", "drop some")
        else:
            await self._open(name, given, 0)
            self._save(name, 0)

    def resume(self, name: str, last_sequence: int | None, on_news: Callable[[], None]) -> Resumption:
        """How it goes on after the indication that was seen last; without one, with the whole result."""
        seen = NEVER_SEEN if last_sequence is None else last_sequence
        with self._forgetting(name):
            resumption = self.knowledge.resume(subscription_id(name), seen, on_news)
        self._digests[name] = self._digest(name)
        self._save(name, resumption.sequence)
        return resumption

    def take(self, name: str) -> Indication | None:
        with self._forgetting(name):
            taken = self.knowledge.take(subscription_id(name))
        if taken is not None:
            changed = _sum(taken.difference.added) - _sum(taken.difference.removed)
            self._digests[name] = (self._digests[name] + changed) % (1 << DIGEST_BITS)
            self._save(name, taken.sequence)
        return taken

    def drop(self, name: str) -> None:
        if name not in self._questions:
            raise NoSuchName("K127", f"no persistent query has the name {name[:60]!r}", "look for a misspelling")
        del self._questions[name], self._digests[name]
        self._file(name).unlink(missing_ok=True)
        self.knowledge.unsubscribe(subscription_id(name))

    @contextlib.contextmanager
    def _forgetting(self, name: str) -> Iterator[None]:
        """A question that can be answered no more has ended: the name is free."""
        try:
            yield
        except KnowledgeError:
            del self._questions[name], self._digests[name]
            raise

    async def _reopen(self, name: str, kept: _Kept) -> None:
        await self._open(name, kept.question, kept.sequence)
        if f"{self._digests[name]:x}" != kept.digest:
            # Nobody has seen this number: whoever comes back is given the whole result.
            self.knowledge.queries.skip(subscription_id(name))

    async def _open(self, name: str, parameters: dict[str, str], sequence: int) -> None:
        """Nobody is told of news yet: `resume` says who is."""
        job = SubscribeJob(question_of(parameters), _nobody, subscription_id(name), sequence)
        await self.knowledge.call(self._owner, job)
        self._questions[name] = parameters
        self._digests[name] = self._digest(name)

    def _digest(self, name: str) -> int:
        return _sum(self.knowledge.queries.result_of(subscription_id(name)).rows)

    def _save(self, name: str, sequence: int) -> None:
        """Not synced to the disk: after a power cut a digest that is too old costs a whole result."""
        kept = _Kept(self._questions[name], sequence, f"{self._digests[name]:x}")
        unfinished = self._file(name).with_suffix(".unfinished")
        unfinished.write_bytes(_encode(kept))
        unfinished.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"


def _nobody() -> None:
    pass


def subscription_id(name: str) -> str:
    return _PREFIX + name


def is_named(subscription_id: str) -> bool:
    return subscription_id.startswith(_PREFIX)


def question_of(parameters: Mapping[str, str]) -> Question:
    """A SPARQL `query`, or the mask of `s`, `p` and `o`. An object's text is a URI or a literal: who asks need not know
    which."""
    is_mask = any(name in parameters for name in "spo")
    if is_mask == ("query" in parameters):
        raise KnowledgeError(
            "K122", "there is no question, or there are two", "give ?query=SELECT …, or a mask: ?s=…&p=…&o=…"
        )
    if not is_mask:
        return SparqlQuery(parameters["query"])
    subject, predicate = (Uri(parameters[name]) if name in parameters else None for name in "sp")
    if "o" not in parameters:
        return (Mask(subject, predicate),)
    return tuple(Mask(subject, predicate, kind(parameters["o"])) for kind in (Uri, Literal))


def _sum(rows: Iterable[Row]) -> int:
    hashes = (blake2b(_encode(row), digest_size=DIGEST_BITS // 8).digest() for row in rows)
    return sum(int.from_bytes(each) for each in hashes) % (1 << DIGEST_BITS)


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise KnowledgeError(
            "K125", f"{name[:60]!r} is no name of a persistent query", "use up to 64 letters, digits, _, - and ."
        )
