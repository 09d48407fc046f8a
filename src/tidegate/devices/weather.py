"""The weather over the region: how much of the traffic's exhaust the air carries off, and when it stands still.

Weather is part of the readings at the start of the path. It makes neighbouring stations rise and fall together: one
slow random walk for the region, a smaller one for each zone, and episodes that cover all zones.
Invariant: hours are visited one by one, so a seed gives the same weather however often the stations are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

# An AR(1) walk that forgets half of its state in a day; the second factor keeps its standard deviation at 1.
_MEMORY: Final = 0.97
_SURPRISE: Final = 0.243
_RAMP_HOURS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Episode:
    """Some hours of standing air. `strength` is the highest load that a station at an urban street has in that time."""

    onset_hour: float
    length_hours: float
    strength: float

    @property
    def end_hour(self) -> float:
        return self.onset_hour + self.length_hours

    def depth(self, hour: float) -> float:
        """Returns how far the episode replaces the usual weather: 0 outside, 1 inside, with two hours of transition."""
        return max(0.0, min(1.0, (hour - self.onset_hour) / _RAMP_HOURS, (self.end_hour - hour) / _RAMP_HOURS))


def first_episode(random: Random) -> Episode:
    """Returns an episode that has full depth for at least 14 hours from the 7th hour at the latest. So a traffic peak
    (8 and 20 local, 13 hours apart in the night when summer time ends) falls into the first 24 hours, whatever the
    start."""
    return Episode(1.0 + 4.0 * random.random(), 18.0 + 22.0 * random.random(), _strength(random))


def next_episode(last: Episode, random: Random) -> Episode:
    """Returns an episode one to three days after the last one; 6 to 48 hours long, mostly short."""
    chance = random.random()
    length_hours = 6.0 + 42.0 * chance * chance * chance
    return Episode(last.end_hour + 24.0 + 42.0 * random.random(), length_hours, _strength(random))


class Weather:
    """The weather hour by hour, determined by `random` alone."""

    def __init__(self, random: Random, zones: Iterable[str]) -> None:
        self.hour = 0
        self.episode = first_episode(random)
        self._random = random
        self._region = _white(random)
        self._zones = {zone: _white(random) for zone in dict.fromkeys(zones)}

    def advance(self) -> None:
        """Advances by one hour."""
        self.hour += 1
        self._region = _MEMORY * self._region + _SURPRISE * _white(self._random)
        for zone, state in self._zones.items():
            self._zones[zone] = _MEMORY * state + _SURPRISE * _white(self._random)
        if self.hour > self.episode.end_hour:
            self.episode = next_episode(self.episode, self._random)

    def stagnation(self, zone: str) -> float:
        """Returns 1 on a usual day, down to 0.4 in wind, up to 2 in still air."""
        return max(0.4, min(2.0, 1.0 + 0.3 * self._region + 0.15 * self._zones[zone]))

    def brightness(self) -> float:
        """Returns how much ozone the sun makes, 1 on a usual day: still air is mostly clear air."""
        return max(0.8, min(1.2, 1.0 + 0.1 * self._region))


def madrid_offset(utc: datetime) -> timedelta:
    """Returns the offset of Madrid's clocks from UTC, by the rule of the European Union; a time zone database may be
    missing."""
    summer = _last_sunday(utc, month=3) <= utc < _last_sunday(utc, month=10)
    return timedelta(hours=2 if summer else 1)


def _last_sunday(utc: datetime, month: int) -> datetime:
    """Returns the instant when the clocks change; both months have 31 days."""
    end = utc.replace(month=month, day=31, hour=1, minute=0, second=0, microsecond=0)
    return end - timedelta(days=(end.weekday() + 1) % 7)


def _strength(random: Random) -> float:
    return 3.8 + 0.6 * random.random()


def _white(random: Random) -> float:
    """Returns an approximately normal deviate of standard deviation 1, without the platform's logarithm."""
    return 2.0 * (random.random() + random.random() + random.random() - 1.5)
