"""Devices: the generated readings obey the laws of their model, and official files are read as they were written."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from datetime import UTC, datetime, timedelta, timezone
from itertools import islice, pairwise
from statistics import correlation, mean
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tidegate.devices import MAGNITUDES, STATIONS, Station, read_official_csv, readings, station
from tidegate.devices.official_csv import FILE_BYTES_MAX
from tidegate.devices.weather import madrid_offset
from tidegate.errors import BadInput
from tidegate.notification import check

if TYPE_CHECKING:
    from pathlib import Path

HOUR = timedelta(hours=1)
MONDAY = datetime(2026, 5, 11, tzinfo=UTC)
POLLUTANTS = frozenset(MAGNITUDES.values())

HOURS = [f"{hour:02}" for hour in range(1, 25)]
HEADER = "provincia;municipio;estacion;magnitud;punto_muestreo;ano;mes;dia;" + ";".join(f"h{h};v{h}" for h in HOURS)


def take(count: int, seed: int = 7, start: datetime = MONDAY, step: timedelta = HOUR) -> list[dict[str, Any]]:
    return list(islice(readings(seed, start, step), count))


@pytest.fixture(scope="module")
def weeks() -> list[dict[str, Any]]:
    """Returns six weeks of all stations, hour by hour."""
    return take(6 * 168 * len(STATIONS))


def local_hour(notification: dict[str, Any]) -> int:
    """Returns the local hour of readings in May and June, when Madrid is two hours ahead."""
    return (int(notification["time"][11:13]) + 2) % 24


def mean_of(notifications: list[dict[str, Any]], pollutant: str, hour: int, **attributes: str) -> float:
    chosen = (n for n in notifications if pollutant in n and attributes.items() <= n.items())
    levels: list[float] = [n[pollutant] for n in chosen if local_hour(n) == hour]
    return mean(levels)


def worst_no2(notifications: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the highest NO2 of each station."""
    worst: dict[str, float] = defaultdict(float)
    for n in notifications:
        worst[n["station"]] = max(worst[n["station"]], n.get("NO2", 0.0))
    return worst


class TestStations:
    def test_the_network_is_whole(self) -> None:
        assert len(STATIONS) == len({each.code for each in STATIONS}) == 28
        assert sum(len(each.pollutants) for each in STATIONS) == 180
        for each in STATIONS:
            assert -4.6 < each.longitude < -3.0
            assert 39.8 < each.latitude < 41.2
            assert {"NO", "NO2", "NOx", "O3"} <= set(each.pollutants) <= POLLUTANTS

    def test_a_station_is_found_by_its_code(self) -> None:
        assert all(station(each.code) is each for each in STATIONS)
        assert (station("28065014").name, station("28065014").kind) == ("Getafe", "traffic")

    @pytest.mark.parametrize("code", ["", "28079004", "Getafe"])
    def test_a_foreign_code_is_named(self, code: str) -> None:
        with pytest.raises(BadInput, match=code or "''") as caught:
            station(code)
        assert caught.value.code == "D810"


