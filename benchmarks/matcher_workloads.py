"""Seeded loads for the matcher: creates packed filters and notifications by the million.

The main load is typical of the Internet of Things: attributes of unequal popularity, and notifications of 6 to 14
attributes. A filter has 2 to 5 constraints. One is *tight* (my device, my site, a narrow interval), and the others are
*loose* (a status, a limit, a pattern). With more subscriptions the tight ones become tighter, so that a notification
has about as many matches at every size. The other loads are difficult for an index.

Everything is drawn with numpy, one attribute at a time, and encoded together: a million filters take about 6 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.filters import Constraint, Filter, Operator
from tidegate.frames import join_maps, publish_frame
from tidegate.index.packing import OPERATORS

Kind = Literal["words", "boolean", "whole", "fraction"]
Forms = Mapping[Kind, Mapping[Operator, float]]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SEED: Final = 20261115

_FILTERS_AT_ONCE: Final = 100_000
_KEYS_AT_ONCE: Final = 4_000_000
_CONSTRAINTS: Final = (2, 5)
_NOTIFICATION_ATTRIBUTES: Final = (6, 14)
# The number of cells of a domain. Clustered numbers are more frequent in some of them.
_CELLS: Final = 64
# The mean width of a tight interval, as a share of its domain, at tightness 1.
_NARROW: Final = 0.07
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Attribute(NamedTuple):
    """An attribute. `size` is the number of its words, or the width of its domain from `low` on.

    An attribute that `identifies` can have tight constraints. Its words grow in number with the subscriptions, or its
    numbers are fine enough for a narrow interval."""

    name: str
    kind: Kind
    size: int
    identifies: bool = False
    low: float = 0.0
    is_clustered: bool = False


# Ordered by popularity, the most popular first.
ATTRIBUTES: Final = (
    Attribute("device", "words", 600, True),
    Attribute("temperature", "fraction", 80, True, -30.0, True),
    Attribute("site", "words", 80, True),
    Attribute("status", "words", 6),
    Attribute("building", "words", 150, True),
    Attribute("battery", "whole", 100),
    Attribute("latitude", "fraction", 16, True, 28.0, True),
    Attribute("customer", "words", 300, True),
    Attribute("humidity", "fraction", 100, True),
    Attribute("longitude", "fraction", 22, True, -18.0),
    Attribute("severity", "whole", 8),
    Attribute("room", "words", 250, True),
    Attribute("firmware", "words", 40),
    Attribute("pressure", "fraction", 250, True, 850.0, True),
    Attribute("online", "boolean", 2),
    Attribute("gateway", "words", 200, True),
    Attribute("voltage", "fraction", 40, True, 210.0),
    Attribute("uptime", "whole", 10_000_000, True),
    Attribute("vendor", "words", 25),
    Attribute("power", "fraction", 5000, True, 0.0, True),
    Attribute("floor", "whole", 60, False, -3.0),
    Attribute("zone", "words", 100, True),
    Attribute("co2_ppm", "whole", 40_000, True, 300.0, True),
    Attribute("model", "words", 120),
    Attribute("noise_level", "fraction", 90, True, 30.0),
    Attribute("asset", "words", 500, True),
    Attribute("speed", "fraction", 180, True, 0.0, True),
    Attribute("country", "words", 30),
    Attribute("signal", "whole", 100, False, -120.0),
    Attribute("flow_rate", "fraction", 60, True),
    Attribute("operator", "words", 60, True),
    Attribute("serial", "whole", 100_000_000, True),
    Attribute("indoor", "boolean", 2),
    Attribute("current", "fraction", 64, True),
    Attribute("protocol", "words", 8),
    Attribute("occupancy", "whole", 500),
    Attribute("vehicle", "words", 350, True),
    Attribute("luminosity", "fraction", 100_000, True),
    Attribute("mode", "words", 5),
    Attribute("error_code", "whole", 1000),
)
_WORDS: Final = (
    "north", "south", "east", "west", "alpha", "delta", "sigma", "omega", "river", "harbour", "bridge", "tower",
    "garden", "market", "station", "factory", "depot", "office", "school", "clinic", "airport", "tunnel", "plaza",
    "avenue", "copper", "silver", "cobalt", "nickel", "quartz", "marble", "cedar", "willow", "maple", "birch", "falcon",
    "heron", "otter", "lynx", "orca", "bison", "comet", "lunar", "solar", "polar", "prime", "nova", "vega", "lyra",
    "madrid", "toledo", "cadiz", "murcia", "bilbao", "gijon", "huesca", "lugo", "zamora", "leon", "jaen", "soria",
    "teruel", "ceuta", "ibiza", "palma",
)  # fmt: skip

_EQUAL: Final = {Operator.EQUAL: 1.0}
_RANGE: Final = {Operator.RANGE: 1.0}
_ONE_SIDED: Final = dict.fromkeys((Operator.BELOW, Operator.AT_MOST, Operator.ABOVE, Operator.AT_LEAST), 0.1)
_PATTERNS: Final = {Operator.PREFIX: 0.12, Operator.SUFFIX: 0.08, Operator.CONTAINS: 0.1}
_NUMBERS: Final = _ONE_SIDED | {Operator.RANGE: 0.45, Operator.NOT_EQUAL: 0.05, Operator.EXISTS: 0.05}
_LOOSE: Final[Forms] = {
    "words": _PATTERNS | {Operator.EQUAL: 0.55, Operator.NOT_EQUAL: 0.08, Operator.EXISTS: 0.07},
    "boolean": _EQUAL,
    "whole": _NUMBERS | {Operator.EQUAL: 0.15},
    "fraction": _NUMBERS,
}
_TIGHT: Final[Forms] = {"words": _EQUAL, "whole": _RANGE, "fraction": _RANGE}
# The part of a word that a pattern uses: little if it is loose, nearly all if it is tight.
_PART_LOOSE: Final = {Operator.PREFIX: slice(4), Operator.SUFFIX: slice(-2, None), Operator.CONTAINS: slice(2, 5)}
_PART_TIGHT: Final = {Operator.PREFIX: slice(-1), Operator.SUFFIX: slice(1, None), Operator.CONTAINS: slice(1, -1)}


@dataclass(frozen=True)
class Workload:
    """How filters and notifications are drawn.

    `tightness` is a factor by number of subscriptions: identifying attributes have so many times more words, and tight
    intervals are so many times narrower. Between the given sizes it follows a power of the size. A skew is the
    exponent of Zipf's law for the values. With a negative skew, values that are otherwise rare are common."""

    about: str
    tightness: Mapping[int, float]
    attributes: Sequence[Attribute] = ATTRIBUTES
    tight: Forms = field(default_factory=lambda: _TIGHT)
    loose: Forms = field(default_factory=lambda: _LOOSE)
    wanted_skew: float = 0.6
    sent_skew: float = 0.6
    # Shares of a domain: the widths of loose intervals, and the most that a one-sided bound leaves.
    widths: tuple[float, float] = (0.03, 0.3)
    tail: float = 0.5
    sharers: int = 1

    def tightness_at(self, size: int) -> float:
        sizes, values = np.array([*self.tightness]), np.array([*self.tightness.values()])
        return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(values))))


