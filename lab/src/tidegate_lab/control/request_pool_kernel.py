"""The event loop of the simulated request pool: timers of the clients, due times of the lanes and sources, and one
short function for each kind of event.

A client sleeps until its next check, or waits for a response until its timeout. One timer per client is enough; it
moves in a heap when the plan of the client changes. Requests and notifications wait in the rings of a lane, which
serves one at a time. Lanes, updates and bystanders are few and act all the time, so the next one is found by a linear
search. The network's round trip is added to each response time; apart from that, answers and notifications arrive as
soon as they are served.

The laws of clients and of the broker are the functions of `tidegate.client.control` and `tidegate.knowledge.pace`,
compiled. The steps around them are those of the client's machines. A test drives both with the same random draws and
compares them after every event. A draw is a mixed counter (SplitMix64). Each client, lane and source has its
own counter, so its draws do not depend on the order of events.

For speed, the work of every event is inlined into `run_until` and called there once: a call would pass the model and
the state field by field, 160 of them. The work for one client touches few lines of the cache.

Invariant: the heap is a permutation of all clients. All functions and constants that are compiled in are defined in
this file or in one of `kernels.cache.law_sources`, because numba notices changes in no other. Throughout, `m` is the
model and `s` its state.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.client.control import adaptive, backoff, congestion, estimates, hints, variation
from tidegate.client.control.adaptive import ADAPTIVE, GRADIENT, GRADIENT_WIDTH, NONE, RANDOM, RANDOM_WIDTH
from tidegate.client.control.backoff import ATTEMPTS_MAX, PACES_MAX
from tidegate.client.control.congestion import DELAY_S_MAX, RIGOROUS_MEAN
from tidegate.client.control.hints import MISSING
from tidegate.client.control.variation import DEVIATION
from tidegate.kernels.cache import njit
from tidegate.knowledge import pace

# Kernels are compiled without reference counting (`_nrt`), which would cost more than the steps themselves. So no
# kernel may allocate: `new_state` does, in Python.
_OPTIONS: Final[dict[str, Any]] = {"cache": True, "nogil": True, "_nrt": False}
kernel = njit(**_OPTIONS)
inlined = njit(**_OPTIONS, inline="always")

# The laws of clients and of the broker: the same functions as the product calls, compiled (decision 037).
bound_s = inlined(hints.bound_s)
is_time = inlined(hints.is_time)
find_threshold_s = inlined(congestion.find_threshold_s)
learn_average_s = inlined(congestion.learn_average_s)
learn_processing_s = inlined(congestion.learn_processing_s)
expect_interval_s = inlined(estimates.expect_interval_s)
expect_growths = inlined(estimates.expect_growths)
adapt_interval_s = inlined(adaptive.adapt_interval_s)
follow_gradient_s = inlined(adaptive.follow_gradient_s)
vary_interval_s = inlined(adaptive.vary_interval_s)
longest_backoff_s = inlined(backoff.longest_backoff_s)
printed_backoff_s = inlined(backoff.printed_backoff_s)
repaired_backoff_s = inlined(backoff.repaired_backoff_s)
learn_success_s = inlined(backoff.learn_success_s)
to_normal = inlined(variation.to_normal)
learn_mean_s = inlined(pace.learn_mean_s)
fade_load = inlined(pace.fade_load)
serve_all_s = inlined(pace.serve_all_s)
next_slot_at_s = inlined(pace.next_slot_at_s)

Integers = NDArray[np.int64]
Indices = NDArray[np.int32]
Floats = NDArray[np.float64]
Records = Any  # an array of CLIENT, LANE or BROKER

# The places of the members of `BackoffKind` and `Variation`.
NO_BACKOFF, PRINTED, REPAIRED, FULL_JITTER = range(4)
UNIFORM, NORMAL = range(2)

# Phases of a client: it sleeps until a check, sleeps until it fetches an announced update, or waits for a response.
CHECKS_NEXT: Final = 0
FETCHES_NEXT: Final = 1
ASKS: Final = 2

# What a lane is serving.
IDLE: Final = 0
NOTIFICATION: Final = 1
REQUEST: Final = 2
PROBE: Final = -1  # stands for a client: marks a request of a bystander

# Counters, from the start of the run.
EVENTS: Final = 0
REQUESTS: Final = 1
REFUSED: Final = 2
TIMED_OUT: Final = 3
SERVED: Final = 4
WASTED: Final = 5  # served after the client had given up
NOTIFIED: Final = 6
DROPPED: Final = 7  # notifications for which the pool had no room
LOST: Final = 8  # notifications that were sent and did not arrive
MERGED: Final = 9
PROBES: Final = 10
PROBES_REFUSED: Final = 11
CALM: Final = 12  # responses that had hardly waited at the broker
FALSE_ALARMS: Final = 13  # those of them that the client took for congested
CONGESTED: Final = 14  # responses that had waited long at the broker
MISSED: Final = 15  # those of them that the client did not take for congested
LOSSES: Final = 16
RESTARTS: Final = 17
DETECTIONS: Final = 18
COUNTERS: Final = 19

CALM_WAIT_S: Final = 1e-3
CONGESTED_WAIT_S: Final = 0.1

# The histograms of latencies: bins of equal ratio, 1.2 % wide, from 10 microseconds to 1000 seconds.
LATENCY_S_MIN: Final = 1e-5
BINS_PER_DECADE: Final = 200
BINS: Final = 8 * BINS_PER_DECADE
BINS_PER_E: Final = BINS_PER_DECADE / math.log(10.0)
SPANS_PER_S: Final = 10  # requests are counted by spans of 100 ms

# The published figures were simulated with these values, so they remain. The product and the small broker forget
# faster: SMOOTHING is 0.05 and NOTIFYING_S is 10 s in tidegate.knowledge.pace.
SIMULATED_SMOOTHING: Final = 0.02
SIMULATED_NOTIFYING_S: Final = 20.0

# SplitMix64.
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = (np.uint64(bits) for bits in (30, 27, 31, 11))
_UNIT: Final = 2.0**-53


class Model(NamedTuple):
    """The parameters as the kernel needs them. `request_pool.Parameters` and the client's settings explain each."""

    clients: int
    lanes: int
    query_s: float
    cached_query_s: float
    notification_s: float
    round_trip_s: float
    lane_entries_max: int
    network_loss: float
    update_every_s: float
    is_update_random: bool
    is_fetched: bool
    has_cache: bool
    slow_from_s: float
    slow_until_s: float
    slow_factor: float
    timeout_s: float
    probes_per_s: float
    is_hinting: bool
    is_giving_slots: bool
    is_giving_spread: bool
    is_conflating: bool
    notifications_per_request: int
    codel_target_s: float
    codel_interval_s: float
    token_every_s: float
    load_share: float
    queue_s_max: float

    strategy: int
    first_s: float
    interval_s_min: float
    interval_s_max: float
    alpha: float
    delta_s: float
    is_frozen_by_congestion: bool
    forgetting_s: float
    prior_episodes: float
    prior_s: float
    decrease_constant: float
    detection: int
    network_s: float
    delay_s_default: float
    queue_share: float
    average_weight: float
    average_factor: float
    backoff: int
    first_value: int
    variation: int
    beta: float
    backoff_s_min: float
    backoff_s_max: float
    is_restarted_by_notifications: bool
    is_backoff_alone_after_failure: bool


