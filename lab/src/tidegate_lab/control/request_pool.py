"""A seeded simulation of a small broker's request pool with many clients: how stale clients get, and at what load.

Every client has a persistent query over the same changing data. The broker notifies all clients of an update. Some
notifications are lost, so clients also check for updates themselves, paced by their `Control`. Requests and
notifications wait in the broker's lanes, first come, first served, within a bound that they share.

The model is that of A. S. Vdovenko et al. (request pool, active control with adaptive strategy and random backoff). It
adds what a broker can do about overload: cache, slots, spread fetches, merged and preferred notifications, CoDel, token
buckets. It leaves out the cost of refusals and hints, clients with several queries, and congestion of the network. A
broker that gives slots is assumed to know its mean service time.

The same parameters, control and seed give the same outcome, on any machine and in any process. The same seed gives all
policies the same updates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.client.control import Control
from tidegate.client.control.estimates import decrease_constant
from tidegate_lab.control import request_pool_kernel as kernel


@dataclass(frozen=True)
class Parameters:
    """A broker, its load, and what it does for its clients.

    `query_s`, `cached_query_s` and `notification_s` are means of service times with a shifted exponential
    distribution."""

    clients: int = 2000
    lanes: int = 4
    query_s: float = 4e-3
    cached_query_s: float = 1e-3
    notification_s: float = 1e-3
    round_trip_s: float = 2e-3
    entries_per_client: float = 1.5
    """The bound of the pool: waiting requests and notifications per client."""
    network_loss: float = 0.05
    """Share of notifications that the network loses, in addition to those for which the pool has no room."""

    update_every_s: float = 1.0
    is_update_random: bool = True
    is_fetched: bool = False
    """Notifications only announce an update, which clients then fetch; otherwise they contain it."""
    has_cache: bool = False
    """Only the first query after an update costs `query_s`."""
    slow_from_s: float = math.inf
    slow_until_s: float = math.inf
    slow_factor: float = 4.0
    join_within_s: float = 1.0
    timeout_s: float = math.inf
    """A client gives up after this time. The broker still serves its request."""
    probes_per_s: float = 20.0
    """Requests of bystanders, which measure how the load affects other clients."""

    is_hinting: bool = True
    """The broker reports processing times, the largest delay it considers healthy, its pace, and when to retry."""
    is_giving_slots: bool = False
    is_giving_spread: bool = False
    is_conflating: bool = False
    """At most one notification per subscription waits. Newer ones are merged into it, and a response cancels it."""
    notifications_per_request: int = 0
    """How many notifications are served before a request when both wait; 0 means first come, first served."""
    codel_target_s: float = 0.0
    """0 means no CoDel."""
    codel_interval_s: float = 0.1
    token_every_s: float = 0.0
    """Interval at which a client gets a token; it may save one. 0 means no token bucket."""
    load_share: float = 0.85
    """The load that the broker aims at with slots, spread and pace."""
    queue_s_max: float = 0.05
    """The longest wait that the broker considers healthy. Its D^br is this plus the mean service time."""

    warm_up_s: float = 20.0
    measured_s: float = 160.0

    def __post_init__(self) -> None:
        assert 1 <= self.lanes <= self.clients <= 1_000_000, (self.lanes, self.clients)
        assert min(self.query_s, self.cached_query_s, self.notification_s, self.update_every_s) > 0, self
        assert min(self.measured_s, self.slow_factor, self.timeout_s, self.load_share, self.queue_s_max) > 0, self
        assert min(self.warm_up_s, self.join_within_s, self.round_trip_s, self.probes_per_s) >= 0, self
        assert min(self.codel_target_s, self.token_every_s, self.notifications_per_request) >= 0, self
        assert 0 <= self.network_loss < 1, self.network_loss
        assert self.lane_entries_max >= 1, self.entries_per_client

    @property
    def lane_entries_max(self) -> int:
        return int(self.entries_per_client * self.clients / self.lanes)

    @property
    def span_requests_max(self) -> float:
        """The number of requests that the lanes could serve in 100 ms without notifications."""
        return self.lanes / self.query_s / kernel.SPANS_PER_S

    @property
    def run_s(self) -> float:
        return self.warm_up_s + self.measured_s


def slide_show() -> Parameters:
    """S1: an update every 10 s, which is announced to all clients and fetched by all of them."""
    return Parameters(update_every_s=10.0, is_update_random=False, is_fetched=True, join_within_s=0.0)


def slide_show_cached() -> Parameters:
    """S1c: the slide-show with a cache."""
    return dataclasses.replace(slide_show(), has_cache=True)


def slide_show_small_pool() -> Parameters:
    """S1d: the slide-show with a pool for 0.3 entries per client."""
    return dataclasses.replace(slide_show(), entries_per_client=0.3)


def steady_overload() -> Parameters:
    """S2: one update per second on average. Checks and notifications together exceed the broker's capacity."""
    return Parameters()


