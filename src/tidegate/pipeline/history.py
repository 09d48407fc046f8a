"""History: a directory of Parquet tables that grows by micro-batches, each of which leaves its rows there exactly once.

    DIR/settings.json                         what made it; another job does not go on with it
    DIR/<table>/day=2026-01-01/batch=7/       the rows of one table, day and batch
    DIR/state/batch=7/                        what the next batch needs to know, and that batch 7 is done
    DIR/checkpoint/                           Spark's own: which batch is next, and which rows it has
    DIR/staging/                              what is being written

A part is written to `staging` and renamed into its place when it is complete; the state comes last. When a driver dies,
Spark gives the batch to its successor with the same rows. The parts that are there already stay as they are, the
others are made, and a batch that has its state is not done again. Hence a batch must depend on nothing but its rows
and the state before it; then every reader sees each row once, whenever the driver died, and however often.

DIR is on the machine, or is a file system that the driver and all executors share; renaming there must be atomic. What
may go wrong here: a directory of something else, other settings, or a second job at the same time.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar
from uuid import uuid4

import msgspec
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession

from tidegate.errors import ConfigError

T = TypeVar("T")

# Spark may ask for the last batch again, which starts from the state before it.
STATES_KEPT: Final = 2
SETTINGS_FILE: Final = "settings.json"
LOCK_FILE: Final = "lock"
STATE_FILE: Final = "state.json"


class History:
    """The directory of one job, which has it for itself while it is `open`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    @contextmanager
    def open(self, settings: msgspec.Struct, query: str) -> Iterator[None]:
        """For the query whose batches make it. Raises when the directory is in use, or holds something else."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = (self._directory / LOCK_FILE).open("w")
        except OSError as error:
            raise ConfigError("C425", f"{self._directory} cannot be used: {error.strerror}", _ANOTHER) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError("C427", f"another job is using {self._directory}", "end it first") from error
            self._claim(settings, query)
            shutil.rmtree(self._directory / "staging", ignore_errors=True)
            yield

    def checkpoint(self, query: str) -> str:
        return str(self._directory / "checkpoint" / query)

    def table(self, name: str) -> str:
        """Its path. The directory is there, with rows or without."""
        path = self._directory / name
        path.mkdir(exist_ok=True)
        return str(path)

    def append(self, rows: DataFrame, table: str, batch: int) -> list[str]:
        """Adds the rows of a batch, which have a column `day`; the paths of all its parts."""
        staged = self._stage()
        rows.repartition("day").write.partitionBy("day").parquet(str(staged))
        parts = []
        for day in sorted(staged.glob("day=*")):
            part = self._directory / table / day.name / f"batch={batch}"
            if not part.exists():
                part.parent.mkdir(parents=True, exist_ok=True)
                day.rename(part)
            parts.append(str(part))
        shutil.rmtree(staged)
        return parts

    def read(self, spark: SparkSession, parts: list[str], schema: str) -> DataFrame:
        """What `append` has left there; empty when it had nothing to add."""
        return spark.read.schema(schema).parquet(*parts) if parts else spark.createDataFrame([], schema)

    # The state between two batches: a value, and tables.

    def has_state(self, batch: int) -> bool:
        return self._state(batch).exists()

    def last_batch(self) -> int:
        """The last that is done; -1 before the first."""
        return max((int(path.name.removeprefix("batch=")) for path in self._states()), default=-1)

    def state(self, batch: int, kind: type[T]) -> T:
        path = self._state(batch) / STATE_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError("C425", f"the state of batch {batch} is not in {path}: {error}", _ANOTHER) from error

    def state_table(self, spark: SparkSession, batch: int, name: str, schema: str) -> DataFrame:
        """A table of the state after a batch; empty before the first."""
        if batch < 0:
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).parquet(str(self._state(batch) / name))

    def save_state(self, batch: int, value: object, **tables: DataFrame) -> None:
        """The batch is done."""
        staged = self._stage()
        staged.mkdir(parents=True)
        for name, rows in tables.items():
            rows.write.parquet(str(staged / name))
        (staged / STATE_FILE).write_bytes(msgspec.json.encode(value))
        self._state(batch).parent.mkdir(exist_ok=True)
        staged.rename(self._state(batch))
        for path in self._states():
            if int(path.name.removeprefix("batch=")) <= batch - STATES_KEPT:
                shutil.rmtree(path)

    def _claim(self, settings: msgspec.Struct, query: str) -> None:
        path, staged = self._directory / SETTINGS_FILE, self._directory / f"{SETTINGS_FILE}.new"
        if not path.exists():
            ours = (LOCK_FILE, staged.name)
            others = sorted(each.name for each in self._directory.iterdir() if each.name not in ours)
            if others:
                raise ConfigError("C425", f"{self._directory} holds {others[0]!r} and is no history", _ANOTHER)
            staged.write_bytes(msgspec.json.encode(settings))
            staged.rename(path)
        made_with, given = msgspec.json.decode(path.read_bytes()), msgspec.to_builtins(settings)
        for name, value in given.items():
            if made_with.get(name) != value:
                raise ConfigError(
                    "C426",
                    f"{self._directory} was made with {name} = {made_with.get(name)}, not {value}",
                    f"go on with the same settings, or {_ANOTHER}",
                )
        # Spark would count its batches from 0 again, whose parts are there.
        if self.last_batch() >= 0 and not Path(self.checkpoint(query)).exists():
            raise ConfigError("C425", f"the checkpoint {self.checkpoint(query)} is gone", _ANOTHER)

    def _state(self, batch: int) -> Path:
        return self._directory / "state" / f"batch={batch}"

    def _states(self) -> list[Path]:
        return list((self._directory / "state").glob("batch=*"))

    def _stage(self) -> Path:
        """A place that nobody else writes to, not even an executor that has outlived its driver."""
        return self._directory / "staging" / uuid4().hex


_ANOTHER: Final = "name another directory"


def count_rows(parts: list[str]) -> int:
    """Of parts of a table, without reading them."""
    files = (file for part in parts for file in Path(part).glob("*.parquet"))
    return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
