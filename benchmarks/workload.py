"""The load that every contender carries: air-quality readings and their subscriptions.

A reading has 10 typed attributes, about 250 bytes in MessagePack and 275 in JSON. Every reading satisfies `WANTED`. No
reading satisfies an alert, but each alert names the station of some reading, so that a matcher must examine it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from random import Random
from typing import Any, Final

Reading = dict[str, Any]

STATIONS: Final = 1000
# Too many for the fast caches, but few enough to create quickly.
READINGS: Final = 4096
WANTED: Final = "network==madrid-air-quality;NO2>20"

_POLLUTANTS: Final = ("NO2", "O3", "PM10")
_LEVEL_MAX: Final = 300


def station_name(number: int) -> str:
    return f"28{number:06d}"


def topic(reading: Reading, separator: str) -> str:
    """Returns the topic or subject of a reading, one per station, for peers without content filters."""
    return f"air{separator}{reading['station']}"


def make_readings(seed: int) -> list[Reading]:
    """Returns a stock of readings that a publisher sends repeatedly."""
    random = Random(seed)
    return [_reading(random, number) for number in range(READINGS)]


def rounds_of(readings: list[Reading], batch: int, count: int) -> Iterator[list[Reading]]:
    """Yields `count` readings in lists of `batch`, the last one shorter. Repeats the stock as often as necessary."""
    endless = cycle(readings)
    for start in range(0, count, batch):
        yield list(islice(endless, min(batch, count - start)))


def alerts(count: int) -> list[str]:
    """Returns distinct filters that no reading satisfies: a station, and a pollutant level that is never reached."""
    filters = []
    for number in range(count):
        level, station = divmod(number, STATIONS)
        threshold = _LEVEL_MAX + level // len(_POLLUTANTS)
        filters.append(f"station=={station_name(station)!r};{_POLLUTANTS[level % len(_POLLUTANTS)]}>{threshold}")
    return filters


def _reading(random: Random, number: int) -> Reading:
    return {
        "station": station_name(random.randrange(STATIONS)),
        "network": "madrid-air-quality",
        "name": "Plaza de Castilla - Canal de Isabel II, acera norte, junto al intercambiador",
        "time": f"2026-01-12T{number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}+01:00",
        "NO2": round(random.uniform(21, _LEVEL_MAX), 1),
        "O3": round(random.uniform(0, _LEVEL_MAX), 1),
        "PM10": random.randrange(_LEVEL_MAX),
        "temperature_celsius": round(random.uniform(-5, 40), 1),
        "is_validated": random.random() < 0.5,
        "reading_number": number,
    }
