"""History: a directory of Parquet tables that grows by micro-batches, each of which adds its rows exactly once.

    DIR/settings.json                         the settings of the job; a job with other settings is refused
    DIR/<table>/day=2026-01-01/batch=7/       the rows of one table, day and batch
    DIR/state/batch=7/                        the state for the next batch; it exists once batch 7 is done
    DIR/checkpoint/                           Spark's own: which batch is next, and which rows it has
    DIR/staging/                              parts that are being written

A part is written to `staging` and renamed into its place when it is complete; the state comes last. If the driver dies,
Spark gives the same batch with the same rows to the next driver. Parts that already exist stay as they are, the missing
ones are written, and a batch that has its state is skipped. Hence a batch must depend only on its rows and on the state
before it. Then every reader sees each row once, whenever and however often the driver dies.

DIR is local, or on a file system that the driver and all executors share; renaming there must be atomic. What may go
wrong: the directory holds something else or was made with other settings, or a second job uses it.
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

# Spark may repeat the last batch, which starts from the state before it.
STATES_KEPT: Final = 2
SETTINGS_FILE: Final = "settings.json"
LOCK_FILE: Final = "lock"
STATE_FILE: Final = "state.json"


class History:
    """The directory of one job. While it is `open`, a lock keeps other jobs out."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    @contextmanager
    def open(self, settings: msgspec.Struct, query: str) -> Iterator[None]:
        """Locks the directory for the query that fills it. ConfigError if it is in use or holds something else."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = (self._directory / LOCK_FILE).open("w")
        except OSError as error:
            raise ConfigError(
                "C425", f"{self._directory} cannot be used: {error.strerror}", _ANOTHER_DIRECTORY
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError("C427", f"another job is using {self._directory}", "stop that job first") from error
            self._claim(settings, query)
            shutil.rmtree(self._directory / "staging", ignore_errors=True)
            yield

    def checkpoint(self, query: str) -> str:
        return str(self._directory / "checkpoint" / query)

    def table(self, name: str) -> str:
        """Returns the path of a table, and creates its directory if it has no rows yet."""
        path = self._directory / name
        path.mkdir(exist_ok=True)
        return str(path)

    def append(self, rows: DataFrame, table: str, batch: int) -> list[str]:
        """Adds the rows of a batch, which must have a column `day`. Returns the paths of all its parts."""
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
        """Reads the parts that `append` returned; no parts give an empty DataFrame."""
        return spark.read.schema(schema).parquet(*parts) if parts else spark.createDataFrame([], schema)

    # The state between two batches: a value, and tables.

    def has_state(self, batch: int) -> bool:
        return self._state(batch).exists()

    def last_batch(self) -> int:
        """Returns the number of the last finished batch; -1 before the first."""
        return max((int(path.name.removeprefix("batch=")) for path in self._states()), default=-1)

    def state(self, batch: int, kind: type[T]) -> T:
        path = self._state(batch) / STATE_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                "C425", f"the state of batch {batch} cannot be read from {path}: {error}", _ANOTHER_DIRECTORY
            ) from error

    def state_table(self, spark: SparkSession, batch: int, name: str, schema: str) -> DataFrame:
        """Reads a table of the state after a batch; empty before the first batch."""
        if batch < 0:
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).parquet(str(self._state(batch) / name))

    def save_state(self, batch: int, value: object, **tables: DataFrame) -> None:
        """Saves the state after a batch. This marks the batch as done."""
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
                raise ConfigError(
                    "C425", f"{self._directory} is not a history: it contains {others[0]!r}", _ANOTHER_DIRECTORY
                )
            staged.write_bytes(msgspec.json.encode(settings))
            staged.rename(path)
        made_with, given = msgspec.json.decode(path.read_bytes()), msgspec.to_builtins(settings)
        for name, value in given.items():
            if made_with.get(name) != value:
                raise ConfigError(
                    "C426",
                    f"{self._directory} was made with {name} = {made_with.get(name)}, not {value}",
                    f"use the same settings, or {_ANOTHER_DIRECTORY}",
                )
        # Without its checkpoint Spark would count batches from 0 again, and their parts already exist.
        if self.last_batch() >= 0 and not Path(self.checkpoint(query)).exists():
            raise ConfigError("C425", f"the checkpoint {self.checkpoint(query)} is missing", _ANOTHER_DIRECTORY)

    def _state(self, batch: int) -> Path:
        return self._directory / "state" / f"batch={batch}"

    def _states(self) -> list[Path]:
        return list((self._directory / "state").glob("batch=*"))

    def _stage(self) -> Path:
        """Returns a new path that nobody else writes to, not even an executor that outlived its driver."""
        return self._directory / "staging" / uuid4().hex


_ANOTHER_DIRECTORY: Final = "choose another directory"


def count_rows(parts: list[str]) -> int:
    """Counts the rows of parts of a table from the files' metadata, without reading the rows."""
    files = (file for part in parts for file in Path(part).glob("*.parquet"))
    return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
