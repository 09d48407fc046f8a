"""Opens damaged stores, each in another process, and reports the outcome as a JSON line per directory.

`python damaged_store.py make DIR` creates a store with several queues. `… open DIR…` opens each directory and drains
all its queues. If opening is refused, it repairs the store first. A process that a signal ends is an outcome like any
other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tidegate.errors import TidegateError
from tidegate.messages import Dequeue, Leased, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.records import decode_record
from tidegate.queues.stores.lmdb_store import LmdbStore
from tidegate.queues.stores.verification import verify

QUEUES = {
    "small": {"physical_queues": 1},
    "wide": {"physical_queues": 8},
    "large": {"physical_queues": 2},
    "quick": {"physical_queues": 2, "durability": "os"},
}


async def make(directory: Path) -> None:
    """Creates thousands of messages, some deleted and some delivered twice, so that the store has free pages and
    entries of all kinds."""
    chance = random.Random(7)
    queues = LogicalQueues(LmdbStore(directory))
    await queues.open()
    for name, settings in QUEUES.items():
        await queues.define(name, settings)
    for batch in range(30):
        for name in QUEUES:
            size_bytes = chance.choice([3000, 9000]) if name == "large" else chance.randrange(20, 200)
            count = 4 if name == "large" else 50
            await queues.enqueue(
                name,
                [
                    make_message(f"{name}-{batch}-{i}-" + "x" * size_bytes, device="d", sequence=batch * 100 + i + 1)
                    for i in range(count)
                ],
            )
        if batch % 4 == 3:
            name = chance.choice(list(QUEUES))
            leased = await queues.dequeue(Dequeue(name, max=60, wait_s=0))
            deleted = [message.receipt for message in leased if chance.random() < 0.6]
            if deleted:
                await queues.settle(Settle(name, "delete", deleted))
            await queues.settle(Settle(name, "release", [m.receipt for m in leased if m.receipt not in deleted]))
    await queues.close()


async def drain(directory: Path) -> dict[str, Any]:
    queues = LogicalQueues(LmdbStore(directory))
    await queues.open()
    delivered: list[str] = []
    corrupt = unreachable = 0
    names = sorted(definition.name for definition in queues.definitions())
    for name in names:
        while leased := await queues.dequeue(Dequeue(name, max=1000, wait_s=0)):
            delivered += [_name(message) for message in leased]
            await queues.settle(Settle(name, "delete", [message.receipt for message in leased]))
        statistics = await queues.statistics(name)
        corrupt += statistics.corrupt
        unreachable += statistics.unreachable
    await queues.close()
    return {"delivered": delivered, "corrupt": corrupt, "unreachable": unreachable, "queues": names}


def _name(message: Leased) -> str:
    body: str = msgspec.msgpack.decode(decode_record(message.record).body)
    return body.partition("-x")[0]


def look(directory: Path) -> dict[str, Any]:
    """Opens and drains a store as a start does. If it is refused, repairs it first. Returns the outcome."""
    try:
        return asyncio.run(drain(directory))
    except TidegateError as error:
        refused = error.code
    found = verify(directory, is_repair=True, advance=lambda _count: None)
    lost = sum(queue.unreachable for queue in found.queues)
    again = sum(each.found for each in found.salvaged.values())
    repaired = asyncio.run(drain(directory))
    return repaired | {"refused": refused, "is_sound": found.is_sound, "lost": lost, "found_again": again}


def report(directory: Path) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            outcome = look(directory)
        except BaseException:
            outcome = {"traceback": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _pid, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    outcome = json.loads(text)
    assert isinstance(outcome, dict)
    return outcome


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)
    if sys.argv[1] == "make":
        asyncio.run(make(Path(sys.argv[2])))
    else:
        for each in sys.argv[2:]:
            print(json.dumps(report(Path(each))), flush=True)
