"""The event loop of the simulated message queue: a heap of events, and one short function for each kind of event.

A message travels device -> enqueue controller -> queue -> dequeue controller -> back-end. Only the queue is a scarce
resource: its server handles enqueues, dequeues, monitoring and notifications first come, first served (equations 1 to 5
of the paper). So one number describes its whole backlog: the time at which it will be free. The messages that a dequeue
takes are decided when it arrives, since the server keeps the order of arrival.

Invariant: messages accepted = messages delivered + messages in the queues, at every event.

The model takes its two random sources as arguments, one for the devices and one for the back-ends, so that all methods
meet the same devices. All constants that are compiled in are defined in this file, because numba notices changes in no
other. Throughout, `m` is the model and `s` its state.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.kernels.cache import njit

# Kernels are compiled without reference counting (`_nrt`). With it, each read of an array of the state would cost two
# atomic operations, and only a third of the speed would remain. So no kernel may allocate: `new_state` does, in Python.
_OPTIONS: Final[dict[str, Any]] = {"cache": True, "nogil": True, "_nrt": False}
kernel = njit(**_OPTIONS)
inlined = njit(**_OPTIONS, inline="always")

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Records = Any  # an array of QUEUE, BACK_END or REQUEST_STATE

# Methods of dequeuing.
CONVENTIONAL: Final = 0
PMS: Final = 1
RDS: Final = 2
RDS_ADAPTIVE: Final = 3
WAKE_UP: Final = 4

# Kinds of events. The comments name the subject of each event first.
ENQUEUE: Final = 0  # a device sends a message
LINGER_OVER: Final = 1  # queue: its oldest message may have waited long enough
ANNOUNCED: Final = 2  # queue: the dequeue controllers learn that it has messages
MONITOR: Final = 3  # back-end: its dequeue controller asks every queue for its length
REQUEST: Final = 4  # back-end: sends a request
RETRY: Final = 5  # request: its sleep is over
DEQUEUE: Final = 6  # request, queue: reaches the queue
ANSWER: Final = 7  # request: the queue's answer is back at the dequeue controller

# Progress of the wake-up of a queue. A wake-up sends at most one request to a queue at a time.
QUIET: Final = 0
ANNOUNCING: Final = 1
READY: Final = 2  # announced while no request was waiting
CLAIMED: Final = 3  # a request is on its way to the queue

# Counters, from the start of the run.
EVENTS: Final = 0
OFFERED: Final = 1
ACCEPTED: Final = 2
DELIVERED: Final = 3
HITS: Final = 4
MISSES: Final = 5
REFUSALS: Final = 6  # dequeues that an overloaded queue refused, at no cost to the queue
MONITORED: Final = 7
NOTIFIED: Final = 8
REQUESTS: Final = 9
TURNED_AWAY: Final = 10  # requests that found no free connection
RETRIES: Final = 11
REPLIES: Final = 12
EMPTY_REPLIES: Final = 13
COUNTERS: Final = 14

# The histogram of latencies: bins of equal ratio, 1.2 % wide, from 10 microseconds to 1000 seconds.
LATENCY_S_MIN: Final = 1e-5
BINS_PER_DECADE: Final = 200
BINS: Final = 8 * BINS_PER_DECADE

# RDS-adaptive: a full reply means that messages pile up; a miss or a small reply means that requests are too frequent.
SLEEP_AFTER_FULL: Final = 0.5
SLEEP_AFTER_MISS: Final = 1.5
SLEEP_AFTER_LITTLE: Final = 1.2
LITTLE: Final = 0.25  # share of a full reply


class Model(NamedTuple):
    """The parameters in the form that the kernel needs. `message_queue.Parameters` explains each of them."""

    method: int
    queues: int
    enqueue_controllers: int
    back_ends: int
    connections_per_back_end: int
    offered_messages_per_s: float
    back_end_requests_per_s: float
    enqueue_cost_s: float
    hit_cost_s: float
    hit_message_cost_s: float
    miss_cost_s: float
    monitor_cost_s: float
    notify_cost_s: float
    network_s: float
    request_messages_max: int
    tries_max: int
    queue_messages_max: int
    backlog_s_max: float
    monitor_period_s: float
    sleep_s: float
    sleep_s_min: float
    is_parked_on_first_miss: bool
    batch_messages: int
    linger_s: float
    warm_up_s: float
    measured_s: float


QUEUE: Final = np.dtype(
    [
        ("free_at_s", np.float64),  # when the server will have finished all accepted work
        ("busy_s", np.float64),
        ("oldest", np.int64),  # place of the oldest message
        ("length", np.int64),
        ("readiness", np.int64),
        ("is_timed", np.int64),  # an event LINGER_OVER is scheduled
    ]
)
BACK_END: Final = np.dtype(
    [
        ("next_to_visit", np.int64),
        ("sleep_s", np.float64),
        ("free_connections", np.int64),
    ]
)
REQUEST_STATE: Final = np.dtype([("taken", np.int64), ("tries", np.int64)])


class Events(NamedTuple):
    """Scheduled events: a binary heap by time. It holds at most one event per request, two per queue and back-end."""

    due_s: Floats
    due: Integers  # [place in the heap, (kind, subject, queue)]
    pending: Integers  # one item: the number of scheduled events


class State(NamedTuple):
    """Everything that changes during a run. A request is a connection in use, and has the number of that connection."""

    counts: Integers
    latencies: Integers  # histogram
    events: Events
    queues: Records
    sent_at_s: Floats  # [queue, place in a ring]: when each of its messages was sent
    next_to_fill: Integers  # [enqueue controller]
    back_ends: Records
    free_connections: Integers  # [back-end, place in a stack]
    seen_length: Integers  # [back-end, queue]: length when it was last monitored
    requests: Records
    choice: Integers  # [request, try]: the queue to visit
    # For wake-ups, both first come, first served: requests that wait for a queue, and queues that wait for a request.
    waiting: Integers
    waiting_ends: Integers
    ready: Integers
    ready_ends: Integers


def new_state(m: Model, devices: np.random.Generator, back_ends: np.random.Generator) -> State:
    requests = m.back_ends * m.connections_per_back_end
    events_max = requests + 2 * m.queues + 2 * m.back_ends + 1
    state = State(
        counts=_zeros(COUNTERS),
        latencies=_zeros(BINS),
        events=Events(np.zeros(events_max), _zeros(events_max, 3), _zeros(1)),
        queues=np.zeros(m.queues, QUEUE),
        sent_at_s=np.zeros((m.queues, m.queue_messages_max)),
        next_to_fill=devices.integers(0, m.queues, m.enqueue_controllers),
        back_ends=np.zeros(m.back_ends, BACK_END),
        free_connections=np.arange(requests).reshape(m.back_ends, m.connections_per_back_end),
        seen_length=_zeros(m.back_ends, m.queues),
        requests=np.zeros(requests, REQUEST_STATE),
        choice=_zeros(requests, m.tries_max),
        waiting=_zeros(requests),
        waiting_ends=_zeros(2),
        ready=_zeros(m.queues),
        ready_ends=_zeros(2),
    )
    state.back_ends["next_to_visit"] = back_ends.integers(0, m.queues, m.back_ends)
    state.back_ends["sleep_s"] = m.sleep_s
    state.back_ends["free_connections"] = m.connections_per_back_end
    return state


def _zeros(*shape: int) -> Integers:
    return np.zeros(shape, np.int64)


@inlined
def push_last(ring: Integers, ends: Integers, item: int) -> None:
    """Appends an item to a ring. `ends` holds the place of the first item and the number of items."""
    ring[(ends[0] + ends[1]) % ring.size] = item
    ends[1] += 1


@inlined
def pop_first(ring: Integers, ends: Integers) -> int:
    item = ring[ends[0]]
    ends[0] = (ends[0] + 1) % ring.size
    ends[1] -= 1
    return item


@inlined
def schedule(events: Events, at_s: float, kind: int, subject: int, queue: int) -> None:
    # numba gives each constant its own type: without the casts it would compile the heap once for each kind of event.
    push_event(events, at_s, np.int64(kind), np.int64(subject), np.int64(queue))


@kernel
def push_event(events: Events, at_s: float, kind: int, subject: int, queue: int) -> None:
    place = events.pending[0]
    events.pending[0] += 1
    while place > 0 and at_s < events.due_s[(place - 1) // 2]:
        move_event(events, (place - 1) // 2, place)
        place = (place - 1) // 2
    events.due_s[place] = at_s
    events.due[place, 0] = kind
    events.due[place, 1] = subject
    events.due[place, 2] = queue


@kernel
def drop_first_event(events: Events) -> None:
    """Removes the first event: moves the last one down from the top, until no event below it is due earlier."""
    events.pending[0] -= 1
    last = events.pending[0]
    at_s = events.due_s[last]
    place = 0
    while True:
        below = 2 * place + 1
        if below + 1 < last and events.due_s[below + 1] < events.due_s[below]:
            below += 1
        if below >= last or at_s <= events.due_s[below]:
            break
        move_event(events, below, place)
        place = below
    move_event(events, last, place)


@inlined
def move_event(events: Events, place: int, to_place: int) -> None:
    events.due_s[to_place] = events.due_s[place]
    for k in range(3):
        events.due[to_place, k] = events.due[place, k]


@inlined
def serve(s: State, queue: int, now_s: float, cost_s: float) -> float:
    """Gives work that arrives now to the server of a queue. Returns when it will be done."""
    s.queues[queue].free_at_s = max(now_s, s.queues[queue].free_at_s) + cost_s
    s.queues[queue].busy_s += cost_s
    return s.queues[queue].free_at_s


@inlined
def is_overloaded(m: Model, s: State, queue: int, now_s: float) -> bool:
    return s.queues[queue].free_at_s - now_s > m.backlog_s_max


# The devices.


@inlined
def on_enqueue(m: Model, s: State, devices: np.random.Generator, now_s: float) -> None:
    schedule(s.events, now_s + 1.0 / m.offered_messages_per_s, ENQUEUE, 0, 0)
    controller = int(devices.random() * m.enqueue_controllers)
    queue = s.next_to_fill[controller]
    s.next_to_fill[controller] = (queue + 1) % m.queues
    s.counts[OFFERED] += 1
    if is_overloaded(m, s, queue, now_s) or s.queues[queue].length == m.queue_messages_max:
        return
    s.counts[ACCEPTED] += 1
    s.sent_at_s[queue, (s.queues[queue].oldest + s.queues[queue].length) % m.queue_messages_max] = now_s
    s.queues[queue].length += 1
    done_s = serve(s, queue, now_s, m.enqueue_cost_s)
    if m.method == WAKE_UP and s.queues[queue].readiness == QUIET:
        if s.queues[queue].length >= m.batch_messages:
            notify(m, s, queue, now_s)
        elif not s.queues[queue].is_timed:
            time_linger(m, s, queue, done_s)


# Wake-up: a queue is announced once it holds a batch, or once its oldest message has lingered.


@inlined
def notify(m: Model, s: State, queue: int, now_s: float) -> None:
    """Makes a queue announce itself to the dequeue controllers, which costs its server some work."""
    s.counts[NOTIFIED] += 1
    done_s = serve(s, queue, now_s, m.notify_cost_s)
    announce(m, s, queue, done_s)


@inlined
def announce(m: Model, s: State, queue: int, at_s: float) -> None:
    s.queues[queue].readiness = ANNOUNCING
    schedule(s.events, at_s + m.network_s, ANNOUNCED, queue, 0)


@inlined
def time_linger(m: Model, s: State, queue: int, not_before_s: float) -> None:
    s.queues[queue].is_timed = 1
    due_s = s.sent_at_s[queue, s.queues[queue].oldest] + m.linger_s
    schedule(s.events, max(not_before_s, due_s), LINGER_OVER, queue, 0)


@inlined
def on_linger_over(m: Model, s: State, queue: int, now_s: float) -> None:
    s.queues[queue].is_timed = 0
    if s.queues[queue].readiness != QUIET or s.queues[queue].length == 0:
        return
    if s.sent_at_s[queue, s.queues[queue].oldest] + m.linger_s > now_s:
        time_linger(m, s, queue, now_s)  # the message that the timer was set for has left with a full batch
    else:
        notify(m, s, queue, now_s)


@inlined
def on_announced(m: Model, s: State, queue: int, now_s: float) -> None:
    if s.waiting_ends[1] > 0:
        claim(m, s, pop_first(s.waiting, s.waiting_ends), queue, now_s)
    else:
        s.queues[queue].readiness = READY
        push_last(s.ready, s.ready_ends, queue)


@inlined
def claim(m: Model, s: State, request: int, queue: int, now_s: float) -> None:
    s.queues[queue].readiness = CLAIMED
    schedule(s.events, now_s + m.network_s, DEQUEUE, request, queue)


@inlined
def after_claim(m: Model, s: State, queue: int, is_refused: bool) -> None:
    """Handles the end of a visit to a claimed queue.

    The answer carries the length of the queue, so a batch that is left needs no notification. Neither does a queue that
    refused: it is visited again when it has finished its backlog."""
    s.queues[queue].readiness = QUIET
    if is_refused or s.queues[queue].length >= m.batch_messages:
        announce(m, s, queue, s.queues[queue].free_at_s)
    elif s.queues[queue].length > 0 and not s.queues[queue].is_timed:
        time_linger(m, s, queue, s.queues[queue].free_at_s)


# The dequeue controllers: which queue a request visits, and what happens to the request afterwards.


@inlined
def on_monitor(m: Model, s: State, back_end: int, now_s: float) -> None:
    schedule(s.events, now_s + m.monitor_period_s, MONITOR, back_end, 0)
    for queue in range(m.queues):
        s.counts[MONITORED] += 1
        s.seen_length[back_end, queue] = s.queues[queue].length
        serve(s, queue, now_s, m.monitor_cost_s)


@inlined
def on_request(m: Model, s: State, back_ends: np.random.Generator, back_end: int, now_s: float) -> None:
    schedule(s.events, now_s + back_ends.exponential(1.0 / m.back_end_requests_per_s), REQUEST, back_end, 0)
    s.counts[REQUESTS] += 1
    if s.back_ends[back_end].free_connections == 0:
        s.counts[TURNED_AWAY] += 1
        return
    s.back_ends[back_end].free_connections -= 1
    request = s.free_connections[back_end, s.back_ends[back_end].free_connections]
    start(m, s, request, now_s)


@inlined
def start(m: Model, s: State, request: int, now_s: float) -> None:
    s.requests[request].taken = 0
    s.requests[request].tries = 0
    if m.method == WAKE_UP:
        if s.ready_ends[1] > 0:
            claim(m, s, request, pop_first(s.ready, s.ready_ends), now_s)
        else:
            push_last(s.waiting, s.waiting_ends, request)
        return
    if m.method == PMS:
        choose_longest(m, s, request)
    else:
        choose_next(m, s, request)
    schedule(s.events, now_s + m.network_s, DEQUEUE, request, s.choice[request, 0])


@inlined
def choose_next(m: Model, s: State, request: int) -> None:
    back_end = request // m.connections_per_back_end
    for k in range(m.tries_max):
        s.choice[request, k] = s.back_ends[back_end].next_to_visit
        s.back_ends[back_end].next_to_visit = (s.back_ends[back_end].next_to_visit + 1) % m.queues


@inlined
def choose_longest(m: Model, s: State, request: int) -> None:
    """Chooses the queues that were longest when last monitored, and the first of equally long ones."""
    lengths = s.seen_length[request // m.connections_per_back_end]
    for k in range(m.tries_max):
        best = -1
        for queue in range(m.queues):
            is_chosen = False
            for earlier in range(k):
                is_chosen |= s.choice[request, earlier] == queue
            if not is_chosen and (best < 0 or lengths[queue] > lengths[best]):
                best = queue
        s.choice[request, k] = best


@inlined
def on_dequeue(m: Model, s: State, request: int, queue: int, now_s: float) -> None:
    s.requests[request].tries += 1
    is_refused = is_overloaded(m, s, queue, now_s)
    if is_refused:
        s.counts[REFUSALS] += 1
        done_s = now_s
    else:
        done_s = take(m, s, request, queue, now_s)
    if m.method == WAKE_UP:
        after_claim(m, s, queue, is_refused)
    schedule(s.events, done_s + m.network_s, ANSWER, request, 0)


@inlined
def take(m: Model, s: State, request: int, queue: int, now_s: float) -> float:
    """Takes the oldest messages, as many as the request still wants. Returns when the queue will have done so."""
    messages = min(s.queues[queue].length, m.request_messages_max - s.requests[request].taken)
    if messages == 0:
        s.counts[MISSES] += 1
        return serve(s, queue, now_s, m.miss_cost_s)
    s.counts[HITS] += 1
    s.counts[DELIVERED] += messages
    done_s = serve(s, queue, now_s, m.hit_cost_s + messages * m.hit_message_cost_s)
    for k in range(messages):
        sent_at_s = s.sent_at_s[queue, (s.queues[queue].oldest + k) % m.queue_messages_max]
        s.latencies[latency_bin(done_s + m.network_s - sent_at_s)] += 1
    s.queues[queue].oldest = (s.queues[queue].oldest + messages) % m.queue_messages_max
    s.queues[queue].length -= messages
    s.requests[request].taken += messages
    return done_s


@inlined
def latency_bin(latency_s: float) -> int:
    return min(max(int(math.log10(latency_s / LATENCY_S_MIN) * BINS_PER_DECADE), 0), BINS - 1)


@inlined
def on_answer(m: Model, s: State, request: int, now_s: float) -> None:
    """Visits another queue, delays the reply, or sends it."""
    taken = s.requests[request].taken
    wants_more = taken < m.request_messages_max and s.requests[request].tries < m.tries_max
    is_rds = m.method == RDS or m.method == RDS_ADAPTIVE
    if m.method == WAKE_UP:
        if taken == 0:
            push_last(s.waiting, s.waiting_ends, request)
        elif wants_more and s.ready_ends[1] > 0:
            claim(m, s, request, pop_first(s.ready, s.ready_ends), now_s)
        else:
            reply(m, s, request)
    elif is_rds and taken == 0 and (m.is_parked_on_first_miss or not wants_more):
        sleep(m, s, request, now_s)
    elif wants_more:
        schedule(s.events, now_s + m.network_s, DEQUEUE, request, s.choice[request, s.requests[request].tries])
    else:
        reply(m, s, request)


@inlined
def sleep(m: Model, s: State, request: int, now_s: float) -> None:
    back_end = request // m.connections_per_back_end
    if m.method == RDS_ADAPTIVE:
        s.back_ends[back_end].sleep_s = min(s.back_ends[back_end].sleep_s * SLEEP_AFTER_MISS, m.sleep_s)
    schedule(s.events, now_s + s.back_ends[back_end].sleep_s, RETRY, request, 0)


@inlined
def reply(m: Model, s: State, request: int) -> None:
    back_end = request // m.connections_per_back_end
    if m.method == RDS_ADAPTIVE:
        if s.requests[request].taken == m.request_messages_max:
            s.back_ends[back_end].sleep_s = max(s.back_ends[back_end].sleep_s * SLEEP_AFTER_FULL, m.sleep_s_min)
        elif s.requests[request].taken < LITTLE * m.request_messages_max:
            s.back_ends[back_end].sleep_s = min(s.back_ends[back_end].sleep_s * SLEEP_AFTER_LITTLE, m.sleep_s)
    s.counts[REPLIES] += 1
    if s.requests[request].taken == 0:
        s.counts[EMPTY_REPLIES] += 1
    s.free_connections[back_end, s.back_ends[back_end].free_connections] = request
    s.back_ends[back_end].free_connections += 1


@kernel
def schedule_first(m: Model, s: State, back_ends: np.random.Generator) -> None:
    schedule(s.events, 0.0, ENQUEUE, 0, 0)
    for back_end in range(m.back_ends):
        schedule(s.events, back_ends.exponential(1.0 / m.back_end_requests_per_s), REQUEST, back_end, 0)
        if m.method == PMS:
            schedule(s.events, back_ends.random() * m.monitor_period_s, MONITOR, back_end, 0)


@kernel
def run_until(m: Model, s: State, devices: np.random.Generator, back_ends: np.random.Generator, end_s: float) -> None:
    while s.events.due_s[0] <= end_s:
        now_s = s.events.due_s[0]
        kind, subject, queue = s.events.due[0, 0], s.events.due[0, 1], s.events.due[0, 2]
        drop_first_event(s.events)
        s.counts[EVENTS] += 1
        if kind == ENQUEUE:
            on_enqueue(m, s, devices, now_s)
        elif kind == DEQUEUE:
            on_dequeue(m, s, subject, queue, now_s)
        elif kind == ANSWER:
            on_answer(m, s, subject, now_s)
        elif kind == REQUEST:
            on_request(m, s, back_ends, subject, now_s)
        elif kind == RETRY:
            s.counts[RETRIES] += 1
            start(m, s, subject, now_s)
        elif kind == LINGER_OVER:
            on_linger_over(m, s, subject, now_s)
        elif kind == ANNOUNCED:
            on_announced(m, s, subject, now_s)
        else:
            on_monitor(m, s, subject, now_s)
