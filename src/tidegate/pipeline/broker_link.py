"""The connection from Spark's Python workers to the broker: one per process and broker, kept while the worker lives.

Every step has a time limit. While the broker does not answer, the client keeps reconnecting; after the option
retryTimeoutS the step fails with a remedy, and so does its task or query. `ask` runs a single step. Work passed to
`run` has several, each wrapped in `within`.
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

# A step that waits for the broker longer than this reports it on standard error, once.
REPORT_AFTER_S: Final = 3.0

_links: dict[BrokerOptions, SyncConnection] = {}


def ask(options: BrokerOptions, question: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    """Runs `question` on this process's connection to the broker. Raises Unavailable after the time limit."""
    return run(options, lambda connection: within(options, question(connection)))


def run(options: BrokerOptions, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    """Runs `work` on this process's connection. Each of its steps must be wrapped in `within`."""
    link = _link(options)
    return answer(options, link.start(work(link.connection)))


def ask_soon(options: BrokerOptions, question: Callable[[Connection], Coroutine[Any, Any, T]]) -> Future[T]:
    """Starts `question` as `ask` does, without waiting; `answer` waits for the result."""
    link = _link(options)
    return link.start(within(options, question(link.connection)))


def answer(options: BrokerOptions, asked: Future[T]) -> T:
    """Waits for the result of `ask_soon`. If the broker is unavailable, the next step opens a new connection."""
    try:
        return asked.result()
    except Unavailable:
        _forget(options)
        raise


async def within(options: BrokerOptions, step: Coroutine[Any, Any, T]) -> T:
    """Awaits one step. Raises Unavailable after retryTimeoutS."""
    report = asyncio.get_running_loop().call_later(REPORT_AFTER_S, _report_waiting, options)
    try:
        async with asyncio.timeout(options.retry_timeout_s):
            return await step
    except TimeoutError:
        raise Unavailable(
            "U710",
            f"the broker at {options.address} has not answered for {options.retry_timeout_s:g} s",
            "check that the broker is running, then start the query again with the same checkpoint: nothing is lost",
        ) from None
    finally:
        report.cancel()


def close_links() -> None:
    """Closes this process's connections, for programs that keep running after their last step."""
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
    """Closes and drops the connection, so that the next step opens a new one."""
    link = _links.pop(options, None)
    if link is not None:
        link.__exit__(Unavailable, None, None)


def _report_waiting(options: BrokerOptions) -> None:
    print(
        f"tidegate: waiting for the broker at {options.address}, for at most {options.retry_timeout_s:g} s",
        file=sys.stderr,
        flush=True,
    )
