"""Passwords come from files or the environment, and are shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate import config as settings
from tidegate.errors import ConfigError
from tidegate.queues.stores.redis_link import RedisLink
from tidegate.security.credentials import masked, read_redis_password, without_secrets

SECRET = "hunter2@/:#"

ADDRESSES = [
    (f"redis://user:{SECRET}@redis:6379/0", "redis://user:***@redis:6379/0"),
    (f"rediss://:{SECRET}@redis/0", "rediss://:***@redis/0"),
    (f"redis://redis/0?password={SECRET[:7]}&db=1", "redis://redis/0?password=***&db=1"),
    ("redis://user@redis:6379/0", "redis://user@redis:6379/0"),
    ("redis://redis:6379/0", "redis://redis:6379/0"),
    ("lmdb", "lmdb"),
]


@pytest.mark.parametrize(("address", "shown"), ADDRESSES)
def test_an_address_is_shown_without_its_password(address: str, shown: str) -> None:
    assert masked(address) == shown
    config, origins = settings.load(None, {"TIDEGATE_QUEUE_STORE": address})
    assert config.queue_store == address
    assert settings.without_passwords(origins)["queue_store"].value == shown


def test_an_error_about_an_address_does_not_show_its_password() -> None:
    with pytest.raises(ConfigError, match="C404") as caught:
        settings.load(None, {"TIDEGATE_QUEUE_STORE": f"radish://user:{SECRET}@redis"})
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="C416") as caught:
        RedisLink("redis://user:hunter2@redis/0?password=hunter2&socket_timeout=soon")
    assert "hunter2" not in str(caught.value)


def test_the_file_wins_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    assert read_redis_password(str(file), {"TIDEGATE_REDIS_PASSWORD": "other"}) == SECRET
    assert read_redis_password("", {"TIDEGATE_REDIS_PASSWORD": "other"}) == "other"
    assert read_redis_password("", {}) == ""
    with pytest.raises(ConfigError, match=r"C445.*redis_password_file"):
        read_redis_password(str(tmp_path / "missing"), {})


def test_child_processes_get_the_secrets_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"TIDEGATE_TOKEN", "TIDEGATE_REDIS_PASSWORD"}
    for name in secrets:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("TIDEGATE_DATA", "kept")
    assert not without_secrets().keys() & secrets
    assert without_secrets()["TIDEGATE_DATA"] == "kept"
    assert without_secrets("TIDEGATE_REDIS_PASSWORD").keys() & secrets == {"TIDEGATE_REDIS_PASSWORD"}
