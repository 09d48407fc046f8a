"""Data is accessible to one user only, and code runs only from directories that no other user can write."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.kernels.cache import cache_version
from tidegate.security.private_files import private_directory, reason_not_to_run

ANOTHER_USER = 12345


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (directory, *directory.rglob("*"))}


def test_a_new_directory_is_for_this_user_alone(tmp_path: Path) -> None:
    private_directory(tmp_path / "parent" / "data")
    assert modes(tmp_path / "parent")["data"] == 0o700


def test_an_open_one_is_closed_with_all_that_is_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (data / "queues").mkdir(parents=True)
    for file in (data / "lock", data / "queues" / "data.mdb", elsewhere):
        file.write_text("x")
        file.chmod(0o666)
    (data / "queues").chmod(0o775)
    data.chmod(0o755)
    (data / "link").symlink_to(elsewhere)
    with caplog.at_level(logging.WARNING):
        private_directory(data)
    found = modes(data)
    del found["link"]
    assert found == {"data": 0o700, "queues": 0o700, "lock": 0o600, "data.mdb": 0o600}
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o666, "what a link leads to is not ours"
    assert str(data) in caplog.text
    caplog.clear()
    private_directory(data)
    assert caplog.text == ""


def test_code_runs_only_from_where_nobody_else_can_write(tmp_path: Path) -> None:
    here = tmp_path / "cache" / "kernels"
    here.mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o755)
    assert reason_not_to_run(here) == ""
    for mode, path in ((0o777, here), (0o1777, here), (0o770, here), (0o777, tmp_path / "cache")):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        assert str(path) in reason_not_to_run(here), oct(mode)
        path.chmod(before)
    (tmp_path / "cache").chmod(0o1777)
    assert reason_not_to_run(here) == "", "the sticky bit protects what is ours, as in /tmp"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_code_does_not_run_from_another_users_directory(tmp_path: Path) -> None:
    here = tmp_path / "cache" / "kernels"
    here.mkdir(parents=True, mode=0o700)
    for path in (here, here.parent):
        os.chown(path, ANOTHER_USER, -1)
        assert "another user" in reason_not_to_run(here)
        os.chown(path, 0, -1)
    assert reason_not_to_run(here) == ""


def test_a_kernel_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / f"kernels-{cache_version()}"
    cache.mkdir()
    cache.chmod(0o777)
    command = "import numba, tidegate.kernels.cache; print(numba.config.CACHE_DIR)"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    used = Path(done.stdout.strip())
    assert used != cache
    assert not used.exists(), "it goes with its process"
    assert str(cache) in done.stderr
    assert "every user may write" in done.stderr
    cache.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (Path(done.stdout.strip()), done.stderr) == (cache, "")
