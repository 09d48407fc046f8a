"""`tidegate pipeline …`: the jobs on Spark. One function per job; the jobs themselves are in `pipeline/`.

Spark is imported only when a job starts, so the other commands work without it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.commands import terminal
from tidegate.commands.command_line import add_client_options, add_command, connect_to
from tidegate.devices import MAGNITUDES
from tidegate.errors import ConfigError
from tidegate.filters import Filter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.pipeline.air_quality_job import Totals
    from tidegate.pipeline.index_files import IndexFiles
    from tidegate.pipeline.match_job import Summary

DURATION_MAX_S: Final = 366 * 86_400
_UNITS_S: Final = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}


def add_pipeline(commands: Any) -> None:
    text = "Run a job on Spark: on this machine, or on a cluster with --master."
    parser = commands.add_parser(
        "pipeline",
        help=text,
        description=text,
        epilog="docs/pipeline.md explains the jobs, and the data source for jobs of your own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="JOB")
    for add in (_add_air_quality, _add_match):
        add(actions)


def add_spark_options(parser: argparse.ArgumentParser, default: str = "all cores of this machine") -> None:
    parser.add_argument("--master", help=f"where Spark runs: local[4], spark://host:7077, … (default: {default})")
    parser.add_argument("--ui", action="store_true", help="serve Spark's web UI while the job runs")


@contextmanager
def session(options: argparse.Namespace, name: str) -> Iterator[SparkSession]:
    """Starts Spark for one job, and stops it when the job ends."""
    try:
        from tidegate.pipeline.session import end_session, spark_session
    except ImportError as error:
        raise ConfigError(
            "C412", f"the pipeline needs {error.name}, which is not installed", "pip install 'tidegate[pipeline]'"
        ) from error
    spark = spark_session(options.master, name=name, ui=options.ui)
    if options.ui:
        terminal.note(f"Spark's web UI: {spark.sparkContext.uiWebUrl}")
    # Spark's own handler cancels running jobs, which looks like a failure. Here queries are stopped one after another.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Py4J logs errors when an interrupt breaks its connections. Real failures are raised as exceptions.
    logging.disable(logging.ERROR)
    try:
        yield spark
    finally:
        end_session(spark)


# match


def _add_match(actions: Any) -> None:
    parser = add_command(
        actions,
        "match",
        _match,
        "Find the subscriptions of a table that match each notification of a table or a queue.",
        "tidegate pipeline match --subscriptions subs.parquet --notifications notes.parquet --out matches.parquet\n"
        "tidegate pipeline match --subscriptions subs.parquet --queue air --once --out matches.parquet\n\n"
        "Key columns identify a notification; all other columns are its attributes.",
    )
    parser.add_argument(
        "--subscriptions", required=True, metavar="TABLE", help="Parquet table with the columns id and filter"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--notifications", metavar="TABLE", help="Parquet table with a column per attribute")
    source.add_argument("--queue", metavar="NAME", help="match the messages of this queue; deletes them when done")
    parser.add_argument("--out", required=True, metavar="DIR", help="new directory for the result, a Parquet table")
    parser.add_argument(
        "--key", action="append", metavar="COLUMN", help="identifies a notification; repeatable (default: id)"
    )
    parser.add_argument(
        "--count", action="store_true", help="write the number of matching subscriptions, not their ids"
    )
    parser.add_argument("--once", action="store_true", help="with --queue: exit when the messages there now are done")
    parser.add_argument("--index", type=Path, metavar="DIR", help="directory for indexes (default: TABLE.index)")
    parser.add_argument(
        "--partitions", type=int, help="partitions of the index (default: one per 250,000 subscriptions)"
    )
    parser.add_argument("--rebuild", action="store_true", help="build the index even if it exists")
    parser.add_argument(
        "--bad-filters",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with invalid filters; skip sets them aside, beside the index (default: fail)",
    )
    add_spark_options(parser)
    add_client_options(parser)


def _match(options: argparse.Namespace) -> int:
    if options.queue is None and options.once:
        raise ConfigError("C417", "--once works only with --queue", "leave it out, or name a queue: --queue air")
    if options.queue is not None and options.key is not None:
        raise ConfigError(
            "C417", "--key cannot be combined with --queue", "leave it out: _queue and _sequence identify messages"
        )
    # The checkpoint is kept with the result, which cannot be continued without it. Spark ignores names with an
    # underscore when it reads the table.
    checkpoint = f"{options.out}/_checkpoint"
    if Path(options.out).exists() and not (options.queue and Path(checkpoint).is_dir()):
        raise ConfigError("C434", f"{options.out!r} already exists", "name a new directory for the result")
    with session(options, "match") as spark:
        from tidegate.pipeline.index_files import build_index
        from tidegate.pipeline.match_job import match_queue, match_table, read_table

        subscriptions = read_table(spark, options.subscriptions)
        notifications = read_table(spark, options.notifications) if options.notifications else None
        index = build_index(
            subscriptions,
            options.index or Path(f"{options.subscriptions.rstrip('/')}.index"),
            partitions=options.partitions,
            bad_filters=options.bad_filters,
            rebuild=options.rebuild,
        )
        _note_index(index)
        if notifications is not None:
            keys = options.key or ["id"]
            summary = match_table(notifications, index, options.out, keys=keys, is_counted=options.count)
        else:
            messages = spark.readStream.format("tidegate").option("queue", options.queue)
            messages = messages.option("address", options.address)
            if options.token_file is not None:
                messages = messages.option("tokenFile", str(options.token_file))
            summary = match_queue(
                messages.load(), index, options.out, checkpoint, is_counted=options.count, is_once=options.once
            )
    _show_summary(summary, index)
    return 0


def _note_index(index: IndexFiles) -> None:
    manifest = index.manifest
    terminal.note(
        f"index of {manifest.subscriptions:,} subscriptions {'built' if index.is_new else 'found'}: "
        f"{len(manifest.files)} partitions, {manifest.size_bytes / 1e6:,.1f} MB, in {index.directory}"
    )
    if manifest.bad_filters:
        terminal.note(f"{manifest.bad_filters:,} invalid filters are set aside: {index.directory}/bad-*.jsonl")


def _show_summary(summary: Summary, index: IndexFiles) -> None:
    manifest = index.manifest
    if terminal.is_for_people():
        print(
            f"{summary.notifications:,} notifications, {manifest.subscriptions:,} subscriptions: "
            f"{summary.matches:,} matches in {summary.seconds:.1f} s; {summary.unmatched:,} notifications match "
            f"nothing, {summary.refused:,} are invalid (see the column error)"
        )
        return
    terminal.print_json(
        {
            "notifications": summary.notifications,
            "subscriptions": manifest.subscriptions,
            "matches": summary.matches,
            "unmatched": summary.unmatched,
            "refused": summary.refused,
            "bad_filters": manifest.bad_filters,
            "index": "built" if index.is_new else "found",
            "seconds": round(summary.seconds, 3),
        }
    )


# air-quality


def _add_air_quality(actions: Any) -> None:
    parser = add_command(
        actions,
        "air-quality",
        _air_quality,
        "Turn the readings of stations in a queue into a history in Parquet, and publish alerts.",
        "tidegate pipeline air-quality --queue air --out history            # until Ctrl-C\n"
        "tidegate pipeline air-quality --queue air --out history --once     # what is in the queue now, for cron\n"
        "tidegate pipeline air-quality --queue air --out history --threshold NO2=400 --threshold O3=240\n"
        "tidegate sub 'alert==NO2;state==begins'                            # receives the alerts\n\n"
        "The history has the tables readings, late, set_aside, windows, index and alerts. You may stop or kill the\n"
        "job at any time. Started again with the same --out it continues; nothing is lost or counted twice.",
    )
    parser.add_argument("--queue", required=True, metavar="NAME", help="the queue; created if it does not exist")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for the history")
    parser.add_argument(
        "--filter",
        default="station^=28;!alert",
        help="filter of the queue if it is created (default: %(default)s, readings but not our alerts)",
    )
    parser.add_argument("--window", default="1 hour", metavar="DURATION", help="width of a window (default: 1 hour)")
    parser.add_argument(
        "--watermark",
        default="2 hours",
        metavar="DURATION",
        help="how long a window stays open after its end, by the time of the latest reading (default: 2 hours)",
    )
    parser.add_argument(
        "--ahead",
        default="1 hour",
        metavar="DURATION",
        help="set aside readings whose time is further ahead of their arrival; 'any' for simulated times "
        "(default: 1 hour)",
    )
    parser.add_argument(
        "--threshold",
        action="append",
        metavar="NAME=VALUE",
        help="alert when the means of this pollutant exceed this value; repeatable (default: NO2=180)",
    )
    parser.add_argument("--windows", type=int, default=3, help="windows in a row that make an episode (default: 3)")
    parser.add_argument(
        "--no-publish", action="store_true", help="keep alerts in the history only, for example for old readings"
    )
    parser.add_argument("--once", action="store_true", help="process what is in the queue now, then exit")
    parser.add_argument(
        "--every", default="10 seconds", metavar="DURATION", help="how often the queue is read (default: 10 seconds)"
    )
    parser.add_argument(
        "--batch", type=int, default=100_000, metavar="MESSAGES", help="messages per batch at most (default: 100000)"
    )
    add_client_options(parser)
    add_spark_options(parser)


def _air_quality(options: argparse.Namespace) -> int:
    settings: dict[str, Any] = {
        "window_s": _parse_duration("--window", options.window),
        "watermark_s": _parse_duration("--watermark", options.watermark, min_s=0),
        "ahead_s": None if options.ahead == "any" else _parse_duration("--ahead", options.ahead, min_s=0),
        "thresholds": dict(_parse_threshold(text) for text in options.threshold or ["NO2=180"]),
        "windows": _positive("--windows", options.windows),
    }
    every = f"{_parse_duration('--every', options.every)} seconds"
    batch_messages = _positive("--batch", options.batch)
    Filter.parse(options.filter)
    asyncio.run(_ensure_queue(options))
    with session(options, "air-quality") as spark:
        from tidegate.pipeline.air_quality import Settings
        from tidegate.pipeline.air_quality_job import Job, read_totals, run

        job = Job(
            queue=options.queue,
            broker=_broker_options(options),
            out=options.out,
            settings=Settings(**settings),
            batch_messages=batch_messages,
            every=every,
            publishes=not options.no_publish,
        )
        try:
            run(spark, job, once=options.once)
        except KeyboardInterrupt:
            # Without --once, Ctrl-C is the normal way to end.
            if options.once:
                raise
        _show_totals(read_totals(options.out), options.out)
    return 0


async def _ensure_queue(options: argparse.Namespace) -> None:
    async with connect_to(options, "pipeline") as broker:
        if all(definition["name"] != options.queue for definition in await broker.queues()):
            await broker.queue(options.queue).create(filter=options.filter)
            terminal.note(f"created the queue {options.queue} with the filter {options.filter}")


def _broker_options(options: argparse.Namespace) -> dict[str, str]:
    """Returns the options of the data source."""
    token_file = {"tokenFile": str(options.token_file)} if options.token_file is not None else {}
    return {"address": options.address} | token_file


def _show_totals(totals: Totals, out: Path) -> None:
    if not terminal.is_for_people():
        terminal.print_json(totals)
        return
    print(f"{out}, totals since its start:")
    print(f"{totals.messages:>12,} messages, {totals.set_aside:,} of them set aside")
    print(
        f"{totals.readings:>12,} readings; {totals.duplicates:,} duplicates and {totals.late:,} late ones not included"
    )
    print(f"{totals.windows:>12,} windows")
    print(f"{totals.alerts:>12,} alerts")


# Parsing of arguments.


def _parse_duration(option: str, text: str, min_s: int = 1) -> int:
    """Returns the seconds of a text such as '90 minutes'."""
    found = re.fullmatch(r"(\d{1,9}) *(second|minute|hour|day)s?", text.strip())
    if found is None:
        raise ConfigError("C417", f"{option} is {text!r}", "give seconds, minutes, hours or days, such as '2 hours'")
    seconds = int(found[1]) * _UNITS_S[found[2]]
    if not min_s <= seconds <= DURATION_MAX_S:
        raise ConfigError("C413", f"{option} is {text!r}", f"use {min_s} seconds to 366 days")
    return seconds


def _parse_threshold(text: str) -> tuple[str, float]:
    name, _equals, value = text.partition("=")
    try:
        threshold = float(value)
    except ValueError:
        threshold = math.nan
    if name not in MAGNITUDES.values() or not math.isfinite(threshold):
        raise ConfigError(
            "C417",
            f"{text!r} is not a threshold",
            f"write NAME=VALUE, such as NO2=180, with a name of {', '.join(MAGNITUDES.values())}",
        )
    return name, threshold


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ConfigError("C413", f"{option} is {value}", "use 1 or more")
    return value
