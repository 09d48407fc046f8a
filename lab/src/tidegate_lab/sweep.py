"""Sweep: runs thousands of seeded simulations on Spark, some seconds of work per task, and keeps their results.

    sweep(spark, message_queue.simulate_table, cases, Path("results"))        a row per case, in the order of the cases

    cases ─► those without a result ─► chunks ─► a task per chunk ─► a Parquet file per chunk ─► the rows of all cases

A simulation is an importable function from a list of cases to a table with one row per case. A case holds everything
that its result depends on, including its seed, so results do not depend on chunks or cores. A result is stored under
the digest of its case, in a file named after the code: the simulation and the modules of its project that it imports.
So a killed sweep resumes where it stopped, a sweep with more cases runs only the new ones, and changed code runs all.

The driver and the executors must share the directory. What may go wrong: a case fails (C436, raised after all others
are done), a node does not share the directory or has other code (C437), a file is corrupt (C438).
"""

from __future__ import annotations

import ast
import os
import pickle
import pkgutil
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from tidegate.errors import ConfigError
from tidegate.pipeline.progress import show_line, spark_failures_as_errors

Simulate: TypeAlias = Callable[[Sequence[Any]], pa.Table]

PRODUCT: Final = "tidegate"
CASE: Final = "_case"
# Long enough that Spark's overhead of about 0.08 s per task does not matter.
CHUNK_S: Final = 4.0
# Enough that a core that finishes early finds more work.
CHUNKS_PER_CORE_MIN: Final = 4
# The driver runs some cases itself to measure how long one takes.
SAMPLE_CASES_MAX: Final = 8
SAMPLE_S: Final = 1.0
SHOW_EVERY_S: Final = 1.0
SHOWN_CASE_MAX: Final = 2000

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def sweep(
    spark: SparkSession,
    simulate: Simulate,
    cases: Sequence[Any],
    directory: Path,
    *,
    chunk_s: float = CHUNK_S,
    what: str = "sweep",
) -> pa.Table:
    """Runs the cases that have no result in the directory yet. Returns the rows of all cases, in their order.

    Cases are dataclasses, named tuples or structs of plain values. The driver runs some of them, at least two, to
    measure how many fill `chunk_s`. `what` is the label of the progress line shown on a terminal."""
    if not cases:
        raise ConfigError("C435", "there is no case to simulate", "give at least one")
    name = _importable_name(simulate)
    results = Results(directory.absolute(), version_of(name))
    keys = [_key(case) for case in cases]
    kept = results.keys()
    # Shuffled, because neighbours in a list of cases are often all long or all short.
    due = [(key, case) for key, case in dict(zip(keys, cases, strict=True)).items() if key not in kept]
    random.Random(0).shuffle(due)  # noqa: S311
    if due:
        results.make_directory()
        _run(spark, name, results, due, chunk_s, what)
    return results.table(keys)


@dataclass(frozen=True)
class Results:
    """The files of one version of a simulation in a directory. Files of other versions are ignored."""

    directory: Path
    version: str

    def keys(self) -> set[str]:
        return {key for path in self._paths() for key in _read(path, [CASE])[CASE].to_pylist()}

    def table(self, keys: Sequence[str]) -> pa.Table:
        """Returns the rows of these cases, in this order."""
        tables = [_read(path) for path in self._paths()]
        if not tables:
            raise self._missing(len(keys))
        table = pa.concat_tables(tables, promote_options="permissive")
        rows = pc.index_in(pa.array(keys), value_set=table[CASE])
        if rows.null_count:
            raise self._missing(rows.null_count)
        return table.take(rows).drop_columns([CASE])

    def path(self, keys: Sequence[str]) -> Path:
        """Returns the file for the results of a chunk."""
        return self.directory / f"{self.version}-{_digest(_encode(keys))}.parquet"

    def make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, keys: Sequence[str], table: pa.Table) -> None:
        """Writes the file atomically, so that a killed process leaves no partial file."""
        path = self.path(keys)
        unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            pq.write_table(table, unfinished)
            os.replace(unfinished, path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob(f"{self.version}-*.parquet"))

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            "C437",
            f"{os.uname().nodename} cannot write results to {self.directory}: {error}",
            "name a directory that the driver and all executors share and may write to",
        )

    def _missing(self, count: int) -> ConfigError:
        return ConfigError(
            "C437",
            f"{count:,} results were written but are not in {self.directory} on the driver",
            "name a directory that the driver and all executors share",
        )


