"""The link to the broker from Spark's Python workers: one a process and broker, kept while the worker lives.

Every step is bounded: while the broker does not answer, the client connects again and again; after the option
retryTimeoutS the step fails with the cure, and so does its task or query. `ask` is one step; what `run` runs has
several, each `within` that time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from tidegate.client import Connection, SyncConnection, connect_sync
from tidegate.errors import Unavailable
from tidegate.pipeline.options import BrokerOptions

T = TypeVar("T")

# A broker that is away for longer than this is told of on standard error, once a step.
TELL_AFTER_S: Final = 3.0

_links: dict[BrokerOptions, SyncConnection] = {}


def ask(options: BrokerOptions, question: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    """Runs `question` on this process's connection to the broker. Unavailable when it takes longer than it may."""
    return run(options, lambda connection: within(options, question(connection)))


def run(options: BrokerOptions, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    """Runs `work`, whose steps are `within` their time, on this process's connection."""
    link = _link(options)
    return answer(options, link.start(work(link.connection)))


def ask_soon(options: BrokerOptions, question: Callable[[Connection], Coroutine[Any, Any, T]]) -> Future[T]:
    """As `ask`, but `answer` waits."""
    link = _link(options)
    return link.start(within(options, question(link.connection)))


def answer(options: BrokerOptions, asked: Future[T]) -> T:
    """Waits for what was asked. After a broker that was away the next step begins with a new connection."""
    try:
        return asked.result()
    except Unavailable:
        _forget(options)
        raise


async def within(options: BrokerOptions, step: Coroutine[Any, Any, T]) -> T:
    told = asyncio.get_running_loop().call_later(TELL_AFTER_S, _tell, options)
    try:
        async with asyncio.timeout(options.retry_timeout_s):
            return await step
    except TimeoutError:
        raise Unavailable(
            "U710",
            f"the broker at {options.address} has not answered for {options.retry_timeout_s:g} s",
            "see to it, and start the query again with the same checkpoint: nothing is lost",
        ) from None
    finally:
        told.cancel()


def close_links() -> None:
    """Ends the connections of this process; for programs that go on when their last step is done."""
    for options in list(_links):
        _forget(options)


def _link(options: BrokerOptions) -> SyncConnection:
    link = _links.get(options)
    if link is None:
        link = connect_sync(
            options.address, name="spark", token=options.token, connect_timeout_s=options.retry_timeout_s
        )
        link.__enter__()
        _links[options] = link
    return link


def _forget(options: BrokerOptions) -> None:
    """The next step starts with a new connection."""
    link = _links.pop(options, None)
    if link is not None:
        link.__exit__(Unavailable, None, None)


def _tell(options: BrokerOptions) -> None:
    print(
        f"tidegate: waiting for the broker at {options.address}, for at most {options.retry_timeout_s:g} s",
        file=sys.stderr,
        flush=True,
    )
