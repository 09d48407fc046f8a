"""`tidegate pipeline …`: the jobs on Spark. One function a job; the jobs themselves are in `pipeline/`.

Spark is imported when a job starts: the other commands do without it.
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

from tidegate import terminal
from tidegate.command_line import add_client_options, add_command, connect_to
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
    parser.add_argument("--ui", action="store_true", help="serve Spark's own pages while the job runs")


@contextmanager
def session(options: argparse.Namespace, name: str) -> Iterator[SparkSession]:
    """Spark for one job, ended with it."""
    try:
        from tidegate.pipeline.session import end_session, spark_session
    except ImportError as error:
        raise ConfigError(
            "C412", f"the pipeline needs {error.name}, which is not installed", "pip install 'tidegate[pipeline]'"
        ) from error
    spark = spark_session(options.master, name=name, ui=options.ui)
    if options.ui:
        terminal.note(f"Spark's pages: {spark.sparkContext.uiWebUrl}")
    # Spark's own handler cancels what runs, which looks like a failure; here queries are stopped one after the other.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Py4J logs what an interrupt does to its connections; failures come as exceptions.
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
        "Find the subscriptions of a table that each notification satisfies: of a table, or of a queue as they come.",
        "tidegate pipeline match --subscriptions subs.parquet --notifications notes.parquet --out matches.parquet\n"
        "tidegate pipeline match --subscriptions subs.parquet --queue air --once --out matches.parquet\n"
        "Subscriptions have the columns id and filter. Keys name a notification, all its other columns are attributes.",
    )
    parser.add_argument("--subscriptions", required=True, metavar="TABLE", help="Parquet table with id and filter")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--notifications", metavar="TABLE", help="Parquet table, a column an attribute")
    source.add_argument("--queue", metavar="NAME", help="take the messages of a queue: they are deleted when done")
    parser.add_argument("--out", required=True, metavar="DIR", help="Parquet table of the result, to be made")
    parser.add_argument("--key", action="append", metavar="COLUMN", help="names a row; repeatable (default: id)")
    parser.add_argument("--count", action="store_true", help="how many subscriptions, not which")
    parser.add_argument("--once", action="store_true", help="with --queue: end when what is there now is done")
    parser.add_argument("--index", type=Path, metavar="DIR", help="where indexes are kept (default: TABLE.index)")
    parser.add_argument("--partitions", type=int, help="of the index (default: one for 250,000 subscriptions)")
    parser.add_argument("--rebuild", action="store_true", help="build the index, also when it is there")
    parser.add_argument(
        "--bad-filters", choices=("fail", "skip"), default="fail", help="skip: set them aside, beside the index"
    )
    add_spark_options(parser)
    add_client_options(parser)


def _match(options: argparse.Namespace) -> int:
    if options.queue is None and options.once:
        raise ConfigError("C417", "--once is for a queue", "leave it out, or name a queue: --queue air")
    if options.queue is not None and options.key is not None:
        raise ConfigError("C417", "--key is for a table", "leave it out: messages are named by _queue and _sequence")
    # Beside the result, which is of no use without it; Spark passes over names with an underscore.
    checkpoint = f"{options.out}/_checkpoint"
    if Path(options.out).exists() and not (options.queue and Path(checkpoint).is_dir()):
        raise ConfigError("C434", f"{options.out!r} is there already", "name a new directory for the result")
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
        terminal.note(f"{manifest.bad_filters:,} bad filters are set aside: {index.directory}/bad-*.jsonl")


def _show_summary(summary: Summary, index: IndexFiles) -> None:
    manifest = index.manifest
    if terminal.is_for_people():
        print(
            f"{summary.notifications:,} notifications, {manifest.subscriptions:,} subscriptions: "
            f"{summary.matches:,} matches in {summary.seconds:.1f} s; {summary.unmatched:,} notifications satisfy "
            f"nobody, {summary.refused:,} break the rules (column error)"
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
        "tidegate pipeline air-quality --queue air --out history --once     # what is there, for cron\n"
        "tidegate pipeline air-quality --queue air --out history --threshold NO2=400 --threshold O3=240\n"
        "tidegate sub 'alert==NO2;state==begins'                            # who wants to know\n"
        "The history has the tables readings, late, set_aside, windows, index and alerts. The job may be ended or\n"
        "killed at any time: started again with the same --out it goes on, and nothing is lost or counted twice.",
    )
    parser.add_argument("--queue", required=True, metavar="NAME", help="the queue; made if it is not there")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the history")
    parser.add_argument(
        "--filter",
        default="station^=28;!alert",
        help="what a queue that is made here holds (default: %(default)s, readings but not our alerts)",
    )
    parser.add_argument("--window", default="1 hour", metavar="DURATION", help="width of a window (default: 1 hour)")
    parser.add_argument(
        "--watermark",
        default="2 hours",
        metavar="DURATION",
        help="how long after the latest reading a window is kept open for others (default: 2 hours)",
    )
    parser.add_argument(
        "--ahead",
        default="1 hour",
        metavar="DURATION",
        help="readings that are further ahead of their arrival are set aside; 'any' when times are made up "
        "(default: 1 hour)",
    )
    parser.add_argument(
        "--threshold",
        action="append",
        metavar="NAME=VALUE",
        help="alert when means of this pollutant are above this; repeatable (default: NO2=180)",
    )
    parser.add_argument("--windows", type=int, default=3, help="so many windows in a row are an episode (default: 3)")
    parser.add_argument(
        "--no-publish", action="store_true", help="keep alerts in the history only, as for old readings"
    )
    parser.add_argument("--once", action="store_true", help="work off what is in the queue, and end")
    parser.add_argument(
        "--every", default="10 seconds", metavar="DURATION", help="how often the queue is read (default: 10 seconds)"
    )
    parser.add_argument(
        "--batch", type=int, default=100_000, metavar="MESSAGES", help="at most so many at a time (default: 100000)"
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
            # Without --once this is how it ends.
            if options.once:
                raise
        _show_totals(read_totals(options.out), options.out)
    return 0


async def _ensure_queue(options: argparse.Namespace) -> None:
    async with connect_to(options, "pipeline") as broker:
        if all(definition["name"] != options.queue for definition in await broker.queues()):
            await broker.queue(options.queue).create(filter=options.filter)
            terminal.note(f"made the queue {options.queue} of what matches {options.filter}")


def _broker_options(options: argparse.Namespace) -> dict[str, str]:
    """Those of the data source."""
    token_file = {"tokenFile": str(options.token_file)} if options.token_file is not None else {}
    return {"address": options.address} | token_file


def _show_totals(totals: Totals, out: Path) -> None:
    if not terminal.is_for_people():
        terminal.print_json(totals)
        return
    print(f"{out} has, since it was begun:")
    print(f"{totals.messages:>12,} messages, {totals.set_aside:,} of them set aside")
    print(f"{totals.readings:>12,} readings; {totals.duplicates:,} duplicates and {totals.late:,} late ones besides")
    print(f"{totals.windows:>12,} windows")
    print(f"{totals.alerts:>12,} alerts")


# Reading what people write.


def _parse_duration(option: str, text: str, min_s: int = 1) -> int:
    """Seconds of '90 minutes'."""
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
            f"{text!r} is no threshold",
            f"write NAME=VALUE, such as NO2=180, of {', '.join(MAGNITUDES.values())}",
        )
    return name, threshold


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ConfigError("C413", f"{option} is {value}", "use 1 or more")
    return value