@dataclass(frozen=True)
class Chunk:
    """The work of one task. The cases are pickled, so that a node that cannot read them can report why."""

    name: str
    results: Results
    keys: tuple[str, ...]
    cases: bytes


def run_chunk(chunk: Chunk) -> list[str]:
    """Runs a chunk on an executor and writes its results. Returns the errors of the cases that failed instead of
    raising them: Spark would retry in vain, and the other cases keep their results."""
    cases = _cases_of(chunk)
    simulate: Simulate = pkgutil.resolve_name(chunk.name)
    done, failed = _simulate_all(simulate, chunk.keys, cases)
    if done:
        chunk.results.write(chunk.keys, pa.concat_tables(done, promote_options="permissive"))
    return failed


@cache
def version_of(name: str) -> str:
    """Returns a digest of a simulation's code: its name and all its sources."""
    return _digest(_encode([name, sorted(sources_of(name.partition(":")[0]).items())]))


def sources_of(module: str) -> dict[str, str]:
    """Returns by name the sources of the module and of all modules of its project that it imports, directly or
    indirectly.

    The project is every module with the same first name, and Tidegate itself: a simulation may run its machines. A
    package that is only on the way to a module is left out: its `__init__` runs too, but mostly gathers what a
    simulation does not use."""
    projects = {module.partition(".")[0], PRODUCT}
    sources: dict[str, str] = {}
    due = [module]
    while due:
        name = due.pop()
        if name not in sources:
            sources[name] = _source(name)
            imported = _imports(name, sources[name], projects)
            due += [each for each in imported if find_spec(each) is not None]
    return sources


def _run(
    spark: SparkSession, name: str, results: Results, due: Sequence[tuple[str, Any]], chunk_s: float, what: str
) -> None:
    def chunk_of(chosen: Sequence[tuple[str, Any]]) -> Chunk:
        keys, cases = zip(*chosen, strict=True)
        return Chunk(name, results, keys, pickle.dumps(cases))

    with _shown_progress(what, len(due)) as expected:
        singles = [chunk_of([each]) for each in due[: SAMPLE_CASES_MAX + 1]]
        expected |= {results.path(single.keys): 1 for single in singles}
        took_s, failed = _run_sample(singles)
        rest = due[len(took_s) :]
        # The first case is not representative: it waited for its kernels to compile.
        rest_s = fmean(took_s[1:] or took_s) * len(rest)
        parallel = spark.sparkContext.defaultParallelism
        count = min(len(rest), max(ceil(rest_s / chunk_s), CHUNKS_PER_CORE_MIN * parallel))
        chunks = [chunk_of(rest[number::count]) for number in range(count)]
        expected |= {results.path(chunk.keys): len(chunk.keys) for chunk in chunks}
        failed += _run_on_executors(spark, chunks)
    if failed:
        raise ConfigError(
            "C436",
            f"{len(failed):,} of {len(due):,} cases failed in {name}, the first is {failed[0]}",
            f"correct the case or the simulation (the others have their results in {results.directory})",
        )


def _run_sample(singles: Sequence[Chunk]) -> tuple[list[float], list[str]]:
    """Runs cases on the driver until it is clear how long one takes. Returns the seconds of each, and the errors of
    those that failed."""
    took_s: list[float] = []
    failed: list[str] = []
    for single in singles:
        started_s = time.perf_counter()
        failed += run_chunk(single)
        took_s.append(time.perf_counter() - started_s)
        if sum(took_s[1:]) >= SAMPLE_S:
            break
    return took_s, failed


def _run_on_executors(spark: SparkSession, chunks: Sequence[Chunk]) -> list[str]:
    if not chunks:
        return []
    with spark_failures_as_errors():
        return spark.sparkContext.parallelize(chunks, len(chunks)).flatMap(run_chunk).collect()


