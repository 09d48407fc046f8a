"""One knowledge base: the graph, the persistent queries on it, and the request pool in front of it.

Listeners submit jobs, and are called back with the answer and the load. Changes and mask queries take microseconds and
run immediately, on the event loop. SPARQL may take long, so workers evaluate it under limits: queries in a lane of
their own, updates in the lane of changes. An update changes nothing until the worker has sent its complete delta.

After each change and before its answer, the pool drops the cached answers that it affects. `publish`, the workers and
the persistent queries of masks receive its delta. A confirmed change is therefore visible to every later answer. Other
open questions only become stale. Workers of their own evaluate them when their turn comes in the schedule, so a change
never waits for them, however expensive they are. A change is confirmed once it has the configured durability.
Subscribers take their indications at their own pace, and never delay a change.

A subscription whose connection is lost is kept for `resume_s`, so that the client can reconnect and resume it.

When the disk cannot store changes, they are refused (K131) and queries still work. `tick` reopens the store once the
disk has room.

What may go wrong: an error of one of the parts, which is sent as the answer; a bug in the broker (K118), which is
logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import types
import uuid
from collections.abc import Callable, Collection, Coroutine, Generator
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.errors import KnowledgeError, Overloaded, Refusals, TidegateError, Unavailable
from tidegate.knowledge import question as questions
from tidegate.knowledge import sparql
from tidegate.knowledge.confirmations import Confirmations, Durability
from tidegate.knowledge.evaluation_schedule import EvaluationBudget, EvaluationSchedule, Turn
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.notifier import Notifier, OnNews
from tidegate.knowledge.persistent_query import EvaluatedQuestion, Evaluation, Indication, PersistentQueries, Resumption
from tidegate.knowledge.question import Question, Result, SparqlQuery
from tidegate.knowledge.request_pool import Lane, Load, PoolRequest, PoolSettings, PoolStatistics, RequestPool
from tidegate.knowledge.sparql_workers import SparqlLimits, SparqlWorkers
from tidegate.knowledge.store_files import Damaged
from tidegate.knowledge.terms import Blank, Mask, Masks, NewTriple, Triple

log = logging.getLogger(__name__)

QUESTIONS_REMEMBERED: Final = 4096
SHARED_CHARACTERS_MAX: Final = 16 * 1024
RESUME_S: Final = 60.0
TRIPLE_BYTES: Final = 400  # the memory of a triple, without its texts
REOPEN_S: Final = 1.0


class ChangeJob(msgspec.Struct, frozen=True):
    """Answered with the Delta."""

    removed: tuple[Mask, ...]
    inserted: tuple[NewTriple | Triple, ...]


class InsertsJob(msgspec.Struct, frozen=True):
    """Inserts that arrived together and are committed together. Answered with a list: the Delta or the error of each
    insert."""

    inserts: tuple[tuple[NewTriple, ...], ...]


class UpdateJob(msgspec.Struct, frozen=True):
    """A SPARQL update; answered with the Delta."""

    text: str


class AskJob(msgspec.Struct, frozen=True):
    """Answered with the Result."""

    question: Question


class SubscribeJob(msgspec.Struct, frozen=True):
    """Answered with a Subscribed.

    `on_news` is called whenever an indication can be taken, and when the broker has ended the subscription. `take` then
    raises the reason, or K117. Without an id, the subscription gets a random one that cannot be guessed. The number of
    its first indication is `sequence` + 1.
    """

    question: Question
    on_news: OnNews
    subscription_id: str = ""
    sequence: int = 0


class CheckJob(msgspec.Struct, frozen=True):
    """Answered with nothing, after waiting in the lane of queries. Subscribers use it to check for lost indications."""


class Subscribed(msgspec.Struct, frozen=True):
    subscription_id: str
    result: Result


Job: TypeAlias = ChangeJob | InsertsJob | UpdateJob | AskJob | SubscribeJob | CheckJob
OnAnswer: TypeAlias = Callable[[Any, Load | None], None]
# A request to a worker: sends it, and takes the callback for the answer and the seconds that the evaluation took.
_WorkerRequest: TypeAlias = Callable[[Callable[..., None]], None]
_Run: TypeAlias = Coroutine[_WorkerRequest, tuple[Any, float], Any]


@types.coroutine
def _wait_for(request: _WorkerRequest) -> Generator[_WorkerRequest, tuple[Any, float], tuple[Any, float]]:
    """Suspends the run of a job until a worker answers. Returns the answer and the seconds, or raises the error."""
    return (yield request)


class KnowledgeBase:
    """Answers every job exactly once, by calling `on_answer` with the answer or a TidegateError.

    Use it on the thread of an event loop. The call of `on_answer` may happen before `submit` returns. `check_room`
    raises Overloaded when `publish` cannot take more deltas; the change is then refused. `notifier` calls the
    subscribers that have an indication to take.
    """

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
        refusals: Refusals | None = None,
        durability: Durability = "os",
        budget: EvaluationBudget | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        settings = settings or PoolSettings()
        self.graph = graph
        self.refusals = refusals if refusals is not None else Refusals()
        self.pool = RequestPool(settings)
        self.workers = SparqlWorkers(graph, settings.query_workers, limits)
        self._masks_of = lru_cache(QUESTIONS_REMEMBERED)(lambda question: questions.masks_of(graph, question))
        self.queries = PersistentQueries(
            partial(questions.find, graph), self._masks_of, on_closed=lambda question: self.schedule.on_closed(question)
        )
        self.schedule = EvaluationSchedule(self.queries.owners_of, budget)
        self.confirmations = Confirmations(
            graph.sync if durability == "fsync" and graph.is_on_disk else None, settings.requests_max
        )
        self.notifier = notifier or Notifier()
        self._publish = publish
        self._check_room = check_room
        self._service_kps = frozenset(service_kps)
        self._resume_s = resume_s
        self._now_s = now_s
        self._jobs: dict[int, tuple[Job, str, OnAnswer]] = {}
        self._next_ticket = 0
        self._is_running = False
        self._is_evaluating = False
        self._is_stopped = False
        self._next_turn: asyncio.TimerHandle | None = None
        self._reopened_s = -math.inf
        self._detached_s: dict[str, float] = {}

    def submit(self, kp: str, job: Job, on_answer: OnAnswer) -> None:
        """Submits a job. It counts towards the quota of `kp`.

        Service KPs are served first. A KP is a service if its name, or the part after its last slash, is in
        `service_kps`.
        """
        self._next_ticket += 1
        ticket = self._next_ticket
        try:
            is_service = kp in self._service_kps or kp.rpartition("/")[2] in self._service_kps
            request = msgspec.structs.replace(self._request(ticket, kp, job, is_service), size_bytes=_size_of(job))
            if isinstance(job, ChangeJob | InsertsJob | UpdateJob):
                self._check_changes()
            answered = self.pool.on_request(request, self._now_s())
        except TidegateError as error:
            self._note(error)
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
        except TidegateError:
            self.notifier.detach(subscription_id)
            raise

    @property
    def spread_s(self) -> float:
        """The time over which the subscribers notified last should spread their fetches."""
        return self.notifier.spread_s

    def sequence_of(self, subscription_id: str) -> int:
        """Returns the number of the last indication that was taken."""
        return self.queries.sequence_of(subscription_id)

    def resume(self, subscription_id: str, last_sequence: int, on_news: OnNews) -> Resumption:
        """Resumes a subscription on another connection."""
        resumption = self.queries.resume(subscription_id, last_sequence)
        self._detached_s.pop(subscription_id, None)
        self.notifier.attach(subscription_id, on_news)
        return resumption

    def detach(self, subscription_id: str, is_kept: bool = False) -> None:
        """Detaches a subscription from a lost connection. It can be resumed within `resume_s`, or at any time if
        `is_kept`."""
        if self.notifier.detach(subscription_id) and not is_kept:
            self._detached_s[subscription_id] = self._now_s()

    def unsubscribe(self, subscription_id: str) -> None:
        self.queries.unsubscribe(subscription_id)
        self.notifier.detach(subscription_id)
        self._detached_s.pop(subscription_id, None)

    def tick(self) -> None:
        """Ends detached subscriptions that were not resumed in time, and reopens a store that could not be written."""
        now_s = self._now_s()
        if self.graph.failure is not None and now_s - self._reopened_s >= REOPEN_S:
            self._reopened_s = now_s
            self.graph.reopen()
        for subscription_id, detached_s in list(self._detached_s.items()):
            if now_s - detached_s > self._resume_s:
                del self._detached_s[subscription_id]
                with contextlib.suppress(TidegateError):  # the broker has already ended the subscription
                    self.queries.unsubscribe(subscription_id)

    def pool_statistics(self) -> PoolStatistics:
        return self.pool.statistics(self._now_s())

    def _note(self, error: TidegateError) -> None:
        if isinstance(error, Overloaded):
            self.refusals.note(error)

    def _check_changes(self) -> None:
        try:
            self.confirmations.check_room()
            if self._check_room is not None:
                self._check_room()
        except Overloaded:
            self.pool.count_refused(Lane.CHANGES)
            raise

    async def call(self, kp: str, job: Job) -> tuple[Any, Load | None]:
        """Submits a job and waits for it. Returns the answer and the load, or raises the error. After a cancellation,
        the answer is discarded."""
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
        """Stops the workers. Requests that still wait for one are answered with U702. Committed changes are still
        confirmed."""
        self._is_stopped = True
        if self._next_turn is not None:
            self._next_turn.cancel()
        await self.workers.stop()
        await self.confirmations.stop()

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
            lane = Lane.SPARQL if isinstance(question, SparqlQuery) else Lane.SUBSCRIPTIONS
            return PoolRequest(ticket, lane, kp, is_service)
        if not isinstance(question, SparqlQuery):
            return PoolRequest(ticket, Lane.QUERIES, kp, is_service, question, self._masks_of(question))
        if not _can_be_shared(question.text):
            return PoolRequest(ticket, Lane.SPARQL, kp, is_service)
        return PoolRequest(ticket, Lane.SPARQL, kp, is_service, question, self._masks_of(question))

    def _run_started(self) -> None:
        """Runs the requests that the pool starts, until it starts no more.

        Requests that a callback submits wait for the next round of the loop. Stale questions are evaluated afterwards,
        so that the changes that made them stale are answered first.
        """
        if self._is_running:
            return
        self._is_running = True
        try:
            while started := self.pool.start(self._now_s()):
                for request in started:
                    self._run(request.ticket)
        finally:
            self._is_running = False
        self._evaluate()

    def _run(self, ticket: int) -> None:
        job, kp, _ = self._jobs[ticket]
        run = self._do(job, kp)
        self._step(ticket, run, partial(run.send, None))

    def _step(self, ticket: int, run: _Run, step: Callable[[], _WorkerRequest]) -> None:
        """Continues the run of a job until it ends or waits for a worker. This is the only place where failures of jobs
        become answers.

        The runs are not tasks of asyncio, which would continue in a later round of the event loop. A job that needs no
        worker is answered immediately, and the delta of an update is applied as soon as it arrives.
        """
        try:
            request = step()
            request(partial(self._on_worker_answer, ticket, run))
            return
        except StopIteration as end:
            answer = end.value
        except TidegateError as error:
            self._note(error)
            answer = error
        except Exception:
            log.exception("a request to the knowledge base failed")
            answer = TidegateError("K118", "internal error in the broker", "see its log, and report it")
        self._finish(ticket, answer)

    def _on_worker_answer(self, ticket: int, run: _Run, answer: Any, took_s: float = 0.0) -> None:
        is_error = isinstance(answer, TidegateError)
        self._step(ticket, run, partial(run.throw, answer) if is_error else partial(run.send, (answer, took_s)))
        self._run_started()

    async def _do(self, job: Job, kp: str) -> Any:
        """Does a job and returns its answer."""
        match job:
            case ChangeJob():
                return self._on_delta(self.graph.change(job.removed, job.inserted))
            case InsertsJob():
                return self._insert(job.inserts)
            case UpdateJob():
                return await self._update(job.text)
            case AskJob(SparqlQuery(text)):
                result, _ = await _wait_for(partial(self.workers.ask, text))
                return result
            case AskJob():
                return questions.ask(self.graph, job.question)
            case CheckJob():
                return None
        return await self._subscribe(job, kp)

    async def _update(self, text: str) -> Delta:
        if sparql.is_data(text):
            return self._on_delta(self.graph.update(text))
        self.graph.check_writable()
        delta, _ = await _wait_for(partial(self.workers.update, text))
        # Changes run one at a time, so the graph is as the worker saw it, and the delta must apply exactly.
        applied = self.graph.apply(delta)
        assert (set(applied.added), set(applied.removed)) == (set(delta.added), set(delta.removed)), (
            "the worker's copy differs from the graph"
        )
        return self._on_delta(delta)

    async def _subscribe(self, job: SubscribeJob, kp: str) -> Subscribed:
        subscription_id, question = job.subscription_id or str(uuid.uuid4()), job.question
        if isinstance(question, Masks):
            result = self.queries.subscribe(subscription_id, kp, question, job.sequence)
        else:
            await self._open(question, kp)
            result, is_stale = self.queries.subscribe_open(subscription_id, kp, question, job.sequence)
            if is_stale:
                self.schedule.on_stale(question, self._now_s())
        self.notifier.attach(subscription_id, job.on_news)
        return Subscribed(subscription_id, result)

    async def _open(self, question: EvaluatedQuestion, kp: str) -> None:
        """Opens a question. Evaluates it first, unless its current result is known."""
        evaluation = self.queries.open(kp, question)
        if evaluation is None:
            return
        try:
            if isinstance(question, SparqlQuery):
                result, took_s = await _wait_for(partial(self.workers.ask_first, question))
            else:
                result, took_s = questions.ask(self.graph, question), 0.0
            notified = self.queries.on_first_answer(evaluation, result)
        except TidegateError:
            self.queries.end_opening(question)
            raise
        self.schedule.on_measured(question, took_s)
        if notified:
            self._notify(notified, Lane.SPARQL)

    def _finish(self, ticket: int, answer: Any) -> None:
        now_s = self._now_s()
        if isinstance(answer, TidegateError):
            for waiting in self.pool.on_failed(ticket, now_s):
                self._send_answer(waiting, answer, None)
        else:
            for answered in self.pool.on_done(ticket, answer, now_s):
                self._send_answer(answered.ticket, answered.answer, answered.load)

    def _send_answer(self, ticket: int, answer: Any, load: Load | None) -> None:
        job, _, on_answer = self._jobs.pop(ticket)
        if isinstance(answer, TidegateError) or not isinstance(job, ChangeJob | InsertsJob | UpdateJob):
            on_answer(answer, load)
            return

        def confirm(error: TidegateError | None) -> None:
            on_answer(answer if error is None else error, load if error is None else None)

        is_changed = any(isinstance(delta, Delta) and delta for delta in (answer if type(answer) is list else [answer]))
        self.confirmations.confirm(confirm, is_changed)

    def _insert(self, inserts: tuple[tuple[NewTriple, ...], ...]) -> list[Delta | TidegateError]:
        """Makes all inserts in one transaction, or one after another when one of them is refused."""
        try:
            return [self._on_delta(delta) for delta in self.graph.insert_together(inserts)]
        except KnowledgeError:
            return [self._insert_alone(inserted) for inserted in inserts]

    def _insert_alone(self, inserted: tuple[NewTriple, ...]) -> Delta | TidegateError:
        try:
            return self._on_delta(self.graph.change((), inserted))
        except TidegateError as error:
            return error

    def _on_delta(self, delta: Delta) -> Delta:
        """Passes a change on to caches, workers, subscribers of masks and `publish`. Other questions become stale."""
        if not delta:
            return delta
        self.pool.on_change(delta)
        self.workers.on_change(delta)
        if self._publish is not None:
            self._publish(delta)
        began_s = self._now_s()
        concern = self.queries.on_change(delta)
        self._notify(concern.notified, Lane.QUERIES)
        for question in concern.stale:
            self.schedule.on_stale(question, began_s)
        self.pool.on_notified(self._now_s() - began_s, began_s)
        return delta

    def _evaluate(self) -> None:
        """Sends the next stale questions to idle evaluators, and sets a timer for the next turn."""
        if self._is_evaluating or self._is_stopped:
            return
        self._is_evaluating = True
        try:
            while turns := self.schedule.start(self._now_s()):
                for turn in turns:
                    self._evaluate_turn(turn)
        finally:
            self._is_evaluating = False
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        if (wait_s := self.schedule.wait_s(self._now_s())) is not None:
            self._next_turn = asyncio.get_running_loop().call_later(wait_s, self._evaluate)

    def _evaluate_turn(self, turn: Turn) -> None:
        evaluation = self.queries.begin(turn.question)
        if evaluation is None:
            self.schedule.on_evaluated(turn, 0.0, False, self._now_s())
        else:
            self.workers.evaluate(turn.question, turn.pace, partial(self._on_evaluated, turn, evaluation))

    def _on_evaluated(self, turn: Turn, evaluation: Evaluation, answer: Any, took_s: float) -> None:
        if isinstance(answer, Unavailable) and not isinstance(answer, Damaged):  # the question is not the cause
            self.schedule.on_failed(turn, self._now_s())
        else:
            notified = self.queries.on_answer(evaluation, answer, turn.held_s)
            is_stale = self.queries.is_stale(turn.question)
            self.schedule.on_evaluated(turn, took_s, is_stale, self._now_s())
            if notified:
                self._notify(notified, Lane.SPARQL)
        self._evaluate()

    def _notify(self, notified: list[str], fetched_in: Lane) -> None:
        self.notifier.notify(notified, self.pool.spread_s(len(notified), fetched_in))


def _size_of(job: Job) -> int:
    """Returns the approximate number of bytes that a request occupies until it is answered."""
    match job:
        case UpdateJob():
            return len(job.text)
        case ChangeJob():
            return _size_of_triples(job.inserted) + TRIPLE_BYTES * len(job.removed)
        case InsertsJob():
            return sum(map(_size_of_triples, job.inserts))
        case CheckJob():
            return 0
    return len(job.question.text) if isinstance(job.question, SparqlQuery) else TRIPLE_BYTES


def _size_of_triples(triples: tuple[NewTriple | Triple, ...]) -> int:
    return sum(
        TRIPLE_BYTES
        + sum(
            len(term.label if isinstance(term, Blank) else term.text)
            for term in (each.subject, each.predicate, each.object)
        )
        for each in triples
    )


def _can_be_shared(text: str) -> bool:
    """Reports whether equal queries may share one evaluation. Very long ones are not worth caching."""
    return len(text) <= SHARED_CHARACTERS_MAX and sparql.is_repeatable(text)
