"""Clients of the elasticity evaluation, one process each: `python -m tidegate_lab.elasticity.load ROLE …`.

| role | does |
|---|---|
| subscribe ADDRESS COUNT RATE | keeps COUNT subscriptions; adds RATE per second from one line of input to the next |
| publish ADDRESS | publishes acknowledged lists, as fast as they are acknowledged |
| take ADDRESS | takes every reading, and blocks the publisher when it is slower |

A client prints `ready` when it is ready. The role `subscribe` prints it again once it has ended the additional
subscriptions, after the second line of input.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final

from tidegate.broker.process import end_process
from tidegate.client import Connection, connect

STATIONS: Final = 10_000
LIST: Final = 256
LISTS_IN_FLIGHT: Final = 16
SUBSCRIBING_AT_ONCE: Final = 512
READY_S: Final = 3600.0


def reading(number: int) -> dict[str, Any]:
    """Returns a reading of one of many stations. Consecutive readings come from different stations."""
    return {"station": 28_000_000 + number * 7919 % STATIONS, "NO2": number % 180, "O3": number % 97, "n": number}


def wanted(number: int) -> str:
    """Returns a filter for one station with an NO2 threshold from 170 to 999.

    Readings have at most 179, so only about one filter in a hundred can match at all."""
    rng = random.Random(number)  # noqa: S311 - the same filters every time, not secrets
    return f"station=={28_000_000 + rng.randrange(STATIONS)};NO2>{rng.randint(170, 999)};O3<{rng.randint(50, 99)}"


class Client:
    """A client process that is ready."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait_ready(self) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await self._process.stdout.readline()
        if line != b"ready\n":
            raise RuntimeError("a client process of the evaluation has ended: see its message above")

    @contextlib.asynccontextmanager
    async def subscribing_more(self) -> AsyncIterator[None]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"more\n")
        yield
        self._process.stdin.write(b"enough\n")
        await self.wait_ready()


@contextlib.asynccontextmanager
async def client(role: str, address: str, *arguments: int) -> AsyncIterator[Client]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate_lab.elasticity.load", role, address, *map(str, arguments),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        one = Client(process)
        await one.wait_ready()
        yield one
    finally:
        await end_process(process)


async def _subscribe(connection: Connection, count: str, rate: str) -> None:
    numbers = itertools.count()

    async def subscribe(some: Iterator[int], stack: contextlib.AsyncExitStack) -> None:
        for number in some:
            await stack.enter_async_context(connection.subscribe(wanted(number)))

    async def subscribe_more(stack: contextlib.AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        began_s, begun = loop.time(), 0
        while True:
            due = int((loop.time() - began_s) * int(rate))
            async with asyncio.TaskGroup() as tasks:
                for number in itertools.islice(numbers, due - begun):
                    tasks.create_task(subscribe(iter((number,)), stack))
            begun = due
            await asyncio.sleep(0.01)

    async with contextlib.AsyncExitStack() as kept:
        async with asyncio.TaskGroup() as tasks:
            first = itertools.islice(numbers, int(count))
            for _ in range(SUBSCRIBING_AT_ONCE):
                tasks.create_task(subscribe(first, kept))
        while True:
            _report_ready()
            await asyncio.to_thread(sys.stdin.readline)
            async with contextlib.AsyncExitStack() as more, asyncio.TaskGroup() as tasks:
                adding = tasks.create_task(subscribe_more(more))
                await asyncio.to_thread(sys.stdin.readline)
                adding.cancel()


async def _publish(connection: Connection) -> None:
    # The lists repeat: encoding the same list again costs the program as much as encoding a new one.
    lists = itertools.cycle([[reading(n + at) for at in range(LIST)] for n in range(0, 40 * LIST, LIST)])

    async def publish() -> None:
        for some in lists:
            await connection.publish(some)

    _report_ready()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(LISTS_IN_FLIGHT):
            tasks.create_task(publish())


async def _take(connection: Connection) -> None:
    async with connection.subscribe("n>=0", policy="block") as subscription:
        _report_ready()
        while True:
            await subscription.take()


def _report_ready() -> None:
    print("ready", flush=True)


_ROLES: Final[dict[str, Callable[..., Coroutine[Any, Any, None]]]] = {
    "subscribe": _subscribe,
    "publish": _publish,
    "take": _take,
}


async def _main(role: str, address: str, *arguments: str) -> None:
    async with connect(address, name=f"{role}-{random.getrandbits(32):08x}") as connection:
        await _ROLES[role](connection, *arguments)


if __name__ == "__main__":
    # A garbage collection over 100,000 subscriptions uses a core for a second, which would distort the measurement
    # of the slices.
    gc.disable()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(*sys.argv[1:]))
