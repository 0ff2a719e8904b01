"""Bodies and parameters of requests to the admin port, and its answers in JSON."""

from __future__ import annotations

import re
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.documents import Document


class Refused(Exception):
    """The request is not carried out; `status` is what HTTP calls the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def json_answer(
    document: Document | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    if isinstance(document, Document):
        body = document.model_dump_json(indent=2, exclude_unset=True).encode() + b"\n"
    else:
        body = orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"
    return Response(body, status, {"cache-control": "no-store"} | (headers or {}), "application/json")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return json_answer({"error": message}, status, headers)


DOCUMENT_BYTES_MAX = 64 * 1024


async def posted(request: Request) -> bytes:
    """Return the body of a request that brings a small document; raise ValueError if it is too long."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > DOCUMENT_BYTES_MAX:
            raise ValueError("the document is too long")
    return body


async def posted_json(request: Request) -> Any:
    """Return the document of a request; raise Refused for another type, ValueError for what is no JSON."""
    if content_type(request) != "application/json":
        raise Refused(415, "Content-Type must be application/json")
    return orjson.loads(await posted(request))


def flag(request: Request, name: str) -> bool:
    """Return a parameter that is `true` or `false` (also if it is missing); raise ValueError for anything else."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise ValueError(f"{name} must be true or false")
    return given == "true"


_NUMBER = re.compile("[0-9]{1,18}")


def number_of(request: Request, name: str, least: int, most: int, default: int | None = None) -> int:
    """Return a parameter that is a whole number in plain digits; ValueError."""
    given = request.query_params.get(name, "" if default is None else str(default))
    if not _NUMBER.fullmatch(given) or not least <= int(given) <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}")
    return int(given)


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
