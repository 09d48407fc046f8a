"""Logical queues against a plain model, for both stores: no message is lost or delivered twice while leased, and groups
are in order.

Time does not pass in the model: a visibility of 0 expires immediately, and one of ten minutes never does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis_process import RedisProcess
from store_worlds import LONG_S, LmdbWorld, RedisWorld, World

from tidegate.messages import Dequeue, Kept, Leased, NewMessage, Settle
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.logical_queues import LogicalQueues
from tidegate.queues.records import decode_record
from tidegate.queues.store import Store, is_alone

PHYSICAL_QUEUES = 2
MAX_DELIVERIES = 3
SETTINGS = {"physical_queues": PHYSICAL_QUEUES, "max_deliveries": MAX_DELIVERIES, "durability": "os"}
EXAMPLES = max(5, int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "100")) // 4)

counts = st.integers(1, 6)
groups = st.sampled_from(["", "", "a", "b"])
named = st.tuples(st.sampled_from(["", "", "lamp", "door"]), st.integers(1, 4))
visibilities = st.sampled_from([0.0, LONG_S])


@dataclass
class Message:
    """A message in the model. It was delivered `least` to `most` times. The two differ only after a store has forgotten
    counts that it need not keep. `receipt` belongs to its lease; a delayed message is hidden and has no receipt."""

    group: str
    physical: int = 0
    sequence: int = 0
    least: int = 0
    most: int = 0
    highest: int = 0
    receipt: str = ""
    is_hidden: bool = False


class QueueMachine(RuleBasedStateMachine):
    """One queue `q` with its dead letters. Subclasses choose the world."""

    leases_survive = True

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = self.make_world()
        self.live: dict[int, Message] = {}
        self.dead: set[int] = set()
        self.names: set[tuple[str, int]] = set()
        self.receipts: list[str] = []
        self.next_body = 0
        self.open()

    def make_world(self) -> World:
        raise NotImplementedError

    def open(self) -> None:
        async def make() -> tuple[Store, LogicalQueues]:
            store = self.world.make()
            queues = LogicalQueues(store)
            await queues.open()
            await queues.define("q", SETTINGS)
            return store, queues

        self.store, self.queues = self.loop.run_until_complete(make())
        self.dead_lettered = 0

    def teardown(self) -> None:
        self.loop.run_until_complete(self.queues.close())
        self.loop.close()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    # Rules.

    @rule(count=counts, group=groups, name=named)
    def enqueue(self, count: int, group: str, name: tuple[str, int]) -> None:
        # Messages of a group go to its physical queue, so a name must belong to one group only.
        device, first = name[0] and name[0] + group, name[1]
        messages: list[NewMessage] = []
        duplicates = 0
        for at in range(count):
            identity = (device, first + at)
            if identity in self.names:
                duplicates += 1
            else:
                self.live[self.next_body + at] = Message(group)
            if all(identity):
                self.names.add(identity)
            messages.append(make_message(self.next_body + at, group=group, device=device, sequence=first + at))
        self.next_body += count
        done = self.run(self.queues.enqueue("q", messages))
        assert (done.accepted, done.duplicates) == (count, duplicates)
        self.learn_places()

    @rule(count=counts, visibility_s=visibilities)
    def dequeue(self, count: int, visibility_s: float) -> None:
        # A reply from several leases may have a message twice, if the first leases have expired.
        count = count if visibility_s else 1
        found: list[Leased] = self.run(
            self.queues.dequeue(Dequeue("q", max=count, wait_s=0.0, visibility_s=visibility_s))
        )
        assert len(found) <= count
        held_groups = self.held_groups()
        available = [each for each in self.live.values() if self.may_be_leased(each, held_groups)]
        bodies = [body_of(each) for each in found]
        assert len(set(bodies)) == len(bodies)
        assert found or all(each.most >= MAX_DELIVERIES for each in available), "messages wait, and none was given"
        self.learn_dead_letters()
        for body, leased in zip(bodies, found, strict=True):
            message = self.live[body]
            assert message in available, (body, message)
            assert message.least < leased.delivery <= message.most + 1
            assert (leased.queue, leased.sequence) == (message.physical, message.sequence)
            assert leased.delivery <= MAX_DELIVERIES
            assert len(found) == 1 or not is_alone(leased.delivery, MAX_DELIVERIES)
            message.least = message.most = leased.delivery
            message.highest = max(message.highest, leased.delivery)
            self.receipts.append(leased.receipt)
        self.check_groups([self.live[body] for body in bodies])
        if visibility_s:
            for body, leased in zip(bodies, found, strict=True):
                self.live[body].receipt = leased.receipt

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        chosen = self.choose(data)
        for body in self.settle("delete", chosen):
            del self.live[body]

    @precondition(lambda self: self.receipts)
    @rule(data=st.data(), visibility_s=visibilities)
    def extend(self, data: st.DataObject, visibility_s: float) -> None:
        for body in self.settle("extend", self.choose(data), visibility_s=visibility_s):
            if not visibility_s:
                self.live[body].receipt = ""

    @precondition(lambda self: self.receipts)
    @rule(data=st.data(), delay_s=st.sampled_from([0.0, 0.0, LONG_S]))
    def release(self, data: st.DataObject, delay_s: float) -> None:
        for body in self.settle("release", self.choose(data), delay_s=delay_s):
            self.live[body].receipt = ""
            self.live[body].is_hidden = delay_s > 0

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        for body in self.settle("return", self.choose(data)):
            message = self.live[body]
            message.receipt = ""
            message.least -= 1
            message.most -= 1

    @rule(physical=st.integers(0, PHYSICAL_QUEUES - 1), part=st.floats(0, 1))
    def delete_below(self, physical: int, part: float) -> None:
        there = sorted(each.sequence for each in self.live.values() if each.physical == physical)
        below = there[int(part * (len(there) - 1))] if there else 1
        gone = [body for body, each in self.live.items() if each.physical == physical and each.sequence < below]
        assert self.run(self.queues.delete_below("q", physical, below)) == len(gone)
        assert self.run(self.queues.delete_below("q", physical, below)) == 0
        for body in gone:
            del self.live[body]

    @rule()
    def redrive(self) -> None:
        assert self.run(self.queues.redrive("q")) == len(self.dead)
        for body in self.dead:
            self.live[body] = Message("")
        self.dead = set()
        self.learn_places()

    @rule()
    def reopen(self) -> None:
        """Ends the broker and starts another in its place."""
        self.run(self.queues.close())
        self.open()
        if self.leases_survive:
            return
        self.receipts = []
        for message in self.live.values():
            message.receipt, message.is_hidden = "", False
            # After this, first deliveries are known only approximately, and a returned message may count as delivered.
            message.least = message.least if message.least > 1 else 0
            message.most = max(message.most, message.highest, 1)
            message.highest = message.most

    # Laws.

    @invariant()
    def nothing_is_lost_and_the_counts_agree(self) -> None:
        kept = [self.read("q", physical) for physical in range(PHYSICAL_QUEUES)]
        for physical, messages in enumerate(kept):
            expected = sorted((each.sequence, body) for body, each in self.live.items() if each.physical == physical)
            assert [(each.sequence, body_of(each)) for each in messages] == expected
        levels = self.run(self.store.queue("q").levels())
        for physical, level in enumerate(levels):
            there = [each for each in self.live.values() if each.physical == physical]
            assert level.messages == len(there)
            assert level.leased == sum(is_held(each) for each in there)
            assert level.waiting <= len(there) - level.leased
        assert sum(level.messages for level in self.run(self.store.queue("q.dead").levels())) == len(self.dead)

    # Internals.

    def read(self, name: str, physical: int) -> list[Kept]:
        found: list[Kept] = self.run(self.queues.read(name, physical, 0, 1 << 40, 10_000))
        return found

    def learn_places(self) -> None:
        """Gives new messages a place in the queue, after all others of their group."""
        for physical in range(PHYSICAL_QUEUES):
            for kept in self.read("q", physical):
                message = self.live[body_of(kept)]
                message.group = decode_record(kept.record).group
                assert message.sequence in (0, kept.sequence)
                message.physical, message.sequence = physical, kept.sequence

    def learn_dead_letters(self) -> None:
        """Finds messages that were delivered too often. LMDB moves them after it has answered the consumer."""
        total = self.store.queue("q").counts().dead_lettered
        expected = len(self.dead) + total - self.dead_lettered
        self.dead_lettered = total

        async def wait() -> None:
            while sum(level.messages for level in await self.store.queue("q.dead").levels()) != expected:
                await asyncio.sleep(0.001)

        self.run(wait())
        for physical in range(PHYSICAL_QUEUES):
            for kept in self.read("q.dead", physical):
                body = body_of(kept)
                if body in self.dead:
                    continue
                message = self.live.pop(body)
                assert message.most >= MAX_DELIVERIES, message
                assert not is_held(message)
                self.dead.add(body)

    def held_groups(self) -> set[str]:
        return {each.group for each in self.live.values() if each.group and is_held(each)}

    def may_be_leased(self, message: Message, held_groups: set[str]) -> bool:
        return not is_held(message) and message.group not in held_groups

    def check_groups(self, found: list[Message]) -> None:
        """Checks that the messages of each group are its first ones, in order."""
        for group in {each.group for each in found if each.group}:
            sequences = [each.sequence for each in found if each.group == group]
            there = sorted(each.sequence for each in self.live.values() if each.group == group)
            assert sequences == there[: len(sequences)]

    def choose(self, data: st.DataObject) -> list[str]:
        chosen = data.draw(st.lists(st.sampled_from(self.receipts), min_size=1, max_size=5, unique=True))
        return list(chosen)

    def settle(self, action: str, receipts: list[str], **times: float) -> list[int]:
        """Settles receipts, and returns the messages whose receipts were valid."""
        good = [body for body, each in self.live.items() if each.receipt in receipts]
        done = self.run(self.queues.settle(Settle("q", action, receipts, **times)))
        assert (done.done, done.stale) == (len(good), len(receipts) - len(good))
        return good


def is_held(message: Message) -> bool:
    return bool(message.receipt) or message.is_hidden


def body_of(message: Leased | Kept) -> int:
    return int(msgspec.msgpack.decode(decode_record(message.record).body))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


def check(machine: type[QueueMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None, print_blob=True)
    )


def test_logical_queues_in_lmdb_agree_with_the_model() -> None:
    class LmdbMachine(QueueMachine):
        leases_survive = False

        def make_world(self) -> World:
            self.directory = tempfile.mkdtemp(prefix="tidegate-model-")
            return LmdbWorld(Path(self.directory))

        def teardown(self) -> None:
            super().teardown()
            shutil.rmtree(self.directory)

    check(LmdbMachine)


def test_logical_queues_in_redis_agree_with_the_model(redis: RedisProcess) -> None:
    class RedisMachine(QueueMachine):
        def make_world(self) -> World:
            with redis.client() as client:
                client.flushall()
            return RedisWorld(redis)

    check(RedisMachine)
