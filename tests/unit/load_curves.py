"""Load curves and simulated layers for tests of the autoscaler, with an oracle that knows the curve.

The layers are queues in series, simulated second by second. Work that a layer cannot do in a second waits for the next
(a fluid with backlog), and within a second notifications wait as in an M/M/1 queue. A change takes time: slices start,
Matchers are busy with moving subscriptions, and at the switch everything pauses for a moment.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate, islice
from math import exp, log, pi, sin
from random import Random

from tidegate.devices import STATIONS, readings
from tidegate.layers.autoscaler import Autoscaler, Counts, Measurement, ServiceLevel, SliceLoad
from tidegate.layers.layer import Layer

EVERY_S = 5  # between two measurements
BATCH = 16
FAN_OUT = 2
PATH_MS = 2.0  # of the network
START_S = 3  # until new slices run
PAUSE_S = 0.1  # at the switch
MOVES_PER_S = 50_000
MOVING_SHARE = 0.2  # of a Matcher's core, while subscriptions move


@dataclass(frozen=True)
class Curve:
    """The rate of notifications for each second. `steps` are the times when it jumps."""

    name: str
    seconds: int
    rate: Callable[[float], float]
    steps: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name


def steps(*rates: tuple[int, float]) -> Curve:
    """Returns a curve that holds each rate for its seconds."""
    starts = list(accumulate((seconds for seconds, _ in rates), initial=0))

    def rate(now_s: float) -> float:
        return rates[bisect(starts, now_s) - 1][1]

    return Curve("steps", starts[-1], rate, tuple(starts[1:-1]))


def ramp(low: float, high: float, seconds: int) -> Curve:
    """Returns a curve that rises and falls."""
    half = seconds / 2
    return Curve("ramp", seconds, lambda now_s: low + (high - low) * (1 - abs(now_s - half) / half))


def sine(low: float, high: float, seconds: int) -> Curve:
    """Returns two days, compressed to `seconds`."""
    middle, swing = (low + high) / 2, (high - low) / 2
    return Curve("sine", seconds, lambda now_s: middle - swing * sin(pi / 2 + 4 * pi * now_s / seconds))


def bursts(base: float, burst: float, every_s: int, burst_s: int, seconds: int) -> Curve:
    starts = tuple(range(every_s, seconds, every_s))
    return Curve(
        "bursts",
        seconds,
        lambda now_s: burst if now_s >= every_s and now_s % every_s < burst_s else base,
        starts,
    )


def flash_crowd(base: float, peak: float, at_s: int, fades_s: float, seconds: int) -> Curve:
    """Returns a curve that jumps to its peak and falls slowly."""
    return Curve(
        "flash crowd",
        seconds,
        lambda now_s: base if now_s < at_s else base + (peak - base) * exp((at_s - now_s) / fades_s),
        (at_s,),
    )


def recorded(peak: float, minute_s: int = 3) -> Curve:
    """Returns the rhythm of two days of the Madrid stations: their NO2 every ten minutes, scaled and compressed."""
    stream = readings(7, datetime(2026, 3, 3, tzinfo=UTC), timedelta(minutes=10))
    sums = []
    for _ in range(2 * 24 * 6):
        values = [reading.get("NO2", 0) for reading in islice(stream, len(STATIONS))]
        sums.append(sum(value for value in values if isinstance(value, (int, float))))
    every_s = 10 * minute_s
    rates = [peak * value / max(sums) for value in sums]
    return Curve("recorded", every_s * len(rates), lambda now_s: rates[int(now_s) // every_s])


def then_quiet(curve: Curve, rate: float, seconds: int) -> Curve:
    """Returns the same curve, followed by a low rate."""
    return Curve(
        curve.name,
        curve.seconds + seconds,
        lambda now_s: curve.rate(now_s) if now_s < curve.seconds else rate,
        curve.steps,
    )


@dataclass(frozen=True)
class Costs:
    """CPU seconds per notification in a layer: `decode` in each Matcher, and the others divided among the slices."""

    access: float = 15e-6
    decode: float = 10e-6
    match: float = 80e-6
    join: float = 30e-6

    def seconds(self, layer: Layer, count: int) -> float:
        match layer:
            case Layer.ACCESS_POINT:
                return self.access / count
            case Layer.MATCHER:
                return self.decode + self.match / count
            case _:
                return self.join / count


class IndexCosts(Costs):
    """Costs of a Matcher that does not follow the law: with a tenth of the subscriptions it takes half the time."""

    def seconds(self, layer: Layer, count: int) -> float:
        return 90e-6 * count**-0.3 if layer is Layer.MATCHER else super().seconds(layer, count)


@dataclass(frozen=True)
class Change:
    at_s: int
    before: Counts
    after: Counts
    why: str


@dataclass
class Layers:
    """The layers under a load. `noise` is the relative standard deviation of the measurements."""

    counts: Counts
    costs: Costs = field(default_factory=Costs)
    subscriptions: int = 100_000
    noise: float = 0.0
    rng: Random = field(default_factory=lambda: Random(1))
    slow_ms: float = 0.0  # of subscribers or the disk
    backlog: dict[Layer, float] = field(default_factory=lambda: dict.fromkeys(Layer, 0.0))
    wanted: Counts | None = None
    switch_s: float = 0.0
    busy: dict[Layer, float] = field(default_factory=lambda: dict.fromkeys(Layer, 0.0))
    done: dict[Layer, float] = field(default_factory=lambda: dict.fromkeys(Layer, 0.0))
    p99_ms: float = PATH_MS

    def begin(self, wanted: Counts, now_s: float) -> None:
        n, m = self.counts[Layer.MATCHER], wanted[Layer.MATCHER]
        moved = self.subscriptions * abs(m - n) / max(m, n)
        self.wanted, self.switch_s = dict(wanted), now_s + START_S + moved / MOVES_PER_S

    def tick(self, now_s: float, rate: float) -> None:
        """Simulates a second of load."""
        share = 1.0
        if self.wanted is not None and now_s >= self.switch_s:
            self.counts, self.wanted = self.wanted, None
            share -= PAUSE_S
        self.p99_ms = PATH_MS + self.slow_ms
        flow = rate
        for layer in Layer:
            seconds = self.costs.seconds(layer, self.counts[layer])
            moving = MOVING_SHARE if self.wanted is not None and layer is Layer.MATCHER else 0.0
            capacity = (share - moving) / seconds
            due = self.backlog[layer] + flow
            flow = min(due, capacity)
            self.backlog[layer] = due - flow
            self.busy[layer], self.done[layer] = flow * seconds + moving, flow
            waits = log(100) * BATCH * seconds / (1 - min(self.busy[layer], 0.99)) + self.backlog[layer] / capacity
            self.p99_ms += 1000 * waits

    def measure(self, now_s: float, rate: float) -> Measurement:
        slices = tuple(
            SliceLoad(
                f"{layer}-{number}",
                layer,
                min(1.0, self._noisy(self.busy[layer])),
                self.done[layer] / (1 if layer is Layer.MATCHER else count),
                self._queue(layer),
            )
            for layer, count in self.counts.items()
            for number in range(count)
        )
        return Measurement(
            now_s, self._noisy(rate), FAN_OUT * rate, self._noisy(self.p99_ms), self.subscriptions, slices
        )

    def _queue(self, layer: Layer) -> float:
        busy = min(self.busy[layer], 0.95)
        return self.backlog[layer] / BATCH + busy / (1 - busy)

    def _noisy(self, value: float) -> float:
        return value * max(0.0, self.rng.gauss(1.0, self.noise)) if self.noise else value


@dataclass
class Run:
    """The result of running a curve."""

    late_s: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)  # by the second
    sentences: list[str] = field(default_factory=list)

    @property
    def slice_seconds(self) -> int:
        return sum(sum(counts.values()) for counts in self.counts)


def run(curve: Curve, layers: Layers, autoscaler: Autoscaler, level: ServiceLevel) -> Run:
    result = Run()
    for now_s in range(curve.seconds):
        rate = curve.rate(now_s)
        layers.tick(now_s, rate)
        result.counts.append(layers.counts)
        if layers.p99_ms > level.p99_ms:
            result.late_s.append(now_s)
        if now_s % EVERY_S == 0:
            decision = autoscaler.observe(layers.measure(now_s, rate), layers.counts)
            result.sentences.append(decision.why)
            if decision.wanted != layers.counts and layers.wanted is None:
                result.changes.append(Change(now_s, layers.counts, decision.wanted, decision.why))
                layers.begin(decision.wanted, now_s)
    return result


def oracle_slice_seconds(curve: Curve, costs: Costs, level: ServiceLevel) -> int:
    """Returns the slice seconds of an oracle that knows the curve. At every second it has the fewest slices that are
    not too busy, and changes cost nothing."""
    total = 0
    for now_s in range(curve.seconds):
        rate = curve.rate(now_s)
        for layer in Layer:
            counts = range(level.least(layer), level.most(layer))
            fits = (n for n in counts if rate * costs.seconds(layer, n) <= level.busy_share_max)
            total += next(fits, level.most(layer))
    return total
