"""The European Air Quality Index: how bad a concentration is, from 1 good to 6 extremely poor.

As the European Environment Agency revised it in 2024 (ETC HE Report 2024/17): for hourly concentrations of five
pollutants, the highest of each band but the last in ug/m3, its end included. A place is as bad as the worst of them.
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
