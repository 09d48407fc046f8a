"""`POST /v1/scale`: changes the number of slices of each layer while notifications flow.

The answer is sent when the change is complete, and reports its effect on a probe. Only one change runs at a time. It
continues even if the client disconnects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.config import Config
from tidegate.errors import ProtocolError
from tidegate.listeners.http.body import read_json
from tidegate.listeners.http.json_response import json_response

SLICES_MAX: Final = 64

Scale: TypeAlias = Callable[[Mapping[str, int]], Awaitable[dict[str, Any]]]
Slices: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=SLICES_MAX)]


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body of `POST /v1/scale`: the number of slices of each layer. Omitted layers keep theirs."""

    access_points: Slices | None = None
    matchers: Slices | None = None
    exit_points: Slices | None = None


class HttpScale:
    def __init__(self, scale: Scale, config: Config) -> None:
        self._scale = scale
        self._config = config

    def routes(self) -> list[Route]:
        return [Route("/v1/scale", self._change, methods=["POST"])]

    async def _change(self, request: Request) -> Response:
        asked: ScaleRequest = await read_json(request, ScaleRequest, self._config.body_bytes_max)
        counts: dict[str, int] = msgspec.to_builtins(asked)
        if not counts:
            raise ProtocolError(
                "P346",
                "the request names no layer",
                'send the number of matchers, access_points or exit_points, such as {"matchers": 4}',
            )
        return json_response(await self._scale(counts))
