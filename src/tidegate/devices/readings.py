"""Readings: simulates the measurements of the stations, as an endless stream determined by a seed.

Devices are the start of the path; this module supplies the notifications of demos and benchmarks. The model has one
number per station, its load: the traffic exhaust that the air does not carry off. All pollutants follow from it.
load = exposure of the station x rhythm of the day x stagnation of the air. The sun produces ozone and the load reduces
it. Outside episodes NO2 stays below 150 ug/m3.

Invariant: one seed, start and step give one stream, on every platform and Python version. Hence the model
uses only `Random.random`, the one method whose sequence Python guarantees, and the four operations of IEEE arithmetic;
`gauss` and `exp` would depend on the platform's mathematical library.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Final

from tidegate.devices.stations import STATIONS
from tidegate.devices.weather import Weather, madrid_offset
from tidegate.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tidegate.devices.stations import Station
    from tidegate.notification import Value

STEP_MAX: Final = timedelta(days=1)
MISSING_SHARE: Final = 0.01
NOISE: Final = 0.06

_HOUR: Final = timedelta(hours=1)

# By local hour: traffic relative to its peaks at 8 and 20, and the ozone (ug/m3) of clean air, highest at 16.
_TRAFFIC: Final = (
    *(0.30, 0.22, 0.17, 0.15, 0.16, 0.25, 0.50, 0.85, 1.00, 0.85, 0.65, 0.52),
    *(0.45, 0.42, 0.40, 0.40, 0.45, 0.60, 0.80, 0.95, 1.00, 0.85, 0.60, 0.42),
)
_OZONE: Final = (62, 60, 58, 56, 54, 52, 50, 50, 54, 62, 72, 82, 91, 98, 103, 106, 107, 105, 100, 92, 82, 74, 68, 65)
_DAY_OF_WEEK: Final = (1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.6)
# The load that halves the ozone.
_OZONE_HALF_LOAD: Final = 2.0

_EXPOSURE: Final = {
    ("urban", "traffic"): 1.0,
    ("urban", "industrial"): 0.9,
    ("urban", "background"): 0.85,
    ("suburban", "traffic"): 0.7,
    ("suburban", "industrial"): 0.65,
    ("suburban", "background"): 0.5,
    ("rural", "traffic"): 0.2,
    ("rural", "industrial"): 0.2,
    ("rural", "background"): 0.1,
}

# Each pollutant as floor + gain * load + share * ozone, in steps of 1/per_unit as the network publishes it
# (CO and hydrocarbons in mg/m3, all others in ug/m3). NOx is missing here: an analyser derives it from NO and NO2.
_RESPONSE: Final[dict[str, tuple[float, float, float, int]]] = {
    "SO2": (2.0, 2.0, 0.0, 1),
    "CO": (0.25, 0.25, 0.0, 10),
    "NO": (1.0, 25.0, 0.0, 1),
    "NO2": (4.0, 60.0, 0.0, 1),
    "PM2.5": (4.0, 8.0, 0.0, 1),
    "PM10": (8.0, 15.0, 0.0, 1),
    "O3": (0.0, 0.0, 1.0, 1),
    "toluene": (0.2, 1.8, 0.0, 10),
    "benzene": (0.1, 0.4, 0.0, 10),
    "ethylbenzene": (0.1, 0.3, 0.0, 10),
    "hydrocarbons": (1.2, 0.2, 0.0, 10),
    "nmhc": (0.1, 0.1, 0.0, 10),
    "xylene": (0.1, 1.2, 0.0, 10),
}
# ug/m3 of NO2 that one ug/m3 of NO becomes: the ratio of their molar masses.
_NO_AS_NO2: Final = 1.53


def readings(
    seed: int, start: datetime, step: timedelta, stations: Sequence[Station] = STATIONS
) -> Iterator[dict[str, Value]]:
    """Returns endless notifications in time order: at every step one from each station, in the order given.

    A `start` without a zone is UTC. The attribute `time` is UTC, while the daily rhythm follows Madrid's clocks. About
    1 % of the values are missing: their attribute is left out.

    Two or three times a week the air stands still over the whole region for 6 hours to 2 days. In such an episode NO2
    exceeds 180 to 200 ug/m3 at urban stations, and particles rise. The first episode always comes within 24 hours and
    exceeds 200 at every urban traffic station (seen with steps up to an hour), because a demo needs an alert.

    Raises BadInput D811 for a step that is not between 1 us and a day, or for no stations."""
    if not timedelta(0) < step <= STEP_MAX:
        raise BadInput("D811", f"the step {step} is out of range", f"use more than 0 and at most {STEP_MAX}")
    if not stations:
        raise BadInput("D811", "there is no station to read", "give at least one; STATIONS holds all 28")
    start = start.replace(tzinfo=UTC) if start.tzinfo is None else start.astimezone(UTC)
    return _stream(seed, start, step, stations)


def _stream(seed: int, start: datetime, step: timedelta, stations: Sequence[Station]) -> Iterator[dict[str, Value]]:
    # Two random sources, so that a seed gives the same weather and episodes for every step width.
    weather = Weather(Random(2 * seed), [each.zone for each in stations])  # noqa: S311  simulation
    random = Random(2 * seed + 1)  # noqa: S311  simulation
    probes = [_Probe.of(each, random) for each in stations]
    noise = random.random
    # One precision for all texts, so that they sort like the times.
    precision = "microseconds" if start.microsecond or step.microseconds else "seconds"
    hour = start.replace(minute=0, second=0, microsecond=0)
    before, after = _conditions(hour, weather, probes), _conditions(hour + _HOUR, weather, probes)
    now = start
    while True:
        while now - hour >= _HOUR:
            hour += _HOUR
            before, after = after, _conditions(hour + _HOUR, weather, probes)
        past = (now - hour) / _HOUR
        time = now.replace(tzinfo=None).isoformat(timespec=precision) + "Z"
        sun = before.ozone + (after.ozone - before.ozone) * past
        for probe, earlier, later in zip(probes, before.loads, after.loads, strict=True):
            yield probe.read(time, earlier + (later - earlier) * past, sun, noise)
        now += step


@dataclass(frozen=True, slots=True)
class _Probe:
    """A station with its instruments. Turns the load and the ozone at one instant into one notification."""

    zone: str
    exposure: float
    attributes: dict[str, Value]
    responses: tuple[tuple[str, float, float, float, int], ...]
    derives_nox: bool

    @classmethod
    def of(cls, place: Station, random: Random) -> _Probe:
        """Makes the probe of a station. Stations of the same kind still differ by some per cent, as streets, heights
        and trees do."""
        exposure = _EXPOSURE[place.area, place.kind] * (0.95 + 0.1 * random.random())
        responses = tuple((name, *_RESPONSE[name]) for name in place.pollutants if name in _RESPONSE)
        return cls(place.zone, exposure, place.attributes(), responses, "NOx" in place.pollutants)

    def read(self, time: str, load: float, sun: float, noise: Callable[[], float]) -> dict[str, Value]:
        ozone = sun * _OZONE_HALF_LOAD / (_OZONE_HALF_LOAD + load)
        measured: dict[str, float] = {}
        for name, floor, gain, share, per_unit in self.responses:
            if noise() >= MISSING_SHARE:
                level = (floor + gain * load + share * ozone) * (1.0 + NOISE * (noise() + noise() - 1.0))
                measured[name] = int(level * per_unit + 0.5) / per_unit
        if self.derives_nox and "NO" in measured and "NO2" in measured:
            measured["NOx"] = float(int(measured["NO2"] + _NO_AS_NO2 * measured["NO"] + 0.5))
        return {**self.attributes, "time": time, **measured}


@dataclass(frozen=True, slots=True)
class _Conditions:
    """The state of the region at a full hour: the ozone of clean air, and the load of each station."""

    ozone: float
    loads: list[float]


def _conditions(hour: datetime, weather: Weather, probes: Sequence[_Probe]) -> _Conditions:
    """Advances the weather by an hour, to `hour`, and returns the conditions then."""
    weather.advance()
    local = hour + madrid_offset(hour)
    traffic = _TRAFFIC[local.hour]
    depth = weather.episode.depth(weather.hour)
    usual = (1.0 - depth) * traffic * _DAY_OF_WEEK[local.weekday()]
    standing = depth * weather.episode.strength * (0.8 + 0.2 * traffic)
    loads = [probe.exposure * (usual * weather.stagnation(probe.zone) + standing) for probe in probes]
    return _Conditions(_OZONE[local.hour] * weather.brightness(), loads)
