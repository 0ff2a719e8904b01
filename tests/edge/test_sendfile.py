"""Files on their way to a client that takes its time: what it gets was checked after the wait, not only before."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import BlockDamaged, ClientDisconnected
from gateway.core.model import FileSpan
from gateway.edge.cycle import RESPONSE, SPAN
from gateway.edge.response import EncodedResponse, FileSender
from tests.edge.apps import respond
from tests.support.serving import request, talking

SIZE_BYTES = 4 * 1024 * 1024
CONTENT = os.urandom(SIZE_BYTES)


class Pages:
    """What is known of the file's bytes: intact up to some check, then restored in a way of the test's."""

    def __init__(self, intact_checks: int, restored: bytes | Exception | None = None) -> None:
        self.intact_checks = intact_checks
        self.restored = restored
        self.asked: list[int] = []

    def intact(self, offset: int, count: int) -> bool:
        self.intact_checks -= 1
        return self.intact_checks >= 0

    def stayed(self, offset: int, count: int) -> bool:
        return True

    async def restore(self, offset: int, count: int) -> memoryview | None:
        self.asked.append(offset)
        await asyncio.sleep(0)
        if isinstance(self.restored, Exception):
            raise self.restored
        if self.restored is None:
            self.intact_checks = 1_000
            return None
        return memoryview(self.restored)[offset : offset + min(count, 100_000)]


class Line:
    """A file, and a client that reads when the test does."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(CONTENT)
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        self.server, self.client = socket.socketpair()
        self.server.setblocking(False)
        self.client.setblocking(False)

    def sender(self, pages: Pages, *, is_fresh: bool = True) -> FileSender:
        span = FileSpan(self.descriptor, 0, SIZE_BYTES, pages)
        return FileSender(self.server.fileno(), span, is_fresh=is_fresh)

    async def read_all(self) -> bytes:
        received = bytearray()
        while len(received) < SIZE_BYTES:
            received += await asyncio.get_running_loop().sock_recv(self.client, 65_536)
        return bytes(received)

    def close(self) -> None:
        os.close(self.descriptor)
        self.server.close()
        self.client.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    made = Line(tmp_path / "f")
    yield made
    made.close()


async def test_a_span_that_stays_intact_is_sent_as_it_lies(line: Line) -> None:
    """Nothing is asked of the disk, and nothing before the first step."""
    pages = Pages(1_000)
    sender = line.sender(pages)
    assert not sender.push()
    assert pages.intact_checks == 1_000
    sending = asyncio.create_task(sender.send())
    assert await line.read_all() == CONTENT
    await sending
    assert sender.sent_bytes == SIZE_BYTES
    assert pages.asked == []


@pytest.mark.parametrize("stays", [True, False], ids=["in memory again", "does not stay in memory"])
async def test_what_left_memory_while_the_client_took_its_time_is_checked_again(line: Line, stays: bool) -> None:
    """1.4 The file gives other bytes by now; the client gets those that were written."""
    pages = Pages(0, None if stays else CONTENT)
    sender = line.sender(pages)
    assert not sender.push(), "the socket takes less than all"
    if not stays:
        with line.path.open("r+b") as file:  # behind what is on its way: that is still the file's own pages
            file.seek(sender.sent_bytes + 4096)
            file.write(bytes(SIZE_BYTES - sender.sent_bytes - 4096))
    sending = asyncio.create_task(sender.send())
    assert await line.read_all() == CONTENT
    await sending
    assert pages.asked
    assert pages.asked[0] > 0


async def test_a_span_that_has_waited_is_checked_before_its_first_byte(line: Line) -> None:
    """Behind an answer that the client had not taken yet."""
    pages = Pages(0, CONTENT)
    sending = asyncio.create_task(line.sender(pages, is_fresh=False).send())
    assert await line.read_all() == CONTENT
    await sending
    assert pages.asked[0] == 0


async def test_a_connection_lost_when_bytes_were_found_missing_ends_the_sender(line: Line) -> None:
    """They may be intact again when the sender goes on; the socket's number is a file's by then, perhaps."""

    class LostMeanwhile(Pages):
        def intact(self, offset: int, count: int) -> bool:
            self.intact_checks -= 1
            if not self.intact_checks:
                asyncio.get_running_loop().call_soon(sender.abandon)
            return self.intact_checks != 0

    sender = line.sender(LostMeanwhile(2))
    assert not sender.push()
    sending = asyncio.create_task(sender.send())
    await asyncio.sleep(0)
    sent_bytes = sender.sent_bytes
    line.client.recv(SIZE_BYTES)
    with pytest.raises(ClientDisconnected):
        await sending
    assert sender.sent_bytes == sent_bytes


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole response", "file in a stream"])
async def test_a_span_behind_an_answer_that_is_still_queued_is_checked_before_its_first_byte(
    line: Line, is_whole: bool
) -> None:
    """1.4 The head waits for the connection, too; the file gives other bytes by the time it is out."""
    line.path.write_bytes(bytes(SIZE_BYTES))
    pages, waits = Pages(0, CONTENT), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/queued":
            await respond(send, bytes(4 * SIZE_BYTES))
            return
        waits.set()
        span = FileSpan(line.descriptor, 0, SIZE_BYTES, pages)
        length = [(b"content-length", b"%d" % SIZE_BYTES)]
        if is_whole:
            await send({"type": RESPONSE, "response": EncodedResponse(200, length, b"", span)})
            return
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": SPAN, "span": span})

    async with talking(app, request("GET", "/queued") + request("GET", "/file")) as (_, wire):
        await waits.wait()
        assert (await wire.answer()).body == bytes(4 * SIZE_BYTES)
        assert (await wire.answer()).body == CONTENT
    assert pages.asked[0] == 0


async def test_damage_found_on_the_way_ends_the_answer(line: Line) -> None:
    """Rather than with a wrong byte."""
    pages = Pages(0, BlockDamaged("not what was written"))
    sender = line.sender(pages)
    assert not sender.push()
    with pytest.raises(BlockDamaged):
        await sender.send()


async def test_a_connection_lost_while_bytes_are_checked_ends_the_sender(line: Line) -> None:
    """The socket's number may be another connection's by the time the bytes are there."""
    pages = Pages(0, CONTENT)
    sender = line.sender(pages)
    assert not sender.push()
    sending = asyncio.create_task(sender.send())
    await asyncio.sleep(0)
    assert pages.asked
    sender.abandon()
    sent_bytes = sender.sent_bytes
    with pytest.raises(ClientDisconnected):
        await sending
    assert sender.sent_bytes == sent_bytes
