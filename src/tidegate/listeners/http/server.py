"""The HTTP listener: Starlette for the routes, uvicorn for the protocol, and our own bounds where they have none.

`openapi.py` documents the routes. What may go wrong: a body that is too large, a request that never completes, a page
of another origin, a broker that is overloaded or shutting down. Each has its own error code and status.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import ssl
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
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.knowledge.knowledge_base import KnowledgeBase
from tidegate.knowledge.named_queries import NamedQueries
from tidegate.listeners.acceptor import Acceptor
from tidegate.listeners.connections import Connections
from tidegate.listeners.gate import Gate
from tidegate.listeners.http.body import read_body
from tidegate.listeners.http.connection import HttpConnection
from tidegate.listeners.http.json_keys import refuse_duplicate_keys
from tidegate.listeners.http.json_response import NO_SNIFF, error_response, json_response
from tidegate.listeners.http.metrics import exposition
from tidegate.listeners.http.openapi import openapi_document
from tidegate.listeners.http.page import HttpPage
from tidegate.listeners.http.persistent import HttpPersistent
from tidegate.listeners.http.publish import PUBLISHER_HEADERS, HttpPublisher
from tidegate.listeners.http.push import ChangesState
from tidegate.listeners.http.queues import HttpQueues
from tidegate.listeners.http.rates import RecentRates
from tidegate.listeners.http.routing import route
from tidegate.listeners.http.scale import HttpScale, Scale
from tidegate.listeners.http.sparql import LOAD_HEADERS, HttpSparql
from tidegate.listeners.http.subscribe import HttpSubscriber
from tidegate.listeners.http.subscriptions import HttpSubscriptions
from tidegate.listeners.http.websocket import WebSocketConnection
from tidegate.queues import LogicalQueues
from tidegate.queues.statistics import QueueStatistics

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
        self._publisher = HttpPublisher(host, config, incarnation, queues.holding_back)
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
        self.places = Connections(config.connections_max)
        self._acceptor = Acceptor(self.places, config.hello_timeout_s, self._make_connection)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._knowledge: KnowledgeBase | None = None

    async def start(
        self, tasks: asyncio.TaskGroup, tls: ssl.SSLContext | None, named: NamedQueries | None = None
    ) -> int:
        """Starts listening and returns the port. `named` adds the endpoints of the knowledge base."""
        config = self._config
        if named is not None:
            self._knowledge = named.knowledge
            self._persistent = HttpPersistent(named)
            self._app.router.routes += [
                *HttpSparql(named.knowledge, config).routes(),
                WebSocketRoute("/v1/persistent", self._persistent.subscribe),
                route(
                    "/v1/persistent",
                    GET=self._persistent.stream,
                    POST=self._persistent.stream,
                    DELETE=self._persistent.drop,
                ),
                route("/v1/persistent/named", GET=self._persistent.list_named),
            ]
        self._server = _Server(
            uvicorn.Config(
                self._app,
                http=functools.partial(  # type: ignore[arg-type]
                    HttpConnection,
                    request_timeout_s=config.request_timeout_s,
                    places=self.places,
                ),
                ws=WebSocketConnection,
                ws_max_size=config.body_bytes_max,
                timeout_keep_alive=math.ceil(config.request_timeout_s),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=[(NO_SNIFF[0].decode(), NO_SNIFF[1].decode())],
                # A client could claim any address in these headers, and so escape its rate limit.
                proxy_headers=False,
            )
        )
        self._serving = tasks.create_task(self._server.serve())
        await self._server.has_started.wait()
        return await self._acceptor.listen(config.bind, config.http_port, tls)

    async def stop(self) -> None:
        """Stops accepting, lets push sessions send their pending events and open requests get their answers, then
        closes."""
        self._is_ready = False
        self._publisher.stop()
        self._subscriber.stop()
        if self._persistent is not None:
            self._persistent.stop()
        if self._server is None or self._serving is None:
            return
        self._acceptor.close()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.drain_s
        # uvicorn would close WebSockets at once, even with pending events.
        while (self._subscriber or self._persistent) and loop.time() < deadline_s:
            await asyncio.sleep(POLL_S)
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(deadline_s - loop.time()))
        self._server.should_exit = True
        await asyncio.wait([self._serving])

    def _make_connection(self) -> asyncio.Protocol:
        assert self._server is not None
        return self._server.make_connection()

    def _routes(self) -> list[Any]:
        return [
            Route("/v1/notifications", self._publisher.publish, methods=["POST"]),
            route("/v1/stream", GET=self._subscriber.stream, POST=self._subscriber.stream),
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
                f"the body of the request is malformed: {error}",
                'send {"filter": "NO2>200", "notification": {"NO2": 150}}',
            ) from error
        refuse_duplicate_keys(body)
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
        if (trouble := self._queues.trouble()) is not None:
            raise trouble
        if self._knowledge is not None and (failure := self._knowledge.graph.failure) is not None:
            raise Unavailable(failure.code, failure.message, failure.remedy)
        return json_response({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        text = exposition(self._registry, await self._queue_statistics())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _queue_statistics(self) -> list[QueueStatistics]:
        """Returns the statistics of the first METRICS_QUEUES_MAX queues. Each includes its dead letters, so dead-letter
        queues are left out."""
        names = [definition.name for definition in self._queues.definitions() if definition.dead]
        found = []
        for name in names[:METRICS_QUEUES_MAX]:
            with contextlib.suppress(TidegateError):  # the queue was dropped meanwhile, or its store is unavailable
                found.append(await self._queues.statistics(name))
        return found

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi_document(self._config))


class UpgradeRequired(ProtocolError):
    """The endpoint is a WebSocket, and the request has no upgrade."""

    status = 426


def _middleware(config: Config, token: str | None) -> list[Middleware]:
    gate = Middleware(Gate, token=token, origins=config.origins, is_local=is_loopback(config.bind))
    if not config.origins:
        return [gate]
    # In front of the gate: a browser's preflight request, which asks whether it may send a token, carries none.
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=config.origins,
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=["Authorization", "Content-Type", *PUBLISHER_HEADERS],
        expose_headers=["Retry-After", *LOAD_HEADERS.values()],
    )
    return [cross_origin, gate]


async def _no_upgrade(_request: Request) -> Response:
    response = error_response(
        UpgradeRequired(
            "P321",
            "this endpoint is a WebSocket",
            "request the upgrade, or use /v1/stream for server-sent events",
        )
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
    response = error_response(error)
    if isinstance(error, ChangesState):
        response.headers["Allow"] = "POST"
    return response


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """Answers requests that Starlette refuses: unknown paths and wrong methods."""
    response = _refused(request.scope, error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
    """Returns a response that nobody reads: the client disconnected in the middle of its request."""
    return Response(status_code=400)


def _refused(scope: Scope, status: int, why: str) -> Response:
    what = f"{scope.get('method', 'WebSocket')} {scope['path']}: {why}"
    response = error_response(ProtocolError("P318", what, "see /openapi.json for all paths and methods"))
    response.status_code = status
    return response


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers and sockets. The broker handles signals, because it must stop more
    than this server; an Acceptor accepts the connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self.started = True
        self.has_started.set()

    def make_connection(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state={})
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
