"""`tidegate evaluate …`: repeats the experiments of the papers and adds new ones. One function per experiment.

Each experiment starts its own brokers and other processes. It ends them in any case, also when it receives SIGTERM.

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

from tidegate.commands.command_line import add_command
from tidegate.commands.pipeline import add_spark_options, session
from tidegate.errors import ConfigError

Evaluate: TypeAlias = Callable[[argparse.Namespace, str], Path]
"""Takes the options, and the command line that the report quotes; returns the path of the report."""


def add_evaluate(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="Repeat the experiments of the papers, and run new ones.")
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    queues = _add_experiment(
        experiments,
        "queues",
        _evaluate_queues,
        "Compare the dequeue methods, in simulation and on a real broker, with LMDB and Redis. Writes a report, "
        "Parquet files and pictures.",
        "tidegate evaluate queues --short --out results    # some minutes; without --short half an hour\n"
        "tidegate evaluate queues --out results --master 'local[*]'    # simulates on all cores",
    )
    add_spark_options(queues, default="no Spark, one simulation after another")
    _add_experiment(
        experiments,
        "elasticity",
        _evaluate_elasticity,
        "Scale real layers under load, with both kinds of switch, and measure the throughput of more slices. Writes a "
        "report, Parquet files and pictures.",
        "tidegate evaluate elasticity --short --out results    # some minutes; without --short twenty",
    )
    control = _add_experiment(
        experiments,
        "control",
        _evaluate_control,
        "Compare ways to pace the checks of many clients, in simulation and on a real broker. Writes a report, Parquet "
        "files and pictures. An interrupted run resumes when it is started again with the same directory.",
        "tidegate evaluate control --short --out results    # some minutes; without --short over an hour\n"
        "tidegate evaluate control --out results --master 'local[*]'    # simulates on all cores",
    )
    control.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="concurrent runs of real clients (default: one per core, two with --short); if the machine is too slow "
        "for this many, runs are discarded and repeated",
    )
    add_spark_options(control, default="no Spark, one simulation after another")


def _add_experiment(
    experiments: Any, name: str, evaluate: Evaluate, text: str, examples: str
) -> argparse.ArgumentParser:
    parser = add_command(experiments, name, _run, text, examples)
    parser.set_defaults(evaluate=evaluate)
    parser.add_argument("--short", action="store_true", help="fewer and shorter runs: shows trends, not exact values")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for the report")
    return parser


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, exit_on_signal)
    command = f"tidegate evaluate {options.experiment}{' --short' * options.short} --out {options.out}"
    print(options.evaluate(options, command))
    return 0


def exit_on_signal(number: int, _frame: object) -> NoReturn:
    """Exits through an exception, so that every process that was started is ended."""
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
        from tidegate_lab.queues.evaluation import evaluate_queues, simulated_over, write_measured, write_simulated
    over_spark = simulated_over(lambda: session(options, "evaluate queues"))
    chapters = (over_spark if options.master else write_simulated, write_measured)
    return evaluate_queues(options.out, is_short=options.short, command=command, chapters=chapters)


def _evaluate_elasticity(options: argparse.Namespace, command: str) -> Path:
    with _needing("server,cluster,evaluation"):
        from tidegate_lab.elasticity.evaluation import evaluate_elasticity
    return evaluate_elasticity(options.out, is_short=options.short, command=command)


def _evaluate_control(options: argparse.Namespace, command: str) -> Path:
    with _needing("server,evaluation"):
        from tidegate_lab.control.evaluation import evaluate_control, measured_by, simulated_over, write_simulated
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError("C413", f"--jobs is {options.jobs}", "use 1 or more")
    over_spark = simulated_over(lambda: session(options, "evaluate control"))
    chapters = (over_spark if options.master else write_simulated, measured_by(options.jobs))
    jobs = f" --jobs {options.jobs}" if options.jobs else ""
    return evaluate_control(options.out, is_short=options.short, command=f"{command}{jobs}", chapters=chapters)