CACHE_LINE_BYTES: Final = 64

# A record takes three lines of the cache. A notification touches only the first.
CLIENT: Final = np.dtype(
    [
        ("accounted_at_s", np.float64),  # stale time is counted up to here
        ("stale_s", np.float64),
        ("heard_at_s", np.float64),  # time of a notification since the last check, or MISSING
        ("heard_spread_s", np.float64),  # the spread that came with that notification, or 0
        ("known", np.int32),  # the version that the client holds
        ("seen", np.int32),  # number of the last decision to notify that the client knows of
        ("answered", np.int32),  # the version in the last response, as the broker knows it
        ("waiting", np.int32),  # decisions that wait to be sent and that no response has carried yet
        ("pending_from", np.int32),  # when conflating: first decision in the waiting entry, 0 for none
        ("is_queued", np.int16),
        ("phase", np.int16),
        ("new_losses", np.int32),
        ("lane", np.int32),
        ("interval_s", np.float64),
        ("backoff_s", np.float64),
        ("average_s", np.float64),
        ("processing_s", np.float64),
        ("delay_s", np.float64),
        ("threshold_s", np.float64),
        ("shortest_s", np.float64),
        ("asked_at_s", np.float64),
        ("checked_at_s", np.float64),
        ("waited_s", np.float64),
        ("calm_interval_s", np.float64),
        ("success_s", np.float64),
        ("episodes", np.float64),
        ("elapsed_s", np.float64),
        ("next_token_s", np.float64),
        ("request", np.int32),  # number of its last request
        ("attempts", np.int32),
    ]
)
LANE: Final = np.dtype(
    [
        ("serves", np.int64),
        ("client", np.int64),
        ("number", np.int64),  # version of a notification, or number of a request
        ("carried", np.int64),
        ("queued_at_s", np.float64),
        ("service_s", np.float64),
        ("wait_s", np.float64),
        ("notifications_in_turn", np.int64),
        ("least_delay_s", np.float64),  # for CoDel, as the next two
        ("interval_ends_s", np.float64),
        ("is_late", np.int64),
    ]
)
BROKER: Final = np.dtype(
    [
        ("version", np.int64),
        ("cached_version", np.int64),
        ("mean_query_s", np.float64),
        ("slot_at_s", np.float64),
        ("notify_load", np.float64),
        ("notify_load_at_s", np.float64),
        ("busy_s", np.float64),
        ("age_s2", np.float64),  # integral of the age of the oldest unseen update over time and clients
    ]
)
ENTRY: Final = np.dtype([("queued_at_s", np.float64), ("client", np.int32), ("number", np.int32)])
TIMER: Final = np.dtype([("due_s", np.float64), ("client", np.int64)])


