"""A persistent query: a question that stays open, as an async iterator of what changes in its result.

    opening ─► indications ─► changes ─► the program
                  ▲  checks, paced by ActiveControl: t = AST + RBT; lost numbers ─► another opening

Indications are numbered. One that is missing shows by the next one, or by the answer to a check, which tells the last
number; then the query is opened again after the last number that was read, and the broker tells what was missed, or a
whole result, from which the difference is taken. So what the program is told always composes to the result. The same
happens when the connection is lost. Openings are requests like checks, and paced like them: a broker that comes back,
or has too much to do, is not run over.

A filter gives a persistent query over notifications: nothing of it is ever removed. The broker does not keep what it
could not deliver, so a loss is told (`Change.lost`) and cannot be made good. A check there is a round trip on the link
of the subscriptions: its answer comes after everything that was delivered or dropped before.

What may go wrong: nobody answers within `connect_timeout_s` at the beginning (U701); the broker refuses the question,
at once or later, when it cannot be answered any more. A program that takes no changes is not read for: the broker
merges what waits, and checks time out meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Final, Self

import msgspec

from tidegate.client.control import ActiveControl, Control, ControlStatistics, SequenceGaps
from tidegate.client.persistent_transport import (
    Checked,
    Heard,
    Indicated,
    Opened,
    PersistentLink,
    PersistentTransport,
    Refused,
    Row,
)
from tidegate.client.websocket import lost
from tidegate.errors import Overloaded, TidegateError, Unavailable

CHANGES_WAITING_MAX: Final = 1000
REQUEST_S: Final = 10.0
RECONNECT_S: Final = 0.5
"""Those whom a broker has left come back at random within this time; so do those who have lost an indication, or sooner
if its spread is shorter, which is meant for questions: to go on costs the broker much less."""
SILENT_CHECKS_MAX: Final = 3
"""After so many checks in a row of which nothing was heard, the connection is given up."""
SLEEP_S_MAX: Final = 3600.0

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.decode


@dataclass(frozen=True)
class Change:
    """What has changed in the result. The first one has all of it. `lost` indications before it never came: of a
    question they are made good by it, of a filter they are gone."""

    sequence: int
    added: list[Row]
    removed: list[Row] = field(default_factory=list)
    merged: int = 0
    lost: int = 0


@dataclass(frozen=True)
class PersistentQueryStatistics:
    control: ControlStatistics
    changes: int
    checks: int
    """Answered ones."""
    openings: int
    is_open: bool
    waiting: int


class PersistentQuery:
    """`async for change in query`. Use it in `async with` to know that it is open before you go on."""

    def __init__(
        self,
        transport: PersistentTransport,
        control: Control,
        tasks: asyncio.TaskGroup,
        open_timeout_s: float,
        request_timeout_s: float = REQUEST_S,
    ) -> None:
        self._transport = transport
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._open_timeout_s = open_timeout_s
        self._request_timeout_s = request_timeout_s
        self._control = ActiveControl(control, Random().random, self._began_s)  # noqa: S311
        self._gaps = SequenceGaps()
        self._link: PersistentLink | None = None
        self._subscription = ""
        self._sequence = 0
        self._rows: Counter[bytes] = Counter()
        self._lost_before_next = 0
        self._check = 0
        self._asked_sequence = 0
        self._silent_checks = 0
        self._answer: asyncio.Future[None] | None = None
        self._replanned = asyncio.Event()
        self._waiting: deque[Change] = deque()
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._working: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_entered = False
        self._is_closed = False
        self._error: TidegateError | None = None
        self._changes = self._checks = self._openings = 0

    async def __aenter__(self) -> Self:
        self._is_entered = True
        self._start()
        await self._until(lambda: self._openings > 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Change]:
        return self if self._is_entered else self._until_left()

    async def __anext__(self) -> Change:
        self._start()
        if not await self._until(lambda: bool(self._waiting)):
            raise StopAsyncIteration
        change = self._waiting.popleft()
        self._has_room.set()
        return change

    def close(self) -> None:
        """Ends it at the broker; iteration stops when what waits is taken."""
        if not self._is_closed:
            self._is_closed = True
            self._wake.set()
            self._drop_link(is_for_good=True)
            if self._working is not None:
                self._working.cancel()

    def check_within(self, seconds: float | None) -> None:
        """Checks soon, at random within this time, for a program that knows of something to fetch, as all others who
        know it do too. Without a time it is within the backoff, if there is one."""
        self._control.on_announcement(seconds, self._loop.time())
        self._replanned.set()

    def statistics(self) -> PersistentQueryStatistics:
        return PersistentQueryStatistics(
            control=self._control.statistics(),
            changes=self._changes,
            checks=self._checks,
            openings=self._openings,
            is_open=self._link is not None,
            waiting=len(self._waiting),
        )

    # Requests, one at a time.

    def _start(self) -> None:
        if self._working is None and not self._is_closed:
            # Who never checks has to open it all the same.
            self._control.on_announcement(0.0, self._loop.time())
            self._working = self._tasks.create_task(self._work())

    async def _work(self) -> None:
        try:
            while True:
                await self._until_due()
                if self._control.on_due(self._loop.time()):
                    await self._request()
        except TidegateError as error:
            self._fail(error)

    async def _until_due(self) -> None:
        while (wait_s := self._control.wait_s(self._loop.time())) > 0:
            self._replanned.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, SLEEP_S_MAX)):
                    await self._replanned.wait()

    async def _request(self) -> None:
        link = self._link
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await (self._open() if link is None else self._ask(link))
        except TimeoutError:
            self._on_silence()
            self._raise_if_never_open(lost("no answer in time"))
        except Overloaded as error:
            self._control.on_refusal(error.retry_after_s, self._loop.time())
            self._raise_if_never_open(error)
        except Unavailable as error:
            self._control.on_timeout(self._loop.time())
            self._raise_if_never_open(error)

    def _on_silence(self) -> None:
        """A broker that has too much to do answers late; one of which nothing is heard at all may be gone."""
        self._control.on_timeout(self._loop.time())
        self._silent_checks += 1
        if self._silent_checks >= SILENT_CHECKS_MAX:
            self._drop_link()

    def _raise_if_never_open(self, error: TidegateError) -> None:
        if self._openings == 0 and self._loop.time() - self._began_s >= self._open_timeout_s:
            raise error

    async def _open(self) -> None:
        link = await self._transport.open(self._subscription, self._sequence)
        self._link = link
        self._silent_checks = 0
        self._on_opened(link.opened)
        self._openings += 1
        self._reading = self._tasks.create_task(self._read(link))
        self._wake.set()

    async def _ask(self, link: PersistentLink) -> None:
        self._check += 1
        self._asked_sequence = self._sequence
        self._answer = self._loop.create_future()
        link.ask(self._check)
        await self._answer

    # What is heard.

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
        is_first = self._openings == 0
        rows = Counter(map(_encode, opened.result)) if opened.result is not None else self._rows
        before, self._rows = self._rows, rows
        is_different = rows != before and not is_first
        # What a number has shown already is not counted a second time.
        self._note_losses(self._gaps.restart(opened.sequence, is_different=is_different and not self._lost_before_next))
        self._control.on_response(opened.hints, self._loop.time())
        self._subscription, self._sequence = opened.subscription, opened.sequence
        if is_different or (is_first and opened.result is not None):
            added, removed = (list(map(_decode, each.elements())) for each in (rows - before, before - rows))
            self._tell(Change(opened.sequence, added, removed, lost=self._lost_before_next))

    def _on_heard(self, heard: Heard) -> None:
        self._silent_checks = 0
        match heard:
            case Indicated():
                self._on_indicated(heard)
            case Checked() if self._is_awaited(heard.check):
                self._on_checked(heard)
            case Refused() if self._is_awaited(heard.check):
                assert self._answer is not None
                self._answer.set_exception(heard.error)

    def _is_awaited(self, check: int) -> bool:
        """Otherwise it comes too late."""
        return check == self._check and self._answer is not None and not self._answer.done()

    def _on_indicated(self, heard: Indicated) -> None:
        found = self._gaps.on_message(heard.sequence, carried=1)
        self._note_losses(found)
        if found and self._transport.is_resumable:
            self._open_again(min(heard.spread_s or 0.0, RECONNECT_S))
            return
        if heard.sequence <= self._sequence:
            return
        self._sequence = heard.sequence
        if self._transport.is_resumable:
            for row in map(_encode, heard.removed):
                self._rows[row] -= 1
                if self._rows[row] <= 0:
                    del self._rows[row]
            self._rows.update(map(_encode, heard.added))
        self._control.on_notification(self._loop.time(), heard.spread_s)
        self._tell(Change(heard.sequence, heard.added, heard.removed, heard.merged, self._lost_before_next))

    def _on_checked(self, checked: Checked) -> None:
        assert self._answer is not None
        if checked.sequence is not None:
            found = self._gaps.on_message(checked.sequence, carried=0)
        else:
            # Results can be compared only if nothing was told meanwhile; and if something was, its number has told.
            is_quiet = self._sequence == self._asked_sequence
            found = int(is_quiet and Counter(map(_encode, checked.result or ())) != self._rows)
        self._note_losses(found)
        self._checks += 1
        self._control.on_response(checked.hints, self._loop.time())
        self._answer.set_result(None)
        if found and self._transport.is_resumable:
            self._open_again(0.0)

    def _note_losses(self, losses: int) -> None:
        self._lost_before_next += losses
        self._control.on_losses(losses)

    def _tell(self, change: Change) -> None:
        self._lost_before_next = 0
        self._changes += 1
        self._waiting.append(change)
        if len(self._waiting) >= CHANGES_WAITING_MAX:
            self._has_room.clear()
        self._wake.set()

    # Ends.

    def _open_again(self, within_s: float) -> None:
        """At random within this time, as others may have lost the same."""
        self._drop_link()
        self.check_within(within_s)

    def _drop_link(self, *, is_for_good: bool = False) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(is_for_good=is_for_good)
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(lost("before a check was answered"))

    def _fail(self, error: TidegateError) -> None:
        self._error = error
        self._drop_link()
        if self._working is not None and self._working is not asyncio.current_task():
            self._working.cancel()
        self._wake.set()

    async def _until(self, is_there: Callable[[], bool]) -> bool:
        """False when it is closed."""
        while not is_there():
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    async def _until_left(self) -> AsyncIterator[Change]:
        """Without `async with`, whoever leaves the loop leaves the query."""
        try:
            while True:
                yield await anext(self)
        except StopAsyncIteration:
            return
        finally:
            self.close()
