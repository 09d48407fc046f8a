"""The dequeue controller with a real store: no request is answered empty while messages wait.

A seed chooses the actions of producers, of consumers that delete, release, return or are too slow, and of clients that
leave at any moment, and it changes the settings of the queue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tidegate.messages import REPLY_BYTES_MAX, Dequeue, Leased, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.stores.lmdb_store import LmdbStore

STEPS = 120
STEPS_ALONE = 30


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
        self.changes = 0
        self.changes_under_way = 0

    async def run(self) -> None:
        await self.queues.open()
        await self.queues.define("q", self.settings)
        for _ in range(STEPS):
            await self.rng.choice([self.enqueue, self.ask, self.ask, self.leave, self.pause, self.redefine])()
        while self.asking:
            await asyncio.wait(self.asking)
        assert self.failures == []
        for _ in range(STEPS_ALONE):
            await self.rng.choice([self.enqueue, self.pause, self.ask_alone, self.ask_alone, self.redefine])()
        await self.drain()
        dead = (await self.queues.statistics("q")).dead_letters
        assert self.deleted + dead == self.put
        await self.queues.close()

    async def enqueue(self) -> None:
        count = self.rng.randint(1, 12)
        self.put += count
        with self.change():
            await self.queues.enqueue("q", [make_message(n) for n in range(count)])

    async def redefine(self) -> None:
        """Changes settings of the queue. Its messages stay, and the next consumer finds them."""
        self.settings["linger_s"] = self.rng.choice([0.0, 0.001, 0.002])
        with self.change():
            await self.queues.define("q", self.settings)

    async def ask_alone(self) -> None:
        """Sends a request while there is no other. Then an empty answer has no excuse."""
        await self.consume(self.wish())

    def wish(self) -> Dequeue:
        most = self.rng.randint(1, 15)
        return Dequeue("q", most, self.rng.randint(1, most), self.rng.choice([0.0, 0.02]), self.rng.choice([0.0, 600]))

    async def ask(self) -> None:
        task = asyncio.create_task(self.consume(self.wish()))
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

    @contextmanager
    def change(self) -> Iterator[None]:
        """Counts a pending change, which may free messages at any moment until it ends."""
        self.changes += 1
        self.changes_under_way += 1
        try:
            yield
        finally:
            self.changes_under_way -= 1

    async def check_nothing_waits(self) -> None:
        """Checks that no message waits after an empty answer. Valid excuses are other requests that are about to take
        the messages, a full set of leases, and a pending change, whose messages may have come after the answer."""
        if self.changes_under_way:
            return
        changes = self.changes
        levels = await self.queues.levels("q")
        is_alone = {*self.asking} <= {asyncio.current_task()} and self.changes == changes
        if self.settings["method"] == "wakeup" and is_alone:
            left = [level for level in levels if level.waiting and level.leased < self.settings["leased_max"]]
            assert not left, "messages wait, and somebody was sent away with nothing"

    async def settle(self, messages: list[Leased]) -> None:
        receipts = [message.receipt for message in messages]
        action = self.rng.choice(["delete", "delete", "release", "return"])
        try:
            await asyncio.sleep(self.rng.choice([0.0, 0.003]))
        except asyncio.CancelledError:
            action = "return"  # as a listener does for a client that has left
        await asyncio.shield(self.settle_and_count(action, receipts))

    async def settle_and_count(self, action: str, receipts: list[str]) -> None:
        with self.change():
            settled = await self.queues.settle(Settle("q", action, receipts))
        self.deleted += settled.done if action == "delete" else 0

    async def drain(self) -> None:
        """Checks that a patient consumer receives everything that is left, except dead letters."""
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


def test_a_reply_from_several_physical_queues_has_one_limit_in_bytes(tmp_path: Path) -> None:
    """A larger answer would end the connection of a consumer with small socket buffers, again and again."""

    async def check() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await queues.define("q", {"physical_queues": 4, "durability": "memory"})
        await queues.enqueue("q", [make_message("x" * 100_000) for _ in range(150)])
        sizes: list[int] = []
        count = 0
        while count < 150:
            messages = await queues.dequeue(Dequeue("q", 10_000, 1, 5.0, 600))
            assert messages
            count += len(messages)
            sizes.append(sum(len(message.record) for message in messages))
        assert max(sizes) <= REPLY_BYTES_MAX
        assert len(sizes) <= 6, "replies are full"
        await queues.close()

    asyncio.run(check())
