"""The knowledge base of a broker over its HTTP listener: query it, change it, follow a query.

Calls block. An overloaded broker refuses a request before it begins it, so a retry is safe. With `wait_s` a call
retries for that long, with the backoff of active control. `follow` reconnects with the same backoff when the connection
is lost. It resumes after the last message; if the broker no longer has the changes since, it sends a whole result.

What may go wrong: nothing answers at the address (U701), the connection is lost during a call (U704), or the broker
refuses the request with its own code.
"""

from __future__ import annotations

import http
import http.client
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
# While a query is followed, the broker sends something at least every 15 s.
SILENT_S: Final = 45.0
_SUCCESSFUL: Final = (http.HTTPStatus.OK, http.HTTPStatus.NO_CONTENT)


class Written(NamedTuple):
    """The bytes of a result and their media type."""

    media_type: str
    body: bytes


class _Refusal(msgspec.Struct):
    error: ErrorBody


class Knowledge:
    def __init__(self, address: str = DEFAULT_HTTP, token: str | None = None) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError("C411", f"{address!r} is not an HTTP address", f"write it as {DEFAULT_HTTP}")
        self._address = address
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        # Each call has its own connection, which closes with the response.
        self._headers = {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def query(self, text: str, accept: str, *, wait_s: float = 0.0) -> Written:
        """Returns the result of a query in one of the accepted media types."""
        headers = {"Content-Type": "application/sparql-query", "Accept": accept}
        return self._read("/v1/sparql", text.encode(), headers, wait_s)

    def update(self, text: str, *, wait_s: float = 0.0) -> dict[str, Any]:
        """Executes an update. Returns the numbers of `added` and `removed` triples and the knowledge base's load."""
        return self._change("/v1/sparql", text.encode(), "application/sparql-update", wait_s)

    def insert(self, document: bytes, media_type: str, *, wait_s: float = 0.0) -> dict[str, Any]:
        """Inserts the triples of a document. Returns the same as `update`."""
        return self._change("/v1/graph", document, media_type, wait_s)

    def follow(self, text: str = "", name: str = "", *, wait_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yields the messages of a persistent query, as docs/knowledge.md describes them: a result, then its changes.

        With a `name` the broker keeps the query until it is dropped; later calls need only the name. `wait_s` bounds
        the retries at the beginning. Once the query is open, reconnecting is retried forever."""
        question = {key: value for key, value in (("query", text), ("name", name)) if value}
        resuming: dict[str, str] = {}
        pace = RetryPace()
        while True:
            retry_after_s = None
            try:
                path = f"/v1/persistent?{urlencode(question | resuming)}"
                method = "POST" if name else "GET"  # a named query changes the state of the broker, so it is no GET
                response = until_accepted(partial(self._open, method, path, SILENT_S), 0.0 if resuming else wait_s)
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
        """Lists the named persistent queries: the query of each, and whether a client is following it."""
        with self._open("GET", "/v1/persistent/named", SILENT_S) as response:
            return msgspec.json.decode(response.read(), type=dict[str, list[dict[str, Any]]])["queries"]

    def drop(self, name: str) -> None:
        """Ends a named persistent query."""
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
            sock.close()  # takes effect when the response is closed, even if the peer would keep the connection open
            refusal = response.read() if response.status not in _SUCCESSFUL else None
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
            return Unavailable(
                "U701", f"{self._address} answers {status}", "check that it is the HTTP address of a broker"
            )


def _messages(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the data of server-sent events until the broker ends them or the connection is lost. Raises the error if
    the broker sends one."""
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
