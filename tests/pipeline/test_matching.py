"""Matching on Spark finds exactly what Filter.matches and a SQL join find. An incomplete index is never used."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from broker_process import BrokerProcess, clean_environment
from command import Outcome, command_line
from pyspark.sql import DataFrame, SparkSession
from queue_client import QueueClient

from tidegate.errors import BadInput, ConfigError, Unavailable
from tidegate.filters import Filter
from tidegate.notification import is_number
from tidegate.pipeline.index_files import IndexFiles, Manifest, build_index
from tidegate.pipeline.match_job import match_queue
from tidegate.pipeline.matching import match

SITES = 12
Rows = list[tuple[Any, ...]]


def draw_subscriptions(count: int, seed: int) -> Rows:
    """Returns subscriptions of one equality and two ranges, which a SQL join can express too. Ids have gaps, and
    include the largest."""
    rng = np.random.default_rng(seed)
    sites, lows, widths = (
        rng.integers(0, SITES, count),
        rng.integers(0, 90, (count, 2)),
        rng.integers(1, 40, (count, 2)),
    )
    return [
        (
            7 * n if n else 2**53 - 1,
            f"site==s{site};t=={low[0]}..{low[0] + width[0]};h>={low[1]};h<{low[1] + width[1]}",
            f"s{site}",
            *map(float, (low[0], low[0] + width[0], low[1], low[1] + width[1])),
        )
        for n, (site, low, width) in enumerate(zip(sites.tolist(), lows.tolist(), widths.tolist(), strict=True))
    ]


def draw_notifications(count: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    sites, numbers = rng.integers(0, SITES + 2, count), rng.random((count, 2)) * 120
    return [
        (f"n{n}", f"s{site}", t, h)
        for n, (site, (t, h)) in enumerate(zip(sites.tolist(), numbers.tolist(), strict=True))
    ]


def subscribers(matched: DataFrame) -> dict[Any, Any]:
    rows = matched.collect()
    assert len({row[0] for row in rows}) == len(rows), "each notification once"
    return {row[0]: row["subscribers"] for row in rows}


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        yield process


@pytest.mark.timeout(300)
def test_it_finds_what_a_sql_join_finds_whatever_the_index_is_cut_into(spark: SparkSession, tmp_path: Path) -> None:
    subscriptions = spark.createDataFrame(
        draw_subscriptions(3000, seed=1),
        "id long, filter string, site string, t_low double, t_high double, h_low double, h_high double",
    )
    notifications = spark.createDataFrame(
        draw_notifications(2500, seed=2), "id string, site string, t double, h double"
    )
    subscriptions.createOrReplaceTempView("subscriptions")
    notifications.repartition(3).createOrReplaceTempView("notifications")
    joined = spark.sql(
        "SELECT n.id, sort_array(collect_list(s.id)) AS subscribers FROM notifications n JOIN subscriptions s "
        "ON n.site = s.site WHERE n.t BETWEEN s.t_low AND s.t_high AND n.h >= s.h_low AND n.h < s.h_high GROUP BY n.id"
    )
    expected = {f"n{n}": [] for n in range(2500)} | subscribers(joined)
    assert sum(map(len, expected.values())) > 10_000
    assert [] in expected.values()
    whole = build_index(subscriptions, tmp_path / "whole")
    cut = build_index(subscriptions, tmp_path / "cut", partitions=5)
    assert (len(whole.manifest.files), len(cut.manifest.files)) == (1, 5)
    assert whole.manifest.subscriptions == cut.manifest.subscriptions == 3000
    table = spark.table("notifications")
    assert subscribers(match(table, whole)) == expected
    assert subscribers(match(table, cut)) == expected
    assert subscribers(match(table, cut, shares=3)) == expected
    counts = {name: len(ids) for name, ids in expected.items()}
    assert subscribers(match(table, cut, is_counted=True)) == counts
    assert subscribers(match(table, cut, is_counted=True, shares=2)) == counts


FILTERS = (
    "*", "a", "!a", "a==1", "a==1,2.5,'x'", "a!=1", "a<2", "a<=2", "a>1", "a>=2.5", "a==1..2.5", "a^=1", "b^=x", "b$=z",
    "b*='y z'", "b=='x'..'y'", "b!=xyz", "c==true", "c==false", "c!=true", "time>='2026-05-01T10'", "price<2.5",
    "time^='2026-05-01T10:30'", "day==2026-05-01", "whole==7;b;!c", "'odd name.x'==1", "n==9007199254740992",
)  # fmt: skip


def test_columns_are_attributes_by_the_rules_of_notifications(spark: SparkSession, tmp_path: Path) -> None:
    ten = datetime(2026, 5, 1, 10, 30, tzinfo=UTC)
    rows: Rows = [
        (0, 1.0, "xyz", True, ten, date(2026, 5, 1), Decimal("2.25"), 7, 1, 2**53),
        (1, 2.5, "x y z", False, None, None, None, None, None, None),
        (2, None, None, None, ten.replace(hour=9), date(2026, 4, 1), Decimal("2.50"), 8, 2, 1),
        (3, math.nan, "x", None, None, None, None, None, None, None),
        (4, None, None, None, None, None, None, None, None, None),
        (5, 1.0, None, None, None, None, None, None, None, 2**53 + 1),
        (6, None, "y" * 65_536, None, None, None, None, None, None, None),
        (7, None, "Xyz'", None, None, None, None, 7, None, None),
    ]
    notifications = spark.createDataFrame(
        rows,
        "id int, a double, b string, c boolean, time timestamp, day date, price decimal(10,2), whole byte, "
        "`odd name.x` int, n long",
    )
    subscriptions = spark.createDataFrame([*enumerate(FILTERS)], "id int, filter string")
    matched = match(notifications, build_index(subscriptions, tmp_path, partitions=2)).collect()
    refused = {row["id"]: row["error"].partition(":")[0] for row in matched if row["error"] is not None}
    assert refused == {3: "N208", 4: "N201", 5: "N207", 6: "N206"}
    for row in matched:
        expected = None
        if row["error"] is None:
            attributes = dict(zip(notifications.columns[1:], map(_as_attribute, rows[row["id"]][1:]), strict=True))
            expected = [n for n, text in enumerate(FILTERS) if Filter.parse(text).matches(attributes)]
        assert row["subscribers"] == expected, row["id"]
    assert {ids for row in matched for ids in row["subscribers"] or ()} >= {*range(len(FILTERS))} - {2}


def _as_attribute(value: Any) -> Any:
    match value:
        case Decimal():
            return float(value)
        case datetime():
            return f"{value:%Y-%m-%dT%H:%M:%S.%f}Z"
        case date():
            return value.isoformat()
    assert value is None or isinstance(value, (str, bool)) or is_number(value)
    return value


def test_what_no_filter_can_compare_and_keys_that_name_nothing_are_refused(spark: SparkSession) -> None:
    nobody = IndexFiles(Path("nowhere"), Manifest((), 0, 0, 0), is_new=False)
    nested = spark.sql("SELECT 1 AS id, array(1, 2) AS many, 'x' AS error")
    with pytest.raises(ConfigError, match=r"C431: the column many has the type array<int>"):
        match(nested, nobody)
    with pytest.raises(ConfigError, match=r"C431: the key column number of the notifications is missing; .* id, many"):
        match(nested, nobody, keys=("number",))
    with pytest.raises(ConfigError, match=r"C431: the key column error .* is reserved for the result"):
        match(nested, nobody, keys=("id", "error"))
    with pytest.raises(ConfigError, match=r"C431: there is no binary column error"):
        match(nested, nobody, body="error")


def test_an_empty_table_has_no_subscribers_for_anybody(spark: SparkSession, tmp_path: Path) -> None:
    index = build_index(spark.createDataFrame([], "id long, filter string"), tmp_path)
    assert index.manifest == Manifest((), 0, 0, 0)
    two = spark.createDataFrame([(1, 5), (2, 6)], "id int, a int")
    assert subscribers(match(two, index)) == {1: [], 2: []}
    assert subscribers(match(two.where("id > 5"), index)) == {}


def test_the_same_subscriptions_reuse_their_index_and_others_do_not(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(n, f"a=={n}") for n in range(20)]
    table = spark.createDataFrame(rows, "id long, filter string")
    first = build_index(table, tmp_path)
    written = (first.directory / "partition-00000.index").stat().st_mtime_ns
    again = build_index(spark.createDataFrame([*reversed(rows)], "id long, filter string"), tmp_path)
    assert (again.directory, again.manifest, again.is_new) == (first.directory, first.manifest, False)
    assert (first.directory / "partition-00000.index").stat().st_mtime_ns == written
    rebuilt = build_index(table, tmp_path, rebuild=True)
    assert (rebuilt.directory, rebuilt.is_new) == (first.directory, True)
    assert (first.directory / "partition-00000.index").stat().st_mtime_ns > written
    other = build_index(table.where("id != 3").union(spark.sql("SELECT 3L, 'a==4'")), tmp_path)
    assert other.is_new
    one = spark.createDataFrame([(1, 4)], "id int, a int")
    assert subscribers(match(one, first)) == {1: [4]}
    assert subscribers(match(one, other)) == {1: [3, 4]}


def test_a_build_that_dies_leaves_nothing_that_is_used(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(n, f"a=={n}") for n in range(20)]
    table = spark.createDataFrame(rows, "id long, filter string")
    place = build_index(table, tmp_path / "other", partitions=3).directory.name
    # One of three partitions cannot be written, because a non-empty directory is in the place of its file.
    in_the_way = tmp_path / "index" / place / "partition-00001.index"
    (in_the_way / "full").mkdir(parents=True)
    with pytest.raises(Unavailable, match=r"U711.*start again"):
        build_index(table, tmp_path / "index", partitions=3)
    assert {path.name for path in in_the_way.parent.iterdir()} >= {"partition-00000.index", "partition-00001.index"}
    assert not (in_the_way.parent / "manifest.json").exists()
    (in_the_way / "full").rmdir()
    in_the_way.rmdir()
    built = build_index(table, tmp_path / "index", partitions=3)
    assert (built.is_new, built.manifest.subscriptions) == (True, 20)
    assert len(list(built.directory.iterdir())) == 4, "three partitions and a manifest, nothing unfinished"
    assert subscribers(match(spark.createDataFrame([(1, 7)], "id int, a int"), built)) == {1: [7]}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([(1, "a==1"), (None, "a"), (None, None)], r"D817: 2 of 3 subscriptions have no id"),
        ([(1, None), (2, "a")], r"D817: 1 of 2 subscriptions have no filter"),
        ([(-4, "a"), (2, "a"), (2**53, "a")], r"D817: 2 of 3 subscriptions have an id below 0 or from 2\^53 on"),
        ([(1, "a"), (5, "b"), (7, "a"), (5, "b>>")], r"D818: subscription 5 is in the table twice"),
        ([(1, "a"), (9, "a>"), (8, "b==x y")], r"D816: 2 filters .* subscription 8: FilterError F109 at column 6"),
    ],
)
def test_rows_that_cannot_be_subscriptions_are_named(
    spark: SparkSession, tmp_path: Path, rows: Rows, fault: str
) -> None:
    with pytest.raises(BadInput, match=fault):
        build_index(spark.createDataFrame(rows, "id long, filter string"), tmp_path, partitions=2)
    assert not list(tmp_path.glob("*/manifest.json"))


def test_bad_filters_can_be_set_aside(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(1, "a"), (9, "a>"), (8, "b==x y"), (4, "a==2")]
    index = build_index(spark.createDataFrame(rows, "id long, filter string"), tmp_path, bad_filters="skip")
    assert (index.manifest.subscriptions, index.manifest.bad_filters) == (2, 2)
    aside = spark.read.json(f"{index.directory}/bad-*.jsonl").collect()
    assert {(row["id"], row["filter"], row["error"].split()[1]) for row in aside} == {
        (9, "a>", "F102"),
        (8, "b==x y", "F109"),
    }
    assert subscribers(match(spark.createDataFrame([(1, 2)], "id int, a int"), index)) == {1: [1, 4]}


def test_tables_of_another_shape_and_places_that_cannot_be_mapped_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"C430: the column id of the subscriptions has the type string; provide it as long"
    ):
        build_index(spark.sql("SELECT '1' AS id, 'a' AS filter"), tmp_path)
    with pytest.raises(ConfigError, match=r"C430: the column filter of the subscriptions is missing"):
        build_index(spark.sql("SELECT 1 AS id, 'a' AS wanted"), tmp_path)
    table = spark.sql("SELECT 1 AS id, 'a' AS filter")
    with pytest.raises(ConfigError, match=r"C432: the index directory 's3:/bucket/index' is not on a file system"):
        build_index(table, Path("s3://bucket/index"))
    with pytest.raises(ConfigError, match=r"C413: the number of partitions is 0"):
        build_index(table, tmp_path, partitions=0)


def test_a_queue_is_matched_once_also_over_a_restart(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    filters = ["NO2>200", "station^=28", "station$=4;NO2<100", "*", "open==true"]
    index = build_index(spark.createDataFrame([*enumerate(filters)], "id long, filter string"), tmp_path / "index")
    bodies: list[Any] = [{"station": f"28{n:03}", "NO2": 3 * n, "open": n % 2 == 0} for n in range(90)]
    bodies += [42, "text", {}, {"deep": {"a": 1}}]
    out = str(tmp_path / "out")
    with httpx.Client(base_url=broker.http, timeout=60) as client:
        queue = QueueClient(client, physical_queues=3)
        messages = spark.readStream.format("tidegate").options(queue=queue.name, address=broker.native).load()
        queue.enqueue(*bodies[:50])
        first = match_queue(messages, index, out, f"{out}/_checkpoint", is_counted=False, is_once=True)
        queue.enqueue(*bodies[50:])
        second = match_queue(messages, index, out, f"{out}/_checkpoint", is_counted=False, is_once=True)
    assert (first.notifications, second.notifications, second.refused) == (50, 44, 4)
    rows = spark.read.parquet(out).collect()
    expected = [[n for n, text in enumerate(filters) if Filter.parse(text).matches(body)] for body in bodies[:90]]
    assert sorted(row["subscribers"] for row in rows if row["error"] is None) == sorted(expected)
    assert len({(row["_queue"], row["_sequence"]) for row in rows}) == 94
    assert first.matches + second.matches == sum(map(len, expected))
    refused = sorted(row["error"].partition(":")[0] for row in rows if row["error"] is not None)
    assert refused == ["N201", "N205", "P304", "P304"]


def _pipeline_match(*arguments: str) -> Outcome:
    done = subprocess.run(
        command_line("pipeline", "match", "--master", "local[2,4]", *arguments),
        capture_output=True,
        text=True,
        timeout=200,
        env=clean_environment(),
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.cold_spark
@pytest.mark.timeout(500)
def test_the_command_matches_tables_and_says_what_it_did(spark: SparkSession, tmp_path: Path) -> None:
    subscriptions, notifications, out = (str(tmp_path / name) for name in ("subs", "notes", "out"))
    spark.createDataFrame([(1, "a>1"), (2, "a>"), (3, "b==x")], "id long, filter string").write.parquet(subscriptions)
    spark.createDataFrame([("k", 2.0, "x"), ("l", 0.0, "y")], "name string, a double, b string").coalesce(
        1
    ).write.parquet(notifications)
    tables = ("--subscriptions", subscriptions, "--notifications", notifications, "--key", "name")
    done = _pipeline_match(*tables, "--out", out, "--bad-filters", "skip", "--partitions", "2")
    assert done.code == 0, done.err
    assert "index of 2 subscriptions built: 2 partitions" in done.err
    assert "1 invalid filters are set aside" in done.err
    summary = done.lines[-1]
    assert summary.pop("seconds") > 0
    assert summary == {
        "notifications": 2,
        "subscriptions": 2,
        "matches": 2,
        "unmatched": 1,
        "refused": 0,
        "bad_filters": 1,
        "index": "built",
    }
    assert subscribers(spark.read.parquet(out)) == {"k": [1, 3], "l": []}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--notifications", "notes", "--once"), "C417: --once works only with --queue"),
        (("--queue", "air", "--key", "id"), "C417: --key cannot be combined with --queue"),
        (("--queue", "air", "--out", "."), "C434: '.' already exists"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_spark_starts(
    arguments: tuple[str, ...], fault: str
) -> None:
    refused = _pipeline_match("--subscriptions", "subs", "--out", "out", *arguments)
    assert refused.code == 2
    assert fault in refused.err
    assert "spark" not in refused.err.lower()
