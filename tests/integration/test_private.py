"""A broker keeps its files, its passwords, its token and its log private."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from broker_process import BrokerProcess
from command import tidegate
from http_client import open_client
from raw_client import RawClient
from redis import Redis
from redis_process import RedisProcess

from tidegate.frames import Hello, Kind, encode_frame

TOKEN = "a-token-that-is-long-enough"
PASSWORD = "a-password-of-redis"
FORGED = "sensor\n2026-01-01 00:00:00,000 CRITICAL tidegate.broker.assembly all is lost\x1b[2J"


def modes(directory: Path) -> dict[str, int]:
    found = (directory, *directory.rglob("*"))
    return {str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode) for path in found}


def test_the_data_directory_is_for_the_brokers_user_alone(capfd: pytest.CaptureFixture[str]) -> None:
    broker = BrokerProcess(has_knowledge=True)
    data = Path(broker.data)
    data.chmod(0o755)
    (data / "knowledge").mkdir()
    left = data / "knowledge" / "left-by-an-older-version"
    left.write_text("x")
    left.chmod(0o644)
    before = os.umask(0)  # an operator's shell may have this mask
    try:
        with broker, open_client(broker) as client:
            for durability in ("fsync", "os"):
                client.put(f"/v1/queues/{durability}", json={"durability": durability}).raise_for_status()
            client.post("/v1/sparql", data={"update": "INSERT DATA { <s> <p> 1 }"}).raise_for_status()
            found = modes(data)
            assert broker.terminate() == 0
            found |= modes(data)
    finally:
        os.umask(before)
    assert {"lock", "queues/fsync/data.mdb", "queues/os/lock.mdb"} <= found.keys()
    assert any(path.startswith("knowledge/") for path in found)
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}
    assert f"other users had access to {data}" in capfd.readouterr().err


def test_a_sparql_worker_has_no_secret_and_no_connection_but_its_own() -> None:
    secrets = {"TIDEGATE_TOKEN": TOKEN, "TIDEGATE_REDIS_PASSWORD": PASSWORD}
    with BrokerProcess(environment=secrets, has_knowledge=True) as broker:
        shown = {"Authorization": f"Bearer {TOKEN}"}
        with open_client(broker, headers=shown) as client:
            client.get("/v1/sparql", params={"query": "ASK {}"}).raise_for_status()
            workers = children(broker.pid)
            assert workers
            for worker in workers:
                environment = Path(f"/proc/{worker}/environ").read_bytes()
                assert b"PATH=" in environment
                assert TOKEN.encode() not in environment
                assert PASSWORD.encode() not in environment
                opened = [os.readlink(file) for file in Path(f"/proc/{worker}/fd").iterdir() if file.name not in "012"]
                assert sum(target.startswith("socket:") for target in opened) == 1, opened
                assert not any("lock" in target or "mdb" in target for target in opened), opened


def children(parent: int) -> list[str]:
    """Returns the children of all threads of a process."""
    return [
        child for task in Path(f"/proc/{parent}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def test_the_password_of_redis_is_on_no_command_line_and_in_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with RedisProcess() as redis:
        with Redis(port=redis.port) as admin:
            admin.config_set("requirepass", PASSWORD)
        flags = ("--queue-store", redis.url, "--log-level", "debug")
        with (
            BrokerProcess(*flags, environment={"TIDEGATE_REDIS_PASSWORD": PASSWORD}) as broker,
            open_client(broker) as client,
        ):
            client.put("/v1/queues/q", json={}).raise_for_status()
            client.post("/v1/queues/q/messages", json={"body": 1}).raise_for_status()
            assert PASSWORD.encode() not in Path(f"/proc/{broker.pid}/cmdline").read_bytes()
            for path in ("/v1/layers", "/v1/queues", "/metrics", "/openapi.json"):
                assert PASSWORD not in client.get(path).text
            assert broker.terminate() == 0
        with_password = redis.url.replace("://", f"://default:{PASSWORD}x@")
        for store, environment in ((redis.url, {}), (with_password, {"TIDEGATE_REDIS_PASSWORD": PASSWORD})):
            ports = ("--native-port", "0", "--http-port", "0", "--ssap-port", "-1")
            refused = tidegate("serve", *ports, "--queue-store", store, environment=environment)
            assert refused.code == 2
            assert "C416" in refused.err
            assert PASSWORD not in refused.err + refused.out
    assert PASSWORD not in capfd.readouterr().err


def test_config_check_shows_that_there_are_passwords_and_not_which(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    environment = {"TIDEGATE_QUEUE_STORE": f"redis://user:{PASSWORD}@redis:6379/0"}
    shown = tidegate("config", "check", environment=environment)
    assert shown.lines[0]["settings"]["queue_store"]["value"] == "redis://user:***@redis:6379/0"
    assert shown.lines[0]["redis_password"] == "none"
    environment["TIDEGATE_REDIS_PASSWORD_FILE"] = str(file)
    named = tidegate("config", "check", environment=environment)
    assert named.lines[0]["redis_password"] == "set"
    assert PASSWORD not in shown.out + named.out
    refused = tidegate("config", "check", environment={"TIDEGATE_REDIS_PASSWORD_FILE": str(tmp_path / "missing")})
    assert (refused.code, "C445" in refused.err) == (2, True)


def test_no_name_forges_a_log_line(capfd: pytest.CaptureFixture[str]) -> None:
    with BrokerProcess("--log-level", "info") as broker:
        with RawClient(broker.native_port) as client:
            client.hello(FORGED)
            client.send(encode_frame(Kind.HELLO, Hello(publisher=FORGED)))
            error = client.wait_closed()
        assert error is not None
        assert broker.terminate() == 0
    log = capfd.readouterr().err
    assert r"sensor\n2026-01-01" in log
    assert "\x1b" not in log
    assert not re.search(r"^2026-01-01", log, re.MULTILINE)
