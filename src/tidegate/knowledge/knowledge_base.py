"""One knowledge base: the graph, the persistent queries on it, and the request pool before it.

Listeners submit jobs and are called back with the answer and the load. Changes and masks take microseconds and run at
once, on the event loop; SPARQL queries, which may take long, run in threads, where the store lets go of the
interpreter. After each change and before its answer, cached answers that it touches are forgotten, `publish` gets its
delta, and the persistent queries find out whom it concerns: who is confirmed a change knows that every later answer and
indication has it. Subscribers take their indications when they can; none of them holds up a change.

A subscription whose connection is lost is kept for `resume_s`, for a client that comes back to go on.

What may go wrong: what the parts refuse, which is the answer; a mistake of the broker (K118), which is logged; a SPARQL
query that never ends, which holds one of the query workers, as the store cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.errors import KnowledgeError, Overloaded, TidegateError
from tidegate.knowledge import question as questions
from tidegate.knowledge.graph import Delta, Graph, NewTriple
from tidegate.knowledge.persistent_query import Indication, PersistentQueries, Resumption
from tidegate.knowledge.question import Question, Result, SparqlQuery
from tidegate.knowledge.request_pool import Lane, Load, PoolRequest, PoolSettings, RequestPool
from tidegate.knowledge.sparql import is_repeatable
from tidegate.knowledge.terms import Mask, Triple

log = logging.getLogger(__name__)

QUESTIONS_REMEMBERED: Final = 4096
SHARED_CHARACTERS_MAX: Final = 16 * 1024
RESUME_S: Final = 60.0


class ChangeJob(msgspec.Struct, frozen=True):
    """Answered with the Delta."""

    removed: tuple[Mask, ...]
    inserted: tuple[NewTriple | Triple, ...]


class UpdateJob(msgspec.Struct, frozen=True):
    """A SPARQL update; answered with the Delta."""

    text: str


class AskJob(msgspec.Struct, frozen=True):
    """Answered with the Result."""

    question: Question


class SubscribeJob(msgspec.Struct, frozen=True):
    """Answered with a Subscribed. `on_news` is called whenever there is something to take, and when nothing can be
    taken any more (K117)."""

    question: Question
    on_news: Callable[[], None]


class CheckJob(msgspec.Struct, frozen=True):
    """Answered with nothing, in its turn among the queries: for subscribers who ask whether they have everything."""


class Subscribed(msgspec.Struct, frozen=True):
    subscription_id: str
    result: Result


Job: TypeAlias = ChangeJob | UpdateJob | AskJob | SubscribeJob | CheckJob
OnAnswer: TypeAlias = Callable[[Any, Load | None], None]


class KnowledgeBase:
    """To be used on the thread of an event loop. `on_answer` gets the answer, or a TidegateError, once; perhaps before
    `submit` returns. `check_room` raises Overloaded when `publish` should get no more deltas."""

    def __init__(
        self,
        graph: Graph,
        settings: PoolSettings | None = None,
        publish: Callable[[Delta], None] | None = None,
        check_room: Callable[[], None] | None = None,
        resume_s: float = RESUME_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.graph = graph
        self.pool = RequestPool(settings)
        self._masks_of = lru_cache(QUESTIONS_REMEMBERED)(lambda question: questions.masks_of(graph, question))
        self.queries = PersistentQueries(lambda question: questions.ask(graph, question), self._masks_of)
        self.spread_s = 0.0  # over which those whom the last change concerns should spread their fetches
        self._publish = publish
        self._check_room = check_room
        self._resume_s = resume_s
        self._now_s = now_s
        self._jobs: dict[int, tuple[Job, str, OnAnswer]] = {}
        self._next_ticket = 0
        self._is_running = False
        self._on_news: dict[str, Callable[[], None]] = {}
        self._detached_s: dict[str, float] = {}

    def submit(self, kp: str, job: Job, on_answer: OnAnswer, is_service: bool = False) -> None:
        self._next_ticket += 1
        ticket = self._next_ticket
        try:
            request = self._request(ticket, kp, job, is_service)
            if request.lane is Lane.CHANGES:
                self._check_changes()
            answered = self.pool.on_request(request, self._now_s())
        except TidegateError as error:
            on_answer(error, None)
            return
        if answered is not None:
            on_answer(answered.answer, answered.load)
            return
        self._jobs[ticket] = (job, kp, on_answer)
        self._run_started()

    def take(self, subscription_id: str) -> Indication | None:
        try:
            return self.queries.take(subscription_id)
        except KnowledgeError:
            self._on_news.pop(subscription_id, None)
            raise

    def resume(self, subscription_id: str, last_sequence: int, on_news: Callable[[], None]) -> Resumption:
        """Goes on with a subscription on another connection."""
        resumption = self.queries.resume(subscription_id, last_sequence)
        self._detached_s.pop(subscription_id, None)
        self._on_news[subscription_id] = on_news
        return resumption

    def detach(self, subscription_id: str, is_kept: bool = False) -> None:
        """Its connection is lost; it may come back, within `resume_s` unless it is kept."""
        if self._on_news.pop(subscription_id, None) is not None and not is_kept:
            self._detached_s[subscription_id] = self._now_s()

    def unsubscribe(self, subscription_id: str) -> None:
        self.queries.unsubscribe(subscription_id)
        self._on_news.pop(subscription_id, None)
        self._detached_s.pop(subscription_id, None)

    def tick(self) -> None:
        """Ends the subscriptions that nobody came back for."""
        now_s = self._now_s()
        for subscription_id, detached_s in list(self._detached_s.items()):
            if now_s - detached_s > self._resume_s:
                del self._detached_s[subscription_id]
                with contextlib.suppress(KnowledgeError):  # its question could be answered no more
                    self.queries.unsubscribe(subscription_id)

    def _check_changes(self) -> None:
        if self._check_room is None:
            return
        try:
            self._check_room()
        except Overloaded:
            self.pool.count_refused(Lane.CHANGES)
            raise

    def _request(self, ticket: int, kp: str, job: Job, is_service: bool) -> PoolRequest:
        match job:
            case ChangeJob() | UpdateJob():
                return PoolRequest(ticket, Lane.CHANGES, kp, is_service)
            case SubscribeJob():
                return PoolRequest(ticket, Lane.SUBSCRIPTIONS, kp, is_service)
            case CheckJob():
                return PoolRequest(ticket, Lane.QUERIES, kp, is_service)
        question = job.question
        if isinstance(question, SparqlQuery) and not _can_be_shared(question.text):
            return PoolRequest(ticket, Lane.QUERIES, kp, is_service)
        return PoolRequest(ticket, Lane.QUERIES, kp, is_service, question, self._masks_of(question))

    def _run_started(self) -> None:
        """Runs what the pool starts, until it starts no more. What a callback submits waits for the next round."""
        if self._is_running:
            return
        self._is_running = True
        try:
            while started := self.pool.start(self._now_s()):
                for request in started:
                    self._run(request.ticket)
        finally:
            self._is_running = False

    def _run(self, ticket: int) -> None:
        job, kp, _ = self._jobs[ticket]
        if isinstance(job, AskJob) and isinstance(job.question, SparqlQuery):
            # A daemon, as a query that never ends must not keep the process from ending; the pool bounds their number.
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._run_in_thread, args=(ticket, job, kp, loop), daemon=True).start()
        else:
            self._finish(ticket, self._answer(job, kp))

    def _run_in_thread(self, ticket: int, job: Job, kp: str, loop: asyncio.AbstractEventLoop) -> None:
        answer = self._answer(job, kp)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._on_thread_done, ticket, answer)

    def _on_thread_done(self, ticket: int, answer: Any) -> None:
        self._finish(ticket, answer)
        self._run_started()

    def _answer(self, job: Job, kp: str) -> Any:
        """The one place where every failure of a job becomes an answer."""
        try:
            match job:
                case ChangeJob():
                    return self._on_delta(self.graph.change(job.removed, job.inserted))
                case UpdateJob():
                    return self._on_delta(self.graph.update(job.text))
                case AskJob():
                    return questions.ask(self.graph, job.question)
                case SubscribeJob():
                    return self._subscribe(job, kp)
                case CheckJob():
                    return None
        except TidegateError as error:
            return error
        except Exception:
            log.exception("a request to the knowledge base failed")
            return TidegateError("K118", "the broker made a mistake", "look into its log")

    def _finish(self, ticket: int, answer: Any) -> None:
        now_s = self._now_s()
        if isinstance(answer, TidegateError):
            for waiting in self.pool.on_failed(ticket, now_s):
                self._call_back(waiting, answer, None)
        else:
            for answered in self.pool.on_done(ticket, answer, now_s):
                self._call_back(answered.ticket, answered.answer, answered.load)

    def _call_back(self, ticket: int, answer: Any, load: Load | None) -> None:
        _, _, on_answer = self._jobs.pop(ticket)
        on_answer(answer, load)

    def _subscribe(self, job: SubscribeJob, kp: str) -> Subscribed:
        subscription_id = str(uuid.uuid4())
        result = self.queries.subscribe(subscription_id, kp, job.question)
        self._on_news[subscription_id] = job.on_news
        return Subscribed(subscription_id, result)

    def _on_delta(self, delta: Delta) -> Delta:
        if delta:
            self.pool.on_change(delta)
            if self._publish is not None:
                self._publish(delta)
            began_s = self._now_s()
            told = self.queries.on_change(delta)
            self.spread_s = self.pool.spread_s(len(told))
            self.pool.on_notified(self._now_s() - began_s, began_s)
            for subscription_id in told:
                if (on_news := self._on_news.get(subscription_id)) is not None:
                    on_news()
        return delta


def _can_be_shared(text: str) -> bool:
    """Whether a query may be answered together with its equals; very long ones are not worth remembering."""
    return len(text) <= SHARED_CHARACTERS_MAX and is_repeatable(text)
