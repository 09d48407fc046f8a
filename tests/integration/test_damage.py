"""A damaged LMDB file is refused or reported: no message is lost silently, and no process ends by a signal."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from broker_process import BrokerProcess, clean_environment
from command import Outcome, tidegate
from http_client import open_client
from store_worlds import LmdbWorld

from tidegate.messages import Dequeue
from tidegate.queues import LogicalQueues
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.stores.lmdb_store import LmdbStore
from tidegate.storage.lmdb_pages import PageFile

SCRIPT = Path(__file__).with_name("damaged_store.py")
# TIDEGATE_TEST_SEEDS adds seeds. Each is a store that is damaged in one place.
SEEDS = int(os.environ.get("TIDEGATE_TEST_SEEDS", "48"))
FIRST_TIER = 8
SEED = int(os.environ.get("TIDEGATE_TEST_SEED", "19"))
AT_ONCE = 40
REFUSALS = {"C446", "C447", "C448"}
PAGE = 4096


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def outcomes(directories: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("open", *map(str, directories)).splitlines()]


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """Yields a directory, in memory if the system has one, because hundreds of stores are synced in it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tidegate-test-", dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def made(room: Path) -> Path:
    directory = room / "made"
    run("make", str(directory))
    for durability in ("fsync", "os"):  # without the unused part of the file, so that copies are quick
        data = directory / "queues" / durability / "data.mdb"
        os.truncate(data, used_bytes(data))
    return directory


@pytest.fixture(scope="module")
def expected(made: Path, room: Path) -> Counter[str]:
    copy = room / "sound"
    shutil.copytree(made, copy)
    [outcome] = outcomes([copy])
    assert outcome["corrupt"] == outcome["unreachable"] == 0
    assert "refused" not in outcome
    return Counter(outcome["delivered"])


def used_bytes(data: Path) -> int:
    with PageFile(data) as file:
        metas, problems = file.metas()
        assert not problems
        return PAGE * (max(meta.last_page for meta in metas) + 1)


def flip(chance: random.Random, data: bytearray) -> str:
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return f"bit {bit % 8} of byte {bit // 8}"


