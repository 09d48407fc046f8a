"""`tidegate evaluate …`: makes the papers' experiments again, and goes beyond them. One function an experiment.

Each starts brokers and other processes of its own, and ends them, also when it is told to end itself.

What may go wrong: an extra is not installed (C412).
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from tidegate.command_line import add_command
from tidegate.errors import ConfigError
from tidegate.pipeline_commands import add_spark_options, session

Evaluate: TypeAlias = Callable[[argparse.Namespace, str], Path]
"""Given its options and the command as a reader would type it again; returns the report's path."""


def add_evaluate(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="Make the papers' experiments again, and go beyond them.")
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    queues = _add_experiment(
        experiments,
        "queues",
        _evaluate_queues,
        "Compare the ways to dequeue, simulated and on a real broker, over LMDB and Redis: report, Parquet, pictures.",
        "tidegate evaluate queues --short --out results    # some minutes; without --short half an hour\n"
        "tidegate evaluate queues --out results --master 'local[*]'    # simulates on all cores",
    )
    add_spark_options(queues, default="without Spark, one simulation after another")
    _add_experiment(
        experiments,
        "elasticity",
        _evaluate_elasticity,
        "Scale real layers while everything flows, with both switches, and measure what more slices carry: report, "
        "Parquet, pictures.",
        "tidegate evaluate elasticity --short --out results    # some minutes; without --short twenty",
    )
    control = _add_experiment(
        experiments,
        "control",
        _evaluate_control,
        "Compare the ways to pace the checks of many clients, simulated and on a real broker: report, Parquet, "
        "pictures. One that was ended goes on when it is started again with the same directory.",
        "tidegate evaluate control --short --out results    # some minutes; without --short over an hour\n"
        "tidegate evaluate control --out results --master 'local[*]'    # simulates on all cores",
    )
    control.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs of real clients at a time (default: one a core, two with --short); where the machine is too "
        "slow for so many, runs are thrown away and made again",
    )
    add_spark_options(control, default="without Spark, one simulation after another")


def _add_experiment(
    experiments: Any, name: str, evaluate: Evaluate, text: str, examples: str
) -> argparse.ArgumentParser:
    parser = add_command(experiments, name, _run, text, examples)
    parser.set_defaults(evaluate=evaluate)
    parser.add_argument("--short", action="store_true", help="fewer and shorter runs: trust the directions")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the report")
    return parser


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, end)
    command = f"tidegate evaluate {options.experiment}{' --short' * options.short} --out {options.out}"
    print(options.evaluate(options, command))
    return 0


def end(number: int, _frame: object) -> NoReturn:
    """As an error does, so that whatever was started is ended."""
    sys.exit(128 + number)


@contextmanager
def _needing(extras: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            "C412", f"the evaluation needs {error.name}, which is not installed", f"pip install 'tidegate[{extras}]'"
        ) from error


def _evaluate_queues(options: argparse.Namespace, command: str) -> Path:
    with _needing("server,redis,evaluation"):
        from tidegate.evaluation.queues import evaluate_queues, simulated_over, write_measured, write_simulated
    over_spark = simulated_over(lambda: session(options, "evaluate queues"))
    chapters = (over_spark if options.master else write_simulated, write_measured)
    return evaluate_queues(options.out, is_short=options.short, command=command, chapters=chapters)


def _evaluate_elasticity(options: argparse.Namespace, command: str) -> Path:
    with _needing("server,cluster,evaluation"):
        from tidegate.evaluation.elasticity import evaluate_elasticity
    return evaluate_elasticity(options.out, is_short=options.short, command=command)


def _evaluate_control(options: argparse.Namespace, command: str) -> Path:
    with _needing("server,evaluation"):
        from tidegate.evaluation.control import evaluate_control, measured_by, simulated_over, write_simulated
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError("C413", f"--jobs is {options.jobs}", "one at a time at least")
    over_spark = simulated_over(lambda: session(options, "evaluate control"))
    chapters = (over_spark if options.master else write_simulated, measured_by(options.jobs))
    jobs = f" --jobs {options.jobs}" if options.jobs else ""
    return evaluate_control(options.out, is_short=options.short, command=f"{command}{jobs}", chapters=chapters)
