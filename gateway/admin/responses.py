"""JSON answers of the admin port."""

from __future__ import annotations

import re
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response


def json_answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"
    return Response(body, status, {"cache-control": "no-store"} | (headers or {}), "application/json")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return json_answer({"error": message}, status, headers)


DOCUMENT_BYTES_MAX = 64 * 1024


async def posted(request: Request) -> bytes:
    """The body of a request that brings a small document; ValueError when it is too long."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > DOCUMENT_BYTES_MAX:
            raise ValueError("the document is too long")
    return body


def flag(request: Request, name: str) -> bool:
    """A parameter that is `true` or `false`, which is what it is where it is missing; ValueError otherwise."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise ValueError(f"{name} must be true or false")
    return given == "true"


def number(request: Request, name: str, least: int, most: int, default: int | None = None) -> int:
    """Return a parameter that is a whole number in plain digits; ValueError."""
    given = request.query_params.get(name, "" if default is None else str(default))
    if not re.fullmatch("[0-9]{1,18}", given) or not least <= int(given) <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}")
    return int(given)


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
