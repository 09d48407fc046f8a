"""A stream hands out everything that arrived before its end, in order, and ends when the program leaves it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tidegate.client.stream import PushedStream
from tidegate.errors import TidegateError, Unavailable

BOUND = 3


class Numbers(PushedStream[int]):
    """Counts how often it was started, taken from and closed."""

    def __init__(self) -> None:
        super().__init__(BOUND)
        self.starts = self.takes = self.closings = 0

    def push(self, *numbers: int) -> None:
        self._add(numbers)

    def fail(self, error: TidegateError) -> None:
        self._fail(error)

    async def _start(self) -> None:
        self.starts += 1

    def _on_taken(self) -> None:
        self.takes += 1

    def _on_closed(self) -> None:
        self.closings += 1


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario

    asyncio.run(bounded())


def test_a_closed_stream_hands_out_what_waits_and_stops() -> None:
    async def scenario() -> None:
        async with Numbers() as numbers:
            numbers.push(1, 2)
            numbers.close()
            assert [number async for number in numbers] == [1, 2]
            assert numbers.takes == 2
        assert numbers.closings == 1, "the end of the block does not close it again"

    run(scenario())


def test_a_failed_stream_hands_out_what_waits_and_raises_at_every_call() -> None:
    async def scenario() -> None:
        async with Numbers() as numbers:
            numbers.push(1)
            numbers.fail(Unavailable("U704", "lost", "wait"))
            assert await anext(numbers) == 1
            for _ in range(2):
                with pytest.raises(Unavailable, match="U704"):
                    await anext(numbers)

    run(scenario())


@pytest.mark.parametrize("is_failing", [True, False])
def test_a_waiting_program_learns_of_the_end(is_failing: bool) -> None:
    async def scenario() -> None:
        numbers = Numbers()
        error = Unavailable("U704", "lost", "wait")
        asyncio.get_running_loop().call_soon(lambda: numbers.fail(error) if is_failing else numbers.close())
        with pytest.raises(Unavailable if is_failing else StopAsyncIteration):
            await anext(numbers)
        assert numbers.starts == 1

    run(scenario())


def test_a_waiting_program_is_woken_by_an_item() -> None:
    async def scenario() -> None:
        numbers = Numbers()
        asyncio.get_running_loop().call_soon(numbers.push, 7)
        assert await anext(numbers) == 7
        assert numbers.closings == 0

    run(scenario())


def test_leaving_a_bare_loop_closes_the_stream_and_leaving_a_loop_in_a_block_does_not() -> None:
    async def scenario() -> None:
        bare = Numbers()
        bare.push(1, 2)
        loop = aiter(bare)
        assert await anext(loop) == 1
        await loop.aclose()  # type: ignore[attr-defined]  # as the end of the program's loop does
        assert bare.closings == 1
        async with Numbers() as entered:
            entered.push(1, 2)
            async for _ in entered:
                break
            assert entered.closings == 0
            assert await anext(entered) == 2
        assert entered.closings == 1

    run(scenario())


def test_a_stream_is_behind_from_its_bound_on() -> None:
    async def scenario() -> None:
        numbers = Numbers()
        for number in range(2 * BOUND):
            assert numbers.is_behind == (number >= BOUND)
            numbers.push(number)
        for left in reversed(range(2 * BOUND)):
            await anext(numbers)
            assert numbers.is_behind == (left >= BOUND)

    run(scenario())
