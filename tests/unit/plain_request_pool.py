"""A second model of the request pool, as a plain event loop that drives the clients' real state machines.

It mirrors `request_pool_kernel`: deques instead of rings, `heapq` for the heap, objects instead of records. It draws
the same random numbers as the kernel, so everything must be equal, event for event.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tidegate.client.control import ActiveControl, Control, Hints, SequenceGaps
from tidegate_lab.control.request_pool import Parameters

MASK = 2**64 - 1


class Draws:
    """The random number generator SplitMix64."""

    def __init__(self, state: int) -> None:
        self._state = state

    def uniform(self) -> float:
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return float((z ^ (z >> 31)) >> 11) * 2.0**-53

    def exponential(self) -> float:
        return -math.log(1.0 - self.uniform())


class Entry(NamedTuple):
    queued_at_s: float
    client: Client | None
    """None for a bystander."""
    number: int


@dataclass
class Client:
    number: int
    machine: ActiveControl
    gaps: SequenceGaps = field(default_factory=SequenceGaps)
    known: int = 0
    answered: int = 0
    waiting: set[int] = field(default_factory=set)
    """Decisions that wait to be sent and that no response has carried."""
    is_queued: bool = False
    request: int = 0
    next_token_s: float = 0.0
    accounted_at_s: float = 0.0
    stale_s: float = 0.0


@dataclass
class Service:
    is_notification: bool
    client: Client | None
    number: int
    carried: int
    service_s: float
    wait_s: float


@dataclass
class Lane:
    number: int
    draws: Draws
    requests: deque[Entry] = field(default_factory=deque)
    notifications: deque[Entry] = field(default_factory=deque)
    service: Service | None = None
    notifications_in_turn: int = 0
    least_delay_s: float = math.inf
    interval_ends_s: float = 0.0
    is_late: bool = False


class RequestPool:
    def __init__(self, parameters: Parameters, control: Control, seed: int) -> None:
        p = self.p = parameters
        states = np.random.SeedSequence(seed).generate_state(p.clients + p.lanes + 2, np.uint64).tolist()
        draws = [Draws(state) for state in states]
        self.counts: Counter[str] = Counter()
        self.age_s2 = self.busy_s = 0.0
        self.updated_at_s: list[float] = [-math.inf]
        self.mean_query_s, self.slot_at_s = p.query_s, 0.0
        self.notify_load = self.notify_load_at_s = 0.0
        self.cached_version: int | None = None
        self.due_s = [math.inf] * len(draws)
        self._heap: list[tuple[float, int]] = []
        self.clients: list[Client] = []
        self.lanes = [Lane(lane, draws[p.clients + lane]) for lane in range(p.lanes)]
        self._updates, self._probes = draws[-2:]
        for number in range(p.clients):
            joined_at_s = p.join_within_s * draws[number].uniform()
            machine = ActiveControl(control, draws[number].uniform, joined_at_s)
            self.clients.append(Client(number, machine))
            self._schedule(number, machine.due_s)
        first_s = p.update_every_s * (self._updates.exponential() if p.is_update_random else 1.0)
        self._schedule(p.clients + p.lanes, first_s)
        if p.probes_per_s > 0:
            self._schedule(p.clients + p.lanes + 1, self._probes.exponential() / p.probes_per_s)

    @property
    def version(self) -> int:
        return len(self.updated_at_s) - 1

    def next_at_s(self) -> float:
        while self._heap and self.due_s[self._heap[0][1]] != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0]

    def step(self) -> None:
        """Processes one event, or several that are due at the same time."""
        now_s = self.next_at_s()
        while self.next_at_s() == now_s:
            self._happen(self._heap[0][1], now_s)

    def account_all(self, now_s: float) -> None:
        for client in self.clients:
            self._learn(client, client.known, now_s)

    def _schedule(self, entry: int, at_s: float) -> None:
        self.due_s[entry] = at_s
        heapq.heappush(self._heap, (at_s, entry))

    def _happen(self, entry: int, now_s: float) -> None:
        self.counts["events"] += 1
        if entry < self.p.clients:
            self._on_client(self.clients[entry], now_s)
        elif entry < self.p.clients + self.p.lanes:
            self._on_served(self.lanes[entry - self.p.clients], now_s)
        elif entry == self.p.clients + self.p.lanes:
            self._on_update(now_s)
        else:
            self._on_probe(now_s)

    # Clients.

    def _on_client(self, client: Client, now_s: float) -> None:
        if client.machine.is_asking:
            self.counts["timed out"] += 1
            client.machine.on_timeout(now_s)
        elif client.machine.on_due(now_s):
            self._on_request(client, now_s)
            return
        self._schedule(client.number, client.machine.due_s)

    def _on_request(self, client: Client, now_s: float) -> None:
        lane = self.lanes[client.number % self.p.lanes]
        client.request += 1
        self.counts["requests"] += 1
        if self._is_full(lane):
            self._refuse(client, self._backlog_s(lane), now_s)
            return
        if self.p.token_every_s > 0:
            if now_s < client.next_token_s - self.p.token_every_s:
                self._refuse(client, client.next_token_s - now_s, now_s)
                return
            client.next_token_s = max(client.next_token_s, now_s) + self.p.token_every_s
        self._schedule(client.number, now_s + self.p.timeout_s)
        lane.requests.append(Entry(now_s, client, client.request))
        self._start_if_idle(lane, now_s)

    def _refuse(self, client: Client, retry_after_s: float, now_s: float) -> None:
        self.counts["refused"] += 1
        client.machine.on_refusal(retry_after_s if self.p.is_hinting else None, now_s + self.p.round_trip_s)
        self._schedule(client.number, client.machine.due_s)

    def _learn(self, client: Client, version: int, now_s: float) -> None:
        if client.known < self.version:
            updated_at_s = self.updated_at_s[client.known + 1]
            since_s = max(updated_at_s, client.accounted_at_s)
            client.stale_s += now_s - since_s
            self.age_s2 += 0.5 * ((now_s - updated_at_s) ** 2 - (since_s - updated_at_s) ** 2)
        client.accounted_at_s = now_s
        client.known = version

    # The broker.

    def _is_full(self, lane: Lane) -> bool:
        entries = len(lane.requests) + (0 if self.p.is_conflating else len(lane.notifications))
        return entries >= self.p.lane_entries_max

    def _backlog_s(self, lane: Lane) -> float:
        return len(lane.requests) * self.mean_query_s + len(lane.notifications) * self.p.notification_s

    def _spread_s(self) -> float | None:
        return self._pace_s() if self.p.is_giving_spread else None

    def _pace_s(self) -> float:
        return self.p.clients * self.mean_query_s / (self.p.lanes * self.p.load_share)

    def _on_update(self, now_s: float) -> None:
        self.updated_at_s.append(now_s)
        after_s = self.p.update_every_s * (self._updates.exponential() if self.p.is_update_random else 1.0)
        self._schedule(self.p.clients + self.p.lanes, now_s + after_s)
        kept = math.exp(-(now_s - self.notify_load_at_s) / 20.0)
        self.notify_load = self.notify_load * kept + self.p.clients * self.p.notification_s / self.p.lanes / 20.0
        self.notify_load_at_s = now_s
        first = int(self._updates.uniform() * self.p.clients)
        for client in self.clients[first:] + self.clients[:first]:
            self._notify(client, now_s)
        for lane in self.lanes:
            self._start_if_idle(lane, now_s)

    def _notify(self, client: Client, now_s: float) -> None:
        lane = self.lanes[client.number % self.p.lanes]
        if self.p.is_conflating:
            client.waiting.add(self.version)
            if client.is_queued:
                self.counts["merged"] += 1
                return
            client.is_queued = True
        elif self._is_full(lane):
            self.counts["dropped"] += 1
            return
        else:
            client.waiting.add(self.version)
        lane.notifications.append(Entry(now_s, client, self.version))

    def _on_probe(self, now_s: float) -> None:
        self._schedule(self.p.clients + self.p.lanes + 1, now_s + self._probes.exponential() / self.p.probes_per_s)
        lane = self.lanes[int(self._probes.uniform() * self.p.lanes)]
        if self._is_full(lane):
            self.counts["probes refused"] += 1
            return
        lane.requests.append(Entry(now_s, None, 0))
        self._start_if_idle(lane, now_s)

    def _on_served(self, lane: Lane, now_s: float) -> None:
        served = lane.service
        assert served is not None
        self.busy_s += served.service_s
        if served.is_notification:
            assert served.client is not None
            self._on_sent(lane, served.client, served, now_s)
        elif served.client is not None:
            self.mean_query_s += 0.02 * (served.service_s - self.mean_query_s)
            if self._is_awaited(served.client, served.number):
                self._on_response(lane, served.client, served, now_s)
            else:
                self.counts["wasted"] += 1
        lane.service = None
        self._start_if_idle(lane, now_s)
        if lane.service is None:
            self._schedule(self.p.clients + lane.number, math.inf)

    def _is_awaited(self, client: Client, number: int) -> bool:
        return client.machine.is_asking and client.request == number

    def _on_sent(self, lane: Lane, client: Client, served: Service, now_s: float) -> None:
        if lane.draws.uniform() < self.p.network_loss:
            self.counts["lost"] += 1
            return
        client.machine.on_losses(client.gaps.on_message(served.number, served.carried))
        if served.number <= client.known:
            return
        if self.p.is_fetched:
            client.machine.on_announcement(self._spread_s(), now_s)
            if not client.machine.is_asking:
                self._schedule(client.number, client.machine.due_s)
        else:
            self._learn(client, served.number, now_s)
            client.machine.on_notification(now_s, self._spread_s())

    def _on_response(self, lane: Lane, client: Client, served: Service, now_s: float) -> None:
        self.counts["served"] += 1
        client.machine.on_losses(client.gaps.on_message(self.version, len(client.waiting)))
        client.waiting.clear()
        client.answered = self.version
        self._learn(client, self.version, now_s)
        hints = Hints(
            processing_s=served.service_s if self.p.is_hinting else None,
            delay_s=self.mean_query_s + self.p.queue_s_max if self.p.is_hinting else None,
            pace_s=self._pace_s() if self.p.is_hinting else None,
            slot_s=self._next_slot_s(lane, now_s) if self.p.is_giving_slots else None,
        )
        before = client.machine.statistics().detections
        client.machine.on_response(hints, now_s + self.p.round_trip_s)
        is_congested = client.machine.statistics().detections > before
        if served.wait_s < 1e-3:
            self.counts["false alarms"] += is_congested
        elif served.wait_s > 0.1:
            self.counts["missed"] += not is_congested
        self._schedule(client.number, client.machine.due_s)

    def _next_slot_s(self, lane: Lane, now_s: float) -> float:
        notify_load = self.notify_load * math.exp(-(now_s - self.notify_load_at_s) / 20.0)
        gap_s = self.mean_query_s / (self.p.lanes * max(0.1, self.p.load_share - notify_load))
        self.slot_at_s = max(self.slot_at_s, now_s + self._backlog_s(lane)) + gap_s
        return self.slot_at_s - now_s

    def _start_if_idle(self, lane: Lane, now_s: float) -> None:
        while lane.service is None and (lane.requests or lane.notifications):
            is_notification = self._is_notification_next(lane)
            lane.notifications_in_turn = lane.notifications_in_turn + 1 if is_notification else 0
            entry = (lane.notifications if is_notification else lane.requests).popleft()
            if is_notification:
                self._start_notification(lane, entry, now_s)
            else:
                self._start_request(lane, entry, now_s)

    def _is_notification_next(self, lane: Lane) -> bool:
        if not (lane.notifications and lane.requests):
            return bool(lane.notifications)
        if self.p.notifications_per_request:
            return lane.notifications_in_turn < self.p.notifications_per_request
        return lane.notifications[0].queued_at_s <= lane.requests[0].queued_at_s

    def _start_notification(self, lane: Lane, entry: Entry, now_s: float) -> None:
        assert entry.client is not None
        if not self.p.is_conflating:
            entry.client.waiting.discard(entry.number)
            self._serve(lane, entry, True, entry.number, 1, self.p.notification_s, now_s)
            return
        entry.client.is_queued = False
        if entry.client.waiting:
            carried = len(entry.client.waiting)
            entry.client.waiting.clear()
            self._serve(lane, entry, True, self.version, carried, self.p.notification_s, now_s)

    def _start_request(self, lane: Lane, entry: Entry, now_s: float) -> None:
        if self.p.codel_target_s and entry.client and self._is_late(lane, now_s - entry.queued_at_s, now_s):
            if self._is_awaited(entry.client, entry.number):
                self._refuse(entry.client, self._backlog_s(lane), now_s)
            return
        cost_s = self.p.query_s
        if self.p.has_cache and self.cached_version == self.version:
            cost_s = self.p.cached_query_s
        self.cached_version = self.version
        self._serve(lane, entry, False, entry.number, 0, cost_s, now_s)

    def _is_late(self, lane: Lane, delay_s: float, now_s: float) -> bool:
        if now_s >= lane.interval_ends_s:
            lane.is_late = self.p.codel_target_s < lane.least_delay_s < math.inf
            lane.least_delay_s = delay_s
            lane.interval_ends_s = now_s + self.p.codel_interval_s
        lane.least_delay_s = min(lane.least_delay_s, delay_s)
        return lane.is_late and delay_s > 2 * self.p.codel_target_s

    def _serve(
        self, lane: Lane, entry: Entry, is_notification: bool, number: int, carried: int, cost_s: float, now_s: float
    ) -> None:
        if self.p.slow_from_s <= now_s < self.p.slow_until_s:
            cost_s *= self.p.slow_factor
        service_s = cost_s * (0.5 + 0.5 * lane.draws.exponential())
        wait_s = now_s - entry.queued_at_s
        lane.service = Service(is_notification, entry.client, number, carried, service_s, wait_s)
        self._schedule(self.p.clients + lane.number, now_s + service_s)
