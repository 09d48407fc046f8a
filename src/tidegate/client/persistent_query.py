"""A persistent query: a query that stays open, as an async iterator of the changes in its result.

    opening ─► indications ─► changes ─► the program
                  ▲  checks, paced by ActiveControl: t = AST + RBT; lost numbers ─► another opening

`persistent_result` keeps the result and finds losses, `persistent_pace` decides when to ask, and this module keeps the
query open. A query that has lost an indication or its connection is opened again after the last number that was read.
Openings are paced like checks, so that clients do not overwhelm a broker that has just restarted or is overloaded.

A filter makes a persistent query over notifications, from whose result nothing is ever removed. The broker does not
keep what it could not deliver, so a loss is reported (`Change.lost`) but cannot be repaired. A check is a round trip on
the link of the subscriptions: its answer follows everything that was delivered or dropped before.

What may go wrong: nothing answers within `connect_timeout_s` at the beginning (U701), or the broker refuses the query,
at once or later, when it can no longer be answered. While a program takes no changes, the query stops reading: the
broker merges waiting indications, and checks time out.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

from tidegate.client.control import Control, ControlStatistics
from tidegate.client.persistent_pace import PersistentPace
from tidegate.client.persistent_result import Change, PersistentResult
from tidegate.client.persistent_transport import (
    Checked,
    Heard,
    Indicated,
    Opened,
    PersistentLink,
    PersistentTransport,
    Refused,
)
from tidegate.client.stream import PushedStream
from tidegate.client.websocket import lost
from tidegate.errors import Overloaded, TidegateError, Unavailable

CHANGES_WAITING_MAX: Final = 1000
REQUEST_S: Final = 10.0
RECONNECT_S: Final = 0.5
"""After a lost connection, clients reconnect at a random time within this span. After a lost indication they do so
within its spread, but at most this span: the spread is sized for queries, and resuming costs the broker much less."""
SILENT_CHECKS_MAX: Final = 3
"""The connection is dropped after this many consecutive checks during which the broker sent nothing."""


@dataclass(frozen=True)
class PersistentQueryStatistics:
    control: ControlStatistics
    changes: int
    checks: int
    """Answered checks."""
    openings: int
    is_open: bool
    waiting: int


class _PendingCheck:
    """The check that waits for its answer. There is at most one, and answers to earlier ones are too late."""

    def __init__(self) -> None:
        self._number = 0
        self._answer: asyncio.Future[None] | None = None

    async def ask(self, link: PersistentLink) -> None:
        """Sends a check and waits for its answer. Raises the error with which it failed."""
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        link.ask(self._number)
        await self._answer

    def is_for(self, number: int) -> bool:
        return number == self._number and self._answer is not None and not self._answer.done()

    def succeed(self) -> None:
        assert self._answer is not None
        self._answer.set_result(None)

    def fail(self, error: TidegateError) -> None:
        """Fails the check, if one is pending."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class PersistentQuery(PushedStream[Change]):
    """`async for change in query`. `async with` waits until the query is open."""

    def __init__(
        self,
        transport: PersistentTransport,
        control: Control,
        tasks: asyncio.TaskGroup,
        open_timeout_s: float,
        request_timeout_s: float = REQUEST_S,
    ) -> None:
        super().__init__(CHANGES_WAITING_MAX)
        self._transport = transport
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._give_up_s = self._loop.time() + open_timeout_s
        self._request_timeout_s = request_timeout_s
        self._pace = PersistentPace(control)
        self._result = PersistentResult(is_resumable=transport.is_resumable)
        self._check = _PendingCheck()
        self._silent_checks = 0
        self._link: PersistentLink | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._working: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._changes = self._checks = self._openings = 0

    def check_within(self, seconds: float | None) -> None:
        """Schedules a check at a random time within `seconds`, for a program that has learnt of something to fetch. The
        time is random because other clients probably learnt of it too. With None, the check falls within the backoff,
        if there is one."""
        self._pace.request_within(seconds)

    def statistics(self) -> PersistentQueryStatistics:
        return PersistentQueryStatistics(
            control=self._pace.statistics(),
            changes=self._changes,
            checks=self._checks,
            openings=self._openings,
            is_open=self._link is not None,
            waiting=len(self._waiting),
        )

    async def _enter(self) -> None:
        await self._start()
        with contextlib.suppress(StopAsyncIteration):  # the query may be closed meanwhile
            await self._wait_until(lambda: self._openings > 0)

    async def _start(self) -> None:
        if self._working is None and not self._is_closed:
            # Even a strategy that never checks must send the opening request.
            self._pace.request_within(0.0)
            self._working = self._tasks.create_task(self._work())

    def _on_taken(self) -> None:
        self._has_room.set()

    # Requests: at most one is in flight.

    async def _work(self) -> None:
        try:
            while True:
                await self._pace.wait_until_due()
                try:
                    await self._request()
                except (Overloaded, Unavailable) as error:
                    self._pace.on_failure(error)
                    if self._openings == 0 and self._loop.time() >= self._give_up_s:
                        raise
        except TidegateError as error:
            self._fail(error)

    async def _request(self) -> None:
        """Opens the query, or checks it if it is open."""
        link = self._link
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await (self._open() if link is None else self._ask(link))
        except TimeoutError:
            # An overloaded broker answers late, so the link is kept until several checks pass in complete silence.
            self._silent_checks += 1
            if self._silent_checks >= SILENT_CHECKS_MAX:
                self._drop_link()
            raise lost("no answer in time") from None

    async def _open(self) -> None:
        link = await self._transport.open(self._result.subscription, self._result.sequence)
        self._link = link
        self._silent_checks = 0
        self._on_opened(link.opened)
        self._openings += 1
        self._reading = self._tasks.create_task(self._read(link))
        self._wake.set()

    async def _ask(self, link: PersistentLink) -> None:
        self._result.on_asked()
        await self._check.ask(link)

    # Messages of the broker.

    async def _read(self, link: PersistentLink) -> None:
        try:
            while self._link is link:
                await self._has_room.wait()
                self._on_heard(await link.read())
        except Unavailable:
            if self._link is link:
                self._open_again(RECONNECT_S)
        except TidegateError as error:
            self._fail(error)

    def _on_opened(self, opened: Opened) -> None:
        losses, change = self._result.on_opened(opened)
        self._pace.on_response(losses, opened.hints)
        self._add_change(change)

    def _on_heard(self, heard: Heard) -> None:
        self._silent_checks = 0
        match heard:
            case Indicated():
                self._on_indicated(heard)
            case Checked() if self._check.is_for(heard.check):
                self._on_checked(heard)
            case Refused() if self._check.is_for(heard.check):
                self._check.fail(heard.error)

    def _on_indicated(self, heard: Indicated) -> None:
        losses, change = self._result.on_indicated(heard)
        self._pace.on_losses(losses)
        if losses and self._transport.is_resumable:
            self._open_again(min(heard.spread_s or 0.0, RECONNECT_S))
        elif change is not None:
            self._pace.on_notification(heard.spread_s)
            self._add_change(change)

    def _on_checked(self, checked: Checked) -> None:
        losses = self._result.on_checked(checked)
        self._checks += 1
        self._pace.on_response(losses, checked.hints)
        self._check.succeed()
        if losses and self._transport.is_resumable:
            self._open_again(0.0)

    def _add_change(self, change: Change | None) -> None:
        if change is not None:
            self._changes += 1
            self._add([change])
            if self.is_behind:
                self._has_room.clear()

    # Reconnecting and ending.

    def _open_again(self, within_s: float) -> None:
        """Opens the query again at a random time within `within_s`, because other clients may have lost the same
        indication."""
        self._drop_link()
        self._pace.request_within(within_s)

    def _drop_link(self, *, is_final: bool = False) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(is_final=is_final)
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        self._check.fail(lost("before a check was answered"))

    def _on_closed(self) -> None:
        self._drop_link(is_final=True)
        if self._working is not None:
            self._working.cancel()

    def _fail(self, error: TidegateError) -> None:
        super()._fail(error)
        self._drop_link()
        if self._working is not None and self._working is not asyncio.current_task():
            self._working.cancel()
