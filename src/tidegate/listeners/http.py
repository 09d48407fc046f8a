"""The HTTP listener: Starlette for the routes, uvicorn for the sockets, bounds of our own where they have none.

The routes are the contract of `openapi.py`. What may go wrong: a body too large, a request that never completes, a
page of foreign origin, a broker that is overloaded or going down; each has its code and status.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Callable, Generator
from typing import Any, Final

import msgspec
import uvicorn
from prometheus_client.registry import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from tidegate.config import Config, is_loopback
from tidegate.errors import ProtocolError, TidegateError, Unavailable
from tidegate.filters import Filter
from tidegate.knowledge.named_queries import NamedQueries
from tidegate.layers.embedded_host import BrokerHost
from tidegate.listeners.gate import Gate
from tidegate.listeners.http_connection import HttpConnection
from tidegate.listeners.http_page import HttpPage
from tidegate.listeners.http_persistent import HttpPersistent
from tidegate.listeners.http_publish import HttpPublisher, read_body
from tidegate.listeners.http_queues import HttpQueues, route
from tidegate.listeners.http_scale import HttpScale, Scale
from tidegate.listeners.http_sparql import LOAD_HEADERS, HttpSparql
from tidegate.listeners.http_subscribe import HttpSubscriber
from tidegate.listeners.http_subscriptions import HttpSubscriptions
from tidegate.listeners.json_response import error_response, json_response
from tidegate.listeners.openapi import openapi_document
from tidegate.metrics import exposition
from tidegate.queues import LogicalQueues
from tidegate.queues.statistics import QueueStatistics
from tidegate.rates import RecentRates

BACKLOG: Final = 1024
POLL_S: Final = 0.01
METRICS_QUEUES_MAX: Final = 1000


class WhyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/why`."""

    filter: str
    notification: dict[str, str | int | float | bool | None]