def capacity_drop() -> Parameters:
    """S3: the capacity drops to a quarter for a minute."""
    return dataclasses.replace(steady_overload(), update_every_s=2.0, slow_from_s=60.0, slow_until_s=120.0)


def after_capacity_drop() -> Parameters:
    """S3p: the minute after the capacity drop."""
    return dataclasses.replace(capacity_drop(), warm_up_s=120.0, measured_s=60.0)


def many_clients() -> Parameters:
    """S4: the slide-show for 10,000 clients, with an update every minute."""
    return dataclasses.replace(slide_show(), clients=10_000, update_every_s=60.0, measured_s=220.0)


def impatient_clients() -> Parameters:
    """W: the steady overload, with clients that give up after one second."""
    return dataclasses.replace(steady_overload(), timeout_s=1.0)


@dataclass(frozen=True)
class Outcome:
    """Measurements of a run, without its warm-up. NaN means that there was nothing to measure."""

    stale_share: float
    """Share of the time in which a client does not hold the newest state."""
    age_s: float
    """Age of the oldest update that a client has not seen, or 0 if it has seen all. Mean over time and clients."""
    response_p50_s: float
    response_p99_s: float
    response_p999_s: float
    requests_per_minute: float
    """Requests of one client."""
    refused_share: float
    timed_out_share: float
    wasted_share: float
    """Share of served requests whose client had already given up."""
    goodput_per_s: float
    """Requests that were served in time."""
    notification_loss: float
    """Share of all decisions to notify whose notification was dropped or lost."""
    dropped_share: float
    """Share of all decisions to notify for which the pool had no room."""
    merged_share: float
    bystander_p50_s: float
    bystander_p99_s: float
    bystander_refused_share: float
    dispersion: float
    """Index of dispersion of the requests in spans of 100 ms; 1 for a Poisson flow."""
    peak_requests: float
    """Most requests in 100 ms."""
    crowded_share: float
    """Share of these spans with at least as many requests as the broker could serve in one."""
    false_alarm_share: float
    """Share of responses that waited less than 1 ms at the broker but were classified as congested."""
    missed_share: float
    """Share of responses that waited more than 100 ms at the broker but were not classified as congested."""
    fairness: float
    """Jain's index of the clients' stale times; 1 if they are equal."""
    utilisation: float
    events: int
    """Events of the whole run, including the warm-up."""


class Case(NamedTuple):
    """One run of a sweep."""

    parameters: Parameters
    control: Control
    seed: int


def simulate(parameters: Parameters, control: Control, seed: int) -> Outcome:
    """Runs one simulation."""
    model = new_model(parameters, control)
    state = kernel.new_state(model, seed, float(parameters.join_within_s), parameters.run_s)
    kernel.run_until(model, state, float(parameters.warm_up_s))
    kernel.account_all(model, state, float(parameters.warm_up_s))
    counts_before, busy_before_s = state.counts.copy(), float(state.broker["busy_s"][0])
    for measured in (state.responses, state.bystanders, state.clients["stale_s"], state.broker["age_s2"]):
        measured[:] = 0
    kernel.run_until(model, state, float(parameters.run_s))
    kernel.account_all(model, state, float(parameters.run_s))
    busy_s = float(state.broker["busy_s"][0]) - busy_before_s
    return _outcome(parameters, state, state.counts - counts_before, busy_s)


def simulate_many(cases: Iterable[Case]) -> list[Outcome]:
    """Returns the outcomes in the order of the cases. Cases are independent, so a sweep may be split into chunks and
    processes in any way without changing the outcomes."""
    return [simulate(*case) for case in cases]


def simulate_table(cases: Sequence[Case]) -> pa.Table:
    """Returns the outcomes of `simulate_many` as a table with one row per case. A sweep on Spark runs this."""
    return table_of(cases, simulate_many(cases))


def table_of(cases: Sequence[Case], outcomes: Sequence[Any]) -> pa.Table:
    """Returns one row per case: seed, parameters, settings of the clients, measurements. Outcomes are dataclasses."""
    rows: list[dict[str, Any]] = [
        {
            "seed": case.seed,
            **_typed_fields(case.parameters),
            **_settings(case.control),
            **dataclasses.asdict(outcome),
        }
        for case, outcome in zip(cases, outcomes, strict=True)
    ]
    return pa.Table.from_pylist(rows)


