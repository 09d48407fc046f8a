"""The dequeue controller over a real store: nobody is sent away with nothing while messages wait.

Seeded: producers, consumers that delete, release, give back or are too slow, and clients that leave at any moment.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tidegate.messages import Dequeue, Leased, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.stores.lmdb_store import LmdbStore

STEPS = 120


class World:
    def __init__(self, directory: Path, seed: int, method: str) -> None:
        self.rng = random.Random(seed)
        self.queues = LogicalQueues(LmdbStore(directory))
        self.settings: dict[str, Any] = {
            "method": method,
            "physical_queues": self.rng.randint(1, 4),
            "max_deliveries": self.rng.choice([0, 2, 3, 5]),
            "linger_s": self.rng.choice([0.0, 0.002]),
            "sleep_s": 0.003,
            "monitor_period_s": 0.003,
            "durability": "memory",
            "leased_max": self.rng.choice([5, 1000]),
        }
        self.asking: list[asyncio.Task[None]] = []
        self.failures: list[BaseException | None] = []
        self.put = 0
        self.deleted = 0

    async def run(self) -> None:
        await self.queues.open()
        await self.queues.define("q", self.settings)
        for _ in range(STEPS):
            await self.rng.choice([self.enqueue, self.ask, self.ask, self.leave, self.pause])()
        while self.asking:
            await asyncio.wait(self.asking)
        assert self.failures == []
        await self.drain()
        dead = (await self.queues.statistics("q")).dead_letters
        assert self.deleted + dead == self.put
        await self.queues.close()

    async def enqueue(self) -> None:
        count = self.rng.randint(1, 12)
        self.put += count
        await self.queues.enqueue("q", [make_message(n) for n in range(count)])

    async def ask(self) -> None:
        most = self.rng.randint(1, 15)
        wanted = Dequeue(
            "q", most, self.rng.randint(1, most), self.rng.choice([0.0, 0.02]), self.rng.choice([0.0, 600])
        )
        task = asyncio.create_task(self.consume(wanted))
        self.asking.append(task)
        task.add_done_callback(self.on_done)

    def on_done(self, task: asyncio.Task[None]) -> None:
        self.asking.remove(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())

    async def leave(self) -> None:
        if self.asking:
            self.rng.choice(self.asking).cancel()

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.005]))

    async def consume(self, wanted: Dequeue) -> None:
        messages = await self.queues.dequeue(wanted)
        if not messages:
            await self.check_nothing_waits()
        elif wanted.visibility_s:
            await self.settle(messages)

    async def check_nothing_waits(self) -> None:
        """Only others who are about to take them, or a full set of leases, excuse an empty answer."""
        levels = await self.queues.levels("q")
        if self.settings["method"] == "wakeup" and self.asking == [asyncio.current_task()]:
            left = [level for level in levels if level.waiting and level.leased < self.settings["leased_max"]]
            assert not left, "messages wait, and somebody was sent away with nothing"

    async def settle(self, messages: list[Leased]) -> None:
        receipts = [message.receipt for message in messages]
        action = self.rng.choice(["delete", "delete", "release", "return"])
        try:
            await asyncio.sleep(self.rng.choice([0.0, 0.003]))
        except asyncio.CancelledError:
            action = "return"  # what a listener does for a client that has left
        await asyncio.shield(self.settle_and_count(action, receipts))

    async def settle_and_count(self, action: str, receipts: list[str]) -> None:
        settled = await self.queues.settle(Settle("q", action, receipts))
        self.deleted += settled.done if action == "delete" else 0

    async def drain(self) -> None:
        """A patient consumer gets everything that is left, but for dead letters."""
        for _ in range(10 * STEPS):
            messages = await self.queues.dequeue(Dequeue("q", 100, 1, 0.05, 600))
            if not messages:
                if not (await self.queues.statistics("q")).messages:
                    return
                await asyncio.sleep(0.002)
                continue
            await self.settle_and_count("delete", [message.receipt for message in messages])


@pytest.mark.parametrize("seed", range(25))
def test_nobody_is_sent_away_with_nothing_while_messages_wait(tmp_path: Path, seed: int) -> None:
    asyncio.run(World(tmp_path, seed, "wakeup").run())


@pytest.mark.parametrize("method", ["rds", "pms", "conventional"])
@pytest.mark.parametrize("seed", range(4))
def test_every_method_delivers_everything(tmp_path: Path, seed: int, method: str) -> None:
    asyncio.run(World(tmp_path, seed, method).run())
