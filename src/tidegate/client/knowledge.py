"""The knowledge base of a broker, over its HTTP listener: ask, change, and follow a question. Needs nothing but Python.

Calls block. What a broker refuses because it has too much to do, it has not begun: with `wait_s` it is asked again, for
so long, by the backoff of active control. `follow` goes on by itself when the connection is lost, by the same backoff:
it asks for what it missed, and where the broker does not know that any more, gives a whole result again.

What may go wrong: nobody answers at the address (U701), the connection is lost in the middle (U704), and whatever the
broker refuses.
"""

from __future__ import annotations

import http
import http.client
import random
import ssl
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from tidegate.client.control import RetryPace
from tidegate.client.link import to_exception
from tidegate.client.refusals import until_accepted
from tidegate.errors import ConfigError, Overloaded, TidegateError, Unavailable
from tidegate.frames import ErrorBody

DEFAULT_HTTP: Final = "http://127.0.0.1:7271"
CONNECT_S: Final = 2.0
# The broker says something every 15 s to whoever follows a question.
SILENT_S: Final = 45.0
_WELL: Final = (http.HTTPStatus.OK, http.HTTPStatus.NO_CONTENT)


class Written(NamedTuple):
    """A result."""

    media_type: str
    body: bytes


class _Refusal(msgspec.Struct):
    error: ErrorBody


class Knowledge:
    def __init__(self, address: str = DEFAULT_HTTP, token: str | None = None) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError("C411", f"{address!r} is no address of HTTP", f"write it as {DEFAULT_HTTP}")
        self._address = address
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        # A connection for each call: its socket goes with the response.
        self._headers = {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def query(self, text: str, accept: str, *, wait_s: float = 0.0) -> Written:
        """The result, as one of the accepted media types."""
        headers = {"Content-Type": "application/sparql-query", "Accept": accept}
        return self._read("/v1/sparql", text.encode(), headers, wait_s)

    def update(self, text: str, *, wait_s: float = 0.0) -> dict[str, Any]:
        """What has changed: `added` and `removed` triples, and the load of the knowledge base."""
        return self._change("/v1/sparql", text.encode(), "application/sparql-update", wait_s)

    def insert(self, document: bytes, media_type: str, *, wait_s: float = 0.0) -> dict[str, Any]:
        """The same for the triples of a document."""
        return self._change("/v1/graph", document, media_type, wait_s)

    def follow(self, text: str = "", name: str = "", *, wait_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """The messages of a persistent query, as docs/knowledge.md has them: a result, then what changes in it. With
        a name the broker keeps it until it is dropped; later the name is enough. `wait_s` is for its beginning: later
        on there is no end to trying."""
        question = {key: value for key, value in (("query", text), ("name", name)) if value}
        resuming: dict[str, str] = {}
        pace = RetryPace(random.random)
        while True:
            retry_after_s = None
            try:
                path = f"/v1/persistent?{urlencode(question | resuming)}"
                response = until_accepted(partial(self._open, "GET", path, SILENT_S), 0.0 if resuming else wait_s)
                for message in _messages(response):
                    resuming["sequence"] = str(message["sequence"])
                    if "subscription" in message and not name:
                        resuming["subscription"] = message["subscription"]
                    pace.on_success()
                    yield message
            except (Unavailable, Overloaded) as error:
                if not resuming:
                    raise
                retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
            time.sleep(pace.on_refusal(retry_after_s))

    def named(self) -> list[dict[str, Any]]:
        """The persistent queries that are kept under names: the question of each, and whether somebody follows it."""
        with self._open("GET", "/v1/persistent/named", SILENT_S) as response:
            return msgspec.json.decode(response.read(), type=dict[str, list[dict[str, Any]]])["queries"]

    def drop(self, name: str) -> None:
        """Ends a persistent query that has a name."""
        self._open("DELETE", f"/v1/persistent?{urlencode({'name': name})}", SILENT_S).close()

    def _change(self, path: str, body: bytes, media_type: str, wait_s: float) -> dict[str, Any]:
        answer = self._read(path, body, {"Content-Type": media_type}, wait_s)
        return msgspec.json.decode(answer.body, type=dict[str, Any])

    def _read(self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float) -> Written:
        with until_accepted(partial(self._open, "POST", path, None, body, headers), wait_s) as response:
            try:
                return Written(response.headers.get_content_type(), response.read())
            except (OSError, http.client.HTTPException) as error:
                raise _lost(error) from error

    def _open(
        self,
        method: str,
        path: str,
        silent_s: float | None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        connection = self._connect()
        try:
            assert connection.sock is not None
            connection.sock.settimeout(silent_s)
            connection.request(method, path, body, self._headers | dict(headers or {}))
            sock = connection.sock
            response = connection.getresponse()
            sock.close()  # when the response is, also where the peer would keep the connection
            refusal = response.read() if response.status not in _WELL else None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _lost(error) from error
        if refusal is not None:
            raise self._refused(response.status, refusal)
        return response

    def _connect(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)
            if self._tls is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_S, context=self._tls)
        )
        try:
            connection.connect()
        except OSError as error:
            raise Unavailable(
                "U701", f"no broker answers at {self._address} ({error})", "start one with: tidegate serve"
            ) from error
        return connection

    def _refused(self, status: int, body: bytes) -> TidegateError:
        try:
            return to_exception(msgspec.json.decode(body, type=_Refusal).error)
        except msgspec.MsgspecError:
            return Unavailable("U701", f"{self._address} answers {status}", "is it the HTTP address of a broker?")


def _messages(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, until the broker ends them or the connection is lost; an error is raised."""
    try:
        for line in response:
            if line.startswith(b"data: "):
                message = msgspec.json.decode(line.removeprefix(b"data: "), type=dict[str, Any])
                if "error" in message:
                    raise to_exception(msgspec.convert(message["error"], ErrorBody))
                yield message
    except (OSError, http.client.HTTPException):
        return
    finally:
        response.close()


def _lost(error: Exception) -> Unavailable:
    return Unavailable("U704", f"the connection was lost ({error or type(error).__name__})", "try again")
