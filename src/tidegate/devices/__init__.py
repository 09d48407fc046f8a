"""Devices: the publishers at the start of the path, here the air quality stations of the Madrid region.

Their notifications are plain attributes, independent of the protocol that carries them. `stations` holds the facts of
the 28 stations, `readings` simulates their measurements from a seed, and `official_csv` reads the files that the
network publishes. All three use the same attribute names, so one filter, such as `NO2 > 200; kind == traffic`, works
for simulated and measured data.
"""

from tidegate.devices.official_csv import read_official_csv
from tidegate.devices.readings import readings
from tidegate.devices.stations import ATTRIBUTION, MAGNITUDES, STATIONS, Station, station

__all__ = ["ATTRIBUTION", "MAGNITUDES", "STATIONS", "Station", "read_official_csv", "readings", "station"]
