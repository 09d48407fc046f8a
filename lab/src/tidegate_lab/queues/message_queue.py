"""A seeded simulation of the distributed message queue: compares the throughput and the cost of dequeuing methods.

Devices send messages at a regular interval, through enqueue controllers, to physical queues. Back-ends request them at
random intervals, through dequeue controllers. The servers of the queues do all the work. Wasted work, such as a dequeue
from an empty queue, takes time away from useful work.

The model is that of section 4 of M. Kinoshita et al., High Throughput Dequeuing Technique in Distributed Message Queues
for IoT, JIP 25, 2017, DOI 10.2197/ipsjjip.25.199. The values of the paper's Table 1 were not available; the parameter
sets here are fitted.

Two bounds are additions of ours, without which no method ever degrades. A queue refuses work once its backlog is too
long. A back-end has a limited number of connections, each of which is in use until its reply is sent.

The same parameters, method and seed give the same outcome, on any machine and in any process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate_lab.queues import message_queue_kernel as kernel


class Method(IntEnum):
    """How a dequeue controller finds messages for a request."""

    CONVENTIONAL = kernel.CONVENTIONAL
    """Visits queues in turn, and sends an empty reply if it found no messages."""
    PMS = kernel.PMS
    """Periodical monitoring and scheduling: visits the queues that were longest when last monitored."""
    RDS = kernel.RDS
    """Retry dequeue-request scheduling: holds a request that found no messages, and retries it after a sleep."""
    RDS_ADAPTIVE = kernel.RDS_ADAPTIVE
    """RDS whose sleep follows the traffic: shorter after full replies, longer after misses and small replies."""
    WAKE_UP = kernel.WAKE_UP
    """Holds the request until a queue announces a batch, and tops the reply up from other queues that are ready."""

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Method.CONVENTIONAL: "conventional",
    Method.PMS: "PMS",
    Method.RDS: "RDS",
    Method.RDS_ADAPTIVE: "RDS-adaptive",
    Method.WAKE_UP: "wake-up",
}


@dataclass(frozen=True)
class Parameters:
    """A deployment, its load, and the settings of the methods. The letters are those of the paper."""

    queues: int = 10
    enqueue_controllers: int = 10
    back_ends: int = 10
    """B. Each back-end has its own dequeue controller."""
    connections_per_back_end: int = 30
    """W: requests that a back-end may have in flight."""

    offered_messages_per_s: float = 4000.0
    """E: the rate of all devices together."""
    back_end_requests_per_s: float = 200.0
    """Lambda: the rate of each back-end."""

    enqueue_cost_s: float = 0.125e-3
    hit_cost_s: float = 2.5e-3
    """Cost of a dequeue that finds messages, in addition to the cost of each message."""
    hit_message_cost_s: float = 0.2e-3
    miss_cost_s: float = 2.5e-3
    monitor_cost_s: float = 0.625e-3
    """Cost of reporting the length of one queue to one dequeue controller."""
    notify_cost_s: float = 0.125e-3
    """Cost of announcing a queue to the dequeue controllers."""
    network_s: float = 0.3e-3
    """One-way delay between a dequeue controller and a queue."""

    request_messages_max: int = 50
    tries_max: int = 3
    """The most queues that one request visits."""
    queue_messages_max: int = 400
    backlog_s_max: float = 25e-3
    """A queue with a longer backlog refuses enqueues and dequeues."""

    monitor_period_s: float = 0.5
    sleep_s: float = 5.0
    """The sleep of RDS, and the longest sleep of RDS-adaptive."""
    sleep_s_min: float = 10e-3
    """The shortest sleep of RDS-adaptive."""
    is_parked_on_first_miss: bool = True
    """RDS sleeps after the first miss; otherwise, after all its tries have missed."""
    batch_messages: int = 25
    """A queue announces itself when it holds this many messages."""
    linger_s: float = 20e-3
    """A queue also announces itself when its oldest message has waited this long."""

    warm_up_s: float = 10.0
    measured_s: float = 60.0

    def __post_init__(self) -> None:
        assert 1 <= self.tries_max <= self.queues, (self.tries_max, self.queues)
        assert min(self.enqueue_controllers, self.back_ends, self.connections_per_back_end) >= 1, self
        assert min(self.request_messages_max, self.queue_messages_max, self.batch_messages) >= 1, self
        assert min(self.offered_messages_per_s, self.back_end_requests_per_s, self.monitor_period_s) > 0, self
        assert min(self.sleep_s, self.sleep_s_min, self.measured_s, self.enqueue_cost_s) > 0, self
        assert min(self.linger_s, self.warm_up_s, self.backlog_s_max, self.network_s) >= 0, self


SET_A = Parameters()
"""Fitted to the paper's RDS: 1.8 times the conventional throughput at lambda = 200."""

SET_B = dataclasses.replace(SET_A, hit_message_cost_s=1e-3)
"""Fitted to the paper's PMS: above the conventional throughput everywhere from lambda = 100 to 200."""


@dataclass(frozen=True)
class Outcome:
    """Measurements of a run, without its warm-up. Only the fields `*_messages` and `events` cover the whole run."""

    throughput_per_s: float
    """Messages delivered to back-ends."""
    offered_per_s: float
    accepted_per_s: float
    dropped_per_s: float
    hit_rate: float
    """Share of all dequeues that found messages."""
    messages_per_hit: float
    latency_p50_s: float
    """Time from sending by the device to arrival at the dequeue controller."""
    latency_p99_s: float
    cost_per_message_s: float
    """Work of the queues per delivered message, including wasted work."""
    utilisation: float

    hits_per_s: float
    missed_per_s: float
    refused_per_s: float
    """Dequeues that an overloaded queue refused. They are no hits, but cost nothing."""
    monitored_per_s: float
    notified_per_s: float
    retried_per_s: float
    requests_per_s: float
    turned_away_per_s: float
    """Requests for which the back-end had no free connection."""
    replies_per_s: float
    empty_replies_per_s: float

    accepted_messages: int
    delivered_messages: int
    left_messages: int
    events: int


