"""Named persistent queries: they exist until a client drops them, need no connection, and survive restarts.

While no subscriber takes the changes of a result, they are merged, as for any subscription. Each name has a file with
its question, the number of the last indication that was taken, and a digest of the result after it. After a restart, a
subscriber that has seen this indication continues from it if the result is still the same. Otherwise it receives the
whole result again. The file is written before the indication is sent. If the broker is killed in between, the
subscriber receives a whole result, and never loses a change.

The digest is the sum of the hashes of the rows. It is updated from the rows that an indication adds and removes.

What may go wrong: an invalid name (K125), a name that belongs to another question (K126), or an unknown name (K127);
too many names (L655); a file that cannot be written (K131), which affects only the subscriber of that name. A file that
cannot be read, or whose question can no longer be answered, is logged and left unchanged.
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
from tidegate.knowledge.store_files import unwritable
from tidegate.knowledge.terms import Literal, Mask, Masks, Uri

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
    """The content of the file of a name."""

    question: dict[str, str]
    sequence: int
    digest: str


class NamedQueries:
    """All named queries of a broker. They count towards the subscription quota of `owner`."""

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
        """Returns the questions by name: the `query` of each, or the parts of its mask."""
        return dict(sorted(self._questions.items()))

    async def open(self) -> None:
        """Reopens the queries that were saved before the restart."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(self._directory.glob("*.json")):
            try:
                await self._reopen(file.stem, msgspec.json.decode(file.read_bytes(), type=_Kept))
            except (OSError, msgspec.MsgspecError, TidegateError) as error:
                log.warning("cannot reopen the persistent query in %s: %s", file, error)

    async def begin(self, name: str, parameters: Mapping[str, str]) -> str:
        """Returns the id of a named subscription. If the name is new, creates it from the question in `parameters`."""
        _check_name(name)
        async with self._beginning:
            await self._begin(name, parameters)
        return subscription_id(name)

    async def _begin(self, name: str, parameters: Mapping[str, str]) -> None:
        given = {each: parameters[each] for each in _PARAMETERS if each in parameters}
        if name in self._questions:
            if given and given != self._questions[name]:
                raise ConflictingName(
                    "K126", f"the name {name!r} belongs to another question", "omit the question, or use another name"
                )
        elif not given:
            raise NoSuchName("K127", f"no persistent query has the name {name!r}", "give a question to create it")
        elif len(self._questions) >= NAMES_MAX:
            raise self.knowledge.refusals.note(
                Overloaded("L655", f"{NAMES_MAX} named persistent queries exist already", "drop some")
            )
        else:
            await self._open(name, given, 0)
            try:
                self._save(name, 0)
            except TidegateError:
                self.drop(name)
                raise

    def resume(self, name: str, last_sequence: int | None, on_news: Callable[[], None]) -> Resumption:
        """Resumes a named query after the last indication that the subscriber saw, or with the whole result if it saw
        none."""
        seen = NEVER_SEEN if last_sequence is None else last_sequence
        with self._dropping_ended(name):
            resumption = self.knowledge.resume(subscription_id(name), seen, on_news)
        self._digests[name] = self._digest(name)
        self._save(name, resumption.sequence)
        return resumption

    def take(self, name: str) -> Indication | None:
        with self._dropping_ended(name):
            taken = self.knowledge.take(subscription_id(name))
        if taken is not None:
            changed = _sum(taken.difference.added) - _sum(taken.difference.removed)
            self._digests[name] = (self._digests[name] + changed) % (1 << DIGEST_BITS)
            self._save(name, taken.sequence)
        return taken

    def drop(self, name: str) -> None:
        if name not in self._questions:
            raise NoSuchName("K127", f"no persistent query has the name {name[:60]!r}", "check the spelling")
        del self._questions[name], self._digests[name]
        self._file(name).unlink(missing_ok=True)
        self.knowledge.unsubscribe(subscription_id(name))

    @contextlib.contextmanager
    def _dropping_ended(self, name: str) -> Iterator[None]:
        """Frees the name if its query has ended because its question can no longer be answered."""
        try:
            yield
        except TidegateError:
            del self._questions[name], self._digests[name]
            raise

    async def _reopen(self, name: str, kept: _Kept) -> None:
        await self._open(name, kept.question, kept.sequence)
        if f"{self._digests[name]:x}" != kept.digest:
            # No subscriber has seen the skipped number, so each one that returns receives the whole result.
            self.knowledge.queries.skip(subscription_id(name))

    async def _open(self, name: str, parameters: dict[str, str], sequence: int) -> None:
        """Opens a query without a listener for its changes; `resume` sets the listener."""
        job = SubscribeJob(question_of(parameters), _no_listener, subscription_id(name), sequence)
        await self.knowledge.call(self._owner, job)
        self._questions[name] = parameters
        self._digests[name] = self._digest(name)

    def _digest(self, name: str) -> int:
        return _sum(self.knowledge.queries.result_of(subscription_id(name)).rows)

    def _save(self, name: str, sequence: int) -> None:
        """Writes the file of a name, without a sync: after a power cut, an outdated digest only costs a whole
        result."""
        kept = _Kept(self._questions[name], sequence, f"{self._digests[name]:x}")
        unfinished = self._file(name).with_suffix(".unfinished")
        try:
            unfinished.write_bytes(_encode(kept))
            unfinished.replace(self._file(name))
        except OSError as error:
            raise unwritable(error) from error

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"


def _no_listener() -> None:
    pass


def subscription_id(name: str) -> str:
    return _PREFIX + name


def is_named(subscription_id: str) -> bool:
    return subscription_id.startswith(_PREFIX)


def question_of(parameters: Mapping[str, str]) -> Question:
    """Returns the question in HTTP parameters: a SPARQL `query`, or a mask of `s`, `p` and `o`.

    The object `o` matches both URIs and literals, so that clients need not know which it is.
    """
    is_mask = any(name in parameters for name in "spo")
    if is_mask == ("query" in parameters):
        raise KnowledgeError(
            "K122", "the request has no question, or two", "give either ?query=SELECT … or a mask: ?s=…&p=…&o=…"
        )
    if not is_mask:
        return SparqlQuery(parameters["query"])
    subject, predicate = (Uri(parameters[name]) if name in parameters else None for name in "sp")
    if "o" not in parameters:
        return Masks((Mask(subject, predicate),))
    return Masks(tuple(Mask(subject, predicate, kind(parameters["o"])) for kind in (Uri, Literal)))


def _sum(rows: Iterable[Row]) -> int:
    hashes = (blake2b(_encode(row), digest_size=DIGEST_BITS // 8).digest() for row in rows)
    return sum(int.from_bytes(each) for each in hashes) % (1 << DIGEST_BITS)


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise KnowledgeError(
            "K125",
            f"{name[:60]!r} is not a valid name of a persistent query",
            "use up to 64 letters, digits, _, - and ., and do not start with .",
        )