@dataclass(frozen=True)
class Load:
    """Concatenated packed filters, where that of subscription i ends at `ends[i]`, and notifications as MessagePack.

    An index may learn from the `earlier` notifications. If it learned from the measured ones, it would fit them too
    well."""

    workload: str
    filters: bytes
    ends: Integers
    earlier: list[bytes]
    maps: list[bytes]

    @property
    def size(self) -> int:
        return len(self.ends)

    def packed(self, ids: Integers) -> bytes:
        """Returns the packed filters of these subscriptions."""
        return b"".join(self.filters[self.ends[k - 1] if k else 0 : self.ends[k]] for k in ids.tolist())

    def notifications(self) -> list[dict[str, Any]]:
        return [_decode(each) for each in self.maps]

    def constraints(self, subscriptions: int) -> Iterator[list[Any]]:
        """Yields the constraints of each of the first subscriptions: [[name, operator number, operand, …], …]."""
        for start, stop in pairwise([0, *self.ends[:subscriptions].tolist()]):
            yield _decode(self.filters[start:stop])

    def make_filters(self, subscriptions: int) -> list[Filter]:
        """Returns the first subscriptions as filters, without the cost of parsing."""
        return [
            Filter(tuple(Constraint(name, OPERATORS[number], tuple(operands)) for name, number, *operands in packed))
            for packed in self.constraints(subscriptions)
        ]


