"""A picture of a history: the hourly means of NO2 at the stations with the highest means, and the alerts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pyarrow.compute
import pyarrow.dataset
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

from tidegate.demo.figure import BLACK, BLUE, GREEN, ORANGE, PURPLE, name_axes, new_figure
from tidegate.devices import ATTRIBUTION

POLLUTANT: Final = "NO2"
LOOKS: Final = (BLUE, ORANGE, GREEN, PURPLE, BLACK)


def draw_history(history: Path, file: Path) -> None:
    """Draws the history into a file. Draws nothing if no window is closed yet."""
    windows = read_table(history, "windows").filter(pyarrow.compute.field("pollutant") == POLLUTANT)
    if windows.num_rows == 0:
        return
    means = windows.group_by("name").aggregate([("mean", "mean")]).sort_by([("mean_mean", "descending")])
    figure, (axes,) = new_figure(1, width=11, height=4.6)
    for name, look in zip(means["name"].to_pylist(), LOOKS, strict=False):
        line = windows.filter(pyarrow.compute.field("name") == name).sort_by("start")
        axes.plot(line["start"].to_pylist(), line["mean"].to_pylist(), color=look.colour, label=name, linewidth=1.2)
    for alert in read_table(history, "alerts").to_pylist():
        if alert["alert"] == POLLUTANT and alert["state"] == "begins":
            axes.axvline(alert["until"], color="#999999", linewidth=0.5, alpha=0.5)
    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.legend(frameon=False, fontsize=9, ncols=len(LOOKS), loc="lower right", bbox_to_anchor=(1.0, 1.0))
    name_axes(axes, f"{POLLUTANT}, hourly means; grey: an alert begins", "", "µg/m³")
    figure.text(0.01, 0.005, f"Readings: simulated from a seed. Stations: {ATTRIBUTION}", fontsize=7, color="#666666")
    figure.savefig(file, dpi=130)


def count_alerts(history: Path) -> int:
    """Returns how many alerts Spark has found so far."""
    return int(read_table(history, "alerts").num_rows)


def read_table(history: Path, table: str) -> Any:
    """Reads the complete parts of a table. A table without parts gives an empty one with the columns used here."""
    if not any((history / table).glob("day=*/batch=*/*.parquet")):
        return pyarrow.table({"pollutant": [], "name": [], "alert": [], "state": []})
    return pyarrow.dataset.dataset(history / table, partitioning="hive").to_table()
