"""Detects whether the client of a held request was connected until it had received its answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import Response

from tidegate.listeners.http.connection import IS_ALL_SENT, IS_CLOSING
from tidegate.listeners.http.peer import Peer

HEAD, BODY, WAITED, END = range(4)


class Connection:
    """A connection that is lost after so much of an answer was written."""

    def __init__(self, lost_at: int | None) -> None:
        self._lost_at = lost_at
        self._is_closing = False
        self.written = 0
        self.scope = {"extensions": {IS_ALL_SENT: lambda: True, IS_CLOSING: lambda: self._is_closing}}

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def send(self, _message: Any) -> None:
        self._is_closing = self._is_closing or self.written == self._lost_at
        self.written += 1


@pytest.mark.parametrize(
    ("lost_at", "is_there", "written"),
    [(None, True, 4), (HEAD, False, 2), (BODY, False, 2), (WAITED, True, 4), (END, True, 4)],
)
def test_who_leaves_before_the_body_is_written_has_no_answer(lost_at: int | None, is_there: bool, written: int) -> None:
    async def scenario() -> None:
        connection = Connection(lost_at)
        async with Peer(connection.scope, connection.receive) as peer:
            assert await peer.send(Response(b"answer"), connection.send) == is_there
        assert connection.written == written

    asyncio.run(scenario())
