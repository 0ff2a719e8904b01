"""Bodies in memory, sent past the transport: no byte is lost where the kernel takes only some of them."""

from __future__ import annotations

import os

import pytest

from gateway.edge.s3_server import ASGIApp, Receive, Scope, Send
from tests.edge.apps import respond
from tests.edge.test_disconnects import narrow
from tests.support.serving import request, serving

CONTENT = os.urandom(3 * 1024 * 1024 + 17)
"""More than a socket's buffers take at once."""


def bytes_app(content: bytes | memoryview, *, chunked: bool) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not chunked:
            await respond(send, content)  # type: ignore[arg-type]
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1000, 64 * 1024 + 1, 100_000, len(CONTENT)])
async def test_they_arrive_whole_and_the_next_answers_behind_them(size: int, chunked: bool, slow: bool) -> None:
    """Of any size, to any client, three requests sent at once."""
    content = memoryview(CONTENT)[:size]
    async with serving(bytes_app(content, chunked=chunked)) as port:
        wire = await (narrow(port) if slow else port.connect())
        await wire.say(request("GET") * 3)
        for _ in range(3):
            assert (await wire.answer()).body == CONTENT[:size]
