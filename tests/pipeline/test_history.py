"""History: a directory continues with the settings it was created with, and a part of a table appears once."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path

import msgspec
import pytest
from plain_air_quality import rows_of
from pyspark.sql import SparkSession

from tidegate.errors import ConfigError
from tidegate.pipeline.history import History, count_rows


class Made(msgspec.Struct):
    window_s: int = 3_600


def test_a_history_goes_on_with_the_settings_that_made_it(tmp_path: Path) -> None:
    with History(tmp_path).open(Made(), "readings"):
        pass
    with History(tmp_path).open(Made(), "readings"):
        pass

    with (
        pytest.raises(ConfigError, match="window_s = 3600, not 60") as caught,
        History(tmp_path).open(Made(60), "readings"),
    ):
        pass
    assert caught.value.code == "C426"


def test_one_job_at_a_time_uses_a_history(tmp_path: Path) -> None:
    with (
        History(tmp_path).open(Made(), "readings"),
        pytest.raises(ConfigError, match="another job") as caught,
        History(tmp_path).open(Made(), "readings"),
    ):
        pass
    assert caught.value.code == "C427"
    with History(tmp_path).open(Made(), "readings"):
        pass


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()

    with pytest.raises(ConfigError, match="'photos'") as caught, History(tmp_path).open(Made(), "readings"):
        pass
    assert caught.value.code == "C425"
    with (
        pytest.raises(ConfigError, match="cannot be used") as caught,
        History(Path("/dev/null/x")).open(Made(), "readings"),
    ):
        pass
    assert caught.value.code == "C425"


def test_a_history_whose_checkpoint_is_gone_is_not_begun_anew(tmp_path: Path) -> None:
    history = History(tmp_path)
    with history.open(Made(), "readings"):
        Path(history.checkpoint("readings")).mkdir(parents=True)
        history.save_state(0, Made())
    shutil.rmtree(history.checkpoint("readings"))

    with pytest.raises(ConfigError, match="checkpoint") as caught, history.open(Made(), "readings"):
        pass
    assert caught.value.code == "C425"


def test_a_batch_needs_the_state_before_it(tmp_path: Path) -> None:
    history = History(tmp_path)
    with history.open(Made(), "readings"):
        history.save_state(0, Made())
        history.save_state(1, Made(7))
        history.save_state(2, Made(8))

        assert [history.has_state(batch) for batch in range(4)] == [False, True, True, False]
        assert history.last_batch() == 2
        assert history.state(2, Made) == Made(8)
        with pytest.raises(ConfigError, match="the state of batch 0") as caught:
            history.state(0, Made)
        assert caught.value.code == "C425"


def test_a_part_of_a_table_stays_as_it_was_written_first(spark: SparkSession, tmp_path: Path) -> None:
    history = History(tmp_path)
    day = date(2026, 1, 1)
    with history.open(Made(), "readings"):
        first = history.append(spark.createDataFrame([(1, day), (2, day)], "x int, day date"), "table", 0)
        again = history.append(spark.createDataFrame([(3, day)], "x int, day date"), "table", 0)
        other = history.append(spark.createDataFrame([(4, day)], "x int, day date"), "table", 1)

        assert first == again
        assert [count_rows(parts) for parts in (first, again, other)] == [2, 2, 1]
        assert sorted(row["x"] for row in history.read(spark, first, "x int").collect()) == [1, 2]
        assert history.read(spark, [], "x int").count() == 0
    assert sorted((row["x"], row["batch"]) for row in rows_of(tmp_path, "table")) == [(1, 0), (2, 0), (4, 1)]
    assert not list((tmp_path / "staging").iterdir())
