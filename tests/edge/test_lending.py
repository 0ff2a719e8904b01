"""Bytes lent from memory: the client gets all of them, and what it does not take nobody holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.core.model import BorrowedBuffer, FileSpan
from gateway.edge.cycle import LENT, SPAN
from gateway.edge.s3_server import ASGIApp, Receive, Scope, Send
from tests.edge.apps import lending_app
from tests.edge.test_disconnects import narrow
from tests.support.serving import request, serving, talking
from tests.support.waiting import until

CONTENT = os.urandom(3 * 1024 * 1024 + 17)
"""More than a socket's buffers take at once."""


def returned(lent: BorrowedBuffer) -> bool:
    """Whether the sender has let go of the bytes."""
    try:
        len(lent.content)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("slow", [False, True])
async def test_they_arrive_whole_and_the_connection_goes_on(slow: bool) -> None:
    """They count as any other bytes of a body: Content-Length, HEAD, pipelining."""
    async with serving(lending_app(CONTENT)) as port:
        wire = await (narrow(port) if slow else port.connect())
        await wire.say(request("GET") + request("HEAD") + request("GET"))
        assert (await wire.answer()).body == CONTENT
        assert (await wire.answer(to_head=True)).headers["content-length"] == str(len(CONTENT))
        assert (await wire.answer()).body == CONTENT


async def test_small_ones_take_one_packet() -> None:
    """They leave together with the head."""
    async with talking(lending_app(b"small"), request("GET")) as (_, wire):
        assert (await wire.reader.read(65536)).endswith(b"\r\n\r\nsmall")


async def test_what_a_client_does_not_take_is_held_by_nobody() -> None:
    """While the server waits for the client, the owner of the bytes may do with them as he likes."""
    content, lents = bytearray(CONTENT), list[BorrowedBuffer]()
    async with serving(lending_app(content, lents)) as port:
        wire = await narrow(port)
        await wire.say(request("GET"))
        await wire.head()
        await until(lambda: bool(lents) and returned(lents[-1]))
        assert 0 < sum(lent.taken for lent in lents) < len(CONTENT)
        content.clear()  # BufferError while anybody holds a view
        wire.abort()
        await port.requests(0)


async def test_what_was_lent_can_come_from_a_file_next(tmp_path: Path) -> None:
    """The rest of a body is wherever it lies by then; not a byte is lost or sent twice."""
    path = tmp_path / "content"
    path.write_bytes(CONTENT)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(CONTENT)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lent = BorrowedBuffer(memoryview(CONTENT))
        await send({"type": LENT, "bytes": lent})
        with path.open("rb") as file:
            await send({"type": SPAN, "span": FileSpan(file.fileno(), lent.taken, len(CONTENT) - lent.taken)})

    async with serving(app) as port:
        for wire in (await narrow(port), await port.connect()):
            await wire.say(request("GET"))
            assert (await wire.answer()).body == CONTENT


def claiming(length: int) -> ASGIApp:
    """Lends more than it has promised."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": LENT, "bytes": BorrowedBuffer(memoryview(b"x" * (length + 1)))})

    return app


async def test_more_than_the_content_length_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    """The client is told of the failure instead: nothing of the answer was out."""
    async with talking(claiming(10), request("GET")) as (_, wire):
        assert (await wire.answer()).status == 500
    assert "longer than its Content-Length" in caplog.text


async def test_a_body_of_unknown_length_comes_in_chunks() -> None:
    """Then they are copied: a chunk says how long it is before anybody knows what the client takes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        lent = BorrowedBuffer(memoryview(b"lent"))
        await send({"type": LENT, "bytes": lent})
        assert lent.taken == 4
        await send({"type": "http.response.body", "body": b""})

    async with talking(app, request("GET")) as (_, wire):
        answer = await wire.answer()
        assert (answer.headers["transfer-encoding"], answer.body) == ("chunked", b"lent")
