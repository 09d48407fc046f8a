"""Autoscaler: turns measured load into the number of slices of each layer, within a stated service level.

It is a pure policy: it gets the time and a measurement, and returns counts and a sentence for the operator. Other
modules measure the load and make the configuration; a decision that is not carried out does no harm.

The law: every Matcher decodes every notification and matches it against its share of the subscriptions. A notification
therefore takes a + b/n seconds in each of n Matchers. Access Points and Exit Points divide the notifications among
themselves, so for them a is 0. Only the ratio of a and b is learned, from the time of a notification at different n;
how busy the slices are always comes from the last measurement. If n slices are busy to a share x, m slices would be
busy to

    x (s + (1 - s)/m) / (s + (1 - s)/n)        with s = a/(a + b), the serial share.

While only one n was measured, s is assumed to be 0.5 when Matchers are added: our index takes 8.8 us with 1,000,000,
5.2 us with 100,000 and 2.2 us with 10,000 subscriptions (mixed, docs/results/matcher.md). A tenth of the subscriptions
takes 0.42 to 0.60 of the time, so s is 0.36 to 0.55. E-SilboPS (figure 12) has 0.1 to 0.2 with many subscriptions and
far more with 100,000. When Matchers are removed, s is assumed to be 0, the worst case.

Slices report how many notifications they handled. The incoming rate is therefore known as a share of their time, even
while they fall behind or catch up. Layers behind the bottleneck grow together with it.

| if the layer | it gets |
|---|---|
| is busier than allowed | enough slices, but none that takes off less than 5 % of the work, or less than it costs |
| is the busiest, over half busy, and p99 is above the goal | one more |
| would keep its busy share and the p99 goal with fewer | fewer; waiting grows as 1/(1 - x), as in any queue |
| is at most half busy while p99 is above the goal | no change: subscribers or the disk are slow |
| of Exit Points was never measured | at least one for four Matchers, the rule of thumb of E-SilboPS |

What may go wrong: the measurements. A late or repeated measurement is ignored; after a pause, earlier wishes are
dropped. A layer with silent slices, which are dead or have just joined, may grow but does not shrink. A wish must hold
before it is carried out: briefly to grow, long to shrink. After each change the autoscaler rests, longer if more
subscriptions moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Final, TypeAlias

from tidegate.errors import ConfigError
from tidegate.layers.layer import Layer

SERIAL_SHARE_ASSUMED: Final = 0.5
MATCHERS_PER_EXIT_POINT: Final = 4
# A slice that takes off less of the others' work than this is not worth adding.
GAIN_MIN: Final = 0.05
# Up to this busy share, notifications hardly wait for a slice: they take twice their own time on average.
CALM_SHARE: Final = 0.5
# The average length of an M/M/1 queue at 0.94 load. A slice with a longer queue is behind: the queue determines its
# latency.
QUEUE_LONG_BATCHES: Final = 16
# Fewer slices may use only this part of the allowed busy share, so that a load at the limit does not cause a layer to
# shrink and grow in turn.
SHRINK_MARGIN: Final = 0.9
# Below this busy share nothing is learned: batches are small, and a notification takes longer than under real load.
LEARN_SHARE_MIN: Final = 0.25
LEARN_WEIGHT: Final = 0.2
# When the number of subscriptions changes by more than this share, what was learned before is forgotten.
SUBSCRIPTIONS_DRIFT_MAX: Final = 0.25
# After this long without a measurement, earlier wishes are dropped.
PAUSE_MAX_S: Final = 30.0
# A Matcher moves `matcher.MOVED_AT_ONCE` subscriptions in some milliseconds, between batches that take as long.
MOVED_PER_S: Final = 20_000
SLICES_MAX: Final = 8


Counts: TypeAlias = dict[Layer, int]


@dataclass(frozen=True)
class Hold:
    """How long a wish must hold before it is carried out: for this time and for this many measurements."""

    seconds: float
    measurements: int


@dataclass(frozen=True)
class ServiceLevel:
    """The goal, and what it may cost. Layers that are not named have 1 to `SLICES_MAX` slices.

    `slice_cost` is the cost of a slice, as a share of the value of meeting the service level for the same time. At 0.1,
    ten slices cost as much as the service level is worth, and a slice that takes off less than a tenth of the work is
    not added. `busy_share_max` is the share of a core that slices may be busy on average.
    """

    p99_ms: float
    slices_min: Mapping[Layer, int] = field(default_factory=dict)
    slices_max: Mapping[Layer, int] = field(default_factory=dict)
    slice_cost: float = 0.02
    busy_share_max: float = 0.7
    grow: Hold = Hold(10.0, 3)
    shrink: Hold = Hold(180.0, 12)
    rest_s: float = 30.0

    def __post_init__(self) -> None:
        _check(self.p99_ms > 0, f"the p99 goal is {self.p99_ms} ms", "use more than 0")
        busy = f"the allowed busy share is {self.busy_share_max}"
        _check(0 < self.busy_share_max < 1, busy, "use more than 0 and less than 1")
        _check(0 <= self.slice_cost <= 1, f"the cost of a slice is {self.slice_cost}", "use 0 to 1")
        _check(0 <= self.rest_s < float("inf"), f"the rest after a change is {self.rest_s} s", "use 0 or more")
        for hold in (self.grow, self.shrink):
            seconds, measurements = f"{hold.seconds} s", f"{hold.measurements} measurements"
            _check(0 <= hold.seconds < float("inf"), f"the wait before a change is {seconds}", "use 0 or more")
            _check(hold.measurements >= 1, f"the wait before a change is {measurements}", "use 1 or more")
        for layer in Layer:
            bounds = f"{layer} has a minimum of {self.least(layer)} and a maximum of {self.most(layer)} slices"
            _check(1 <= self.least(layer) <= self.most(layer), bounds, "use a minimum from 1 up to the maximum")

    def least(self, layer: Layer) -> int:
        return self.slices_min.get(layer, 1)

    def most(self, layer: Layer) -> int:
        return self.slices_max.get(layer, SLICES_MAX)

    @property
    def gain_min(self) -> float:
        return max(GAIN_MIN, self.slice_cost)


@dataclass(frozen=True)
class SliceLoad:
    """The load of one slice. `busy_share` is the share of a core, 0 to 1; `handled_per_s` counts the notifications that
    it has finished; `queue_batches` counts the batches that wait for it."""

    name: str
    layer: Layer
    busy_share: float
    handled_per_s: float
    queue_batches: float


@dataclass(frozen=True)
class Measurement:
    """The load since the previous measurement. `notifications_per_s` counts what came in, including notifications that
    still wait. `p99_ms` is meaningless if nothing was delivered. A slice that did not report is left out."""

    now_s: float
    notifications_per_s: float
    deliveries_per_s: float
    p99_ms: float
    subscriptions: int
    slices: tuple[SliceLoad, ...]


@dataclass(frozen=True)
class Decision:
    """The wanted counts and the reason for them. Without a change they are the present counts."""

    wanted: Counts
    why: str


class Law:
    """Predicts how busy another number of slices would be, from the time of a notification in each of n slices. For
    layers that divide the notifications, the serial share is given; for Matchers, which get them all, it is learned."""

    def __init__(self, serial_share: float | None = None) -> None:
        self._given = serial_share
        self._seconds: dict[int, float] = {}

    def learn(self, count: int, seconds: float) -> None:
        known = self._seconds.get(count, seconds)
        self._seconds[count] = known + LEARN_WEIGHT * (seconds - known)

    def forget(self) -> None:
        self._seconds.clear()

    @property
    def serial_share(self) -> float | None:
        """The serial share s; None while only one number of slices was measured."""
        if self._given is not None or len(self._seconds) < 2:
            return self._given
        # Least squares of seconds = a + b/n, with neither below 0.
        xs, ys = [1 / count for count in self._seconds], list(self._seconds.values())
        x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
        slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
        b = slope / sum((x - x_mean) ** 2 for x in xs)
        b = min(max(b, 0.0), y_mean / x_mean)
        a = y_mean - b * x_mean
        return a / (a + b)

    def ratio(self, count: int, other: int) -> float:
        """Returns how busy `other` slices would be, relative to `count` slices."""
        serial = self.serial_share
        if serial is None:
            serial = SERIAL_SHARE_ASSUMED if other > count else 0.0
        return (serial + (1 - serial) / other) / (serial + (1 - serial) / count)

    def most_useful(self, gain_min: float, most: int) -> int:
        """Returns the highest count, up to `most`, at which the last slice still takes off at least `gain_min` of the
        work of the others."""
        count = 1
        while count < most and 1 - self.ratio(count, count + 1) >= gain_min:
            count += 1
        return count


@dataclass(frozen=True)
class _Reading:
    """A layer in one measurement. `share` is how busy its slices would be with exactly the incoming load. It is higher
    than `busy_share` while they fall behind, lower while they catch up, above 1 if there are too few slices, and None
    if no slice reported. `seconds` is the time that a notification took in each slice."""

    count: int
    answered: int = 0
    busy_share: float = 0.0
    share: float | None = None
    seconds: float = 0.0
    is_behind: bool = False

    @property
    def is_complete(self) -> bool:
        return self.answered == self.count


class Autoscaler:
    """Guarantees: counts stay within the bounds of the service level. A change follows a wish that held and the rest
    after the previous change; only a change that restores the bounds is immediate. All else equal, a higher load never
    gets fewer slices."""

    def __init__(self, level: ServiceLevel) -> None:
        self._level = level
        self._laws = {Layer.ACCESS_POINT: Law(0.0), Layer.MATCHER: Law(), Layer.EXIT_POINT: Law(0.0)}
        self._learned_with = 0  # subscriptions
        self._readings: dict[Layer, _Reading] = {}
        self._knows_exit_points = False
        self._counts: Counts = {}
        self._now_s = float("-inf")
        self._rest_until_s = float("-inf")
        self._wishes: deque[tuple[float, Counts]] = deque()
        self._wishes_since_s = float("inf")

    def observe(self, measurement: Measurement, current: Mapping[Layer, int]) -> Decision:
        counts = {layer: current[layer] for layer in Layer}
        within = {layer: min(max(n, self._level.least(layer)), self._level.most(layer)) for layer, n in counts.items()}
        if not measurement.now_s > self._now_s:
            last = f"but the last measurement was at {self._now_s:.1f} s"
            return Decision(within, f"ignored: measured at {measurement.now_s:.1f} s, {last}")
        self._record(measurement, counts)
        if within != counts:
            self._rest(counts, within, measurement)
            return Decision(within, f"{_changes(counts, within)}: required by the bounds of the service level")
        if measurement.now_s < self._rest_until_s:
            left_s = self._rest_until_s - measurement.now_s
            return Decision(counts, f"resting {left_s:.0f} s more after the last change; {self._state(measurement)}")
        # Wish before learning: whatever makes Matchers busier would otherwise also teach that more of them do not help.
        wish = self._wish(measurement)
        self._learn()
        self._remember(measurement.now_s, wish)
        wanted = {layer: self._held(layer, measurement.now_s) for layer in Layer}
        if wanted == counts:
            return Decision(counts, self._why_not(wish, measurement))
        why = self._why(wanted, measurement)
        self._rest(counts, wanted, measurement)
        return Decision(wanted, why)

    # Measurements.

    def _record(self, measurement: Measurement, counts: Counts) -> None:
        """Records a measurement. A crash or an operator may have changed the counts, which needs a rest as well."""
        if self._counts and counts != self._counts:
            self._rest(self._counts, counts, measurement)
        if measurement.now_s - self._now_s > PAUSE_MAX_S:
            self._forget_wishes()
        if abs(measurement.subscriptions - self._learned_with) > SUBSCRIPTIONS_DRIFT_MAX * self._learned_with:
            self._laws[Layer.MATCHER].forget()
            self._learned_with = measurement.subscriptions
        self._now_s, self._counts = measurement.now_s, counts
        self._readings = {layer: _read(layer, counts[layer], measurement) for layer in Layer}
        self._knows_exit_points |= self._readings[Layer.EXIT_POINT].share is not None

    def _learn(self) -> None:
        matchers = self._readings[Layer.MATCHER]
        if matchers.is_complete and matchers.busy_share >= LEARN_SHARE_MIN and matchers.seconds > 0:
            self._laws[Layer.MATCHER].learn(matchers.count, matchers.seconds)

    # Wishes.

    def _wish(self, measurement: Measurement) -> Counts:
        wish = {layer: self._wish_for(layer, measurement) for layer in Layer}
        if not self._knows_exit_points:
            by_rule = min(ceil(wish[Layer.MATCHER] / MATCHERS_PER_EXIT_POINT), self._level.most(Layer.EXIT_POINT))
            wish[Layer.EXIT_POINT] = max(by_rule, self._counts[Layer.EXIT_POINT])
        return wish

    def _wish_for(self, layer: Layer, measurement: Measurement) -> int:
        reading, most = self._readings[layer], self._level.most(layer)
        if reading.share is None:
            return reading.count
        enough = (n for n in range(self._level.least(layer), most) if self._is_enough(layer, n, measurement))
        needed = next(enough, most)
        if self._is_late_by(layer, measurement):
            needed = max(needed, reading.count + 1)
        if needed > reading.count:
            return max(reading.count, min(needed, self._most_useful(layer)))
        return needed if reading.is_complete and not reading.is_behind else reading.count

    def _is_enough(self, layer: Layer, count: int, measurement: Measurement) -> bool:
        """Reports whether `count` slices would meet the service level. The estimate ignores that more slices may lower
        the latency, but includes that fewer slices raise it."""
        before, share = self._readings[layer].share or 0.0, self._share_with(layer, count)
        if count >= self._readings[layer].count:
            return share <= self._level.busy_share_max
        if share > self._level.busy_share_max * SHRINK_MARGIN:
            return False
        return share <= CALM_SHARE or not self._is_late(measurement, (1 - before) / (1 - share))

    def _share_with(self, layer: Layer, count: int) -> float:
        reading = self._readings[layer]
        return (reading.share or 0.0) * self._laws[layer].ratio(reading.count, count)

    def _is_late(self, measurement: Measurement, longer: float = 1.0) -> bool:
        return measurement.deliveries_per_s > 0 and measurement.p99_ms * longer > self._level.p99_ms

    def _is_late_by(self, layer: Layer, measurement: Measurement) -> bool:
        """Reports whether this layer causes a p99 above the goal. Notifications wait for the busiest layer, if for any.
        A layer that is behind only needs time to catch up, unless its load is too high."""
        reading, busiest = self._readings[layer], max(each.busy_share for each in self._readings.values())
        return self._is_late(measurement) and not reading.is_behind and reading.busy_share >= busiest > CALM_SHARE

    def _most_useful(self, layer: Layer) -> int:
        """Returns the highest count that is worth its cost. While the serial share is only assumed, one more slice is
        always allowed, because that is how to learn it."""
        law, most = self._laws[layer], self._level.most(layer)
        useful = law.most_useful(self._level.gain_min, most)
        return useful if law.serial_share is not None else max(useful, min(self._readings[layer].count + 1, most))

    # Wishes that hold.

    def _remember(self, now_s: float, wish: Counts) -> None:
        self._wishes_since_s = min(self._wishes_since_s, now_s)
        self._wishes.append((now_s, wish))
        while self._wishes[0][0] < now_s - max(self._level.grow.seconds, self._level.shrink.seconds):
            self._wishes.popleft()

    def _held(self, layer: Layer, now_s: float) -> int:
        """Returns the count that all wishes of the hold time agree on: the smallest growth if all were for more slices,
        the smallest reduction if all were for fewer."""
        count = self._counts[layer]
        grow, shrink = (self._wishes_of(layer, hold, now_s) for hold in (self._level.grow, self._level.shrink))
        if min(grow, default=count) > count:
            return min(grow)
        return min(count, max(shrink, default=count))

    def _wishes_of(self, layer: Layer, hold: Hold, now_s: float) -> list[int]:
        """Returns the wishes of the last `hold`, or none if that much time has not passed since the first wish."""
        since_s = now_s - hold.seconds
        wishes = [wish[layer] for at_s, wish in self._wishes if at_s >= since_s]
        return wishes if self._wishes_since_s <= since_s and len(wishes) >= hold.measurements else []

    def _rest(self, before: Counts, after: Counts, measurement: Measurement) -> None:
        self._forget_wishes()
        moving_s = _moved(before, after, measurement) / MOVED_PER_S
        self._rest_until_s = measurement.now_s + self._level.rest_s + moving_s

    def _forget_wishes(self) -> None:
        self._wishes.clear()
        self._wishes_since_s = float("inf")

    # Reasons for the operator.

    def _why(self, wanted: Counts, measurement: Measurement) -> str:
        reasons = [
            f"{layer.spelled} {self._counts[layer]} → {count}: {self._why_change(layer, count, measurement)}"
            for layer, count in wanted.items()
            if count != self._counts[layer]
        ]
        if moved := _moved(self._counts, wanted, measurement):
            reasons.append(f"about {moved:,.0f} of {measurement.subscriptions:,} subscriptions move")
        return "; ".join([*reasons, self._state(measurement)])

    def _why_change(self, layer: Layer, count: int, measurement: Measurement) -> str:
        share = self._readings[layer].share
        if share is None:
            return f"one per {MATCHERS_PER_EXIT_POINT} Matchers until Exit Points are measured"
        load = f"load {share:.0%} per slice, {self._share_with(layer, count):.0%} after the change"
        if count < self._counts[layer]:
            return f"{load}, limit {self._level.busy_share_max * SHRINK_MARGIN:.0%} for fewer slices"
        if share > self._level.busy_share_max:
            return f"{load}, limit {self._level.busy_share_max:.0%}"
        return f"{load}, and p99 {measurement.p99_ms:.0f} ms is above the goal of {self._level.p99_ms:g} ms"

    def _why_not(self, wish: Counts, measurement: Measurement) -> str:
        reasons = [reason for layer in Layer if (reason := self._why_stay(layer, wish[layer], measurement))]
        if self._is_late(measurement) and max(each.busy_share for each in self._readings.values()) <= CALM_SHARE:
            reasons.append(self._why_slow(measurement))
        return "; ".join([*(reasons or ["nothing to change"]), self._state(measurement)])

    def _why_stay(self, layer: Layer, wish: int, measurement: Measurement) -> str:
        reading, name, most = self._readings[layer], layer.spelled, self._level.most(layer)
        if wish != reading.count:
            hold = self._level.grow if wish > reading.count else self._level.shrink
            must_hold = f"for {hold.seconds:g} s and {hold.measurements} measurements"
            return f"{name} {reading.count} → {wish} if the load stays like this {must_hold}"
        if not reading.is_complete:
            return f"only {reading.answered} of {reading.count} {name} have reported"
        load = f"{name} have a load of {reading.share or 0.0:.0%} per slice"
        if self._is_enough(layer, reading.count, measurement) and not self._is_late_by(layer, measurement):
            return f"{load}, and are catching up" if reading.is_behind else ""
        if reading.count == most:
            return f"{load}, but {most} is the maximum"
        gain = 1 - self._laws[layer].ratio(reading.count, reading.count + 1)
        return f"{load}, but one more would take off only {gain:.1%}, less than {self._level.gain_min:.0%}"

    def _why_slow(self, measurement: Measurement) -> str:
        late = f"p99 {measurement.p99_ms:.0f} ms is above the goal of {self._level.p99_ms:g} ms"
        busiest = max(measurement.slices, key=lambda each: each.busy_share, default=None)
        if busiest is not None and busiest.busy_share > self._level.busy_share_max:
            alone = f"{busiest.name} alone is {busiest.busy_share:.0%} busy"
            return f"{late}, and {alone}: more slices do not help with uneven load"
        calm = f"no layer is over {CALM_SHARE:.0%} busy"
        return f"{late}, but {calm}: subscribers or the disk are slow, more slices do not help"

    def _state(self, measurement: Measurement) -> str:
        shares = ", ".join(
            f"{layer.spelled} {reading.busy_share:.0%}" if reading.answered else f"{layer.spelled} not measured"
            for layer, reading in self._readings.items()
        )
        rates = f"{measurement.notifications_per_s:,.0f} notifications/s, {measurement.deliveries_per_s:,.0f}"
        return f"p99 {measurement.p99_ms:.0f} ms (goal {self._level.p99_ms:g} ms), {rates} deliveries/s, busy: {shares}"


def _read(layer: Layer, count: int, measurement: Measurement) -> _Reading:
    slices = [each for each in measurement.slices if each.layer == layer and isfinite(each.busy_share)]
    if not slices:
        return _Reading(count)
    busy_share = sum(each.busy_share for each in slices) / len(slices)
    handled_per_s = sum(each.handled_per_s for each in slices) / len(slices)
    if layer is not Layer.MATCHER:
        handled_per_s *= count  # each has its share of the notifications, not all
    seconds = busy_share / handled_per_s if handled_per_s > 0 else 0.0
    share = measurement.notifications_per_s * seconds
    is_behind = sum(each.queue_batches for each in slices) >= QUEUE_LONG_BATCHES * len(slices)
    if not isfinite(share) or seconds == 0:
        share = busy_share
    return _Reading(count, len(slices), busy_share, share, seconds, is_behind)


def _moved(before: Counts, after: Counts, measurement: Measurement) -> float:
    """Estimates how many subscriptions move. Rendezvous hashing moves only those of Matchers that join or leave."""
    n, m = before[Layer.MATCHER], after[Layer.MATCHER]
    return measurement.subscriptions * abs(m - n) / max(m, n)


def _changes(before: Counts, after: Counts) -> str:
    return ", ".join(f"{layer.spelled} {before[layer]} → {n}" for layer, n in after.items() if n != before[layer])


def _check(is_right: bool, problem: str, remedy: str) -> None:
    if not is_right:
        raise ConfigError("C413", problem, remedy)
