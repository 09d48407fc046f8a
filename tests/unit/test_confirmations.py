"""Confirmations of changes: none is sent before the sync that covers its change, and changes share syncs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidegate.errors import Overloaded, TidegateError
from tidegate.knowledge.confirmations import Confirmations
from tidegate.knowledge.store_files import not_synced

WAIT_S = 30


class Disk:
    """A disk that syncs on request. `is_synced` counts the durable changes."""

    def __init__(self) -> None:
        self.written = self.synced = self.syncs = 0
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)
        self.error: Exception | None = None

    def sync(self) -> None:
        written = self.written
        self.syncs += 1
        self.begun.release()
        assert self.may_go_on.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        self.synced = written


async def begun(disk: Disk) -> None:
    assert await asyncio.to_thread(disk.begun.acquire, timeout=WAIT_S)


def test_a_change_is_confirmed_after_the_sync_that_began_after_it() -> None:
    async def scenario() -> None:
        disk = Disk()
        confirmations = Confirmations(disk.sync, 100)
        confirmed: list[tuple[int, int]] = []

        def change() -> None:
            disk.written += 1
            number = disk.written
            confirmations.confirm(lambda _: confirmed.append((number, disk.synced)))

        change()
        await begun(disk)
        for _ in range(9):
            change()
        assert confirmed == []
        assert len(confirmations) == 10
        disk.may_go_on.release()
        await begun(disk)
        assert [number for number, _ in confirmed] == [1]
        disk.may_go_on.release()
        await confirmations.stop()
        assert [number for number, _ in confirmed] == list(range(1, 11))
        assert all(synced >= number for number, synced in confirmed)
        assert disk.syncs == confirmations.syncs == 2, "nine changes share the second sync"

    asyncio.run(scenario())


def test_a_change_that_changes_nothing_waits_only_while_others_do() -> None:
    async def scenario() -> None:
        disk = Disk()
        confirmations = Confirmations(disk.sync, 100)
        confirmed: list[str] = []
        confirmations.confirm(lambda _: confirmed.append("alone"), is_changed=False)
        assert confirmed == ["alone"]
        confirmations.confirm(lambda _: confirmed.append("first"))
        confirmations.confirm(lambda _: confirmed.append("the same again"), is_changed=False)
        assert confirmed == ["alone"]
        disk.may_go_on.release(2)
        await confirmations.stop()
        assert confirmed == ["alone", "first", "the same again"]

    asyncio.run(scenario())


def test_a_sync_that_fails_is_the_answer_to_its_changes_alone() -> None:
    async def scenario() -> None:
        disk = Disk()
        disk.error = not_synced(OSError("the disk is gone"))
        confirmations = Confirmations(disk.sync, 100)
        answers: list[TidegateError | None] = []
        confirmations.confirm(answers.append)
        disk.may_go_on.release()
        await confirmations.stop()
        disk.error = None
        confirmations.confirm(answers.append)
        disk.may_go_on.release()
        await confirmations.stop()
        assert answers[0] is not None
        assert (answers[0].code, answers[1]) == ("K132", None)

    asyncio.run(scenario())


def test_there_is_a_bound_and_without_syncs_nobody_waits() -> None:
    async def scenario() -> None:
        disk = Disk()
        confirmations = Confirmations(disk.sync, 2)
        for _ in range(2):
            confirmations.check_room()
            confirmations.confirm(lambda _: None)
        with pytest.raises(Overloaded, match="L652"):
            confirmations.check_room()
        disk.may_go_on.release(2)
        await confirmations.stop()
        confirmations.check_room()
        answers: list[TidegateError | None] = []
        Confirmations(None, 2).confirm(answers.append)
        assert answers == [None]

    asyncio.run(scenario())
