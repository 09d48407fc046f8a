"""Named durable subscriptions over HTTP: a filter with its own queue, which stores notifications while no client is
connected.

Clients receive them by `POST /v1/stream?name=…` or `/v1/subscribe?name=…` (`durable`), or dequeue them from the queue.
"""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.config import Config
from tidegate.errors import NoSuchQueue
from tidegate.listeners.http.body import read_json
from tidegate.listeners.http.json_response import json_response
from tidegate.listeners.http.queues import level_json
from tidegate.listeners.http.routing import route
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import DEAD, SUBSCRIPTION, Definition, SubscriptionSettings


class SubscriptionRequest(SubscriptionSettings, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/subscriptions`."""

    name: str
    filter: str
    policy: str = "block"


class HttpSubscriptions:
    """The endpoints under `/v1/subscriptions`."""

    def __init__(self, queues: LogicalQueues, config: Config) -> None:
        self._queues = queues
        self._config = config

    def routes(self) -> list[Route]:
        return [
            route("/v1/subscriptions", GET=self._list, POST=self._define),
            route("/v1/subscriptions/{name}", GET=self._show, DELETE=self._drop),
        ]

    async def _define(self, request: Request) -> Response:
        asked: SubscriptionRequest = await read_json(request, SubscriptionRequest, self._config.body_bytes_max)
        is_new = find_subscription(self._queues, asked.name) is None
        definition = await self._queues.define_subscription(asked.name, asked.filter, asked.policy, asked)
        return json_response(_subscription_json(definition), 201 if is_new else 200)

    async def _list(self, request: Request) -> Response:
        shown = []
        for definition in self._queues.definitions():
            if definition.name.startswith(SUBSCRIPTION) and not definition.name.endswith(DEAD):
                with contextlib.suppress(NoSuchQueue):  # dropped during an earlier await of this loop
                    shown.append(await self._describe(definition))
        return json_response({"subscriptions": shown})

    async def _show(self, request: Request) -> Response:
        return json_response(await self._describe(self._get(request)))

    async def _drop(self, request: Request) -> Response:
        await self._queues.drop(self._get(request).name)
        return Response(status_code=204)

    def _get(self, request: Request) -> Definition:
        return get_subscription(self._queues, str(request.path_params["name"]))

    async def _describe(self, definition: Definition) -> dict[str, Any]:
        statistics = await self._queues.statistics(definition.name)
        read = {"last_read_at": statistics.last_read_at, "expires_at": statistics.expires_at}
        return _subscription_json(definition) | level_json(statistics) | read


def find_subscription(queues: LogicalQueues, name: str) -> Definition | None:
    try:
        return queues.definition(SUBSCRIPTION + name) if not name.endswith(DEAD) else None
    except NoSuchQueue:
        return None


def get_subscription(queues: LogicalQueues, name: str) -> Definition:
    definition = find_subscription(queues, name)
    if definition is None:
        raise NoSuchQueue(
            "Q901",
            f"there is no subscription {name!r}",
            "create it with POST /v1/subscriptions, or pass a filter as well",
        )
    return definition


def _subscription_json(definition: Definition) -> dict[str, Any]:
    settings = definition.settings
    return {
        "name": definition.name.removeprefix(SUBSCRIPTION),
        "filter": settings.filter,
        "policy": settings.policy,
        "queue": definition.name,
    }