def _cases_of(chunk: Chunk) -> Sequence[Any]:
    with suppress(ImportError):
        if version_of(chunk.name) == chunk.results.version:
            cases: Sequence[Any] = pickle.loads(chunk.cases)  # noqa: S301
            return cases
    raise ConfigError(
        "C437",
        f"{os.uname().nodename} does not have the same code of {chunk.name} as the driver",
        "install the same version on every node",
    )


def _simulate_all(simulate: Simulate, keys: Sequence[str], cases: Sequence[Any]) -> tuple[list[pa.Table], list[str]]:
    """Returns tables of the cases that have a result, and the errors of the others. Runs all cases together; if that
    fails, runs each alone to find which ones fail."""
    try:
        return [_simulate(simulate, keys, cases)], []
    except Exception as error:  # whatever a case does, the others keep their results, and the report names it
        if len(cases) == 1:
            return [], [f"{cases[0]!r:.{SHOWN_CASE_MAX}}: {type(error).__name__}: {error}"]
    done: list[pa.Table] = []
    failed: list[str] = []
    for key, case in zip(keys, cases, strict=True):
        tables, wrong = _simulate_all(simulate, [key], [case])
        done += tables
        failed += wrong
    return done, failed


def _simulate(simulate: Simulate, keys: Sequence[str], cases: Sequence[Any]) -> pa.Table:
    table = simulate(cases)
    if table.num_rows != len(cases):
        raise ValueError(f"{table.num_rows} rows for {len(cases)} cases; a simulation must return one row per case")
    return table.append_column(CASE, pa.array(keys))


def _importable_name(simulate: Simulate) -> str:
    name = f"{simulate.__module__}:{simulate.__qualname__}"
    try:
        is_found = simulate.__module__ != "__main__" and pkgutil.resolve_name(name) is simulate
    except (ImportError, AttributeError, ValueError):
        is_found = False
    if not is_found:
        raise ConfigError(
            "C435",
            f"executors cannot import the simulation {name}",
            "define it at the top level of a module that is not the main program",
        )
    return name


def _imports(module: str, source: str, projects: Set[str]) -> Iterator[str]:
    """Yields what import statements name of these projects: modules, and names in packages, which may be modules."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name.partition(".")[0] in projects)
        elif isinstance(statement, ast.ImportFrom):
            start = resolve_name("." * statement.level + (statement.module or ""), _spec(module).parent)
            if start.partition(".")[0] in projects:
                yield start
                if _spec(start).submodule_search_locations is not None:
                    yield from (f"{start}.{alias.name}" for alias in statement.names)


def _spec(module: str) -> ModuleSpec:
    spec = find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {module} here", name=module)
    return spec


def _source(module: str) -> str:
    loader = _spec(module).loader
    return (loader.get_source(module) if isinstance(loader, InspectLoader) else None) or ""


def _key(case: Any) -> str:
    try:
        return _digest(_encode(case))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            "C435",
            f"the case {case!r:.{SHOWN_CASE_MAX}} cannot be hashed: {error}",
            "use dataclasses, named tuples or structs of numbers, texts, and lists and maps of them",
        ) from error


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            "C438", f"{path} cannot be read: {error}", "delete it, and its cases are run again"
        ) from error


@contextmanager
def _shown_progress(what: str, total: int) -> Iterator[dict[Path, int]]:
    """Shows on a terminal how many cases are done, as a line on standard error. Yields a map for the caller to fill:
    the expected files, and the number of cases in each."""
    expected: dict[Path, int] = {}
    if not sys.stderr.isatty():
        yield expected
        return
    is_over = threading.Event()

    def show() -> None:
        started_s = time.monotonic()
        while not is_over.wait(SHOW_EVERY_S):
            done = sum(count for path, count in expected.copy().items() if path.exists())
            show_line(progress_line(what, done, total, time.monotonic() - started_s))

    shower = threading.Thread(target=show, name="progress of the sweep", daemon=True)
    shower.start()
    try:
        yield expected
    finally:
        is_over.set()
        shower.join()
        show_line("")


def progress_line(what: str, done: int, total: int, elapsed_s: float) -> str:
    """Returns `loads: 812 of 2,000 cases, about 41 s left`."""
    left = f", about {elapsed_s * (total - done) / done:,.0f} s left" if done else ""
    return f"{what}: {done:,} of {total:,} cases{left}"
