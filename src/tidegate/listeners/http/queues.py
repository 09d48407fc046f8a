"""Logical queues over HTTP: the endpoints that define and inspect them, and those for their messages.

A dequeue may wait for messages, at the cost of a future and a task. If its client disconnects meanwhile, the request is
cancelled. If the client disconnects while the answer is written, its messages are returned, and the delivery does not
count. After that, they come back only when their leases expire.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.config import Config
from tidegate.errors import NoSuchQueue, QueueError, TidegateError
from tidegate.listeners.http.body import read_json
from tidegate.listeners.http.json_message import PostedMessage, kept_json, leased_json, to_new_messages
from tidegate.listeners.http.json_response import json_response
from tidegate.listeners.http.peer import Peer
from tidegate.listeners.http.routing import Endpoint, parse_number, route
from tidegate.messages import Dequeue, Leased, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import Definition
from tidegate.queues.logical_queues import READ_MESSAGES_MAX
from tidegate.queues.statistics import QueueStatistics

READ_MESSAGES: Final = 1000
# The default end of a range read: above every sequence.
SEQUENCE_END: Final = 1 << 62

# action, which is also the last part of the path -> the key of its count in the answer
SETTLEMENTS: Final = {"delete": "deleted", "extend": "extended", "release": "released"}


class DequeueRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/queues/{q}/dequeue`."""

    max: int = 100
    min: int = 1
    wait_s: float = 20.0
    visibility_s: float = 30.0


class SettleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/queues/{q}/delete`, `extend` and `release`."""

    receipts: list[str]
    visibility_s: float = 30.0
    delay_s: float = 0.0


class RedriveRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/queues/{q}/redrive`."""

    max: int = READ_MESSAGES_MAX


class DeleteBelowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/queues/{q}/physical/{i}/delete-below`."""

    sequence: int


class HttpQueues:
    """The endpoints under `/v1/queues`."""

    def __init__(self, queues: LogicalQueues, config: Config) -> None:
        self._queues = queues
        self._config = config

    def routes(self) -> list[Route]:
        queue = "/v1/queues/{q}"
        physical = queue + "/physical/{i}"
        return [
            route("/v1/queues", GET=self._list),
            route(queue, GET=self._show, PUT=self._define, DELETE=self._drop),
            route(f"{queue}/stats", GET=self._statistics),
            route(f"{queue}/messages", POST=self._enqueue),
            route(f"{queue}/dequeue", POST=self._dequeue),
            *(route(f"{queue}/{action}", POST=self._settle(action)) for action in SETTLEMENTS),
            route(f"{queue}/redrive", POST=self._redrive),
            route(f"{physical}/messages", GET=self._read),
            route(f"{physical}/delete-below", POST=self._delete_below),
        ]

    # Queues.

    async def _list(self, request: Request) -> Response:
        """Lists the queues that users named. With `all=1`, adds dead-letter queues and those of subscriptions, which
        have a dot in their names."""
        is_all = request.query_params.get("all", "0") not in ("", "0")
        shown = []
        for definition in self._queues.definitions():
            if is_all or "." not in definition.name:
                with contextlib.suppress(NoSuchQueue):  # dropped during an earlier await of this loop
                    shown.append(await self._describe(definition))
        return json_response({"queues": shown})

    async def _show(self, request: Request) -> Response:
        return json_response(await self._describe(self._queues.definition(_name(request))))

    async def _define(self, request: Request) -> Response:
        settings = await self._read_json(request, Any)
        name = _name(request)
        is_new = not self._has(name)
        definition = await self._queues.define(name, settings)
        return json_response(_definition_json(definition), 201 if is_new else 200)

    async def _drop(self, request: Request) -> Response:
        await self._queues.drop(_name(request))
        return Response(status_code=204)

    async def _statistics(self, request: Request) -> Response:
        return json_response(await self._queues.statistics(_name(request)))

    # Messages.

    async def _enqueue(self, request: Request) -> Response:
        posted = await self._read_json(request, list[PostedMessage] | PostedMessage)
        messages = to_new_messages(posted if isinstance(posted, list) else [posted])
        return json_response(await self._queues.enqueue_from_client(_name(request), messages))

    async def _dequeue(self, request: Request) -> Response:
        asked = await self._read_json(request, DequeueRequest)
        return DequeueResponse(
            self._queues, Dequeue(_name(request), asked.max, asked.min, asked.wait_s, asked.visibility_s)
        )

    def _settle(self, action: str) -> Endpoint:
        async def settle(request: Request) -> Response:
            asked = await self._read_json(request, SettleRequest)
            settled = await self._queues.settle(
                Settle(_name(request), action, asked.receipts, asked.visibility_s, asked.delay_s)
            )
            return json_response({SETTLEMENTS[action]: settled.done, "stale": settled.stale})

        return settle

    async def _redrive(self, request: Request) -> Response:
        asked = await self._read_json(request, RedriveRequest)
        self._queues.definition(_name(request))
        return json_response({"redriven": await self._queues.redrive(_name(request), _check_max(asked.max))})

    # Physical queues.

    async def _read(self, request: Request) -> Response:
        query = request.query_params
        start = parse_number("from", query.get("from", "0"))
        stop = parse_number("to", query.get("to", str(SEQUENCE_END)))
        messages_max = _check_max(parse_number("max", query.get("max", str(READ_MESSAGES))))
        kept = await self._queues.read(_name(request), _physical(request), start, stop, messages_max)
        following = kept[-1].sequence + 1 if kept else start
        return json_response({"messages": [kept_json(each) for each in kept], "next": following})

    async def _delete_below(self, request: Request) -> Response:
        asked = await self._read_json(request, DeleteBelowRequest)
        deleted = await self._queues.delete_below(_name(request), _physical(request), asked.sequence)
        return json_response({"deleted": deleted})

    # Inside.

    async def _read_json(self, request: Request, kind: Any) -> Any:
        return await read_json(request, kind, self._config.body_bytes_max)

    def _has(self, name: str) -> bool:
        try:
            self._queues.definition(name)
        except NoSuchQueue:
            return False
        return True

    async def _describe(self, definition: Definition) -> dict[str, Any]:
        return _definition_json(definition) | level_json(await self._queues.statistics(definition.name))


