"""Matching on Spark: a million subscriptions and a hundred thousand notifications, compared with SQL and without Spark.

SQL can express the main load too: every subscription wants one site and two ranges. SQL joins on the site and filters
by the ranges, with its table of subscriptions in memory. The index paths map files that were built before; the build is
measured separately. All paths must find the same matches, or the benchmark reports an error instead of figures. The
load "mixed" has all operators, and notifications as MessagePack, as they come from a queue.

Measured: wall clock and CPU time of warm runs, interleaved, from Parquet to results that are discarded.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.job import QUICK, Effort, show_progress
from benchmarks.matcher_workloads import MAIN, SEED, make_load
from benchmarks.processes import Failed, tree_cpu_s, tree_cpu_since_s
from benchmarks.tables import ratio, write_table
from tidegate.filters import Constraint, Filter
from tidegate.index.packing import OPERATORS
from tidegate.index.saved_index import SavedIndex
from tidegate.pipeline.index_files import IndexFiles, build_index
from tidegate.pipeline.matching import CHUNK_NOTIFICATIONS, match
from tidegate.pipeline.session import end_session, spark_session

SITES: Final = 1000
SUBSCRIPTIONS, NOTIFICATIONS = 1_000_000, 100_000
SUBSCRIPTIONS_QUICK, NOTIFICATIONS_QUICK = 20_000, 2_000
SHARES: Final = 2
RATIO_GOAL: Final = 10
_ROUNDS_MAX: Final = 3
_FILES: Final = 4

_INDEX: Final = "index, ids"
_COUNTED: Final = "index, counts"
_SHARED: Final = "index in 2 shares, ids joined"
_SQL: Final = "SQL join, pairs"
_SQL_MERGED: Final = "SQL join, ids collected"
_ONE_PROCESS: Final = "no Spark: one process, ids"
_HEAD: Final = (
    "path", "seconds", "notifications/s", "CPU s", "SQL, ids / this", "of CPU", "this / no Spark", "of CPU",
)  # fmt: skip
_NOTES: Final = (
    "{notifications:,} notifications, {subscriptions:,} subscriptions, {matches:,} matches; {about}",
    "medians of {rounds} interleaved rounds on {cores} cores; results are checked, then discarded",
    "CPU: of all processes, with Java and Python workers; more reliable than seconds on a busy machine",
    "index built in {build.wall_s:.1f} s, {build.cpu_s:.1f} s of CPU: {files} files, {size_mb:,.0f} MB",
    "bytes per subscription in the index: {size_each:.0f}",
    "an existing index is found in {survey_s:.1f} s, the time of a checksum of the table",
    "no Spark: the same files, notifications as bytes in memory, one thread",
)


class Taken(NamedTuple):
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Load:
    """A table of subscriptions, a table of notifications, and the same notifications as bytes. `body` names the column
    that `match` decodes, or is None if the columns are the attributes."""

    about: str
    subscriptions: DataFrame
    notifications: DataFrame
    body: str | None
    maps: Sequence[bytes]


def run(effort: Effort) -> str:
    sizes = (SUBSCRIPTIONS_QUICK, NOTIFICATIONS_QUICK) if effort == QUICK else (SUBSCRIPTIONS, NOTIFICATIONS)
    show_progress("Spark starts")
    spark = spark_session(spark__driver__memory="4g")
    try:
        with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as made:
            rounds = min(effort.rounds, _ROUNDS_MAX)
            plain = _measure(_draw_plain(spark, Path(made) / "plain", *sizes), rounds, has_sql=True)
            return plain + "\n" + _measure(_draw_mixed(spark, Path(made) / "mixed", *sizes), rounds, has_sql=False)
    finally:
        end_session(spark)


def _measure(load: Load, rounds: int, *, has_sql: bool) -> str:
    show_progress(f"{load.about}: building the index")
    index, build, survey_s = _build(load)
    contenders = _contenders(load, index) | (_sql_contenders(load) if has_sql else {})
    show_progress(f"{load.about}: checking")
    matches = _check(load, index, has_sql=has_sql)
    taken: dict[str, list[Taken]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, work in contenders.items():
            once = _taken(work)
            place = f"round {number}" if number else "warming up"
            show_progress(f"{load.about}: {place}  {name}: {once.wall_s:.2f} s, CPU {once.cpu_s:.2f} s")
            taken[name] += [once] * (number > 0)
    manifest = index.manifest
    facts = {
        "notifications": len(load.maps),
        "subscriptions": manifest.subscriptions,
        "matches": matches,
        "about": load.about,
        "rounds": rounds,
        "cores": load.notifications.sparkSession.sparkContext.defaultParallelism,
        "build": build,
        "survey_s": survey_s,
        "files": len(manifest.files),
        "size_mb": manifest.size_bytes / 1e6,
        "size_each": manifest.size_bytes / manifest.subscriptions,
    }
    goal = [f"goal: {_INDEX!r} at least {RATIO_GOAL} times as fast as {_SQL_MERGED!r}"] if has_sql else []
    rows = [_row(name, len(load.maps), {name: _median(runs) for name, runs in taken.items()}) for name in taken]
    return write_table("Matching on Spark", _HEAD, rows, [note.format(**facts) for note in _NOTES] + goal)


def _build(load: Load) -> tuple[IndexFiles, Taken, float]:
    """Builds the index in warm workers. Returns it, the cost of the build, and the time to find an existing index."""
    directory = Path(tempfile.mkdtemp(prefix="index-", dir=_directory(load.subscriptions)))
    build_index(load.subscriptions.limit(1000), directory)
    build = _taken(lambda: build_index(load.subscriptions, directory))
    began_s = time.monotonic()
    index = build_index(load.subscriptions, directory)
    return index, build, time.monotonic() - began_s


def _directory(table: DataFrame) -> Path:
    return Path(table.inputFiles()[0].removeprefix("file://")).parent


def _contenders(load: Load, index: IndexFiles) -> dict[str, Callable[[], None]]:
    indexes = [SavedIndex(Path(path)) for path in index.paths]
    chunks = [
        (b"".join(maps), np.cumsum([0, *map(len, maps)], dtype=np.int64)[:-1])
        for start in range(0, len(load.maps), CHUNK_NOTIFICATIONS)
        if (maps := load.maps[start : start + CHUNK_NOTIFICATIONS])
    ]

    def match_in_one_process() -> None:
        for data, starts in chunks:
            for each in indexes:
                each.match_maps(data, starts)

    return {
        _INDEX: lambda: _discard(match(load.notifications, index, body=load.body)),
        _COUNTED: lambda: _discard(match(load.notifications, index, body=load.body, is_counted=True)),
        _SHARED: lambda: _discard(match(load.notifications, index, body=load.body, shares=SHARES)),
        _ONE_PROCESS: match_in_one_process,
    }


def _sql_contenders(load: Load) -> dict[str, Callable[[], None]]:
    subscriptions = load.subscriptions.cache()
    subscriptions.count()
    pairs = _pairs(load.notifications, subscriptions)
    return {_SQL: lambda: _discard(pairs), _SQL_MERGED: lambda: _discard(_collected(pairs))}


def _pairs(notifications: DataFrame, subscriptions: DataFrame) -> DataFrame:
    notification, subscription = notifications.alias("n"), subscriptions.alias("s")
    wanted = "n.site = s.site AND n.t BETWEEN s.t_low AND s.t_high AND n.h BETWEEN s.h_low AND s.h_high"
    return notification.join(subscription, F.expr(wanted)).select("n.id", F.col("s.id").alias("subscription"))


def _collected(pairs: DataFrame) -> DataFrame:
    return pairs.groupBy("id").agg(F.sort_array(F.collect_list("subscription")).alias("subscribers"))


def _check(load: Load, index: IndexFiles, *, has_sql: bool) -> int:
    """Checks that all paths find the same matches, and returns their number."""
    found = [match(load.notifications, index, body=load.body, shares=shares) for shares in (1, SHARES)]
    if has_sql:
        found.append(_collected(_pairs(load.notifications, load.subscriptions)))
    sums = [
        each.where(F.size("subscribers") > 0)
        .agg(F.sum(F.size("subscribers")), F.bit_xor(F.xxhash64("id", "subscribers")))
        .collect()[0]
        for each in found
    ]
    if len(set(sums)) != 1:
        raise Failed(f"WRONG: the paths disagree, (matches, checksum) are {[tuple(each) for each in sums]}")
    matches: int = sums[0][0]
    return matches


def _discard(table: DataFrame) -> None:
    table.write.format("noop").mode("overwrite").save()


def _taken(work: Callable[[], Any]) -> Taken:
    began_s, before_s = time.monotonic(), tree_cpu_s(os.getpid())
    work()
    return Taken(time.monotonic() - began_s, tree_cpu_since_s(os.getpid(), before_s))


def _median(taken: Sequence[Taken]) -> Taken:
    return Taken(median(each.wall_s for each in taken), median(each.cpu_s for each in taken))


def _row(name: str, notifications: int, taken: Mapping[str, Taken]) -> list[str]:
    this, without, sql = taken[name], taken[_ONE_PROCESS], taken.get(_SQL_MERGED, Taken(0.0, 0.0))
    return [
        name,
        f"{this.wall_s:.2f}",
        f"{notifications / this.wall_s:,.0f}",
        f"{this.cpu_s:.2f}",
        ratio(sql.wall_s, this.wall_s) if sql.wall_s else "-",
        ratio(sql.cpu_s, this.cpu_s) if sql.wall_s else "-",
        ratio(this.wall_s, without.wall_s),
        ratio(this.cpu_s, without.cpu_s),
    ]


def _draw_plain(spark: SparkSession, directory: Path, subscriptions: int, notifications: int) -> Load:
    """Draws the load that SQL can express. A notification matches one site in a thousand, and about a quarter of each
    site's ranges per attribute."""
    about = "one site and two ranges each"
    show_progress(f"{about}: drawing")
    rng = np.random.default_rng(SEED)
    sites, lows = rng.integers(0, SITES, subscriptions), np.round(rng.random((2, subscriptions)) * 90, 3)
    highs = np.round(lows + 10 + rng.random((2, subscriptions)) * 40, 3)
    columns = (sites.tolist(), *lows.tolist(), *highs.tolist())
    filters = [f"site==s{s};t=={a}..{c};h=={b}..{d}" for s, a, b, c, d in zip(*columns, strict=True)]
    wanted = {
        "id": np.arange(subscriptions),
        "filter": filters,
        "site": [f"s{site}" for site in sites.tolist()],
        "t_low": lows[0],
        "t_high": highs[0],
        "h_low": lows[1],
        "h_high": highs[1],
    }
    sent = {
        "site": [f"s{site}" for site in rng.integers(0, SITES, notifications).tolist()],
        **dict(zip(("t", "h"), (rng.random((2, notifications)) * 120), strict=True)),
    }
    rows = zip(sent["site"], sent["t"].tolist(), sent["h"].tolist(), strict=True)
    maps = [msgspec.msgpack.encode({"site": site, "t": t, "h": h}) for site, t, h in rows]
    return Load(
        about,
        _write(spark, directory / "subscriptions", wanted),
        _write(spark, directory / "notifications", {"id": np.arange(notifications), **sent}),
        None,
        maps,
    )


def _draw_mixed(spark: SparkSession, directory: Path, subscriptions: int, notifications: int) -> Load:
    about = "mixed: all operators, notifications as MessagePack"
    show_progress(f"{about}: drawing")
    load = make_load(MAIN, subscriptions, notifications)
    texts = [
        str(Filter(tuple(Constraint(name, OPERATORS[number], tuple(operands)) for name, number, *operands in packed)))
        for packed in load.constraints(subscriptions)
    ]
    return Load(
        about,
        _write(spark, directory / "subscriptions", {"id": np.arange(subscriptions), "filter": texts}),
        _write(spark, directory / "notifications", {"id": np.arange(notifications), "body": load.maps}),
        "body",
        load.maps,
    )


def _write(spark: SparkSession, directory: Path, columns: Mapping[str, Any]) -> DataFrame:
    """Writes a table as Parquet, in several files so that all cores can read."""
    table = pa.table(columns)
    directory.mkdir(parents=True)
    rows = -(-len(table) // _FILES)
    for number in range(_FILES):
        pq.write_table(table.slice(number * rows, rows), directory / f"part-{number}.parquet")
    return spark.read.parquet(str(directory))
