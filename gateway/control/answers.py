"""JSON answers of the admin port."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A document that nobody keeps."""
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"
    return Response(body, status, {"cache-control": "no-store"} | (headers or {}), "application/json")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """What is wrong, in words."""
    return json_answer({"error": message}, status, headers)