class DequeueResponse(Response):
    """Waits for messages and sends them. Returns them to the queue unless the operating system took all of the
    answer."""

    def __init__(self, queues: LogicalQueues, wanted: Dequeue) -> None:
        super().__init__()
        self._queues = queues
        self._wanted = wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Peer(scope, receive) as peer:
            leased = await peer.run_while_connected(self._queues.dequeue(self._wanted))
            is_sent = False
            try:
                is_sent = await peer.send(json_response({"messages": [leased_json(each) for each in leased]}), send)
            finally:
                if leased and not is_sent:
                    await return_messages(self._queues, self._wanted.queue, leased)


async def return_messages(queues: LogicalQueues, queue: str, leased: Sequence[Leased]) -> None:
    """Returns messages to their queue. If that fails, they become visible again when their leases expire."""
    with contextlib.suppress(TidegateError):
        await queues.settle(Settle(queue, "return", [each.receipt for each in leased]))


def level_json(statistics: QueueStatistics) -> dict[str, int]:
    """Returns how full a queue is, and how many dequeue requests it holds (`parked`)."""
    return {
        "messages": statistics.messages,
        "waiting": statistics.waiting,
        "leased": statistics.leased,
        "parked": statistics.parked,
        "dead_letters": statistics.dead_letters,
    }


def _definition_json(definition: Definition) -> dict[str, Any]:
    return {"name": definition.name} | msgspec.structs.asdict(definition.settings)


def _name(request: Request) -> str:
    return str(request.path_params["q"])


def _physical(request: Request) -> int:
    return parse_number("the physical queue", request.path_params["i"])


def _check_max(messages_max: int) -> int:
    if not 1 <= messages_max <= READ_MESSAGES_MAX:
        raise QueueError("Q908", f"max is {messages_max}", f"use a max from 1 to {READ_MESSAGES_MAX}")
    return messages_max
