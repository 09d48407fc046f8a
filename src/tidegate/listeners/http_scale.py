"""`POST /v1/scale`: how many slices the layers have, changed while everything flows.

It answers when the layers are as wanted, with what the change did to a probe. One change at a time; who goes away
meanwhile leaves it going on.
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
from tidegate.listeners.json_request import read_json
from tidegate.listeners.json_response import json_response

SLICES_MAX: Final = 64

Scale: TypeAlias = Callable[[Mapping[str, int]], Awaitable[dict[str, Any]]]
Slices: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=SLICES_MAX)]


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body: how many slices; layers that are not named stay as they are."""

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
            raise ProtocolError("P346", "no layer is named", 'send {"matchers": 4}, access_points or exit_points')
        return json_response(await self._scale(counts))