class Case(NamedTuple):
    """One run of a sweep."""

    parameters: Parameters
    method: Method
    seed: int


def simulate(parameters: Parameters, method: Method, seed: int) -> Outcome:
    """Runs one simulation. With the same seed, all methods meet the same devices and requests of the back-ends."""
    devices, back_ends = np.random.default_rng(seed).spawn(2)
    model = kernel.Model(method=int(method), **_typed_fields(parameters))
    state = kernel.new_state(model, devices, back_ends)
    kernel.schedule_first(model, state, back_ends)
    kernel.run_until(model, state, devices, back_ends, model.warm_up_s)
    counts_before, busy_before_s = state.counts.copy(), state.queues["busy_s"].sum()
    state.latencies[:] = 0
    kernel.run_until(model, state, devices, back_ends, model.warm_up_s + model.measured_s)
    return _outcome(
        parameters, state, state.counts - counts_before, float(state.queues["busy_s"].sum() - busy_before_s)
    )


def simulate_many(cases: Iterable[Case]) -> list[Outcome]:
    """Returns the outcomes in the order of the cases. Cases are independent, so a sweep may be split into chunks and
    processes in any way without changing the outcomes."""
    return [simulate(*case) for case in cases]


def simulate_table(cases: Sequence[Case]) -> pa.Table:
    """Returns the outcomes of `simulate_many` as a table with one row per case. A sweep on Spark runs this."""
    return table_of(cases, simulate_many(cases))


def table_of(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> pa.Table:
    """Returns one row per case: method, seed, all parameters, all measurements."""
    rows: list[dict[str, Any]] = [
        {
            "method": case.method.label,
            "seed": case.seed,
            **_typed_fields(case.parameters),
            **dataclasses.asdict(outcome),
        }
        for case, outcome in zip(cases, outcomes, strict=True)
    ]
    return pa.Table.from_pylist(rows)


def _typed_fields(parameters: Parameters) -> dict[str, Any]:
    """Returns the fields, each converted to its declared type.

    A time given as an integer would otherwise make numba compile the kernel again, and change the type of a column."""
    types = {"int": int, "float": float, "bool": bool}
    return {
        field.name: types[str(field.type)](getattr(parameters, field.name)) for field in dataclasses.fields(parameters)
    }


def _outcome(parameters: Parameters, state: kernel.State, counts: NDArray[np.int64], busy_s: float) -> Outcome:
    """Computes the outcome. `counts` and `busy_s` cover the measured time, the counts in `state` the whole run."""
    accepted, delivered_in_all = int(state.counts[kernel.ACCEPTED]), int(state.counts[kernel.DELIVERED])
    left = int(state.queues["length"].sum())
    assert accepted == delivered_in_all + left, (accepted, delivered_in_all, left)
    rates = counts / parameters.measured_s
    delivered = max(1, int(counts[kernel.DELIVERED]))
    tries = int(counts[kernel.HITS] + counts[kernel.MISSES] + counts[kernel.REFUSALS])
    return Outcome(
        throughput_per_s=float(rates[kernel.DELIVERED]),
        offered_per_s=float(rates[kernel.OFFERED]),
        accepted_per_s=float(rates[kernel.ACCEPTED]),
        dropped_per_s=float(rates[kernel.OFFERED] - rates[kernel.ACCEPTED]),
        hit_rate=int(counts[kernel.HITS]) / max(1, tries),
        messages_per_hit=int(counts[kernel.DELIVERED]) / max(1, int(counts[kernel.HITS])),
        latency_p50_s=_quantile_s(state.latencies, 0.50),
        latency_p99_s=_quantile_s(state.latencies, 0.99),
        cost_per_message_s=busy_s / delivered,
        utilisation=busy_s / (parameters.measured_s * parameters.queues),
        hits_per_s=float(rates[kernel.HITS]),
        missed_per_s=float(rates[kernel.MISSES]),
        refused_per_s=float(rates[kernel.REFUSALS]),
        monitored_per_s=float(rates[kernel.MONITORED]),
        notified_per_s=float(rates[kernel.NOTIFIED]),
        retried_per_s=float(rates[kernel.RETRIES]),
        requests_per_s=float(rates[kernel.REQUESTS]),
        turned_away_per_s=float(rates[kernel.TURNED_AWAY]),
        replies_per_s=float(rates[kernel.REPLIES]),
        empty_replies_per_s=float(rates[kernel.EMPTY_REPLIES]),
        accepted_messages=accepted,
        delivered_messages=delivered_in_all,
        left_messages=left,
        events=int(state.counts[kernel.EVENTS]),
    )


def _quantile_s(latencies: NDArray[np.int64], share: float) -> float:
    """Returns the middle of the bin in which the quantile lies; NaN if nothing was delivered."""
    cumulated = np.cumsum(latencies)
    if cumulated[-1] == 0:
        return float("nan")
    number = int(np.searchsorted(cumulated, share * cumulated[-1]))
    return float(kernel.LATENCY_S_MIN * 10 ** ((number + 0.5) / kernel.BINS_PER_DECADE))
