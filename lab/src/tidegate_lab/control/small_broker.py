"""A small broker of known speed, as a process of its own: what active control is measured with.

It is Tidegate's graph, persistent queries and SSAP listener; other than there, what it serves takes a time that is
known. Queries and indications each occupy one of a few lanes for a random time, with the same parameters as in the
simulation of the request pool. A plain one is the broker of the papers: an indication is numbered when it is decided,
waits among the requests, first come first served, and is dropped when its lane is full. What Tidegate's own broker does
about that (merged and preferred indications, slots, spread), and CoDel, are parameters too.

    python -m tidegate_lab.control.small_broker PARAMETERS SEED      parameters as MessagePack in hexadecimal

It tells its address on standard output. Then it answers each line on standard input with its counts, and ends with the
input; the first line is when the time of the parameters begins. A lane's clock is ahead of the event loop's by no more
than what it serves now, and goes on from where it was when the loop is late: what it can serve in a second is exact.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

import msgspec

from tidegate.errors import Overloaded
from tidegate.knowledge import question as questions
from tidegate.knowledge.graph import Graph
from tidegate.knowledge.knowledge_base import AskJob, Job, KnowledgeBase, OnAnswer, Subscribed, SubscribeJob
from tidegate.knowledge.notifier import Notifier
from tidegate.knowledge.pace import NOTIFYING_S, SMOOTHING, fade_load, learn_mean_s, next_slot_at_s, serve_all_s
from tidegate.knowledge.persistent_query import Indication
from tidegate.knowledge.question import Question
from tidegate.knowledge.request_pool import Load
from tidegate.listeners.ssap import SsapListener
from tidegate_lab.control.request_pool import Parameters

TICK_S: Final = 1.0


class Counts(msgspec.Struct):
    """Of indications: decided, dropped as there was no place, merged into one that waits."""

    decided: int = 0
    dropped: int = 0
    merged: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """Queries and notices that wait, each since when and whom to call. `ends_s` is when it is done with what it serves,
    or was with the last."""

    loop: asyncio.AbstractEventLoop
    queries: deque[tuple[float, Callable[[Load | Overloaded], None]]] = field(default_factory=deque)
    notices: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    finish: Callable[[], None] | None = None
    ends_s: float = 0.0
    notices_in_turn: int = 0
    is_late: bool = False
    least_wait_s: float = math.inf
    interval_ends_s: float = 0.0
    is_advancing: bool = False

    def put_notice(self, tell: Callable[[], None]) -> None:
        self.notices.append((self.loop.time(), tell))


class Lanes:
    """Where queries and notices wait and are served, and what their clients are told about it."""

    def __init__(self, parameters: Parameters, rng: Random) -> None:
        self._loop = asyncio.get_running_loop()
        self.each = [Lane(self._loop) for _ in range(parameters.lanes)]
        self.zero_s = math.inf
        self._parameters = parameters
        self._rng = rng
        self._is_cached = False
        self._mean_query_s = parameters.query_s
        self._notify_load = self._notify_load_at_s = self._slot_at_s = 0.0

    def put_query(self, lane: Lane, answer: Callable[[Load | Overloaded], None]) -> None:
        if self.is_full(lane):
            answer(self._refusal(lane))
        else:
            lane.queries.append((self._loop.time(), answer))
            self._wake(lane)

    def is_full(self, lane: Lane) -> bool:
        """Notices that are merged are bounded by the number of clients, and take no place of requests."""
        entries = len(lane.queries) + (0 if self._parameters.is_conflating else len(lane.notices))
        return entries >= self._parameters.lane_entries_max

    def on_change(self, notices: int) -> None:
        now_s = self._loop.time()
        notices_s = notices * self._parameters.notification_s / self._parameters.lanes
        self._notify_load = self._notify_load_now(now_s) + notices_s / NOTIFYING_S
        self._notify_load_at_s = now_s
        self._is_cached = False

    def wake_all(self) -> None:
        for lane in self.each:
            self._wake(lane)

    @property
    def spread_s(self) -> float:
        """In which it would serve every client once; 0 when it tells nobody."""
        p = self._parameters
        return serve_all_s(p.clients, self._mean_query_s, p.lanes, p.load_share) if p.is_giving_spread else 0.0

    def _wake(self, lane: Lane) -> None:
        if lane.finish is None:
            self._advance(lane)

    def _advance(self, lane: Lane) -> None:
        """Does what is due by now. What that brings in is served by the same loop."""
        if lane.is_advancing:
            return
        lane.is_advancing = True
        while lane.finish is not None or self._begin_next(lane):
            if lane.ends_s > self._loop.time():
                self._loop.call_at(lane.ends_s, self._advance, lane)
                break
            assert lane.finish is not None
            lane.finish()
            lane.finish = None
        lane.is_advancing = False

    def _begin_next(self, lane: Lane) -> bool:
        """False when nothing waits."""
        while lane.queries or lane.notices:
            if self._is_notice_next(lane):
                lane.notices_in_turn += 1
                queued_s, lane.finish = lane.notices.popleft()
                began_s = max(lane.ends_s, queued_s)
                lane.ends_s = began_s + self._service_s(self._parameters.notification_s, began_s)
                return True
            lane.notices_in_turn = 0
            queued_s, answer = lane.queries.popleft()
            began_s = max(lane.ends_s, queued_s)
            waiting_s = began_s - queued_s
            if self._is_late(lane, waiting_s, began_s):
                answer(self._refusal(lane))
                continue
            processing_s = self._service_s(self._query_s(), began_s)
            lane.ends_s = began_s + processing_s
            lane.finish = partial(self._answer, lane, answer, processing_s, waiting_s)
            return True
        return False

    def _answer(
        self, lane: Lane, answer: Callable[[Load | Overloaded], None], processing_s: float, waiting_s: float
    ) -> None:
        self._mean_query_s = learn_mean_s(self._mean_query_s, processing_s, SMOOTHING)
        slot_s = self._next_slot_s(lane) if self._parameters.is_giving_slots else 0.0
        answer(Load(processing_s, waiting_s, processing_s + waiting_s, slot_s))

    def _is_notice_next(self, lane: Lane) -> bool:
        if not lane.notices or not lane.queries:
            return bool(lane.notices)
        if self._parameters.notifications_per_request:
            return lane.notices_in_turn < self._parameters.notifications_per_request
        return lane.notices[0][0] <= lane.queries[0][0]

    def _is_late(self, lane: Lane, waiting_s: float, now_s: float) -> bool:
        """CoDel: refuses what has waited for twice the target, once the least wait of an interval was above it."""
        target_s = self._parameters.codel_target_s
        if target_s <= 0:
            return False
        if now_s >= lane.interval_ends_s:
            lane.is_late = target_s < lane.least_wait_s < math.inf
            lane.least_wait_s = waiting_s
            lane.interval_ends_s = now_s + self._parameters.codel_interval_s
        lane.least_wait_s = min(lane.least_wait_s, waiting_s)
        return lane.is_late and waiting_s > 2 * target_s

    def _query_s(self) -> float:
        is_cached, self._is_cached = self._is_cached, self._parameters.has_cache
        return self._parameters.cached_query_s if is_cached else self._parameters.query_s

    def _service_s(self, mean_s: float, now_s: float) -> float:
        parameters = self._parameters
        if parameters.slow_from_s <= now_s - self.zero_s < parameters.slow_until_s:
            mean_s *= parameters.slow_factor
        return mean_s * (0.5 + 0.5 * self._rng.expovariate(1.0))

    def _refusal(self, lane: Lane) -> Overloaded:
        what = f"{len(lane.queries)} requests wait already"
        return Overloaded("L652", what, "ask less often", retry_after_s=self._backlog_s(lane))

    def _backlog_s(self, lane: Lane) -> float:
        return len(lane.queries) * self._mean_query_s + len(lane.notices) * self._parameters.notification_s

    def _next_slot_s(self, lane: Lane) -> float:
        p, now_s, backlog_s = self._parameters, self._loop.time(), self._backlog_s(lane)
        notify_load = self._notify_load_now(now_s)
        self._slot_at_s = next_slot_at_s(
            self._slot_at_s, now_s, backlog_s, self._mean_query_s, p.lanes, p.load_share, notify_load
        )
        return self._slot_at_s - now_s

    def _notify_load_now(self, now_s: float) -> float:
        return fade_load(self._notify_load, now_s - self._notify_load_at_s, NOTIFYING_S)


class Notices(Notifier):
    """Puts notices into the lanes, which call the subscribers when they serve them.

    Where indications are not merged, `take` takes an indication as soon as it is decided.
    """

    def __init__(
        self, lanes: Lanes, parameters: Parameters, rng: Random, take: Callable[[str], Indication | None]
    ) -> None:
        super().__init__()
        self.counts = Counts()
        self.lane_of: dict[str, Lane] = {}
        self.told: Indication | None = None  # the one whose subscriber is called now
        self._lanes = lanes
        self._parameters = parameters
        self._rng = rng
        self._take = take
        self._queued: set[str] = set()  # subscriptions of which a notice waits for whatever there will be
        self._numbers_waiting: dict[str, deque[int]] = {}

    def notify(self, notified: list[str], spread_s: float) -> None:
        """Puts notices into the lanes instead of sending them at once. Begins with another subscription each time."""
        self.spread_s = self._lanes.spread_s
        self._lanes.on_change(len(notified))
        first = self._rng.randrange(len(notified)) if notified else 0
        for subscription_id in (*notified[first:], *notified[:first]):
            self._put(subscription_id)
        self._lanes.wake_all()

    def first_waiting(self, subscription_id: str) -> int | None:
        """Returns the number of the first indication that waits in a lane, if one does."""
        waiting = self._numbers_waiting.get(subscription_id)
        return waiting[0] if waiting else None

    def _put(self, subscription_id: str) -> None:
        lane = self.lane_of[subscription_id]
        self.counts.decided += 1
        if self._parameters.is_conflating:
            if subscription_id in self._queued:
                self.counts.merged += 1
                return
            self._queued.add(subscription_id)
            lane.put_notice(partial(self._tell_now, subscription_id, None))
            return
        indication = self._take(subscription_id)
        if self._lanes.is_full(lane):
            self.counts.dropped += 1
        elif indication is not None:
            self._numbers_waiting.setdefault(subscription_id, deque()).append(indication.sequence)
            lane.put_notice(partial(self._tell_now, subscription_id, indication))

    def _tell_now(self, subscription_id: str, indication: Indication | None) -> None:
        self._queued.discard(subscription_id)
        if indication is not None:
            self._numbers_waiting[subscription_id].popleft()
        self.told = indication
        self.call([subscription_id])
        self.told = None


class SmallKnowledgeBase(KnowledgeBase):
    """Changes and subscriptions cost nothing, as in the simulation."""

    def __init__(self, graph: Graph, lanes: Lanes, parameters: Parameters, rng: Random) -> None:
        self.notices = Notices(lanes, parameters, rng, lambda subscription_id: self.queries.take(subscription_id))
        super().__init__(graph, notifier=self.notices)
        self._lanes = lanes
        self._parameters = parameters
        self._lane_of_kp: dict[str, Lane] = {}

    def submit(self, kp: str, job: Job, on_answer: OnAnswer) -> None:
        lane = self._lane_of_kp.setdefault(kp, self._lanes.each[len(self._lane_of_kp) % len(self._lanes.each)])
        match job:
            case AskJob():
                self._lanes.put_query(lane, partial(self._answer, job.question, on_answer))
            case SubscribeJob():
                super().submit(kp, job, partial(self._on_subscribed, lane, on_answer))
            case _:
                super().submit(kp, job, on_answer)

    def take(self, subscription_id: str) -> Indication | None:
        return super().take(subscription_id) if self._parameters.is_conflating else self.notices.told

    def sequence_of(self, subscription_id: str) -> int:
        """Of the last one that was sent or dropped: those that wait follow."""
        waiting = self.notices.first_waiting(subscription_id)
        return super().sequence_of(subscription_id) if waiting is None else waiting - 1

    def _answer(self, question: Question, on_answer: OnAnswer, load: Load | Overloaded) -> None:
        if isinstance(load, Overloaded):
            on_answer(load, None)
        else:
            on_answer(questions.ask(self.graph, question), load)

    def _on_subscribed(self, lane: Lane, on_answer: OnAnswer, answer: Any, load: Load | None) -> None:
        if isinstance(answer, Subscribed):
            self.notices.lane_of[answer.subscription_id] = lane
        on_answer(answer, None)


async def _serve(parameters: Parameters, seed: int) -> None:
    loop = asyncio.get_running_loop()
    rng = Random(seed)  # noqa: S311
    lanes = Lanes(parameters, rng)
    knowledge = SmallKnowledgeBase(Graph(), lanes, parameters, rng)
    listener = SsapListener(knowledge)
    port = await listener.start("127.0.0.1", 0)
    _say(f"ssap://127.0.0.1:{port}")
    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(_every(TICK_S, lambda: listener.tick(loop.time())))
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.readline():
            lanes.zero_s = min(lanes.zero_s, loop.time())
            _say(msgspec.json.encode(knowledge.notices.counts).decode())
        ticking.cancel()
    await listener.stop()
    await knowledge.stop()


async def _every(seconds: float, call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        call()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Parameters), int(sys.argv[2])))