class HttpListener:
    def __init__(
        self,
        host: BrokerHost,
        queues: LogicalQueues,
        config: Config,
        token: str | None,
        incarnation: str,
        status: Callable[[], dict[str, Any]],
        registry: CollectorRegistry,
        scale: Scale,
        rates: RecentRates,
    ) -> None:
        self._host = host
        self._scale = scale
        self._rates = rates
        self._config = config
        self._status = status
        self._registry = registry
        self._is_ready = True
        self._publisher = HttpPublisher(host, config, incarnation)
        self._subscriber = HttpSubscriber(host, queues)
        self._queues = queues
        self._app = Starlette(
            routes=self._routes(),
            middleware=_middleware(config, token),
            exception_handlers={
                TidegateError: _on_error,  # type: ignore[dict-item]
                HTTPException: _on_http_exception,  # type: ignore[dict-item]
                ClientDisconnect: _on_disconnect,  # type: ignore[dict-item]
            },
        )
        self._app.router.redirect_slashes = False
        self._app.router.default = _no_route
        self._persistent: HttpPersistent | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, tasks: asyncio.TaskGroup, named: NamedQueries | None = None) -> int:
        """Listens; returns the port."""
        config = self._config
        if named is not None:
            self._persistent = HttpPersistent(named)
            self._app.router.routes += [
                *HttpSparql(named.knowledge, config).routes(),
                WebSocketRoute("/v1/persistent", self._persistent.subscribe),
                route("/v1/persistent", GET=self._persistent.stream, DELETE=self._persistent.drop),
                route("/v1/persistent/named", GET=self._persistent.list_named),
            ]
        # Bound here: uvicorn ends the process when it cannot listen.
        sockets = await _bind(config.bind, config.http_port)
        self._server = _Server(
            uvicorn.Config(
                self._app,
                http=functools.partial(  # type: ignore[arg-type]
                    HttpConnection,
                    request_timeout_s=config.request_timeout_s,
                    connections_max=config.connections_max,
                ),
                ws="wsproto",
                ws_max_size=config.body_bytes_max,
                ssl_certfile=config.tls_cert or None,
                ssl_keyfile=config.tls_key or None,
                backlog=BACKLOG,
                timeout_keep_alive=math.ceil(config.request_timeout_s),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # A client could name any address in them, and so escape its rate limit.
                proxy_headers=False,
            )
        )
        self._serving = tasks.create_task(self._server.serve(sockets))
        while not self._server.started:
            await asyncio.sleep(POLL_S)
        return int(sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """No longer ready; push sessions give out what waits for them, open requests are answered."""
        self._is_ready = False
        self._publisher.stop()
        self._subscriber.stop()
        if self._persistent is not None:
            self._persistent.stop()
        if self._server is None or self._serving is None:
            return
        for server in self._server.servers:
            server.close()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.drain_s
        # uvicorn would close WebSockets at once, whatever waits for them.
        while (self._subscriber or self._persistent) and loop.time() < deadline_s:
            await asyncio.sleep(POLL_S)
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(deadline_s - loop.time()))
        self._server.should_exit = True
        await asyncio.wait([self._serving])

    def _routes(self) -> list[Any]:
        return [
            Route("/v1/notifications", self._publisher.publish, methods=["POST"]),
            Route("/v1/stream", self._subscriber.stream),
            WebSocketRoute("/v1/subscribe", self._subscriber.subscribe),
            Route("/v1/subscribe", _no_upgrade),
            *HttpSubscriptions(self._queues, self._config).routes(),
            *HttpQueues(self._queues, self._config).routes(),
            Route("/v1/why", self._why, methods=["POST"]),
            Route("/v1/layers", self._layers),
            Route("/v1/rates", self._recent_rates),
            *HttpScale(self._scale, self._config).routes(),
            *HttpPage().routes(),
            Route("/healthz", self._healthy),
            Route("/readyz", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
        ]

    async def _why(self, request: Request) -> Response:
        body = await read_body(request, self._config.body_bytes_max)
        try:
            asked = msgspec.json.decode(body, type=WhyRequest)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(
                "P317",
                f"the question is malformed: {error}",
                'send {"filter": "NO2>200", "notification": {"NO2": 150}}',
            ) from error
        return json_response(Filter.parse(asked.filter).explain(asked.notification))

    async def _layers(self, request: Request) -> Response:
        return json_response(self._status())

    async def _recent_rates(self, request: Request) -> Response:
        return json_response({"rates": [rate._asdict() for rate in self._rates.recent]})

    async def _healthy(self, request: Request) -> Response:
        return json_response({"status": "up"})

    async def _ready(self, request: Request) -> Response:
        if not self._is_ready:
            raise Unavailable("U702", "the broker is shutting down", "connect again in a moment")
        return json_response({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        text = exposition(self._registry, await self._queue_statistics())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _queue_statistics(self) -> list[QueueStatistics]:
        """Of the first queues; those of dead letters are counted in theirs."""
        names = [definition.name for definition in self._queues.definitions() if definition.dead]
        found = []
        for name in names[:METRICS_QUEUES_MAX]:
            with contextlib.suppress(TidegateError):  # it was dropped meanwhile, or its store is away
                found.append(await self._queues.statistics(name))
        return found

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi_document(self._config))


class UpgradeRequired(ProtocolError):
    """A plain request where a WebSocket is expected."""

    status = 426


def _middleware(config: Config, token: str | None) -> list[Middleware]:
    gate = Middleware(Gate, token=token, origins=config.origins, is_local=is_loopback(config.bind))
    if not config.origins:
        return [gate]
    # In front of the gate: a browser shows no token when it asks whether it may send one.
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=config.origins,
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=["Authorization", "Content-Type", "Tidegate-Publisher", "Tidegate-Sequence"],
        expose_headers=["Retry-After", *LOAD_HEADERS.values()],
    )
    return [cross_origin, gate]


async def _bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the host, all with one port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            # With its protocol named: asyncio turns Nagle's delay off only where it sees that a socket is TCP.
            sockets.append(socket.socket(family, kind, protocol))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            sockets[-1].bind((address[0], chosen))
    except OSError:
        for opened in sockets:
            opened.close()
        raise
    return sockets


async def _no_upgrade(_request: Request) -> Response:
    response = error_response(
        UpgradeRequired("P321", "this is a WebSocket", "ask for the upgrade, or use /v1/stream for server-sent events")
    )
    response.headers["Upgrade"] = "websocket"
    return response


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        response = _refused(scope, 404, "there is no such WebSocket")
        await WebSocket(scope, receive, send).send_denial_response(response)
        return
    raise HTTPException(404)


async def _on_error(_request: Request, error: TidegateError) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """What Starlette refuses by itself: an unknown path, a wrong method."""
    response = _refused(request.scope, error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
    """The peer has left in the middle of its request: nobody reads this."""
    return Response(status_code=400)


def _refused(scope: Scope, status: int, why: str) -> Response:
    what = f"{scope.get('method', 'WebSocket')} {scope['path']}: {why}"
    response = error_response(ProtocolError("P318", what, "/openapi.json lists what there is"))
    response.status_code = status
    return response


class _Server(uvicorn.Server):
    """Leaves signals to the broker, which has more to do at its end than to close sockets."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
