"""On a full disk the broker refuses only what needs space: consumers continue, the broker can restart, and readiness
reports the state.

The tests limit the file size of the broker's process from outside, which LMDB sees as a full disk.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from broker_process import BrokerProcess
from http_client import code_of, open_client

PATIENCE_S = 60.0
BODY = "x" * 10_000
SMALL = "x" * 30


@contextlib.contextmanager
def files_at_most(size_bytes: int) -> Iterator[None]:
    """Limits the file size of the processes that are started in this block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_up(process: BrokerProcess) -> int:
    """Prevents all files of the broker from growing, and returns the limit."""
    _soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    size_bytes = (Path(process.data) / "queues" / "fsync" / "data.mdb").stat().st_size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))
    return size_bytes


def put(client: httpx.Client, body: str, count: int = 100) -> httpx.Response:
    return client.post("/v1/queues/work/messages", json=[{"body": f"{i}-{body}"} for i in range(count)])


def put_until_refused(client: httpx.Client, body: str) -> int:
    accepted = 0
    while (response := put(client, body)).is_success:
        accepted += response.json()["accepted"]
    assert code_of(response) == (503, "U707")
    assert "full" in response.json()["error"]["message"]
    return accepted


def take(client: httpx.Client, messages_max: int) -> int:
    """Takes and deletes some messages, and returns how many."""
    messages = client.post("/v1/queues/work/dequeue", json={"max": messages_max, "wait_s": 0.2}).json()["messages"]
    receipts = {"receipts": [message["receipt"] for message in messages]}
    if messages:
        deleted = client.post("/v1/queues/work/delete", json=receipts)
        assert deleted.json() == {"deleted": len(messages), "stale": 0}
    return len(messages)


def wait_ready(client: httpx.Client) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not client.get("/readyz").is_success:
        assert time.monotonic() < deadline_s, "still not ready"
        time.sleep(0.05)


def test_while_the_disk_is_full_deletes_work_and_make_room() -> None:
    with BrokerProcess() as process, open_client(process) as client:
        client.put("/v1/queues/work", json={"physical_queues": 4}).raise_for_status()
        fill_up(process)
        accepted = put_until_refused(client, BODY)
        assert accepted
        assert code_of(client.get("/readyz")) == (503, "U707")
        assert client.get("/healthz").is_success
        while not (ready := client.get("/readyz")).is_success:
            assert code_of(ready) == (503, "U707")
            count = take(client, 50)
            assert count, "all was deleted, and there is still no room"
            accepted -= count
        accepted += put(client, SMALL).raise_for_status().json()["accepted"]
        while count := take(client, 1000):
            accepted -= count
        assert accepted == 0


def test_a_restart_on_a_full_disk_works_and_room_is_noticed() -> None:
    with BrokerProcess() as process, open_client(process) as client:
        client.put("/v1/queues/work", json={}).raise_for_status()
        size_bytes = fill_up(process)
        accepted = put_until_refused(client, SMALL * 100)
        for stop in (process.kill, process.terminate):
            stop()
            with files_at_most(size_bytes):
                process.start()
            assert code_of(client.get("/readyz")) == (503, "U707")
            assert code_of(put(client, BODY)) == (503, "U707")
            assert code_of(client.put("/v1/queues/other", json={})) == (503, "U707")
            accepted -= take(client, 10)
        _soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        wait_ready(client)
        accepted += put(client, BODY).raise_for_status().json()["accepted"]
        assert client.get("/v1/queues/work/stats").json()["messages"] == accepted


def test_scattered_deletes_work_on_a_full_disk() -> None:
    """This is the worst case: every delete changes another page, and frees none."""
    with BrokerProcess() as process, open_client(process) as client:
        client.put("/v1/queues/work", json={"physical_queues": 1}).raise_for_status()
        fill_up(process)
        accepted = put_until_refused(client, "x" * 300)
        leased = []
        while messages := client.post(
            "/v1/queues/work/dequeue", json={"max": 5000, "wait_s": 0, "visibility_s": 600}
        ).json()["messages"]:
            leased += messages
        assert len(leased) == accepted
        receipts = [message["receipt"] for message in leased[::10]]
        deleted = client.post("/v1/queues/work/delete", json={"receipts": receipts})
        assert deleted.json() == {"deleted": len(receipts), "stale": 0}