def new_model(parameters: Parameters, control: Control) -> kernel.Model:
    fields = {**_typed_fields(parameters), **_settings(control)}
    fields |= {
        "lane_entries_max": parameters.lane_entries_max,
        "prior_episodes": control.interval.prior_episodes_per_s * control.interval.prior_s,
        "decrease_constant": decrease_constant(control.interval.alpha),
    }
    codes = {name: list(type(value)).index(value) for name, value in fields.items() if isinstance(value, StrEnum)}
    return kernel.Model(**{name: (fields | codes)[name] for name in kernel.Model._fields})


def _settings(control: Control) -> dict[str, Any]:
    """Returns all settings of a client in one map. Their names are distinct."""
    settings = _typed_fields(control)
    for part in ("interval", "detection", "backoff"):
        settings |= _typed_fields(settings.pop(part))
    settings["backoff"] = settings.pop("kind")
    return settings


def _typed_fields(values: Any) -> dict[str, Any]:
    """Returns the fields, each number converted to its declared type.

    A time given as an integer would otherwise make numba compile the kernel again, and change the type of a column."""
    types: dict[str, type] = {"int": int, "float": float, "bool": bool}
    return {
        field.name: types.get(str(field.type), _unchanged)(getattr(values, field.name))
        for field in dataclasses.fields(values)
    }


def _unchanged(value: Any) -> Any:
    return value


def _outcome(parameters: Parameters, state: kernel.State, counts: NDArray[np.int64], busy_s: float) -> Outcome:
    """Computes the outcome. `counts` and `busy_s` cover the measured time only."""
    client_s = parameters.clients * parameters.measured_s
    stale_s = state.clients["stale_s"]
    spans = state.requests_by_span[
        math.ceil(parameters.warm_up_s * kernel.SPANS_PER_S) : int(parameters.run_s * kernel.SPANS_PER_S)
    ]
    requests, served = int(counts[kernel.REQUESTS]), int(counts[kernel.SERVED])
    return Outcome(
        stale_share=float(stale_s.sum()) / client_s,
        age_s=float(state.broker["age_s2"][0]) / client_s,
        response_p50_s=_quantile_s(state.responses, 0.50),
        response_p99_s=_quantile_s(state.responses, 0.99),
        response_p999_s=_quantile_s(state.responses, 0.999),
        requests_per_minute=requests / client_s * 60,
        refused_share=_share(counts[kernel.REFUSED], requests),
        timed_out_share=_share(counts[kernel.TIMED_OUT], requests),
        wasted_share=_share(counts[kernel.WASTED], served + counts[kernel.WASTED]),
        goodput_per_s=served / parameters.measured_s,
        notification_loss=_share(counts[kernel.DROPPED] + counts[kernel.LOST], counts[kernel.NOTIFIED]),
        dropped_share=_share(counts[kernel.DROPPED], counts[kernel.NOTIFIED]),
        merged_share=_share(counts[kernel.MERGED], counts[kernel.NOTIFIED]),
        bystander_p50_s=_quantile_s(state.bystanders, 0.50),
        bystander_p99_s=_quantile_s(state.bystanders, 0.99),
        bystander_refused_share=_share(counts[kernel.PROBES_REFUSED], counts[kernel.PROBES]),
        dispersion=float(spans.var() / spans.mean()) if spans.any() else math.nan,
        peak_requests=float(spans.max()) if spans.size else math.nan,
        crowded_share=float((spans >= parameters.span_requests_max).mean()) if spans.size else math.nan,
        false_alarm_share=_share(counts[kernel.FALSE_ALARMS], counts[kernel.CALM]),
        missed_share=_share(counts[kernel.MISSED], counts[kernel.CONGESTED]),
        fairness=float(stale_s.sum() ** 2 / (stale_s.size * (stale_s**2).sum())) if stale_s.any() else math.nan,
        utilisation=busy_s / (parameters.lanes * parameters.measured_s),
        events=int(state.counts[kernel.EVENTS]),
    )


def _share(part: int, whole: int) -> float:
    return int(part) / int(whole) if whole else math.nan


def _quantile_s(latencies: NDArray[np.int64], share: float) -> float:
    """Returns the middle of the bin in which the quantile lies; NaN if nothing was measured."""
    cumulated = np.cumsum(latencies)
    if cumulated[-1] == 0:
        return math.nan
    number = int(np.searchsorted(cumulated, share * cumulated[-1]))
    return float(kernel.LATENCY_S_MIN * 10 ** ((number + 0.5) / kernel.BINS_PER_DECADE))