def make_load(workload_name: str, size: int, notifications: int, seed: int = SEED) -> Load:
    workload = WORKLOADS[workload_name]
    rng = np.random.default_rng(seed)
    domains = [_Domain(rng, attribute, workload, size) for attribute in workload.attributes]
    distinct = max(size // workload.sharers, 1)
    filters: list[bytes] = []
    while len(filters) < distinct:
        filters += _draw_filters(rng, workload, domains, min(_FILTERS_AT_ONCE, distinct - len(filters)))
    if distinct < size:
        filters = [filters[k] for k in rng.integers(0, distinct, size).tolist()]
    earlier, maps = (_draw_notifications(rng, domains, notifications) for _ in range(2))
    ends = np.cumsum([len(each) for each in filters], dtype=np.int64)
    return Load(workload_name, b"".join(filters), ends, earlier, maps)


def as_frames(maps: Sequence[bytes], batch: int) -> list[bytes]:
    """Returns PUBLISH frames of `batch` notifications each."""
    starts = range(0, len(maps), batch)
    return [publish_frame(start + 1, join_maps([*maps[start : start + batch]])) for start in starts]


class _Domain:
    """The values of an attribute. Filters and notifications draw from the same values, each with its own skew."""

    def __init__(self, rng: np.random.Generator, attribute: Attribute, workload: Workload, size: int) -> None:
        tightness = workload.tightness_at(size)
        self._attribute, self._workload = attribute, workload
        self._narrow = _NARROW / tightness
        self._places = rng.permutation(_CELLS)
        self._values = _make_values(attribute, tightness, int(rng.integers(len(_WORDS))))
        count = _CELLS if self._values is None else len(self._values)
        is_skewed = attribute.is_clustered or self._values is not None
        self._wanted = _zipf(count, workload.wanted_skew if is_skewed else 0.0)
        self._sent = _zipf(count, workload.sent_skew if is_skewed else 0.0)

    def draw_sent(self, rng: np.random.Generator, count: int) -> Iterator[tuple[Any, ...]]:
        """Returns (name, value) for `count` notifications."""
        return zip(repeat(self._attribute.name, count), self._draw(rng, self._sent, count), strict=True)

    def draw_wanted(
        self, rng: np.random.Generator, operator: Operator, is_tight: bool, count: int
    ) -> Iterator[tuple[Any, ...]]:
        """Returns (name, operator number, operand, …) for `count` filters."""
        head = repeat(self._attribute.name, count), repeat(OPERATORS.index(operator), count)
        return zip(*head, *self._draw_operands(rng, operator, is_tight, count), strict=True)

    def _draw_operands(
        self, rng: np.random.Generator, operator: Operator, is_tight: bool, count: int
    ) -> Sequence[list[Any]]:
        if operator is Operator.EXISTS:
            return ()
        if operator is Operator.RANGE:
            return self._draw_intervals(rng, is_tight, count)
        if operator in _ONE_SIDED:
            return (self._draw_bounds(rng, operator, count),)
        wanted = self._draw(rng, self._wanted, count)
        if operator in _PATTERNS:
            part = (_PART_TIGHT if is_tight else _PART_LOOSE)[operator]
            return ([word[part] for word in wanted],)
        return (wanted,)

    def _draw_intervals(self, rng: np.random.Generator, is_tight: bool, count: int) -> Sequence[list[Any]]:
        low, high = (0.5 * self._narrow, 1.5 * self._narrow) if is_tight else self._workload.widths
        centres = self._draw_numbers(rng, self._wanted, count)
        reach = rng.uniform(low, high, count) * self._attribute.size / 2
        return self._as_values(centres - reach), self._as_values(centres + reach)

    def _draw_bounds(self, rng: np.random.Generator, operator: Operator, count: int) -> list[Any]:
        share = rng.random(count) * self._workload.tail
        if operator in (Operator.ABOVE, Operator.AT_LEAST):
            share = 1 - share
        return self._as_values(self._attribute.low + self._attribute.size * share)

    def _draw(self, rng: np.random.Generator, shares: Floats, count: int) -> list[Any]:
        if self._values is None:
            return self._as_values(self._draw_numbers(rng, shares, count))
        values: list[Any] = self._values[np.searchsorted(shares, rng.random(count))].tolist()
        return values

    def _draw_numbers(self, rng: np.random.Generator, shares: Floats, count: int) -> Floats:
        cells = self._places[np.searchsorted(shares, rng.random(count))]
        return self._attribute.low + self._attribute.size * (cells + rng.random(count)) / _CELLS

    def _as_values(self, numbers: Floats) -> list[Any]:
        values: list[Any] = (np.rint(numbers).astype(np.int64) if self._attribute.kind == "whole" else numbers).tolist()
        return values


def _make_values(attribute: Attribute, tightness: float, first_word: int) -> NDArray[np.object_] | None:
    """Returns words or booleans, or None for numbers, of which there are too many."""
    if attribute.kind == "boolean":
        return np.array([True, False], object)
    if attribute.kind != "words":
        return None
    count = max(2, round(attribute.size * (tightness if attribute.identifies else 1.0)))
    words = len(_WORDS)
    return np.array([f"{_WORDS[(first_word + k) % words]}-{k // words}" for k in range(count)], object)


def _zipf(count: int, exponent: float) -> Floats:
    """Returns the cumulative shares of `count` ranks by Zipf's law."""
    shares = np.cumsum(np.arange(1, count + 1) ** -exponent)
    return np.asarray(shares / shares[-1])


def _draw_filters(rng: np.random.Generator, workload: Workload, domains: Sequence[_Domain], count: int) -> list[bytes]:
    numbers, is_tight, ends = _draw_wanted_attributes(rng, workload, count)
    constraints: list[Any] = [None] * len(numbers)
    for number, domain in enumerate(domains):
        kind = workload.attributes[number].kind
        for tight, forms in ((True, workload.tight), (False, workload.loose)):
            places = np.flatnonzero((numbers == number) & (is_tight == tight))
            if len(places):
                operators, weights = list(forms[kind]), np.array([*forms[kind].values()])
                drawn = rng.choice(len(operators), len(places), p=weights / weights.sum())
                for k, operator in enumerate(operators):
                    chosen = places[drawn == k].tolist()
                    _put(constraints, chosen, domain.draw_wanted(rng, operator, tight, len(chosen)))
    return [_encode(constraints[start:stop]) for start, stop in pairwise([0, *ends])]


def _draw_notifications(rng: np.random.Generator, domains: Sequence[_Domain], count: int) -> list[bytes]:
    sizes = rng.integers(_NOTIFICATION_ATTRIBUTES[0], _NOTIFICATION_ATTRIBUTES[1] + 1, count)
    chosen = _draw_distinct(rng, _popularity(len(domains)), count, _NOTIFICATION_ATTRIBUTES[1])
    numbers = chosen[np.arange(_NOTIFICATION_ATTRIBUTES[1]) < sizes[:, None]]
    pairs: list[Any] = [None] * len(numbers)
    for number, domain in enumerate(domains):
        places = np.flatnonzero(numbers == number).tolist()
        _put(pairs, places, domain.draw_sent(rng, len(places)))
    return [_encode(dict(pairs[start:stop])) for start, stop in pairwise([0, *np.cumsum(sizes).tolist()])]


def _draw_wanted_attributes(
    rng: np.random.Generator, workload: Workload, count: int
) -> tuple[Integers, NDArray[np.bool_], list[int]]:
    """Returns the attributes of the constraints of all filters, which of them are tight, and where each filter ends."""
    attributes, most = workload.attributes, _CONSTRAINTS[1]
    popularity = _popularity(len(attributes))
    can_be_tight = np.array([each.identifies and each.kind in workload.tight for each in attributes])
    can_be_loose = np.array([each.kind in workload.loose for each in attributes])
    tight = np.full(count, -1)
    if can_be_tight.any():
        weights = popularity * can_be_tight
        tight = rng.choice(len(attributes), count, p=weights / weights.sum())
    chosen = _draw_distinct(rng, popularity * can_be_loose, count, most, tight)
    sizes = rng.integers(_CONSTRAINTS[0], most + 1, count)
    # The tight constraint was drawn first. This shuffle can put it anywhere.
    keys = np.where(np.arange(most) < sizes[:, None], rng.random((count, most)), 2.0)
    chosen = np.take_along_axis(chosen, np.argsort(keys, axis=1), axis=1)
    is_used = np.arange(most) < sizes[:, None]
    return chosen[is_used], (chosen == tight[:, None])[is_used], np.cumsum(sizes).tolist()


def _draw_distinct(
    rng: np.random.Generator, weights: Floats, count: int, each: int, first: Integers | None = None
) -> Integers:
    """Returns `count` rows of `each` different numbers, drawn by their weights without replacement.

    Exponential waiting times give the same distribution in one step. A number of `first` (-1 for none) comes first in
    its row."""
    rows = []
    step = _KEYS_AT_ONCE // len(weights)
    for start in range(0, count, step):
        stop = min(start + step, count)
        with np.errstate(divide="ignore"):
            keys = rng.exponential(size=(stop - start, len(weights))) / weights
        if first is not None:
            has_first = np.flatnonzero(first[start:stop] >= 0)
            keys[has_first, first[start:stop][has_first]] = -1.0
        nearest = np.argpartition(keys, each - 1, axis=1)[:, :each]
        order = np.argsort(np.take_along_axis(keys, nearest, axis=1), axis=1)
        rows.append(np.take_along_axis(nearest, order, axis=1))
    return np.concatenate(rows)


def _popularity(attributes: int) -> Floats:
    """Returns the share of the attribute at each rank by Zipf's law."""
    return np.diff(_zipf(attributes, 1.0), prepend=0.0)


def _put(items: list[Any], places: Iterable[int], values: Iterable[Any]) -> None:
    for place, value in zip(places, values, strict=True):
        items[place] = value


_NUMBER_KINDS: Final[tuple[Kind, ...]] = ("whole", "fraction")
MAIN: Final = "mixed"
DENSE: Final = "dense"
WORKLOADS: Final[Mapping[str, Workload]] = {
    MAIN: Workload(
        "all operators; 5.4 matches at 10 k subscriptions, 6.1 at 100 k, 8.1 at 1 M",
        {10_000: 1.0, 100_000: 12.7, 1_000_000: 113.0},
    ),
    DENSE: Workload(
        "the same with wider constraints: about 100 matches", {10_000: 0.045, 100_000: 0.6, 1_000_000: 7.6}
    ),
    "ranges": Workload(
        "no equality: intervals and one-sided bounds",
        {2_000: 0.5, 100_000: 10.0},
        tight=dict.fromkeys(_NUMBER_KINDS, _RANGE),
        loose=dict.fromkeys(_NUMBER_KINDS, _ONE_SIDED | {Operator.RANGE: 0.6}),
    ),
    "hot-strings": Workload(
        "every filter wants one of a handful of strings, and intervals",
        {100_000: 0.03},
        tight={"words": _EQUAL},
        loose=dict.fromkeys(_NUMBER_KINDS, _RANGE),
        widths=(0.001, 0.02),
    ),
    "one-sided": Workload(
        "only one-sided bounds",
        {100_000: 1.0},
        tight={},
        loose=dict.fromkeys(_NUMBER_KINDS, _ONE_SIDED),
        tail=0.1,
    ),
    "many-attributes": Workload(
        "all operators on 1000 attributes",
        {2_000: 0.1, 100_000: 1.0},
        attributes=[each._replace(name=f"m{n}.{each.name}") for n in range(25) for each in ATTRIBUTES],
    ),
    "rare-wanted": Workload(
        "filters want rare values, and notifications carry a few frequent ones",
        {2_000: 0.5, 100_000: 5.0},
        wanted_skew=-1.0,
        sent_skew=1.5,
    ),
    "rare-sent": Workload(
        "filters want a few frequent values, and notifications carry rare ones",
        {2_000: 0.5, 100_000: 5.0},
        wanted_skew=1.5,
        sent_skew=-1.0,
    ),
    "patterns": Workload(
        "only prefixes, suffixes and contained texts",
        {2_000: 0.5, 100_000: 10.0},
        tight={"words": _PATTERNS},
        loose={"words": _PATTERNS},
    ),
    "identical": Workload("every filter is shared by 100 subscriptions", {2_000: 0.2, 100_000: 10.0}, sharers=100),
}
