"""The official CSV files of the Madrid region's air quality network, as notifications in the order of time.

Devices stand at the start of the path; here their past is read back from what the network publishes (UTF-8 with or
without BOM, `;`, decimal comma). A line is one series of one day: `hNN` is the value of the hour that ends at NN:00,
`vNN` its flag, V valid, T provisional, N missing. The series of a station and an hour become one notification.

Times are the local ones of the file (Europe/Madrid), written without a zone such as `2026-05-13T08:00:00`: the file
cannot say which of the two is meant in the hour that autumn repeats. Invariant: a file is taken whole or not at all.
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

# Three years of the whole network; a series takes about seven times its text in memory.
FILE_BYTES_MAX: Final = 32 * 1024 * 1024

_HOURS: Final = tuple(f"{hour:02}" for hour in range(1, 25))
_SERIES_COLUMNS: Final = ("punto_muestreo", "magnitud", "ano", "mes", "dia")
_COLUMNS: Final = (*_SERIES_COLUMNS, *(kind + hour for hour in _HOURS for kind in "hv"))
_DECIMAL: Final = re.compile(r"-?[0-9]{1,9}(?:,[0-9]{1,9})?")
_WHOLE: Final = re.compile(r"[0-9]{1,4}")
_SAMPLING_POINT: Final = re.compile(r"([0-9]{8})(?:_.*)?")
_KNOWN: Final = {each.code: each.attributes() for each in STATIONS}


def read_official_csv(path: str | os.PathLike[str]) -> Iterator[dict[str, Value]]:
    """One notification a station and hour, with `provisional` true when any of its values is.

    Missing values are left out, and so are hours without any value. A station outside the known 28 has its code only;
    a pollutant without a name here is called by its number, as `magnitude_81`. Where two series measure the same
    (an analyser was replaced), the first in the file that has a value counts.

    The file is read and checked when this is called. Raises BadInput D801 to D809 with file, line and column.
    """
    name = os.fspath(path)
    days: dict[datetime, list[_Series]] = {}
    for line in _split_lines(name, _read_text(name)):
        days.setdefault(_parse_day(line), []).append(_parse_series(line))
    return _notifications(days)


class _Series(NamedTuple):
    """What one line says of its day: 24 values, None where missing, and their flags."""

    station: str
    pollutant: str
    values: tuple[float | None, ...]
    flags: str


def _notifications(days: dict[datetime, list[_Series]]) -> Iterator[dict[str, Value]]:
    # A day's last hour ends at the midnight before the next day's first, so days in order give hours in order.
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
    """One line of the file by column, and where it stands."""

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
            f"{name}, line 1: this is not the official format, no column of it is there",
            "the first line reads provincia;municipio;estacion;magnitud;punto_muestreo;ano;mes;dia;h01;v01;…",
        )
    if missing:
        raise BadInput(
            "D803",
            f"{name}, line 1: the column {missing[0]} is missing ({len(missing)} in all)",
            "add it, or take the file anew",
        )


def _parse_series(line: _Line) -> _Series:
    code = line.match("punto_muestreo", _SAMPLING_POINT, "D808", "it starts with the station's eight digits")[1]
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
        line.refuse("D805", "dia", f"makes no date of {year}-{month}-{day} ({error})", "correct ano, mes and dia")
    return midnight


def _parse_value(line: _Line, hour: str) -> float | None:
    text, flag = line.cells[f"h{hour}"], line.cells[f"v{hour}"]
    if flag == "N" or not (text or flag):
        return None
    if flag not in ("V", "T"):
        line.refuse("D807", f"v{hour}", "is no flag", "flags are V valid, T provisional, N missing")
    if not text:
        return None
    line.match(f"h{hour}", _DECIMAL, "D804", "write a number with a decimal comma, such as 0,3")
    return float(text.replace(",", "."))
