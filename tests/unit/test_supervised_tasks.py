"""Work that frames start: an unexpected error is never lost, and nothing runs after the end."""

from __future__ import annotations

import asyncio

from tidegate.hosts.supervised_tasks import SupervisedTasks


def test_an_unexpected_error_is_reported_and_the_others_continue() -> None:
    failures: list[Exception] = []
    done: list[str] = []

    async def fail() -> None:
        raise ValueError("a bug")

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.append("work")

    async def scenario() -> None:
        tasks = SupervisedTasks(failures.append)
        tasks.start(work)
        tasks.start(fail)
        await tasks.close(asyncio.get_running_loop().time() + 60)

    asyncio.run(scenario())
    assert [str(failure) for failure in failures] == ["a bug"]
    assert done == ["work"]


def test_closing_cancels_what_the_deadline_finds() -> None:
    failures: list[Exception] = []

    async def wait() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        tasks = SupervisedTasks(failures.append)
        running = tasks.start(wait)
        await asyncio.sleep(0)
        unstarted = tasks.start(wait)
        await tasks.close(deadline_s=0.0)
        assert running.cancelled()
        assert unstarted.cancelled()
        await tasks.close(deadline_s=0.0)

    asyncio.run(scenario())
    assert failures == []
