"""One knowledge base: the graph, the persistent queries on it, and the request pool before it.

Listeners submit jobs and are called back with the answer and the load. Changes and masks take microseconds and run at
once, on the event loop. SPARQL, which may take long, is evaluated by workers, under limits: queries in a lane of their
own; updates, and queries that stay open, in the lane of changes. An update changes nothing before the worker has told
its whole delta. After each change and before its answer, cached answers that it touches are forgotten, `publish` and
the workers get its delta, and the persistent queries find out whom it concerns: who is confirmed a change knows that
every later answer and indication has it. While queries that it concerns are asked again the next change waits, and
nothing else. Subscribers take their indications when they can; none of them holds up a change.

A subscription whose connection is lost is kept for `resume_s`, for a client that comes back to go on.

What may go wrong: what the parts refuse, which is the answer; a mistake of the broker (K118), which is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.errors import KnowledgeError, Overloaded, TidegateError
from tidegate.knowledge import question as questions
from tidegate.knowledge import sparql
from tidegate.knowledge.graph import Delta, Graph, NewTriple
from tidegate.knowledge.persistent_query import Indication, PersistentQueries, Resumption
from tidegate.knowledge.question import Question, Result, SparqlQuery
from tidegate.knowledge.request_pool import Lane, Load, PoolRequest, PoolSettings, PoolStatistics, RequestPool
from tidegate.knowledge.sparql_workers import SparqlLimits, SparqlWorkers
from tidegate.knowledge.terms import Mask, Triple

log = logging.getLogger(__name__)

QUESTIONS_REMEMBERED: Final = 4096
SHARED_CHARACTERS_MAX: Final = 16 * 1024
RESUME_S: Final = 60.0


class ChangeJob(msgspec.Struct, frozen=True):
    """Answered with the Delta."""

    removed: tuple[Mask, ...]
    inserted: tuple[NewTriple | Triple, ...]


class InsertsJob(msgspec.Struct, frozen=True):
    """Inserts that came together, and are committed together; answered with a list of what each is answered with alone:
    its Delta, or an error."""

    inserts: tuple[tuple[NewTriple, ...], ...]


class UpdateJob(msgspec.Struct, frozen=True):
    """A SPARQL update; answered with the Delta."""

    text: str


class AskJob(msgspec.Struct, frozen=True):
    """Answered with the Result."""

    question: Question


class SubscribeJob(msgspec.Struct, frozen=True):
    """Answered with a Subscribed. `on_news` is called whenever there is something to take, and when nothing can be
    taken any more (K117). Without an id it gets one that nobody can guess; indications are numbered on from
    `sequence`."""

    question: Question
    on_news: Callable[[], None]
    subscription_id: str = ""
    sequence: int = 0


class CheckJob(msgspec.Struct, frozen=True):
    """Answered with nothing, in its turn among the queries: for subscribers who ask whether they have everything."""


class Subscribed(msgspec.Struct, frozen=True):
    subscription_id: str
    result: Result


Job: TypeAlias = ChangeJob | InsertsJob | UpdateJob | AskJob | SubscribeJob | CheckJob
OnAnswer: TypeAlias = Callable[[Any, Load | None], None]
_LATER: Final = object()  # instead of an answer that a worker will give


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
        limits: SparqlLimits | None = None,
        service_kps: Collection[str] = (),
    ) -> None:
        settings = settings or PoolSettings()
        self.graph = graph
        self.pool = RequestPool(settings)
        self.workers = SparqlWorkers(graph, settings.query_workers, limits)
        self._masks_of = lru_cache(QUESTIONS_REMEMBERED)(lambda question: questions.masks_of(graph, question))
        self.queries = PersistentQueries(lambda question: questions.ask(graph, question), self._masks_of)
        self.spread_s = 0.0  # over which those whom the last change concerns should spread their fetches
        self._publish = publish
        self._check_room = check_room
        self._service_kps = frozenset(service_kps)
        self._resume_s = resume_s
        self._now_s = now_s
        self._jobs: dict[int, tuple[Job, str, OnAnswer]] = {}
        self._next_ticket = 0
        self._is_running = False
        self._on_news: dict[str, Callable[[], None]] = {}
        self._detached_s: dict[str, float] = {}

    def submit(self, kp: str, job: Job, on_answer: OnAnswer) -> None:
        """`kp` is whose quota counts; those among `service_kps`, by this or by what follows a slash, come first."""
        self._next_ticket += 1
        ticket = self._next_ticket
        try:
            is_service = kp in self._service_kps or kp.rpartition("/")[2] in self._service_kps
            request = self._request(ticket, kp, job, is_service)
            if isinstance(job, ChangeJob | InsertsJob | UpdateJob):
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

    def sequence_of(self, subscription_id: str) -> int:
        """The number of the last indication that was taken."""
        return self.queries.sequence_of(subscription_id)

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

    def pool_statistics(self) -> PoolStatistics:
        return self.pool.statistics(self._now_s())

    def _check_changes(self) -> None:
        if self._check_room is None:
            return
        try:
            self._check_room()
        except Overloaded:
            self.pool.count_refused(Lane.CHANGES)
            raise

    async def call(self, kp: str, job: Job) -> tuple[Any, Load | None]:
        """Submits a job and waits; its answer and the load, or its error raised. Whoever is cancelled is not told."""
        done: asyncio.Future[tuple[Any, Load | None]] = asyncio.get_running_loop().create_future()

        def on_answer(answer: Any, load: Load | None) -> None:
            if done.cancelled():
                return
            if isinstance(answer, TidegateError):
                done.set_exception(answer)
            else:
                done.set_result((answer, load))

        self.submit(kp, job, on_answer)
        return await done

    async def stop(self) -> None:
        """Ends the workers. Whoever still waits for one is told that the broker shuts down."""
        await self.workers.stop()

    def _request(self, ticket: int, kp: str, job: Job, is_service: bool) -> PoolRequest:
        match job:
            case ChangeJob() | InsertsJob():
                return PoolRequest(ticket, Lane.CHANGES, kp, is_service)
            case UpdateJob():
                sparql.check_length(job.text, sparql.UPDATE_CHARACTERS_MAX)
                return PoolRequest(ticket, Lane.CHANGES, kp, is_service)
            case CheckJob():
                return PoolRequest(ticket, Lane.QUERIES, kp, is_service)
        question = job.question
        if isinstance(question, SparqlQuery):
            sparql.check_length(question.text, sparql.QUERY_CHARACTERS_MAX)
        if isinstance(job, SubscribeJob):
            # No change may come between the first result of a query and the first change that it is told.
            lane = Lane.CHANGES if isinstance(question, SparqlQuery) else Lane.SUBSCRIPTIONS
            return PoolRequest(ticket, lane, kp, is_service)
        if not isinstance(question, SparqlQuery):
            return PoolRequest(ticket, Lane.QUERIES, kp, is_service, question, self._masks_of(question))
        if not _can_be_shared(question.text):
            return PoolRequest(ticket, Lane.SPARQL, kp, is_service)
        return PoolRequest(ticket, Lane.SPARQL, kp, is_service, question, self._masks_of(question))

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
        self._go_on(ticket, partial(self._begin, ticket, job, kp))

    def _go_on(self, ticket: int, step: Callable[[], Any]) -> None:
        """The one place where every failure of a job becomes an answer."""
        try:
            answer = step()
        except TidegateError as error:
            answer = error
        except Exception:
            log.exception("a request to the knowledge base failed")
            answer = TidegateError("K118", "the broker made a mistake", "look into its log")
        if answer is not _LATER:
            self._finish(ticket, answer)

    def _then(self, ticket: int, step: Callable[[Any], Any]) -> Callable[[Any], None]:
        """What a worker is to call with its answer."""

        def on_answer(answer: Any) -> None:
            self._go_on(ticket, partial(step, answer))
            self._run_started()

        return on_answer

    def _begin(self, ticket: int, job: Job, kp: str) -> Any:
        """An answer, or _LATER."""
        match job:
            case ChangeJob():
                return self._on_delta(ticket, self.graph.change(job.removed, job.inserted))
            case InsertsJob():
                return self._insert(ticket, job.inserts)
            case UpdateJob():
                if sparql.is_data(job.text):
                    return self._on_delta(ticket, self.graph.update(job.text))
                self.workers.update(job.text, self._then(ticket, partial(self._on_updated, ticket)))
                return _LATER
            case AskJob(SparqlQuery(text)):
                self.workers.ask(text, self._then(ticket, lambda answer: answer))
                return _LATER
            case AskJob():
                return questions.ask(self.graph, job.question)
            case CheckJob():
                return None
        if not isinstance(job.question, SparqlQuery) or self.queries.is_open(job.question):
            return self._subscribe(job, kp, None)
        self.queries.check_room(kp)
        self.workers.ask_open(job.question.text, self._then(ticket, partial(self._subscribe, job, kp)))
        return _LATER

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

    def _subscribe(self, job: SubscribeJob, kp: str, first: Result | TidegateError | None) -> Subscribed:
        if isinstance(first, TidegateError):
            raise first
        subscription_id = job.subscription_id or str(uuid.uuid4())
        result = self.queries.subscribe(subscription_id, kp, job.question, first, job.sequence)
        self._on_news[subscription_id] = job.on_news
        return Subscribed(subscription_id, result)

    def _on_updated(self, ticket: int, answer: Delta | TidegateError) -> Any:
        if isinstance(answer, TidegateError):
            raise answer
        applied = self.graph.apply(answer)
        assert (set(applied.added), set(applied.removed)) == (set(answer.added), set(answer.removed)), (
            "a worker is astray"
        )
        return self._on_delta(ticket, answer)

    def _insert(self, ticket: int, inserts: tuple[tuple[NewTriple, ...], ...]) -> Any:
        """In one transaction, unless there are open questions which have to be asked after each of the inserts, when
        the graph has no later one."""
        if not self.queries.are_masks:
            return self._insert_each(ticket, inserts, [])
        try:
            deltas = self.graph.insert_together(inserts)
        except KnowledgeError:  # of one of them, which is found out
            return self._insert_each(ticket, inserts, [])
        return [self._on_delta(ticket, delta) for delta in deltas]

    def _insert_each(
        self, ticket: int, inserts: tuple[tuple[NewTriple, ...], ...], done: list[Delta | TidegateError]
    ) -> Any:
        """Goes on with those that are not done yet."""

        def on_told(delta: Delta) -> Any:
            return self._insert_each(ticket, inserts, [*done, delta])

        while len(done) < len(inserts):
            try:
                delta = self._on_delta(ticket, self.graph.change((), inserts[len(done)]), on_told)
            except KnowledgeError as error:
                delta = error
            if delta is _LATER:
                return _LATER
            done.append(delta)
        return done

    def _on_delta(self, ticket: int, delta: Delta, on_told: Callable[[Delta], Any] = lambda delta: delta) -> Any:
        """The delta, when all whom it concerns are told; or _LATER, and then what `on_told` makes of it."""
        if not delta:
            return delta
        self.pool.on_change(delta)
        self.workers.on_change(delta)
        if self._publish is not None:
            self._publish(delta)
        began_s = self._now_s()
        concern = self.queries.on_change(delta)
        self._tell(concern.told, Lane.QUERIES)
        if not concern.to_ask:
            self.pool.on_notified(self._now_s() - began_s, began_s)
            return delta

        def on_answer(question: SparqlQuery, answer: Result | TidegateError) -> Any:
            self._tell(self.queries.on_answer(question, answer), Lane.SPARQL)
            if self.queries.is_awaiting:
                return _LATER
            self.pool.on_notified(self._now_s() - began_s, began_s)
            return on_told(delta)

        for question in concern.to_ask:
            self.workers.ask_open(question.text, self._then(ticket, partial(on_answer, question)))
        return _LATER

    def _tell(self, told: list[str], fetched_in: Lane) -> None:
        self.spread_s = self.pool.spread_s(len(told), fetched_in)
        for subscription_id in told:
            on_news = self._on_news.get(subscription_id)
            try:
                if on_news is not None:
                    on_news()
            except Exception:  # the change is made, and the others are to be told
                log.exception("the subscriber of %s cannot be told", subscription_id)


def _can_be_shared(text: str) -> bool:
    """Whether a query may be answered together with its equals; very long ones are not worth remembering."""
    return len(text) <= SHARED_CHARACTERS_MAX and sparql.is_repeatable(text)