class Timers(NamedTuple):
    """When clients act next: a heap by time and client with four children per place. Each client knows its place.

    The last four places are padded with numbers that belong to no client and are never due."""

    heap: Records  # [place in the heap]
    place: Indices  # [client]


class State(NamedTuple):
    """Everything that changes during a run."""

    counts: Integers
    responses: Integers  # histogram
    bystanders: Integers  # histogram
    requests_by_span: Integers
    updated_at_s: Floats  # [version]
    streams: NDArray[np.uint64]  # one per client, one per lane, updates, probes
    timers: Timers
    due_s: Floats  # one per lane, updates, probes
    clients: Records
    lanes: Records
    broker: Records  # one item
    requests: Records  # [lane, place in a ring]
    requests_ends: Integers  # [lane, (place of the first, number of items)]
    notifications: Records
    notifications_ends: Integers


def new_state(m: Model, seed: int, join_within_s: float, run_s: float) -> State:
    entries = m.clients + m.lanes + 2
    places = max(m.lane_entries_max, -(-m.clients // m.lanes)) + 1
    updates_max = int(run_s / m.update_every_s * 3) + 200
    state = State(
        counts=np.zeros(COUNTERS, np.int64),
        responses=np.zeros(BINS, np.int64),
        bystanders=np.zeros(BINS, np.int64),
        requests_by_span=np.zeros(int(run_s * SPANS_PER_S) + 2, np.int64),
        updated_at_s=np.full(updates_max, np.inf),
        streams=np.random.SeedSequence(seed).generate_state(entries, np.uint64),
        timers=new_timers(m.clients),
        due_s=np.full(m.lanes + 2, np.inf),
        clients=zeros_in_lines(m.clients, CLIENT, 0),
        lanes=np.zeros(m.lanes, LANE),
        broker=np.zeros(1, BROKER),
        requests=np.zeros((m.lanes, places), ENTRY),
        requests_ends=np.zeros((m.lanes, 2), np.int64),
        notifications=np.zeros((m.lanes, places), ENTRY),
        notifications_ends=np.zeros((m.lanes, 2), np.int64),
    )
    state.clients["lane"] = np.arange(m.clients) % m.lanes
    state.clients["heard_at_s"] = MISSING
    state.clients["interval_s"] = np.inf if m.strategy == NONE else m.first_s
    state.clients["delay_s"] = m.delay_s_default
    state.clients["threshold_s"] = m.delay_s_default + m.network_s
    state.clients["shortest_s"] = np.inf
    state.lanes["least_delay_s"] = np.inf
    state.broker["mean_query_s"] = m.query_s
    schedule_first(m, state, join_within_s)
    return state


def new_timers(clients: int) -> Timers:
    """Returns timers that are never due. The four children of a place lie in one line of the cache."""
    size = -(-(clients - 1) // 4) * 4 + 1
    heap = zeros_in_lines(size, TIMER, first=1)
    heap["due_s"], heap["client"] = np.inf, np.arange(size)
    return Timers(heap, np.arange(clients, dtype=np.int32))


def zeros_in_lines(count: int, dtype: np.dtype[Any], first: int) -> Records:
    """Returns an array of zeros whose record `first` starts at a line of the cache."""
    memory = np.zeros(count * dtype.itemsize + CACHE_LINE_BYTES, np.uint8)
    start = -(memory.ctypes.data + first * dtype.itemsize) % CACHE_LINE_BYTES
    return memory[start : start + count * dtype.itemsize].view(dtype)


# Random draws.


@inlined
def draw(s: State, stream: int) -> float:
    """Returns a uniform number from 0 to 1, excluding 1."""
    s.streams[stream] += _STEP
    z = s.streams[stream]
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    z = z ^ (z >> _S31)
    return np.float64(z >> _S11) * _UNIT


@inlined
def draw_exponential(s: State, stream: int) -> float:
    return -math.log(1.0 - draw(s, stream))


@kernel
def draw_normal(s: State, stream: int) -> float:
    return to_normal(draw(s, stream), draw(s, stream))


# The timers and the rings.


@kernel
def reschedule(t: Timers, client: int, due_s: float) -> None:
    place = t.place[client]
    if due_s < t.heap[place].due_s:
        while place > 0:
            above = (place - 1) >> 2
            if not is_sooner(due_s, client, t.heap[above].due_s, t.heap[above].client):
                break
            put(t, place, t.heap[above].due_s, t.heap[above].client)
            place = above
    else:
        while 4 * place + 4 < t.heap.size:
            below = soonest_of_four(t, 4 * place + 1)
            if not is_sooner(t.heap[below].due_s, t.heap[below].client, due_s, client):
                break
            put(t, place, t.heap[below].due_s, t.heap[below].client)
            place = below
    put(t, place, due_s, client)


@inlined
def soonest_of_four(t: Timers, first: int) -> int:
    """Returns which of four neighbouring places is due first. Sums replace branches, which would be unpredictable."""
    one = first + is_place_sooner(t, first + 1, first)
    two = first + 2 + is_place_sooner(t, first + 3, first + 2)
    return one + (two - one) * is_place_sooner(t, two, one)


@inlined
def is_place_sooner(t: Timers, place: int, other: int) -> bool:
    return is_sooner(t.heap[place].due_s, t.heap[place].client, t.heap[other].due_s, t.heap[other].client)


@inlined
def is_sooner(due_s: float, client: int, other_s: float, other: int) -> bool:
    return (due_s < other_s) | ((due_s == other_s) & (client < other))


@inlined
def put(t: Timers, place: int, due_s: float, client: int) -> None:
    t.heap[place].due_s = due_s
    t.heap[place].client = client
    t.place[client] = place


@inlined
def push_last(ring: Records, ends: Integers, lane: int, queued_at_s: float, client: int, number: int) -> None:
    place = ends[lane, 0] + ends[lane, 1]
    if place >= ring.shape[1]:
        place -= ring.shape[1]
    ring[lane, place].queued_at_s = queued_at_s
    ring[lane, place].client = client
    ring[lane, place].number = number
    ends[lane, 1] += 1


@inlined
def drop_first(ring: Records, ends: Integers, lane: int) -> None:
    ends[lane, 0] += 1
    if ends[lane, 0] == ring.shape[1]:
        ends[lane, 0] = 0
    ends[lane, 1] -= 1


@inlined
def count_latency(histogram: Integers, latency_s: float) -> None:
    place = int(math.log(max(latency_s, LATENCY_S_MIN) / LATENCY_S_MIN) * BINS_PER_E)
    histogram[min(place, BINS - 1)] += 1


# The client, as in tidegate.client.control.


@inlined
def on_losses(s: State, client: int, sequence: int, carried: int) -> None:
    c = s.clients[client]
    lost = max(0, sequence - c.seen - carried)
    s.clients[client].seen = max(c.seen, sequence)
    s.clients[client].new_losses += lost
    s.counts[LOSSES] += lost


@kernel
def step_adaptive(m: Model, s: State, client: int, is_congested: bool, now_s: float) -> float:
    c = s.clients[client]
    losses = c.new_losses
    elapsed_s = max(0.0, now_s - c.checked_at_s)
    s.clients[client].new_losses = 0
    s.clients[client].checked_at_s = now_s
    if m.strategy < ADAPTIVE or m.strategy == GRADIENT:
        return c.interval_s
    kept = math.exp(-elapsed_s / m.forgetting_s)
    c.episodes = c.episodes * kept + (1.0 if losses > 0 else 0.0)
    c.elapsed_s = c.elapsed_s * kept + elapsed_s
    expected_s, growths = 0.0, 0.0
    if m.strategy != ADAPTIVE:
        episodes_per_s = (c.episodes + m.prior_episodes) / (c.elapsed_s + m.prior_s)
        expected_s = expect_interval_s(episodes_per_s, m.decrease_constant, m.alpha, m.delta_s)
        expected_s = max(m.interval_s_min, expected_s)
        growths = expect_growths(expected_s, m.alpha, m.delta_s)
    is_frozen = is_congested and m.is_frozen_by_congestion
    interval_s = adapt_interval_s(m.strategy, c.interval_s, losses, is_frozen, expected_s, growths, m.alpha, m.delta_s)
    c.interval_s = min(m.interval_s_max, max(m.interval_s_min, interval_s))
    return c.interval_s


@inlined
def step_interval(m: Model, s: State, client: int, is_congested: bool, response_s: float, now_s: float) -> float:
    """Returns the next interval. `response_s` is MISSING after a failure."""
    interval_s = step_adaptive(m, s, client, is_congested, now_s)
    if m.strategy == RANDOM:
        return vary_interval_s(interval_s, RANDOM_WIDTH, draw(s, client))
    if m.strategy == GRADIENT:
        return step_gradient(m, s, client, response_s)
    return interval_s


@kernel
def step_gradient(m: Model, s: State, client: int, response_s: float) -> float:
    c = s.clients[client]
    if response_s >= 0.0:
        c.shortest_s = min(c.shortest_s, response_s)
    interval_s = follow_gradient_s(c.interval_s, response_s, c.shortest_s)
    c.interval_s = min(m.interval_s_max, max(m.interval_s_min, interval_s))
    return vary_interval_s(c.interval_s, GRADIENT_WIDTH, draw(s, client))


@kernel
def detect(m: Model, s: State, client: int, response_s: float, processing_s: float, delay_s: float) -> bool:
    c = s.clients[client]
    if is_time(delay_s, DELAY_S_MAX):
        c.delay_s = delay_s
    if not is_time(processing_s, response_s):
        processing_s = MISSING
    elif m.detection == RIGOROUS_MEAN:
        processing_s = learn_processing_s(c.processing_s, processing_s, m.average_weight)
        c.processing_s = processing_s
    c.threshold_s = find_threshold_s(
        m.detection, response_s, processing_s, c.delay_s, c.average_s, m.network_s, m.queue_share, m.average_factor
    )
    is_congested = response_s > c.threshold_s
    c.average_s = learn_average_s(m.detection, c.average_s, response_s, is_congested, m.average_weight)
    s.counts[DETECTIONS] += is_congested
    return is_congested


@inlined
def on_calm(s: State, client: int) -> None:
    c = s.clients[client]
    c.success_s = learn_success_s(c.success_s, c.backoff_s)
    c.calm_interval_s = c.waited_s
    c.backoff_s = 0.0
    c.attempts = 0


@kernel
def collide(m: Model, s: State, client: int, excess_s: float, adaptive_s: float, pace_s: float) -> float:
    c = s.clients[client]
    if m.backoff == NO_BACKOFF:
        return 0.0
    if m.backoff == PRINTED:
        normal = draw_normal(s, client)
        c.backoff_s = printed_backoff_s(c.backoff_s, c.average_s, normal, m.beta, m.backoff_s_min, m.backoff_s_max)
        return c.backoff_s
    longest_s = longest_backoff_s(pace_s, m.backoff_s_min, m.backoff_s_max)
    if m.backoff == FULL_JITTER:
        c.attempts = min(c.attempts + 1, ATTEMPTS_MAX)
        span_s = min(m.backoff_s_min * float(1 << c.attempts), longest_s)
        c.backoff_s = 0.5 * span_s
        return span_s * draw(s, client)
    wanted_s = repaired_backoff_s(
        m.first_value,
        c.backoff_s,
        c.calm_interval_s,
        c.success_s,
        adaptive_s,
        excess_s,
        pace_s,
        m.beta,
        m.backoff_s_min,
    )
    c.backoff_s = min(wanted_s, longest_s)
    if m.variation == UNIFORM:
        return 2.0 * c.backoff_s * draw(s, client)
    factor = MISSING
    while not (0.0 <= factor <= 2.0):
        factor = 1.0 + DEVIATION * draw_normal(s, client)
    return c.backoff_s * factor


@inlined
def wait(m: Model, s: State, client: int, wait_s: float, hint_s: float, now_s: float) -> None:
    s.clients[client].phase = CHECKS_NEXT
    s.clients[client].heard_at_s = MISSING
    waited_s = max(wait_s, bound_s(hint_s, m.interval_s_max))
    s.clients[client].waited_s = waited_s
    reschedule(s.timers, client, now_s + waited_s)


@kernel
def on_failure(m: Model, s: State, client: int, excess_s: float, retry_after_s: float, now_s: float) -> None:
    s.counts[DETECTIONS] += 1
    adaptive_s = step_interval(m, s, client, True, MISSING, now_s)
    backoff_s = collide(m, s, client, excess_s, adaptive_s, MISSING)
    if not (m.is_backoff_alone_after_failure and m.backoff != NO_BACKOFF):
        backoff_s = adaptive_s + backoff_s
    wait(m, s, client, backoff_s, retry_after_s, now_s)


@inlined
def on_refusal(m: Model, s: State, client: int, retry_after_s: float, now_s: float) -> None:
    s.counts[REFUSED] += 1
    if not m.is_hinting:
        retry_after_s = MISSING
    on_failure(m, s, client, max(0.0, bound_s(retry_after_s, m.interval_s_max)), retry_after_s, now_s + m.round_trip_s)


@inlined
def is_restarted(m: Model, s: State, client: int, now_s: float) -> bool:
    """Returns whether notifications since the last check replace the check that is due. If so, plans the next one."""
    heard_at_s = s.clients[client].heard_at_s
    if heard_at_s < 0.0:
        return False
    since_s = max(0.0, now_s - heard_at_s)
    wait_s = step_adaptive(m, s, client, False, now_s) - since_s
    s.clients[client].heard_at_s = MISSING
    if wait_s <= 0:
        return False
    s.counts[RESTARTS] += 1
    s.clients[client].phase = CHECKS_NEXT
    if s.clients[client].heard_spread_s > 0.0:
        wait_s += s.clients[client].heard_spread_s * draw(s, client)
    reschedule(s.timers, client, now_s + wait_s)
    return True


@inlined
def on_announcement(m: Model, s: State, client: int, now_s: float) -> None:
    if s.clients[client].phase == ASKS:
        return
    span_s = 2.0 * s.clients[client].backoff_s
    if m.is_giving_spread:
        span_s = bound_s(pace_s(m, s), m.interval_s_max)
    s.clients[client].heard_at_s = MISSING
    due_s = now_s + span_s * draw(s, client)
    if s.clients[client].phase != FETCHES_NEXT or due_s < s.timers.heap[s.timers.place[client]].due_s:
        s.clients[client].phase = FETCHES_NEXT
        reschedule(s.timers, client, due_s)


@inlined
def learn(s: State, client: int, version: int, now_s: float) -> None:
    """Gives a client a version. Its time up to now counts as stale if it held less than the newest version."""
    account(s, client, now_s)
    s.clients[client].known = version


@inlined
def account(s: State, client: int, now_s: float) -> None:
    c = s.clients[client]
    updated_at_s = s.updated_at_s[c.known + 1]
    since_s = max(updated_at_s, c.accounted_at_s)
    if since_s < now_s:
        s.clients[client].stale_s += now_s - since_s
        # The age grows with time, so its integral is half the difference of the squares.
        s.broker[0].age_s2 += 0.5 * ((now_s - updated_at_s) ** 2 - (since_s - updated_at_s) ** 2)
    s.clients[client].accounted_at_s = now_s


# The broker.


@inlined
def pace_s(m: Model, s: State) -> float:
    """Returns the time in which the broker would serve every client once."""
    return serve_all_s(m.clients, s.broker[0].mean_query_s, m.lanes, m.load_share)


@inlined
def backlog_s(m: Model, s: State, lane: int) -> float:
    return s.requests_ends[lane, 1] * s.broker[0].mean_query_s + s.notifications_ends[lane, 1] * m.notification_s


@inlined
def is_full(m: Model, s: State, lane: int) -> bool:
    """Returns whether a lane is full. Merged notifications do not count: there is at most one per client."""
    entries = s.requests_ends[lane, 1]
    if not m.is_conflating:
        entries += s.notifications_ends[lane, 1]
    return entries >= m.lane_entries_max


@inlined
def next_slot_s(m: Model, s: State, lane: int, now_s: float) -> float:
    b = s.broker[0]
    notify_load = fade_load(b.notify_load, now_s - b.notify_load_at_s, SIMULATED_NOTIFYING_S)
    b.slot_at_s = next_slot_at_s(
        b.slot_at_s, now_s, backlog_s(m, s, lane), b.mean_query_s, m.lanes, m.load_share, notify_load
    )
    return b.slot_at_s - now_s


@inlined
def on_update(m: Model, s: State, now_s: float) -> None:
    updates = m.clients + m.lanes
    s.broker[0].version += 1
    version = s.broker[0].version
    s.updated_at_s[version] = now_s
    after_s = m.update_every_s
    if m.is_update_random:
        after_s *= draw_exponential(s, updates)
    # There is room for three times the expected number of updates and more. A run that fills it has no further ones.
    s.due_s[m.lanes] = now_s + after_s if version + 2 < s.updated_at_s.size else math.inf
    b = s.broker[0]
    notify_load = fade_load(b.notify_load, now_s - b.notify_load_at_s, SIMULATED_NOTIFYING_S)
    b.notify_load = notify_load + m.clients * m.notification_s / m.lanes / SIMULATED_NOTIFYING_S
    b.notify_load_at_s = now_s
    client = int(draw(s, updates) * m.clients)
    for _ in range(m.clients):
        notify(m, s, client, version, now_s)
        client = client + 1 if client + 1 < m.clients else 0


@inlined
def notify(m: Model, s: State, client: int, version: int, now_s: float) -> None:
    lane = s.clients[client].lane
    s.counts[NOTIFIED] += 1
    if m.is_conflating:
        if s.clients[client].pending_from == 0:
            s.clients[client].pending_from = version
        if s.clients[client].is_queued:
            s.counts[MERGED] += 1
            return
        s.clients[client].is_queued = 1
    elif is_full(m, s, lane):
        s.counts[DROPPED] += 1
        return
    else:
        s.clients[client].waiting += 1
    push_last(s.notifications, s.notifications_ends, lane, now_s, client, version)


@inlined
def on_probe(m: Model, s: State, now_s: float) -> int:
    """Sends a request of a bystander. Returns the lane that received it."""
    probes = m.clients + m.lanes + 1
    s.due_s[m.lanes + 1] = now_s + draw_exponential(s, probes) / m.probes_per_s
    lane = int(draw(s, probes) * m.lanes)
    s.counts[PROBES] += 1
    if is_full(m, s, lane):
        s.counts[PROBES_REFUSED] += 1
    else:
        push_last(s.requests, s.requests_ends, lane, now_s, PROBE, 0)
    return lane


@inlined
def on_client(m: Model, s: State, client: int, now_s: float) -> None:
    if s.clients[client].phase == ASKS:
        s.counts[TIMED_OUT] += 1
        excess_s = max(0.0, max(0.0, now_s - s.clients[client].asked_at_s) - s.clients[client].threshold_s)
        on_failure(m, s, client, excess_s, MISSING, now_s)
    elif not is_restarted(m, s, client, now_s):
        on_request(m, s, client, now_s)


@inlined
def on_request(m: Model, s: State, client: int, now_s: float) -> None:
    lane = s.clients[client].lane
    s.clients[client].phase = ASKS
    s.clients[client].asked_at_s = now_s
    s.clients[client].heard_at_s = MISSING
    s.clients[client].request += 1
    s.counts[REQUESTS] += 1
    s.requests_by_span[int(now_s * SPANS_PER_S)] += 1
    if is_full(m, s, lane):
        on_refusal(m, s, client, backlog_s(m, s, lane), now_s)
        return
    if m.token_every_s > 0:
        next_token_s = s.clients[client].next_token_s
        if now_s < next_token_s - m.token_every_s:
            on_refusal(m, s, client, next_token_s - now_s, now_s)
            return
        s.clients[client].next_token_s = max(next_token_s, now_s) + m.token_every_s
    reschedule(s.timers, client, now_s + m.timeout_s)
    push_last(s.requests, s.requests_ends, lane, now_s, client, s.clients[client].request)


@inlined
def on_served(m: Model, s: State, lane: int, now_s: float) -> None:
    served = s.lanes[lane]
    client = served.client
    s.broker[0].busy_s += served.service_s
    if served.serves == NOTIFICATION:
        on_sent(m, s, lane, now_s)
    elif client == PROBE:
        count_latency(s.bystanders, now_s - served.queued_at_s + m.round_trip_s)
    else:
        b = s.broker[0]
        b.mean_query_s = learn_mean_s(b.mean_query_s, served.service_s, SIMULATED_SMOOTHING)
        if s.clients[client].phase == ASKS and s.clients[client].request == served.number:
            on_response(m, s, lane, client, now_s)
        else:
            s.counts[WASTED] += 1
    s.lanes[lane].serves = IDLE


@inlined
def on_sent(m: Model, s: State, lane: int, now_s: float) -> None:
    client, version = s.lanes[lane].client, s.lanes[lane].number
    if draw(s, m.clients + lane) < m.network_loss:
        s.counts[LOST] += 1
        return
    on_losses(s, client, version, s.lanes[lane].carried)
    if version <= s.clients[client].known:
        return
    if m.is_fetched:
        on_announcement(m, s, client, now_s)
        return
    learn(s, client, version, now_s)
    if m.is_restarted_by_notifications and s.clients[client].phase != ASKS:
        s.clients[client].heard_at_s = now_s
        if m.is_giving_spread:
            s.clients[client].heard_spread_s = bound_s(pace_s(m, s), m.interval_s_max)


@inlined
def on_response(m: Model, s: State, lane: int, client: int, now_s: float) -> None:
    version = s.broker[0].version
    # The response carries the outcome of all decisions that still wait to be sent, so these do not count as lost.
    if m.is_conflating:
        pending_from = s.clients[client].pending_from
        carried = version - pending_from + 1 if pending_from > 0 else 0
        s.clients[client].pending_from = 0
    else:
        carried = s.clients[client].waiting
        s.clients[client].waiting = 0
        s.clients[client].answered = version
    on_losses(s, client, version, carried)
    learn(s, client, version, now_s)
    s.counts[SERVED] += 1
    arrived_at_s = now_s + m.round_trip_s
    response_s = max(0.0, arrived_at_s - s.clients[client].asked_at_s)
    count_latency(s.responses, response_s)
    processing_s, delay_s, wished_s, slot_s = MISSING, MISSING, MISSING, MISSING
    if m.is_hinting:
        processing_s = s.lanes[lane].service_s
        delay_s = s.broker[0].mean_query_s + m.queue_s_max
        wished_s = pace_s(m, s)
    if m.is_giving_slots:
        slot_s = next_slot_s(m, s, lane, now_s)
    is_congested = detect(m, s, client, response_s, processing_s, delay_s)
    if s.lanes[lane].wait_s < CALM_WAIT_S:
        s.counts[CALM] += 1
        s.counts[FALSE_ALARMS] += is_congested
    elif s.lanes[lane].wait_s > CONGESTED_WAIT_S:
        s.counts[CONGESTED] += 1
        s.counts[MISSED] += not is_congested
    adaptive_s = step_interval(m, s, client, is_congested, response_s, arrived_at_s)
    backoff_s = 0.0
    if is_congested:
        excess_s = max(0.0, response_s - s.clients[client].threshold_s)
        backoff_s = collide(m, s, client, excess_s, adaptive_s, bound_s(wished_s, 1.0 / PACES_MAX * m.interval_s_max))
    else:
        on_calm(s, client)
    wait(m, s, client, adaptive_s + backoff_s, slot_s, arrived_at_s)


@inlined
def start_service(m: Model, s: State, lane: int, now_s: float) -> None:
    """Starts to serve the next entry of a lane, skipping those that were cancelled or that CoDel refuses."""
    while s.requests_ends[lane, 1] + s.notifications_ends[lane, 1] > 0:
        if is_notification_next(m, s, lane):
            entry = s.notifications[lane, s.notifications_ends[lane, 0]]
            client, number, queued_at_s, carried = entry.client, entry.number, entry.queued_at_s, 1
            drop_first(s.notifications, s.notifications_ends, lane)
            s.lanes[lane].notifications_in_turn += 1
            if m.is_conflating:
                s.clients[client].is_queued = 0
                pending_from = s.clients[client].pending_from
                if pending_from == 0:
                    continue
                number = s.broker[0].version
                carried = number - pending_from + 1
                s.clients[client].pending_from = 0
            elif number > s.clients[client].answered:
                s.clients[client].waiting -= 1
            serves, cost_s = NOTIFICATION, m.notification_s
        else:
            entry = s.requests[lane, s.requests_ends[lane, 0]]
            client, number, queued_at_s, carried = entry.client, entry.number, entry.queued_at_s, 0
            drop_first(s.requests, s.requests_ends, lane)
            s.lanes[lane].notifications_in_turn = 0
            if m.codel_target_s > 0 and client != PROBE and is_late(m, s, lane, now_s - queued_at_s, now_s):
                if s.clients[client].phase == ASKS and s.clients[client].request == number:
                    on_refusal(m, s, client, backlog_s(m, s, lane), now_s)
                continue
            serves, cost_s = REQUEST, query_cost_s(m, s)
        if m.slow_from_s <= now_s < m.slow_until_s:
            cost_s *= m.slow_factor
        # The distribution is a shifted exponential: the time is at least half of the mean.
        service_s = cost_s * (0.5 + 0.5 * draw_exponential(s, m.clients + lane))
        s.lanes[lane].serves = serves
        s.lanes[lane].client = client
        s.lanes[lane].number = number
        s.lanes[lane].carried = carried
        s.lanes[lane].queued_at_s = queued_at_s
        s.lanes[lane].service_s = service_s
        s.lanes[lane].wait_s = now_s - queued_at_s
        s.due_s[lane] = now_s + service_s
        return
    s.due_s[lane] = math.inf


@inlined
def is_notification_next(m: Model, s: State, lane: int) -> bool:
    """Returns whether a lane serves a notification next.

    The older entry goes first. If `notifications_per_request` is set, that many notifications precede a request."""
    if s.notifications_ends[lane, 1] == 0:
        return False
    if s.requests_ends[lane, 1] == 0:
        return True
    if m.notifications_per_request > 0:
        return s.lanes[lane].notifications_in_turn < m.notifications_per_request
    notified_at_s = s.notifications[lane, s.notifications_ends[lane, 0]].queued_at_s
    return notified_at_s <= s.requests[lane, s.requests_ends[lane, 0]].queued_at_s


@inlined
def query_cost_s(m: Model, s: State) -> float:
    if not m.has_cache:
        return m.query_s
    # The cached version is stored plus one: 0 means that nothing is cached yet.
    if s.broker[0].cached_version == s.broker[0].version + 1:
        return m.cached_query_s
    s.broker[0].cached_version = s.broker[0].version + 1
    return m.query_s


@inlined
def is_late(m: Model, s: State, lane: int, delay_s: float, now_s: float) -> bool:
    """Returns whether CoDel refuses a request.

    It refuses those that waited more than twice the target, if the least wait of the last interval was above the
    target."""
    if now_s >= s.lanes[lane].interval_ends_s:
        least_s = s.lanes[lane].least_delay_s
        s.lanes[lane].is_late = m.codel_target_s < least_s < math.inf
        s.lanes[lane].least_delay_s = delay_s
        s.lanes[lane].interval_ends_s = now_s + m.codel_interval_s
    elif delay_s < s.lanes[lane].least_delay_s:
        s.lanes[lane].least_delay_s = delay_s
    return s.lanes[lane].is_late and delay_s > 2 * m.codel_target_s


# A run.


@kernel
def schedule_first(m: Model, s: State, join_within_s: float) -> None:
    for client in range(m.clients):
        joined_at_s = join_within_s * draw(s, client)
        s.clients[client].asked_at_s = joined_at_s
        s.clients[client].checked_at_s = joined_at_s
        if m.strategy != NONE:
            reschedule(s.timers, client, joined_at_s)
    first_s = m.update_every_s
    if m.is_update_random:
        first_s *= draw_exponential(s, m.clients + m.lanes)
    s.due_s[m.lanes] = first_s
    probes = m.clients + m.lanes + 1
    if m.probes_per_s > 0:
        s.due_s[m.lanes + 1] = draw_exponential(s, probes) / m.probes_per_s


@kernel
def run_until(m: Model, s: State, end_s: float) -> None:
    while True:
        source = soonest_source(s)
        now_s = min(s.timers.heap[0].due_s, s.due_s[source])
        if now_s > end_s:
            return
        s.counts[EVENTS] += 1
        first, last = source, source
        if s.timers.heap[0].due_s == now_s:
            client = s.timers.heap[0].client
            on_client(m, s, client, now_s)
            first = last = s.clients[client].lane
        elif source < m.lanes:
            on_served(m, s, source, now_s)
        elif source == m.lanes:
            on_update(m, s, now_s)
            first, last = 0, m.lanes - 1
        else:
            first = last = on_probe(m, s, now_s)
        for lane in range(first, last + 1):
            if s.lanes[lane].serves == IDLE:
                start_service(m, s, lane, now_s)


@inlined
def soonest_source(s: State) -> int:
    source = 0
    for other in range(1, s.due_s.size):
        if s.due_s[other] < s.due_s[source]:
            source = other
    return source


@kernel
def account_all(m: Model, s: State, now_s: float) -> None:
    for client in range(m.clients):
        account(s, client, now_s)
