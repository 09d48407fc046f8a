"""The web page at `/` on the HTTP port: the files of the package `tidegate.page`, held in memory.

The files are the same for everybody and hold no data, so they need no token. The page itself uses the same endpoints
as any program, with the token if one is set. Its headers forbid the browser to run or load anything from outside the
package. The browser revalidates each file every time, so that after an update it never mixes old and new files.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.devices import ATTRIBUTION, STATIONS
from tidegate.devices.air_quality_index import BAND_NAMES, BANDS

INDEX: Final = "index.html"
REGION: Final = "region.json"
MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}
HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class HttpPage:
    """The endpoints `/` and `/page/…`."""

    def __init__(self) -> None:
        self._files = {name: _PageFile(name, content) for name, content in _contents().items()}

    def routes(self) -> list[Route]:
        return [Route("/", self._index), Route("/page/{name}", self._file)]

    async def _index(self, request: Request) -> Response:
        return self._files[INDEX].answer(request)

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)


class _PageFile:
    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        self._headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    def answer(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self._headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._media_type)


def _contents() -> dict[str, bytes]:
    packaged = {
        each.name: each.read_bytes()
        for each in files("tidegate.page").iterdir()
        if each.name.rpartition(".")[2] in MEDIA_TYPES
    }
    return packaged | {REGION: msgspec.json.encode(_region())}


def _region() -> dict[str, Any]:
    """Returns the stations that the map shows before anything is published, and the bands that rate their readings."""
    return {
        "stations": [asdict(station) for station in STATIONS],
        "band_names": BAND_NAMES,
        "bands": BANDS,
        "attribution": ATTRIBUTION,
    }
