"""The European Air Quality Index: rates a concentration from 1 (good) to 6 (extremely poor).

This is the version that the European Environment Agency revised in 2024 (ETC HE Report 2024/17), for hourly
concentrations of five pollutants in ug/m3. BANDS has the upper bound of each band except the last, inclusive. The index
of a place is that of its worst pollutant.
"""

from __future__ import annotations

from typing import Final

BAND_NAMES: Final = ("good", "fair", "moderate", "poor", "very poor", "extremely poor")
BANDS: Final[dict[str, tuple[float, ...]]] = {
    "PM2.5": (5, 15, 50, 90, 140),
    "PM10": (15, 45, 120, 195, 270),
    "NO2": (10, 25, 60, 100, 150),
    "O3": (60, 100, 120, 160, 180),
    "SO2": (20, 40, 125, 190, 275),
}
