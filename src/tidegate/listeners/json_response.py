"""Answers in JSON, errors included: `{"error": {"code", "message", "remedy", "column"?}}` with a fitting status."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from tidegate.errors import Overloaded, TidegateError


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_response(error: TidegateError) -> Response:
    response = json_response({"error": error.to_dict()}, error.status)
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
