"""A second model of the simulated message queue, as SimPy processes, to check the kernel.

It shares only the parameters with the kernel. Where the kernel computes when work will be done, a SimPy resource
actually queues it here. Where the kernel stores the stages of a wake-up, each queue has a process that runs through
them here. It is about forty times slower, but reads like the description of the system.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import simpy

from tidegate_lab.queues.message_queue import Method, Parameters

Process = Generator[simpy.Event, Any, Any]


@dataclass
class Tally:
    """The counts since the end of the warm-up. `latencies_s` has an entry per delivered message."""

    hits: int = 0
    tries: int = 0
    busy_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


class Queue:
    """A first-come-first-served server and its messages, each represented by the time it was sent."""

    def __init__(self, env: simpy.Environment, parameters: Parameters) -> None:
        self.env = env
        self.parameters = parameters
        self.server = simpy.Resource(env, capacity=1)
        self.free_at_s = 0.0
        self.messages: deque[float] = deque()
        self.arrival = env.event()
        self.visit = env.event()

    def is_overloaded(self) -> bool:
        return self.free_at_s - self.env.now > self.parameters.backlog_s_max

    def is_full(self) -> bool:
        return len(self.messages) >= self.parameters.queue_messages_max

    def work(self, cost_s: float, tally: Tally) -> Process:
        tally.busy_s += cost_s
        self.free_at_s = max(self.free_at_s, self.env.now) + cost_s
        expected_s = self.free_at_s
        with self.server.request() as turn:
            yield turn
            yield self.env.timeout(cost_s)
        assert abs(self.env.now - expected_s) < 1e-6, "the backlog is not what first come first served makes it"


class MessageQueue:
    """Devices, queues, dequeue controllers and back-ends. `run` returns the measurements."""

    def __init__(self, parameters: Parameters, method: Method, seed: int) -> None:
        self.parameters = parameters
        self.method = method
        self.random = random.Random(seed)
        self.env = simpy.Environment()
        self.tally = Tally()
        self.queues = [Queue(self.env, parameters) for _ in range(parameters.queues)]
        self.turns = [self._round_robin() for _ in range(parameters.back_ends)]
        self.seen = [dict.fromkeys(range(parameters.queues), 0) for _ in range(parameters.back_ends)]
        self.sleeps_s = [parameters.sleep_s] * parameters.back_ends
        self.outstanding = [0] * parameters.back_ends
        self.waiting: deque[simpy.Event] = deque()
        self.ready: deque[Queue] = deque()

    def run(self) -> Tally:
        self.env.process(self._devices())
        for back_end in range(self.parameters.back_ends):
            self.env.process(self._back_end(back_end))
            if self.method is Method.PMS:
                self.env.process(self._monitor(back_end))
        if self.method is Method.WAKE_UP:
            for queue in self.queues:
                self.env.process(self._announce_again_and_again(queue))
        self.env.run(self.parameters.warm_up_s)
        self.tally = Tally()
        self.env.run(self.parameters.warm_up_s + self.parameters.measured_s)
        return self.tally

    def _round_robin(self) -> cycle[int]:
        first = self.random.randrange(self.parameters.queues)
        return cycle([(first + k) % self.parameters.queues for k in range(self.parameters.queues)])

    def _devices(self) -> Process:
        controllers = [self._round_robin() for _ in range(self.parameters.enqueue_controllers)]
        while True:
            queue = self.queues[next(self.random.choice(controllers))]
            if not queue.is_overloaded() and not queue.is_full():
                queue.messages.append(self.env.now)
                self.env.process(queue.work(self.parameters.enqueue_cost_s, self.tally))
                queue.arrival.succeed()
                queue.arrival = self.env.event()
            yield self.env.timeout(1 / self.parameters.offered_messages_per_s)

    def _monitor(self, back_end: int) -> Process:
        yield self.env.timeout(self.random.random() * self.parameters.monitor_period_s)
        while True:
            for number, queue in enumerate(self.queues):
                self.seen[back_end][number] = len(queue.messages)
                self.env.process(queue.work(self.parameters.monitor_cost_s, self.tally))
            yield self.env.timeout(self.parameters.monitor_period_s)

    def _announce_again_and_again(self, queue: Queue) -> Process:
        while True:
            yield from self._wait_for_batch(queue)
            yield from queue.work(self.parameters.notify_cost_s, self.tally)
            is_worth_another_visit = True
            while is_worth_another_visit:
                yield self.env.timeout(self.parameters.network_s)
                if self.waiting:
                    self.waiting.popleft().succeed(queue)
                else:
                    self.ready.append(queue)
                is_refused = yield queue.visit
                is_worth_another_visit = is_refused or len(queue.messages) >= self.parameters.batch_messages
                yield self.env.timeout(max(0.0, queue.free_at_s - self.env.now) if is_worth_another_visit else 0.0)

    def _wait_for_batch(self, queue: Queue) -> Process:
        while len(queue.messages) < self.parameters.batch_messages:
            if not queue.messages:
                yield queue.arrival
                continue
            remaining_s = queue.messages[0] + self.parameters.linger_s - self.env.now
            if remaining_s <= 1e-12:
                return
            yield queue.arrival | self.env.timeout(remaining_s)

    def _back_end(self, back_end: int) -> Process:
        while True:
            yield self.env.timeout(self.random.expovariate(self.parameters.back_end_requests_per_s))
            if self.outstanding[back_end] < self.parameters.connections_per_back_end:
                self.env.process(self._request(back_end))

    def _request(self, back_end: int) -> Process:
        self.outstanding[back_end] += 1
        serve = self._serve_when_woken if self.method is Method.WAKE_UP else self._serve_in_turn
        while True:
            taken = yield from serve(back_end)
            if taken or self.method in (Method.CONVENTIONAL, Method.PMS):
                break
            if self.method in (Method.RDS, Method.RDS_ADAPTIVE):
                self._adapt(back_end, 1.5)
                yield self.env.timeout(self.sleeps_s[back_end])
        if taken == self.parameters.request_messages_max:
            self._adapt(back_end, 0.5)
        elif taken < self.parameters.request_messages_max / 4:
            self._adapt(back_end, 1.2)
        self.outstanding[back_end] -= 1

    def _adapt(self, back_end: int, factor: float) -> None:
        if self.method is Method.RDS_ADAPTIVE:
            longest_s, shortest_s = self.parameters.sleep_s, self.parameters.sleep_s_min
            self.sleeps_s[back_end] = min(max(self.sleeps_s[back_end] * factor, shortest_s), longest_s)

    def _serve_in_turn(self, back_end: int) -> Process:
        taken = 0
        for number in self._choose(back_end):
            taken += yield from self._visit(self.queues[number], self.parameters.request_messages_max - taken)
            is_parked = self.method in (Method.RDS, Method.RDS_ADAPTIVE) and self.parameters.is_parked_on_first_miss
            if taken == self.parameters.request_messages_max or (taken == 0 and is_parked):
                break
        return taken

    def _choose(self, back_end: int) -> list[int]:
        if self.method is Method.PMS:
            seen = self.seen[back_end]
            return sorted(seen, key=lambda number: -seen[number])[: self.parameters.tries_max]
        return list(islice(self.turns[back_end], self.parameters.tries_max))

    def _serve_when_woken(self, back_end: int) -> Process:
        taken = 0
        for _ in range(self.parameters.tries_max):
            if self.ready:
                queue = self.ready.popleft()
            elif taken:
                break
            else:
                self.waiting.append(self.env.event())
                queue = yield self.waiting[-1]
            taken += yield from self._visit(queue, self.parameters.request_messages_max - taken)
            if taken in (0, self.parameters.request_messages_max):
                break
        return taken

    def _visit(self, queue: Queue, messages_max: int) -> Process:
        yield self.env.timeout(self.parameters.network_s)
        tally = self.tally
        tally.tries += 1
        is_refused = queue.is_overloaded()
        messages = (
            [] if is_refused else [queue.messages.popleft() for _ in range(min(messages_max, len(queue.messages)))]
        )
        if self.method is Method.WAKE_UP:
            visit, queue.visit = queue.visit, self.env.event()
            self.env.process(self._tell(visit, is_refused))
        if messages:
            tally.hits += 1
            cost_s = self.parameters.hit_cost_s + len(messages) * self.parameters.hit_message_cost_s
            yield from queue.work(cost_s, tally)
        elif not is_refused:
            yield from queue.work(self.parameters.miss_cost_s, tally)
        yield self.env.timeout(self.parameters.network_s)
        tally.latencies_s.extend(self.env.now - sent_at_s for sent_at_s in messages)
        return len(messages)

    def _tell(self, visit: simpy.Event, is_refused: bool) -> Process:
        """Reports whether a visit is refused, after it has joined the queue's work, so that the backlog is known."""
        yield self.env.timeout(0)
        visit.succeed(is_refused)
