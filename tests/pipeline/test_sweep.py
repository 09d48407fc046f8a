"""A sweep on Spark returns the same as a plain loop, runs no case twice, and reports which case fails."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import toy_simulation
from broker_process import clean_environment
from pyspark.sql import SparkSession
from toy_simulation import Toy

from tidegate.errors import ConfigError
from tidegate_lab.queues.evaluation import evaluate_queues, run_over
from tidegate_lab.queues.message_queue import SET_A, Case, Method, simulate_table
from tidegate_lab.queues.simulated import Extent, Run, run_here, write_chapter
from tidegate_lab.sweep import progress_line, sources_of, sweep, version_of

WAIT_S = 100


@pytest.fixture(scope="module")
def sparks(spark: SparkSession) -> SparkSession:
    """Returns a Spark session whose workers can import the simulation of these tests."""
    spark.sparkContext.addPyFile(toy_simulation.__file__)
    return spark


def message_queues(seeds: range) -> list[Case]:
    brief = replace(SET_A, warm_up_s=0.2, measured_s=0.5)
    return [Case(brief, method, seed) for method in Method for seed in seeds]


def test_any_chunks_give_what_a_plain_loop_gives(spark: SparkSession, tmp_path: Path) -> None:
    cases = message_queues(range(6))
    expected = simulate_table(cases)
    for number, chunk_s in enumerate((100.0, 1e-4)):
        assert sweep(spark, simulate_table, cases, tmp_path / str(number), chunk_s=chunk_s).equals(expected)
    few, many = (len(list((tmp_path / name).iterdir())) for name in "01")
    assert few < many == len(cases)


def test_the_rows_are_in_the_order_of_the_cases_even_of_one_that_is_there_twice(
    sparks: SparkSession, tmp_path: Path
) -> None:
    toys = [Toy(number % 20) for number in range(30)]
    random.Random(1).shuffle(toys)
    assert sweep(sparks, toy_simulation.simulate, toys, tmp_path).equals(toy_simulation.simulate(toys))


def test_a_result_that_is_there_twice_counts_once(sparks: SparkSession, tmp_path: Path) -> None:
    """This happens if executors outlive their driver, and write results that the next one has too."""
    toys = [Toy(number) for number in range(3)]
    expected = sweep(sparks, toy_simulation.simulate, toys, tmp_path)
    for file in list(tmp_path.iterdir()):
        shutil.copy(file, file.with_stem(f"{file.stem}-again"))
    assert sweep(sparks, toy_simulation.simulate, toys, tmp_path).equals(expected)


def test_more_cases_run_those_only(sparks: SparkSession, tmp_path: Path) -> None:
    results, marks = tmp_path / "results", tmp_path / "marks"
    marks.mkdir()
    toys = [Toy(number, str(marks)) for number in range(40)]
    sweep(sparks, toy_simulation.simulate, toys[10:30], results)
    assert toy_simulation.runs_of(marks) == list(range(10, 30))
    table = sweep(sparks, toy_simulation.simulate, toys, results)
    assert toy_simulation.runs_of(marks) == list(range(40))
    assert table["square"].to_pylist() == [number**2 for number in range(40)]


DRIVER = """
import sys
from pathlib import Path
from tidegate.pipeline.session import spark_session
from tidegate_lab.sweep import sweep
from toy_simulation import Toy, simulate

