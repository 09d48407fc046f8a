"""Reads the official CSV files of the Madrid region's air quality network, as notifications in time order.

Devices are the start of the path; this module replays past measurements that the network publishes (UTF-8 with or
without BOM, `;`, decimal comma). A line is one series of one day: `hNN` is the value of the hour that ends at NN:00,
`vNN` its flag: V valid, T provisional, N missing. All series of a station and an hour become one notification.

Times are the local times of the file (Europe/Madrid), written without a zone, such as `2026-05-13T08:00:00`: the file
does not distinguish the two occurrences of the hour that repeats in autumn. Invariant: a file is accepted as a whole or
not at all.
"""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from tidegate.devices.stations import MAGNITUDES, STATIONS
from tidegate.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tidegate.notification import Value

# About three years of the whole network. In memory a series takes about seven times the size of its text.
FILE_BYTES_MAX: Final = 32 * 1024 * 1024

_HOURS: Final = tuple(f"{hour:02}" for hour in range(1, 25))
_SERIES_COLUMNS: Final = ("punto_muestreo", "magnitud", "ano", "mes", "dia")
_COLUMNS: Final = (*_SERIES_COLUMNS, *(kind + hour for hour in _HOURS for kind in "hv"))
_DECIMAL: Final = re.compile(r"-?[0-9]{1,9}(?:,[0-9]{1,9})?")
_WHOLE: Final = re.compile(r"[0-9]{1,4}")
_SAMPLING_POINT: Final = re.compile(r"([0-9]{8})(?:_.*)?")
_KNOWN: Final = {each.code: each.attributes() for each in STATIONS}


def read_official_csv(path: str | os.PathLike[str]) -> Iterator[dict[str, Value]]:
    """Returns one notification per station and hour. `provisional` is true if any of its values is provisional.

    Missing values are left out, and so are hours without any value. A station outside the known 28 has only its code. A
    pollutant without a name here is named by its number, such as `magnitude_81`. If two series measure the same
    pollutant (an analyser was replaced), the first one in the file that has a value counts.

    The file is read and checked when this is called. Raises BadInput D801 to D809 with file, line and column."""
    name = os.fspath(path)
    days: dict[datetime, list[_Series]] = {}
    for line in _split_lines(name, _read_text(name)):
        days.setdefault(_parse_day(line), []).append(_parse_series(line))
    return _notifications(days)


class _Series(NamedTuple):
    """One line of the file, which covers one day: 24 values, None where missing, and their flags."""

    station: str
    pollutant: str
    values: tuple[float | None, ...]
    flags: str


def _notifications(days: dict[datetime, list[_Series]]) -> Iterator[dict[str, Value]]:
    # A day's last hour ends at midnight, before the first hour of the next day: sorted days give sorted hours.
    for day in sorted(days):
        in_station_order = sorted(days[day], key=lambda series: series.station)
        for hour in range(24):
            time = (day + timedelta(hours=hour + 1)).isoformat()
            for code, of_station in groupby(in_station_order, key=lambda series: series.station):
                measured = _merge(of_station, hour)
                if measured:
                    yield {**_KNOWN.get(code, {"station": code}), "time": time, **measured}


def _merge(of_station: Iterable[_Series], hour: int) -> dict[str, Value]:
    measured: dict[str, Value] = {}
    for _, pollutant, values, flags in of_station:
        value = values[hour]
        if value is not None and pollutant not in measured:
            measured[pollutant] = value
            if flags[hour] == "T":
                measured["provisional"] = True
    return measured


class _Line(NamedTuple):
    """One line of the file by column, and its place in the file."""

    file: str
    number: int
    cells: dict[str, str]

    def refuse(self, code: str, column: str, problem: str, remedy: str) -> NoReturn:
        place = f"{self.file}, line {self.number}, column {column}"
        raise BadInput(code, f"{place}: {self.cells[column][:40]!r} {problem}", remedy)

    def match(self, column: str, pattern: re.Pattern[str], code: str, remedy: str) -> re.Match[str]:
        found = pattern.fullmatch(self.cells[column])
        if found is None:
            self.refuse(code, column, "is malformed", remedy)
        return found


def _read_text(name: str) -> str:
    try:
        with open(name, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise BadInput("D801", f"{name!r} cannot be read: {error}", "give the path of a readable CSV file") from error
    if len(content) > FILE_BYTES_MAX:
        raise BadInput("D809", f"{name} has over {FILE_BYTES_MAX} bytes", "split it, for example by year")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInput(
            "D802", f"{name}, line {line}: this is not UTF-8 text", "save the official CSV as UTF-8"
        ) from error


def _split_lines(name: str, text: str) -> Iterator[_Line]:
    rows = text.replace("\r\n", "\n").split("\n")
    columns = [column.strip().lower() for column in rows[0].split(";")]
    _check_columns(name, columns)
    for number, row in enumerate(rows[1:], start=2):
        if not row.strip():
            continue
        cells = [cell.strip() for cell in row.split(";")]
        if len(cells) != len(columns):
            raise BadInput(
                "D806",
                f"{name}, line {number}: {len(cells)} cells under {len(columns)} columns",
                "give every line as many cells as the first; is the file cut off?",
            )
        yield _Line(name, number, dict(zip(columns, cells, strict=True)))


def _check_columns(name: str, columns: Iterable[str]) -> None:
    missing = [column for column in _COLUMNS if column not in columns]
    if len(missing) == len(_COLUMNS):
        raise BadInput(
            "D802",
            f"{name}, line 1: this is not the official format: it has none of its columns",
            "the first line reads provincia;municipio;estacion;magnitud;punto_muestreo;ano;mes;dia;h01;v01;…",
        )
    if missing:
        raise BadInput(
            "D803",
            f"{name}, line 1: the column {missing[0]} is missing ({len(missing)} in all)",
            "add it, or download the file again",
        )


def _parse_series(line: _Line) -> _Series:
    code = line.match("punto_muestreo", _SAMPLING_POINT, "D808", "start it with the eight digits of the station")[1]
    magnitude = int(line.match("magnitud", _WHOLE, "D804", "write the pollutant's number, such as 8 for NO2")[0])
    pollutant = MAGNITUDES.get(magnitude, f"magnitude_{magnitude}")
    values = tuple(_parse_value(line, hour) for hour in _HOURS)
    return _Series(code, pollutant, values, "".join(line.cells[f"v{hour}"] or "N" for hour in _HOURS))


def _parse_day(line: _Line) -> datetime:
    year, month, day = (int(line.match(name, _WHOLE, "D805", "write digits only")[0]) for name in ("ano", "mes", "dia"))
    try:
        midnight = datetime(year, month, day)
        midnight + timedelta(days=1)
    except (ValueError, OverflowError) as error:
        line.refuse(
            "D805", "dia", f"does not make a valid date: {year}-{month}-{day} ({error})", "correct ano, mes and dia"
        )
    return midnight


def _parse_value(line: _Line, hour: str) -> float | None:
    text, flag = line.cells[f"h{hour}"], line.cells[f"v{hour}"]
    if flag == "N" or not (text or flag):
        return None
    if flag not in ("V", "T"):
        line.refuse("D807", f"v{hour}", "is not a flag", "use V for valid, T for provisional or N for missing")
    if not text:
        return None
    line.match(f"h{hour}", _DECIMAL, "D804", "write a number with a decimal comma, such as 0,3")
    return float(text.replace(",", "."))
