"""`tidegate pipeline …`: the jobs on Spark. One function a job; the jobs themselves are in `pipeline/`.

Spark is imported when a job starts: the other commands do without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate import terminal
from tidegate.command_line import add_client_options, add_command
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.pipeline.index_files import IndexFiles
    from tidegate.pipeline.match_job import Summary


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
    jobs: tuple[Callable[[Any], None], ...] = (_add_match,)
    for add in jobs:
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