results, marks, count = sys.argv[1:]
toys = [Toy(number, marks, takes_s=0.05) for number in range(int(count))]
sweep(spark_session("local[2]", spark__driver__memory="1g"), simulate, toys, Path(results), chunk_s=0.2)
"""


@pytest.mark.crash
@pytest.mark.cold_spark
@pytest.mark.timeout(2 * WAIT_S)
def test_a_sweep_whose_driver_was_killed_goes_on_where_it_was(sparks: SparkSession, tmp_path: Path) -> None:
    results, marks, count = tmp_path / "results", tmp_path / "marks", 400
    marks.mkdir()
    here = str(Path(toy_simulation.__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(results), str(marks), str(count)],
        env=clean_environment() | {"PYTHONPATH": path},
    )
    try:
        # More files than the driver writes itself, so the executors are working.
        wait_until(lambda: len(list(results.glob("*.parquet"))) > 15, driver)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    toys = [Toy(number, str(marks), takes_s=0.05) for number in range(count)]
    kept = {number for file in results.glob("*.parquet") for number in pq.read_table(file)["number"].to_pylist()}
    assert 15 < len(kept) < count
    table = sweep(sparks, toy_simulation.simulate, toys, results)
    assert table["square"].to_pylist() == [number**2 for number in range(count)]
    runs = toy_simulation.runs_of(marks)
    assert set(runs) == set(range(count))
    assert {number for number in kept if runs.count(number) != 1} == set()


def wait_until(holds: Any, driver: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert driver.poll() is None, "the driver has ended"
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_case_that_fails_is_named_and_the_others_are_kept(sparks: SparkSession, tmp_path: Path) -> None:
    results, marks = tmp_path / "results", tmp_path / "marks"
    marks.mkdir()
    toys = [Toy(number, str(marks)) for number in range(40)]
    wrong = [replace(toy, fails=toy.number in (7, 31)) for toy in toys]
    with pytest.raises(ConfigError) as raised:
        sweep(sparks, toy_simulation.simulate, wrong, results)
    assert raised.value.code == "C436"
    assert "2 of 40 cases failed in toy_simulation:simulate" in raised.value.message
    assert any(f"{wrong[number]!r}: ZeroDivisionError: there is no {number}" in str(raised.value) for number in (7, 31))
    before = toy_simulation.runs_of(marks)
    assert sweep(sparks, toy_simulation.simulate, toys, results).equals(
        toy_simulation.simulate([Toy(n) for n in range(40)])
    )
    after = toy_simulation.runs_of(marks)
    assert {number for number in after if after.count(number) != before.count(number)} == {7, 31}


def test_a_simulation_must_give_a_row_a_case(sparks: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"C436.*0 rows for 1 cases"):
        sweep(sparks, toy_simulation.forget_one, [Toy(1)], tmp_path)


def test_a_simulation_that_executors_lack_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "only_here.py"
    copy.write_text(Path(toy_simulation.__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    only_here = importlib.import_module(copy.stem)
    with pytest.raises(ConfigError, match=r"C437.*only_here:simulate.*install"):
        sweep(spark, only_here.simulate, [only_here.Toy(number) for number in range(11)], tmp_path / "results")


PROJECT = {
    "__init__": "from project.never import nothing\n",
    "never": "nothing = 0\n",
    "model": "import os\nfrom project.clients import pace as of_clients\nfrom .kernel import step\n",
    "kernel": "from .constants import STEP as step\n",
    "constants": "import project.model\nSTEP = 1\n",
    "clients/__init__": "from project.aside import nothing\n",
    "aside": "nothing = 0\n",
    "clients/pace": "def later():\n    import project.late\n",
    "late": "",
}
OF_THE_MODEL = {"model", "clients", "clients.pace", "kernel", "constants", "late", "aside"}


def test_the_code_of_a_simulation_is_what_it_imports_from_its_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in PROJECT.items():
        path = tmp_path / "project" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def versions() -> tuple[str, str]:
        version_of.cache_clear()
        return version_of("project.model:run"), version_of("project.late:run")

    assert set(sources_of("project.model")) == {f"project.{name}" for name in OF_THE_MODEL}
    before = versions()
    assert len(set(before)) == 2
    (tmp_path / "project/clients/pace.py").write_text("PACE = 2\n")
    model, late = versions()
    assert model != before[0]
    assert late == before[1]


def test_the_code_of_the_request_pool_has_its_kernel_and_the_clients_machines() -> None:
    modules = set(sources_of("tidegate_lab.control.request_pool"))
    assert {"tidegate_lab.control.request_pool_kernel", "tidegate.client.control.backoff"} <= modules
    assert not {"tidegate_lab.queues.message_queue", "tidegate.client.connection"} & modules


def test_a_spoilt_file_is_named(sparks: SparkSession, tmp_path: Path) -> None:
    toys = [Toy(1), Toy(2)]
    sweep(sparks, toy_simulation.simulate, toys, tmp_path)
    spoilt = next(tmp_path.glob("*.parquet"))
    spoilt.write_bytes(spoilt.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"C438.*{spoilt.name}.*delete it"):
        sweep(sparks, toy_simulation.simulate, toys, tmp_path)
    spoilt.unlink()
    assert sweep(sparks, toy_simulation.simulate, toys, tmp_path).num_rows == 2


def test_a_directory_that_cannot_be_written_to_is_named(sparks: SparkSession, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(ConfigError, match="C437"):
        sweep(sparks, toy_simulation.simulate, [Toy(1)], in_the_way / "results")


@dataclass(frozen=True)
class Odd:
    value: object


def test_what_cannot_be_swept_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    def inner(toys: Any) -> pa.Table:
        return toy_simulation.simulate(toys)

    with pytest.raises(ConfigError, match=r"C435.*no case"):
        sweep(spark, toy_simulation.simulate, [], tmp_path)
    with pytest.raises(ConfigError, match=r"C435.*cannot import"):
        sweep(spark, inner, [Toy(1)], tmp_path)
    with pytest.raises(ConfigError, match=r"C435.*Odd\(value=.*dataclasses"):
        sweep(spark, toy_simulation.simulate, [Odd(object())], tmp_path)
    assert list(tmp_path.iterdir()) == []


TINY = Extent(
    seeds=(1, 2), warm_up_s=0.2, measured_s=0.3, rates=(100.0, 200.0), sleeps_s=(0.5, 5.0), lingers_s=(0.0, 0.02)
)


@pytest.mark.evaluation
def test_an_evaluation_over_spark_is_the_same(spark: SparkSession, tmp_path: Path) -> None:
    def evaluate(name: str, run: Run) -> dict[str, bytes]:
        out = tmp_path / name
        evaluate_queues(out, is_short=True, command="c", chapters=[lambda out, _: write_chapter(out, TINY, run)])
        return {path.name: path.read_bytes() for path in out.iterdir()}

    over_spark = evaluate("spark", run_over(spark, tmp_path / "sweep"))
    plain = evaluate("plain", run_here)
    assert plain.keys() == over_spark.keys()
    assert [name for name in plain if plain[name] != over_spark[name]] == []
    assert "loads.parquet" in plain


def test_progress_tells_how_long_it_will_take() -> None:
    assert progress_line("loads", 500, 2000, 10.0) == "loads: 500 of 2,000 cases, about 30 s left"
    assert progress_line("loads", 0, 2000, 10.0) == "loads: 0 of 2,000 cases"