def flip_in_structure(chance: random.Random, data: bytearray) -> str:
    """Flips a bit of the structure that leads to records: the meta pages, or the first bytes of a page."""
    page = chance.choice([0, 1, chance.randrange(len(data) // PAGE)])
    at = page * PAGE + chance.randrange(168 if page < 2 else 64)
    data[at] ^= 1 << chance.randrange(8)
    return f"a bit of byte {at % PAGE} of page {page}"


def spoil_page(chance: random.Random, data: bytearray) -> str:
    page = chance.randrange(len(data) // PAGE)
    data[page * PAGE : (page + 1) * PAGE] = chance.choice([bytes(PAGE), chance.randbytes(PAGE)])
    return f"page {page}"


def cut_off(chance: random.Random, data: bytearray) -> str:
    del data[chance.randrange(len(data)) :]
    return f"all behind byte {len(data)}"


WAYS: list[Callable[[random.Random, bytearray], str]] = [
    flip,
    flip_in_structure,
    flip_in_structure,
    spoil_page,
    cut_off,
]


def damage(seed: int, directory: Path) -> str:
    chance = random.Random(seed)
    path = directory / "queues" / chance.choice(["fsync", "fsync", "os"]) / "data.mdb"
    data = bytearray(path.read_bytes())
    what = WAYS[seed % len(WAYS)](chance, data)
    path.write_bytes(data)
    return f"seed {seed}: {what} of {path.parent.name}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seeds",
    [range(SEED, SEED + FIRST_TIER), pytest.param(range(SEED + FIRST_TIER, SEED + SEEDS), marks=pytest.mark.seeds)],
)
def test_damage_is_refused_or_reported(made: Path, expected: Counter[str], room: Path, seeds: range) -> None:
    print(f"TIDEGATE_TEST_SEED={seeds.start} TIDEGATE_TEST_SEEDS={len(seeds)}")
    seen: Counter[str] = Counter()
    for start in range(seeds.start, seeds.stop, AT_ONCE):
        directories, told = [], []
        for seed in range(start, min(start + AT_ONCE, seeds.stop)):
            directories.append(room / str(seed))
            shutil.copytree(made, directories[-1])
            told.append(damage(seed, directories[-1]))
        for what, directory, outcome in zip(told, directories, outcomes(directories), strict=True):
            seen[check(what, outcome, expected)] += 1
            shutil.rmtree(directory)
    print(dict(seen))
    assert seen["refused"]
    assert seen["reported"] + seen["unharmed"]


def check(what: str, outcome: dict[str, Any], expected: Counter[str]) -> str:
    """Checks the law, and returns which of its cases applied."""
    assert "signal" not in outcome, f"{what}: ended by signal {outcome['signal']}"
    assert "traceback" not in outcome, f"{what}: {outcome['traceback']}"
    delivered = Counter(outcome["delivered"])
    assert not delivered - expected, f"{what}: delivered twice, or never sent: {list(delivered - expected)[:3]}"
    missing = (expected - delivered).total()
    if "refused" in outcome:
        assert outcome["refused"] in REFUSALS, what
        assert not outcome["is_sound"], what
        assert outcome["corrupt"] == outcome["unreachable"] == 0, what
        return "refused"
    assert missing <= outcome["corrupt"] + outcome["unreachable"], f"{what}: {missing} messages are missing in silence"
    return "reported" if outcome["corrupt"] + outcome["unreachable"] else "unharmed"


# The operator's view.


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


def serve(data: Path, *flags: str) -> Outcome:
    """Starts a broker that is expected to refuse its data."""
    ports = ("--native-port", "0", "--http-port", "0", "--ssap-port", "-1")
    return tidegate("serve", *ports, "--data", str(data), *flags)


def damaged_branch(data: Path) -> None:
    """Overwrites the root of the messages with zeros, so that none can be found."""
    path = data / "queues" / "fsync" / "data.mdb"
    with PageFile(path) as file:
        metas, _problems = file.metas()
        newest = max(metas, key=lambda meta: meta.transaction)
        root = file.check(newest).trees["messages"].described.root
    with path.open("r+b") as out:
        out.seek(root * PAGE)
        out.write(bytes(PAGE))


def test_a_missing_file_is_no_empty_store(data: Path) -> None:
    (data / "queues" / "fsync" / "data.mdb").unlink()
    refused = serve(data)
    assert refused.code == 2
    assert "C446" in refused.err
    assert "mount the volume" in refused.err
    (data / "stores.json").unlink()
    (data / "queues" / "os" / "data.mdb").unlink()
    [outcome] = outcomes([data])
    assert outcome["queues"] == outcome["delivered"] == []


def test_another_store_in_its_place_is_refused(data: Path, room: Path) -> None:
    other = room / "other"
    run("make", str(other))
    shutil.copy(other / "queues" / "fsync" / "data.mdb", data / "queues" / "fsync" / "data.mdb")
    assert "C446" in serve(data).err


def test_a_directory_without_a_store_is_refused_where_one_is_required(tmp_path: Path) -> None:
    refused = serve(tmp_path / "unmounted", "--require-store")
    assert refused.code == 2
    assert "C449" in refused.err


def test_a_file_that_was_cut_off_is_refused(data: Path) -> None:
    path = data / "queues" / "fsync" / "data.mdb"
    os.truncate(path, path.stat().st_size // 2)
    refused = serve(data)
    assert refused.code == 2
    assert "C447" in refused.err
    assert "queue verify" in refused.err


def test_a_directory_of_a_former_version_opens_and_gets_an_identity(data: Path, expected: Counter[str]) -> None:
    """Such a directory has no identities, and its values have no checksums."""
    (data / "stores.json").unlink()
    for durability in ("fsync", "os"):
        with lmdb.open(str(data / "queues" / durability), max_dbs=16) as environment:
            store = environment.open_db(b"store")
            databases = [environment.open_db(name) for name in (b"queues", b"counters", b"deliveries")]
            with environment.begin(write=True) as transaction:
                transaction.drop(store)
                for database in databases:
                    for key, value in list(transaction.cursor(db=database)):
                        transaction.put(key, value[:-4], db=database)
    [outcome] = outcomes([data])
    assert Counter(outcome["delivered"]) == expected
    assert outcome["corrupt"] == outcome["unreachable"] == 0
    assert set(json.loads((data / "stores.json").read_text())) == {"fsync", "os"}
    assert tidegate("queue", "verify", "--data", str(data)).code == 0


def test_verify_finds_and_repairs_what_hung_on_a_damaged_branch(data: Path, expected: Counter[str]) -> None:
    sound = tidegate("queue", "verify", "--data", str(data))
    assert sound.code == 0
    assert sound.lines[-1]["sound"]
    assert sum(line["reachable"] for line in sound.lines[:-1]) == expected.total()

    damaged_branch(data)
    assert "C448" in serve(data).err
    damaged = tidegate("queue", "verify", "--data", str(data))
    assert damaged.code == 1
    assert not damaged.lines[-1]["sound"]
    by_name = {line["queue"]: line for line in damaged.lines[:-1]}
    assert by_name["wide"]["unreachable"] == by_name["wide"]["counted"] > 0
    assert by_name["quick"]["unreachable"] == 0

    repaired = tidegate("queue", "verify", "--data", str(data), "--repair")
    assert repaired.code == 0
    result = repaired.lines[-1]["repaired"]["fsync"]
    assert result["found_again"] == result["kept"] > 0
    assert Path(result["damaged_copy"]).is_dir()
    assert tidegate("queue", "verify", "--data", str(data)).code == 0
    [outcome] = outcomes([data])
    assert Counter(outcome["delivered"]) == expected


def test_queues_whose_definition_is_lost_get_a_name(data: Path, expected: Counter[str]) -> None:
    path = data / "queues" / "fsync" / "data.mdb"
    content = bytearray(path.read_bytes())
    with PageFile(path) as file:
        metas, _problems = file.metas()
        newest = max(metas, key=lambda meta: meta.transaction)
        root = file.check(newest).trees["queues"].described.root
    content[root * PAGE : (root + 1) * PAGE] = bytes(PAGE)
    path.write_bytes(content)
    repaired = tidegate("queue", "verify", "--data", str(data), "--repair")
    assert repaired.code == 0
    assert repaired.lines[-1]["repaired"]["fsync"]["recovered_queues"]
    [outcome] = outcomes([data])
    assert Counter(outcome["delivered"]) == expected
    assert all(name.startswith("recovered-") for name in outcome["queues"])


def test_a_corrupt_record_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = LmdbWorld(tmp_path)

    async def check() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await queues.define("q", {"physical_queues": 1})
        await queues.enqueue("q", [make_message(number) for number in range(3)])
        await queues.close()
        world.spoil("q", 2)
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        assert len(await queues.dequeue(Dequeue("q", max=10, wait_s=0))) == 2
        assert len(await queues.read("q", 0, 0, 100, 100)) == 2
        assert (await queues.statistics("q")).corrupt == 1
        await queues.close()

    asyncio.run(check())
    said = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert said == ["a corrupt record was set aside queue=q physical=0 sequence=2"]


def test_a_running_broker_is_verified_and_damage_that_comes_then_is_seen() -> None:
    with BrokerProcess() as process, open_client(process) as client:
        for name in ("work", "zoo"):
            client.put(f"/v1/queues/{name}", json={"physical_queues": 1, "durability": "fsync"}).raise_for_status()
            for _ in range(3):
                messages = [{"body": "x" * 300} for _ in range(400)]
                client.post(f"/v1/queues/{name}/messages", json=messages).raise_for_status()
        data = Path(process.data)
        live = tidegate("queue", "verify", "--data", str(data))
        assert live.code == 0
        assert live.lines[-1]["in_use"]
        assert "C414" in tidegate("queue", "verify", "--data", str(data), "--repair").err

        path = data / "queues" / "fsync" / "data.mdb"
        with PageFile(path) as file:
            metas, _problems = file.metas()
            leaves = file.check(max(metas, key=lambda meta: meta.transaction)).trees["messages"].leaves.tolist()
        with path.open("r+b") as out:
            out.seek(leaves[5] * PAGE)
            out.write(random.Random(3).randbytes(PAGE))  # a page that LMDB refuses
        got = dict.fromkeys(("work", "zoo"), 0)
        for name in got:
            request = {"max": 100, "wait_s": 0, "visibility_s": 600}
            while messages := client.post(f"/v1/queues/{name}/dequeue", json=request).json()["messages"]:
                got[name] += len(messages)
        assert got["zoo"] == 1200
        assert 1150 < got["work"] < 1200
        statistics = client.get("/v1/queues/work/stats").json()
        assert statistics["unreachable"] == 1200 - got["work"]
        assert f'tidegate_queue_unreachable{{queue="work"}} {1200 - got["work"]}.0' in client.get("/metrics").text
        assert tidegate("queue", "verify", "--data", str(data)).code == 1
