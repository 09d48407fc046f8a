"""The HTTP listener: Starlette for the routes, uvicorn for the sockets, bounds of our own where they have none.

The routes are the contract of `openapi.py`. What may go wrong: a body too large, a request that never completes, a
page of foreign origin, a broker that is overloaded or going down; each has its code and status.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Generator
from typing import Any, Final

import msgspec
import uvicorn
from prometheus_client.registry import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidegate.config import Config
from tidegate.errors import ProtocolError, TidegateError, Unavailable
from tidegate.filters import Filter
from tidegate.layers.embedded_host import EmbeddedHost
from tidegate.listeners.gate import Gate
from tidegate.listeners.http_publish import HttpPublisher, read_body
from tidegate.listeners.http_subscribe import HttpSubscriber
from tidegate.listeners.json_response import error_response, json_response
from tidegate.listeners.openapi import openapi_document
from tidegate.metrics import exposition

log = logging.getLogger(__name__)

REQUEST_HEAD_BYTES_MAX: Final = 64 * 1024


class WhyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/why`."""

    filter: str
    notification: dict[str, str | int | float | bool | None]


class HttpListener:
    def __init__(
        self,
        host: EmbeddedHost,
        config: Config,
        token: str | None,
        incarnation: str,
        status: Callable[[], dict[str, Any]],
        registry: CollectorRegistry,
    ) -> None:
        self._config = config
        self._status = status
        self._registry = registry
        self._is_ready = True
        self._publisher = HttpPublisher(host, config, incarnation)
        self._subscriber = HttpSubscriber(host)
        self._app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(Gate, token=token, origins=config.origins)],
            exception_handlers={TidegateError: _on_error, HTTPException: _on_http_exception},  # type: ignore[dict-item]
        )
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, tasks: asyncio.TaskGroup) -> int:
        """Listens; returns the port."""
        config = self._config
        self._server = _Server(
            uvicorn.Config(
                self._app,
                host=config.bind,
                port=config.http_port,
                http=functools.partial(_BoundedHttp, request_timeout_s=config.request_timeout_s),  # type: ignore[arg-type]
                ws="wsproto",
                ws_max_size=config.body_bytes_max,
                ssl_certfile=config.tls_cert or None,
                ssl_keyfile=config.tls_key or None,
                limit_concurrency=config.connections_max,
                timeout_graceful_shutdown=max(1, int(config.drain_s)),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
            )
        )
        self._serving = tasks.create_task(self._server.serve())
        while not self._server.started:
            if self._serving.done():
                raise OSError(f"HTTP cannot listen on {config.bind}:{config.http_port}")
            await asyncio.sleep(0.01)
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """No longer ready; push sessions give out what waits for them, open requests are answered."""
        self._is_ready = False
        self._subscriber.stop()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])

    def _routes(self) -> list[Any]:
        return [
            Route("/v1/notifications", self._publisher.publish, methods=["POST"]),
            Route("/v1/stream", self._subscriber.stream),
            WebSocketRoute("/v1/subscribe", self._subscriber.subscribe),
            Route("/v1/why", self._why, methods=["POST"]),
            Route("/v1/layers", self._layers),
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

    async def _healthy(self, request: Request) -> Response:
        return json_response({"status": "up"})

    async def _ready(self, request: Request) -> Response:
        if not self._is_ready:
            raise Unavailable("U702", "the broker is shutting down", "connect again in a moment")
        return json_response({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        return Response(exposition(self._registry), media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi_document(self._config))


async def _on_error(_request: Request, error: TidegateError) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """What Starlette refuses by itself: an unknown path, a wrong method."""
    refused = ProtocolError(
        "P318", f"{request.method} {request.url.path}: {error.detail}", "/openapi.json lists what there is"
    )
    response = error_response(refused)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


class _Server(uvicorn.Server):
    """Leaves signals to the broker, which has more to do at its end than to close sockets."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with two bounds that it lacks: the time a request may take to arrive (a peer that sends
    nothing, or a byte now and then, would hold its connection for ever), and the size of a request's head."""

    def __init__(self, *args: Any, request_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timeout_s = request_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._deadline is not None and self._head_bytes > REQUEST_HEAD_BYTES_MAX and self._is_in_head():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._expect_request()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._cancel_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._cancel_deadline()
        super().handle_websocket_upgrade()

    def _is_in_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_request(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self._request_timeout_s, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
            self.transport.close()
