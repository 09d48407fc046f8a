"""JSON answers. An error is `{"error": {"code", "message", "remedy", "column"?}}` with the error's HTTP status."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
from starlette.responses import Response

from tidegate.errors import Overloaded, TidegateError

# Every answer has this header: it forbids browsers to guess another type than Content-Type.
NO_SNIFF: Final = (b"x-content-type-options", b"nosniff")


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_response(error: TidegateError) -> Response:
    response = json_response({"error": error.to_dict()}, error.status)
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
