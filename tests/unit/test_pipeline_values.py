"""The values of the pipeline: offsets, shares, options, and the messages of Spark's failures."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import ConfigError, QueueError, Unavailable
from tidegate.messages import Level, Levels
from tidegate.pipeline import java
from tidegate.pipeline.offsets import Offset, allot
from tidegate.pipeline.options import parse_sink_options, parse_source_options
from tidegate.pipeline.progress import lag, to_error

queues = st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 10**6)), min_size=1, max_size=64)


@given(queues, st.integers(1, 10**7))
def test_rows_are_allotted_up_to_the_limit_and_not_beyond(waiting: list[tuple[int, int]], rows_max: int) -> None:
    starts = [start for start, _count in waiting]
    counts = [count for _start, count in waiting]
    ends = [start + count for start, count in waiting]
    given_ends = allot(starts, ends, rows_max)
    shares = [end - start for end, start in zip(given_ends, starts, strict=True)]
    assert all(0 <= share <= count for share, count in zip(shares, counts, strict=True))
    assert sum(shares) == min(rows_max, sum(counts))


def test_a_queue_that_is_further_behind_gets_more() -> None:
    assert allot([1, 1], [101, 901], 100) == [11, 91]


class TestOffset:
    looked = Levels("a1", [Level(0, 0, 0, 0, None, 5, 9), Level(0, 0, 0, 0, None, 1, 1)])

    def test_what_spark_logs_is_read_again(self) -> None:
        offset = Offset("air", "a1", [9, 1])
        assert Offset.from_dict(offset.to_dict()) == offset
        offset.check("air", self.looked)

    @pytest.mark.parametrize(
        ("offset", "reason"),
        [
            (Offset("water", "a1", [9, 1]), "belongs to queue 'water', not to 'air'"),
            (Offset("air", "b2", [9, 1]), "dropped and created again"),
            (Offset("air", "a1", [10, 1]), "ahead of queue"),
            (Offset("air", "a1", [9]), "ahead of queue"),
        ],
    )
    def test_a_checkpoint_of_something_else(self, offset: Offset, reason: str) -> None:
        with pytest.raises(ConfigError, match=f"C421.*{reason}.*give this query a new checkpoint"):
            offset.check("air", self.looked)

    def test_a_checkpoint_of_another_source(self) -> None:
        with pytest.raises(ConfigError, match=r"C421.*0"):
            Offset.from_dict({"0": 17})


class TestOptions:
    def test_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIDEGATE_TOKEN", "secret")
        options = parse_source_options({"queue": "air"})
        assert (options.rows_per_trigger, options.is_loss_fatal, options.mode, options.deletes) == (
            100_000,
            True,
            "permissive",
            True,
        )
        assert options.broker.token == "secret"

    def test_spark_gives_names_in_any_case_and_options_of_its_own(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text(" secret\n")
        given_options = {"QUEUE": "air", "MaxRowsPerTrigger": "5", "checkpointlocation": "/x", "path": "y"}
        options = parse_source_options(given_options | {"tokenfile": str(tmp_path / "token")})
        assert (options.rows_per_trigger, options.broker.token) == (5, "secret")

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            ({}, "no queue"),
            ({"queue": "a", "maxRows": "5"}, "'maxrows' is not an option of tidegate; use one of: .*maxRowsPerTrigger"),
            ({"queue": "a", "maxRowsPerTrigger": "-1"}, "maxRowsPerTrigger is '-1'"),
            ({"queue": "a", "failOnDataLoss": "perhaps"}, "failOnDataLoss is 'perhaps'; choose one of: true, false"),
            ({"queue": "a", "mode": "x"}, "mode is 'x'"),
            ({"queue": "a", "retryTimeoutS": "soon"}, "retryTimeoutS is 'soon'"),
            ({"queue": "a", "tokenFile": "/nowhere/token"}, "/nowhere/token"),
            ({"queue": "a", "address": "http://x"}, "http"),
        ],
    )
    def test_wrong_options_fail_at_once(self, wrong: dict[str, str], reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            parse_source_options(wrong)

    def test_the_sink_needs_no_queue(self) -> None:
        assert parse_sink_options({}).queue == ""
        with pytest.raises(ConfigError, match=r"C419.*maxrowspertrigger"):
            parse_sink_options({"maxRowsPerTrigger": "5"})


class TestFailures:
    def test_an_error_of_ours_is_found_in_what_spark_says(self) -> None:
        text = (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted\n"
            '  File "x.py", line 1, in read\n    raise QueueError("Q914", …)\n'
            "tidegate.errors.QueueError: QueueError Q914: 3 of the messages are gone; let nobody else take\n"
            "\tat org.apache.spark.Something\n"
        )
        error = to_error(Exception(text))
        assert isinstance(error, QueueError)
        assert (error.code, error.message, error.remedy) == (
            "Q914", "3 of the messages are gone", "let nobody else take",
        )  # fmt: skip

    def test_any_other_failure_is_told_in_its_own_words(self) -> None:
        error = to_error(Exception("\n  No space left on device\n at …"))
        assert isinstance(error, Unavailable)
        assert "No space left on device" in str(error)

    def test_an_error_of_python_is_the_reason(self) -> None:
        text = (
            'Query failed\nTraceback (most recent call last):\n  File "x.py", line 1\n    raise x\nValueError: no 3\n'
        )
        assert "Spark failed: ValueError: no 3;" in str(to_error(Exception(text)))

    def test_lag_is_what_waits_in_all_queues(self) -> None:
        latest, end = '{"queue":"a","id":"1","sequences":[10,20]}', '{"queue":"a","id":"1","sequences":[7,20]}'
        ours = SimpleNamespace(latestOffset=latest, endOffset=end)
        other = SimpleNamespace(latestOffset="17", endOffset=None)
        assert lag(SimpleNamespace(sources=[ours, other])) == 3


class TestJava:
    @pytest.fixture
    def homes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

        def make(version: str, modules: str | None = None, name: str = "java home") -> Path:
            home = tmp_path / name
            (home / "bin").mkdir(parents=True)
            program = home / "bin" / "java"
            program.write_text('#!/bin/sh\nfor each do echo "[$each]"; done\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
            listed = f'MODULES="{modules}"\n' if modules is not None else ""
            (home / "release").write_text(f'JAVA_VERSION="{version}"\n{listed}')
            monkeypatch.setenv("JAVA_HOME", str(home))
            return home

        return make

    def test_a_suitable_java_home_is_used_as_it_is(self, homes: Any) -> None:
        home = homes("17.0.9", "java.base jdk.incubator.vector")
        assert java.java_home() == home
        assert java.version_of(home) == (17, 0, 9)

    def test_an_old_one_is_not(self, homes: Any) -> None:
        home = homes("11.0.2", "java.base jdk.incubator.vector")
        assert java.java_home() != home
        assert java.version_of(java.java_home()) >= (21,)

    def test_a_java_without_the_module_gets_a_launcher_that_drops_the_flag(self, homes: Any) -> None:
        made = java.java_home() if homes("21.0.8", "java.base") else Path()
        arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "Main", "two words", "--add-modules=other"]
        ran = subprocess.run([made / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
        assert ran.stdout.split("\n")[:-1] == ["[-Da=b c]", "[Main]", "[two words]", "[--add-modules=other]"]
        assert java.version_of(made) == (21, 0, 8)
        assert java.java_home() == made

    def test_the_launcher_stands_for_itself_when_it_is_java_home(self, homes: Any, monkeypatch: Any) -> None:
        homes("21.0.8", "java.base")
        made = java.java_home()
        monkeypatch.setenv("JAVA_HOME", str(made))
        assert java.java_home() == made

    @pytest.mark.parametrize(("version", "option"), [("25.0.2", "-XX:+UseSerialGC"), ("25.0.3", ""), ("21.0.1", "")])
    def test_a_java_that_spoils_data_gets_another_collector(self, homes: Any, version: str, option: str) -> None:
        assert java.needed_options(homes(version)) == option

    def test_a_java_that_says_nothing_is_asked(self, homes: Any) -> None:
        home = homes("17")
        (home / "release").unlink()
        (home / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"19.0.1\" 2022' >&2\n")
        assert java.version_of(home) == (19, 0, 1)
        assert java.version_of(Path(os.devnull)) == ()