class TestReadings:
    def test_a_seed_is_a_stream_and_another_seed_another(self) -> None:
        assert take(2000, seed=3) == take(2000, seed=3) != take(2000, seed=4)

    def test_the_stream_of_a_seed_never_changes(self) -> None:
        """This is a golden stream: other platforms, Python versions and later releases must produce the same bytes."""
        text = json.dumps(take(5000, seed=2026, start=datetime(2026, 3, 27), step=timedelta(minutes=20)))
        assert (
            hashlib.sha256(text.encode()).hexdigest()
            == "4c0d149e01cdb48168fff4ec3622aec44df0323f561e22c1a0fea829b71504be"
        )

    def test_every_station_speaks_once_a_step_in_the_order_of_time(self) -> None:
        for at, n in enumerate(take(28 * 50, step=timedelta(minutes=7))):
            assert n["time"] == (MONDAY + at // 28 * timedelta(minutes=7)).strftime("%Y-%m-%dT%H:%M:%SZ")
            assert n["station"] == STATIONS[at % 28].code

    @given(st.integers(), st.timedeltas(timedelta(microseconds=1), timedelta(days=1)))
    @settings(deadline=None, max_examples=50)
    def test_any_seed_and_step_give_lawful_notifications_whose_times_sort_as_text(
        self, seed: int, step: timedelta
    ) -> None:
        notifications = take(28 * 5, seed=seed, step=step)
        for n in notifications:
            check(n)
        times = [n["time"] for n in notifications]
        assert times == sorted(times)
        assert len(set(times)) == 5

    def test_a_station_gives_its_facts_and_what_it_measures_and_no_negative_value(
        self, weeks: list[dict[str, Any]]
    ) -> None:
        for n in weeks:
            place = station(n["station"])
            assert place.attributes().items() <= n.items()
            assert n.keys() & POLLUTANTS <= set(place.pollutants)
            assert n.keys() - POLLUTANTS == place.attributes().keys() | {"time"}
            assert all(n[pollutant] >= 0 for pollutant in n.keys() & POLLUTANTS)

    def test_about_one_value_in_a_hundred_is_missing(self, weeks: list[dict[str, Any]]) -> None:
        missing = mean("PM10" not in n for n in weeks if "PM10" in station(n["station"]).pollutants)
        assert 0.005 < missing < 0.015

    def test_traffic_peaks_in_the_morning_and_in_the_evening(self, weeks: list[dict[str, Any]]) -> None:
        for pollutant in ("NO", "NO2", "PM10", "PM2.5"):
            by_hour = [mean_of(weeks, pollutant, hour, kind="traffic") for hour in (3, 8, 14, 20)]
            assert by_hour[0] < by_hour[1] > by_hour[2] < by_hour[3], (pollutant, by_hour)

    def test_ozone_peaks_in_the_afternoon_and_goes_against_no2(self, weeks: list[dict[str, Any]]) -> None:
        assert mean_of(weeks, "O3", 16) > 1.3 * mean_of(weeks, "O3", 4)
        both = [(n["O3"], n["NO2"]) for n in weeks if n["area"] == "urban" and {"O3", "NO2"} <= n.keys()]
        assert correlation(*zip(*both, strict=True)) < -0.3

    def test_streets_are_worse_than_the_country_and_workdays_worse_than_sundays(
        self, weeks: list[dict[str, Any]]
    ) -> None:
        assert mean_of(weeks, "NO2", 8, area="urban", kind="traffic") > 3 * mean_of(weeks, "NO2", 8, area="rural")
        calm = [n for n in weeks if n.get("NO2", 999) < 130 and n["kind"] == "traffic"]
        sundays = [n for n in calm if datetime.fromisoformat(n["time"]).weekday() == 6]
        workdays = [n for n in calm if datetime.fromisoformat(n["time"]).weekday() < 5]
        assert mean_of(sundays, "NO2", 8) < 0.85 * mean_of(workdays, "NO2", 8)

    def test_neighbours_rise_and_fall_together(self, weeks: list[dict[str, Any]]) -> None:
        """This also holds without the daily rhythm and the episodes: at one hour of the day, with usual air only."""
        levels: dict[str, dict[str, float]] = {"Getafe": {}, "Leganés": {}}
        for n in weeks:
            if n["name"] in levels and n.get("NO2", 999) < 130 and n["time"][11:13] == "18":
                levels[n["name"]][n["time"]] = n["NO2"]
        shared = sorted(levels["Getafe"].keys() & levels["Leganés"].keys())
        assert correlation(*([levels[name][time] for time in shared] for name in levels)) > 0.8

    def test_nox_is_no2_and_no_together(self, weeks: list[dict[str, Any]]) -> None:
        for n in weeks:
            if "NOx" in n:
                assert n["NOx"] == pytest.approx(n["NO2"] + 1.53 * n["NO"], abs=0.51)

    @pytest.mark.parametrize("seed", range(100))
    def test_the_first_day_brings_an_alert_at_every_urban_street(self, seed: int) -> None:
        """This holds from any hour, and across both clock changes."""
        start = datetime(2026, 1 + seed % 12, 24 + seed % 5, seed % 24, seed * 7 % 60)
        worst = worst_no2(take(24 * 28, seed=seed, start=start))
        assert all(worst[each.code] > 200 for each in STATIONS if (each.area, each.kind) == ("urban", "traffic"))
        assert all(worst[each.code] > 180 for each in STATIONS if each.area == "urban")
        assert all(worst[each.code] < 100 for each in STATIONS if each.area == "rural")

    @pytest.mark.parametrize("seed", range(5))
    def test_episodes_come_a_few_times_a_week_and_pass(self, seed: int) -> None:
        hourly = take(12 * 168 * 28, seed=seed)
        worst = [max(worst_no2(hourly[at : at + 28]).values()) for at in range(0, len(hourly), 28)]
        onsets = sum(before <= 180 < now for before, now in pairwise([0.0, *worst]))
        assert 1.5 < onsets / 12 < 5
        assert mean(level < 150 for level in worst) > 0.5

    def test_the_weather_of_a_seed_does_not_depend_on_the_step(self) -> None:
        """Read every ten minutes or every hour, the same full hours have the same levels, except for noise."""
        fine = [n for n in take(28 * 6 * 48, step=timedelta(minutes=10)) if n["time"].endswith("00:00Z")]
        for often, seldom in zip(fine, take(28 * 48), strict=True):
            if "O3" in often and "O3" in seldom:
                assert often["O3"] == pytest.approx(seldom["O3"], rel=0.15, abs=1)

    def test_a_start_of_another_zone_is_the_same_instant(self) -> None:
        elsewhere = MONDAY.astimezone(timezone(timedelta(hours=-5)))
        assert take(100, start=elsewhere) == take(100) == take(100, start=MONDAY.replace(tzinfo=None))

    def test_a_station_of_ones_own_needs_nothing_of_the_network(self) -> None:
        own = Station("99000001", "Pier", "Harbour", "suburban", "industrial", 0.0, 0.0, 2, ("ethylbenzene", "NOx"))
        for n in islice(readings(1, MONDAY, HOUR, [own]), 100):
            assert n.keys() - own.attributes().keys() <= {"time", "ethylbenzene"}

    @pytest.mark.parametrize("step", [timedelta(0), -HOUR, timedelta(days=1, microseconds=1)])
    def test_a_step_out_of_range_is_refused_at_once(self, step: timedelta) -> None:
        with pytest.raises(BadInput) as caught:
            readings(1, MONDAY, step)
        assert caught.value.code == "D811"

    def test_no_station_is_refused_instead_of_waiting_forever(self) -> None:
        with pytest.raises(BadInput) as caught:
            readings(1, MONDAY, HOUR, [])
        assert caught.value.code == "D811"


@pytest.mark.parametrize(
    ("utc", "hours"),
    [
        (datetime(2026, 3, 29, 0, 59), 1),
        (datetime(2026, 3, 29, 1), 2),
        (datetime(2026, 10, 25, 0, 59), 2),
        (datetime(2026, 10, 25, 1), 1),
        (datetime(2024, 3, 31, 1), 2),
    ],
)
def test_clocks_change_at_one_utc_on_the_last_sundays(utc: datetime, hours: int) -> None:
    assert madrid_offset(utc) == timedelta(hours=hours)


def series(
    values: dict[int, str], point: str = "28065014_8_8", magnitude: str = "8", day: str = "2026;05;13", flag: str = "V"
) -> str:
    """Returns one line of an official file, with `values` by hour and all others missing."""
    cells = (f"{values[hour]};{flag}" if hour in values else ";N" for hour in range(1, 25))
    return f"28;65;14;{magnitude};{point};{day};" + ";".join(cells)


def write(path: Path, *lines: str, end: str = "\n", bom: bytes = b"\xef\xbb\xbf") -> Path:
    path.write_bytes(bom + "".join(line + end for line in (HEADER, *lines)).encode())
    return path


VALID = "\n".join([HEADER, series({1: "5", 24: "0,3"}), series({7: "61"}, "28005002_10_1", "10", flag="T")]).encode()


class TestOfficialCsv:
    def test_the_series_of_a_station_and_hour_are_one_notification(self, tmp_path: Path) -> None:
        file = write(
            tmp_path / "day.csv",
            series({8: "41", 24: "7"}),
            series({8: "0,3", 9: "-0,1"}, "28065014_6_48", "6", flag="T"),
            series({8: "12"}, "28005002_9_49", "9"),
        )
        getafe, alcala = station("28065014").attributes(), station("28005002").attributes()
        assert list(read_official_csv(file)) == [
            {**alcala, "time": "2026-05-13T08:00:00", "PM2.5": 12.0},
            {**getafe, "time": "2026-05-13T08:00:00", "NO2": 41.0, "CO": 0.3, "provisional": True},
            {**getafe, "time": "2026-05-13T09:00:00", "CO": -0.1, "provisional": True},
            {**getafe, "time": "2026-05-14T00:00:00", "NO2": 7.0},
        ]

    @pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r\n \r\n"])
    @pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
    def test_line_ends_and_bom_do_not_matter(self, tmp_path: Path, end: str, bom: bytes) -> None:
        lines = [series({1: "5"}), series({2: "6"})]
        assert list(read_official_csv(write(tmp_path / "a.csv", *lines, end=end, bom=bom))) == list(
            read_official_csv(str(write(tmp_path / "b.csv", *lines)))
        )

    def test_the_days_of_a_file_come_in_order_whatever_theirs_is(self, tmp_path: Path) -> None:
        days = ["2026;01;01", "2025;12;31", "2025;12;30"]
        every_hour = {hour: str(hour) for hour in range(1, 25)}
        file = write(tmp_path / "days.csv", *(series(every_hour, day=day) for day in days))
        notifications = list(read_official_csv(file))
        first = datetime(2025, 12, 30, 1)
        assert [n["time"] for n in notifications] == [(first + at * HOUR).isoformat() for at in range(72)]
        assert [n["NO2"] for n in notifications] == [float(hour) for hour in range(1, 25)] * 3

    def test_of_two_series_of_the_same_the_first_with_a_value_counts(self, tmp_path: Path) -> None:
        file = write(
            tmp_path / "two.csv", series({1: "5"}, flag="V"), series({1: "6", 2: "7"}, "28065014_8_9", flag="T")
        )
        first, second = read_official_csv(file)
        assert (first["NO2"], "provisional" in first) == (5.0, False)
        assert (second["NO2"], second["provisional"]) == (7.0, True)

    def test_foreign_stations_and_pollutants_keep_their_numbers(self, tmp_path: Path) -> None:
        file = write(tmp_path / "foreign.csv", series({1: "3"}, "08001001_81_1", "81"))
        assert list(read_official_csv(file)) == [
            {"station": "08001001", "time": "2026-05-13T01:00:00", "magnitude_81": 3.0}
        ]

    @pytest.mark.parametrize(("number", "name"), MAGNITUDES.items())
    def test_every_pollutant_has_its_name(self, tmp_path: Path, number: int, name: str) -> None:
        (n,) = read_official_csv(write(tmp_path / "one.csv", series({1: "3"}, magnitude=str(number))))
        assert n[name] == 3.0

    def test_a_day_without_values_is_no_notification(self, tmp_path: Path) -> None:
        assert list(read_official_csv(write(tmp_path / "empty.csv"))) == []
        assert list(read_official_csv(write(tmp_path / "empty.csv", series({}), series({1: "5"}, flag="N")))) == []

    def test_the_columns_may_stand_in_any_order(self, tmp_path: Path) -> None:
        def turn(line: str) -> str:
            return ";".join(reversed(line.split(";")))

        line = series({3: "1,5"})
        turned = tmp_path / "turned.csv"
        turned.write_text(f"{turn(HEADER).upper()}\n{turn(line)}\n")
        assert list(read_official_csv(turned)) == list(read_official_csv(write(tmp_path / "straight.csv", line)))

    @pytest.mark.parametrize(
        ("line", "code", "words"),
        [
            (series({5: "4x"}), "D804", ["column h05", "'4x'", "comma"]),
            (series({5: "4.5"}), "D804", ["column h05", "'4.5'", "comma"]),
            (series({5: "1" * 400}), "D804", ["column h05"]),
            (series({5: "nan"}), "D804", ["column h05"]),
            (series({5: "٣"}), "D804", ["column h05"]),
            (series({5: "4"}, magnitude="NO2"), "D804", ["column magnitud", "'NO2'"]),
            (series({5: "4"}, day="2026;02;30"), "D805", ["column dia", "2026-2-30"]),
            (series({5: "4"}, day="2026;13;01"), "D805", ["2026-13-1"]),
            (series({5: "4"}, day="0;1;1"), "D805", ["0-1-1"]),
            (series({5: "4"}, day="9999;12;31"), "D805", ["9999-12-31"]),
            (series({5: "4"}, day="MMXXVI;1;1"), "D805", ["column ano", "'MMXXVI'"]),
            (series({5: "4"})[:-2], "D806", ["55 cells under 56"]),
            (series({5: "4"}) + ";", "D806", ["57 cells under 56"]),
            (series({5: "4"}, flag="X"), "D807", ["column v05", "'X'"]),
            (series({5: "4"}, flag=""), "D807", ["column v05", "''"]),
            (series({5: "4"}, point="2806501_8_8"), "D808", ["column punto_muestreo", "'2806501_8_8'"]),
        ],
    )
    def test_a_wrong_line_is_refused_with_place_and_cure(
        self, tmp_path: Path, line: str, code: str, words: list[str]
    ) -> None:
        file = write(tmp_path / "wrong.csv", series({1: "1"}), line)
        with pytest.raises(BadInput) as caught:
            read_official_csv(file)
        assert caught.value.code == code
        for word in [str(file), "line 3", *words]:
            assert word in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "code", "words"),
        [
            (b"", "D802", ["line 1"]),
            (b"a;b\n1;2\n", "D802", ["punto_muestreo"]),
            (b"\x89PNG\r\n\x1a\n\x00\x00", "D802", ["line 1", "UTF-8"]),
            (HEADER.encode("utf-16"), "D802", ["UTF-8"]),
            (HEADER.encode() + b"\n\n\xff", "D802", ["line 3", "UTF-8"]),
            (HEADER.replace(";v24", "").encode(), "D803", ["v24"]),
            (HEADER.replace("magnitud;", "").encode(), "D803", ["magnitud"]),
        ],
    )
    def test_another_format_is_refused(self, tmp_path: Path, content: bytes, code: str, words: list[str]) -> None:
        file = tmp_path / "other.csv"
        file.write_bytes(content)
        with pytest.raises(BadInput) as caught:
            read_official_csv(file)
        assert caught.value.code == code
        for word in [str(file), *words]:
            assert word in str(caught.value)

    def test_what_cannot_be_read_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "absent.csv", "\0"):
            with pytest.raises(BadInput) as caught:
                read_official_csv(path)
            assert caught.value.code == "D801"

    def test_a_file_beyond_the_bound_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "huge.csv"
        with file.open("wb") as sparse:
            sparse.truncate(FILE_BYTES_MAX + 1)
        with pytest.raises(BadInput) as caught:
            read_official_csv(file)
        assert caught.value.code == "D809"

    @given(
        st.one_of(
            st.binary(),
            st.text().map(str.encode),
            st.lists(st.text(st.sampled_from("0123456789;,-_VTNh \r\n\x00٣é"))).map(
                lambda parts: "\n".join([HEADER, *parts]).encode()
            ),
            st.builds(
                lambda at, what: b"".join([VALID[:at], what, VALID[at + 1 :]]),
                st.integers(0, 1000),
                st.binary(max_size=3) | st.sampled_from([b";", b"\n", b"9", b",", b"\r"]),
            ),
        )
    )
    @example(b"")
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=400)
    def test_any_bytes_give_lawful_rows_or_bad_input(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "fuzz.csv"
        file.write_bytes(content)
        try:
            notifications = list(read_official_csv(file))
        except BadInput:
            return
        for n in notifications:
            check(n)
        assert [n["time"] for n in notifications] == sorted(str(n["time"]) for n in notifications)
