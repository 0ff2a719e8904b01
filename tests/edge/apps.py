"""Small ASGI applications that tests of the server put behind it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from gateway.core.model import BorrowedBuffer, FileSpan
from gateway.edge.cycle import LENT, RESPONSE, SPAN
from gateway.edge.s3_server import ASGIApp, Receive, Scope, Send


async def respond(send: Send, body: bytes = b"", status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    """A whole response with a Content-Length."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Receive) -> bytes:
    """The whole request body; ConnectionError when the client leaves before its end."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("disconnected")
        piece: bytes = message["body"]
        body += piece
        if not message["more_body"]:
            return body


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body it got."""
    await respond(send, await read_body(receive))


async def unread(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without looking at the body."""
    await respond(send, b"unread")


async def mirror(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what the scope says about the request."""
    shown: dict[str, Any] = {name: scope[name] for name in ("method", "http_version", "scheme", "path")}
    shown |= {name: scope[name].decode("latin-1") for name in ("raw_path", "query_string")}
    shown["authority"] = scope.get("forebay.authority", b"").decode("latin-1")
    shown["headers"] = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    shown["extensions"] = sorted(scope.get("extensions") or {})
    await read_body(receive)
    await respond(send, json.dumps(shown).encode())


def file_app(path: Path, *, pieces: int = 1, length: int | None = None) -> ASGIApp:
    """Sends a file, in `pieces` messages; as bytes under other servers.

    `length` is claimed as Content-Length and sent as count instead of the file's own size.
    """
    content = path.read_bytes()
    size = length if length is not None else len(content)
    bounds = [size * number // pieces for number in range(pieces + 1)]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if RESPONSE not in (scope.get("extensions") or {}):
            await send({"type": "http.response.body", "body": content})
            return
        with path.open("rb") as file:
            for first, stop in itertools.pairwise(bounds):
                span = FileSpan(file.fileno(), first, stop - first)
                await send({"type": SPAN, "span": span, "more_body": stop < size})

    return app


def lending_app(content: bytes | bytearray, lents: list[BorrowedBuffer] | None = None) -> ASGIApp:
    """Lends a body from memory, what is left of it again and again; `lents` gets everything that it lends."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size, taken = len(content), 0
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while taken < size:
            lent = BorrowedBuffer(memoryview(content)[taken:])
            if lents is not None:
                lents.append(lent)
            await send({"type": LENT, "bytes": lent})
            taken += lent.taken
        await send({"type": "http.response.body", "body": b""})

    return app
