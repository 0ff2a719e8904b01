"""Pages on their way from a file to a socket: those that were looked at are sent, and nothing else ever is."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.blocks.block_file import BlockFile, ChunkChecksums
from gateway.blocks.layout import CHUNK_BYTES, Extent
from gateway.blocks.page_cache import PAGE_BYTES
from gateway.core.errors import BlockDamaged
from gateway.core.model import FileSpan
from gateway.edge import response
from gateway.edge.response import STEP_BYTES, FileSender, send_span
from tests.support.page_cache import drop_unmapped, page_out

SIZE_BYTES = 40 * CHUNK_BYTES + 777
CONTENT = random.Random(1).randbytes(SIZE_BYTES)


class Block:
    """A block that lies in a file, as `objects.SpanFile`; `exchange` does to its pages what memory pressure does."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(CONTENT)
        checksums = ChunkChecksums(SIZE_BYTES)
        checksums.update(CONTENT)
        self.extent = Extent("f", 0, SIZE_BYTES, bytes(checksums.packed))
        self.file = BlockFile(os.open(path, os.O_RDWR))
        self.file.begin_lease()
        self.file.verify(self.extent, 0, SIZE_BYTES)
        self.span = FileSpan(self.file.descriptor, 0, SIZE_BYTES, self)

    def intact(self, offset: int, count: int) -> bool:
        return self.file.intact(self.extent, offset, count)

    def stayed(self, offset: int, count: int) -> bool:
        return self.file.stayed(self.extent, offset, count)

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return memoryview(CONTENT)[offset : offset + 100_000]

    def exchange(self, position: int) -> None:
        """Take all pages away, and have one come back from the device with another byte in it."""
        descriptor, pages = self.file.descriptor, self.file._pages
        assert pages is not None
        os.fdatasync(descriptor)
        for _ in range(3):  # pages on their way through the kernel's lists stay when asked once
            page_out(pages._address, SIZE_BYTES // PAGE_BYTES * PAGE_BYTES)
        drop_unmapped(descriptor, 0, 0)
        assert not pages.present(position, 1)
        os.pwrite(descriptor, bytes([CONTENT[position] ^ 0xFF]), position)


@pytest.fixture
def block(tmp_path: Path) -> Iterator[Block]:
    made = Block(tmp_path / "f")
    yield made
    made.file.end_lease()


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    server, client = socket.socketpair()
    server.setblocking(False)
    client.setblocking(False)
    with server, client:
        yield server, client


def received(client: socket.socket) -> bytes:
    """All that has arrived by now."""
    parts = []
    while True:
        try:
            parts.append(client.recv(STEP_BYTES))
        except BlockingIOError:
            return b"".join(parts)


@pytest.fixture
def before_taking(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Have something happen once, when the pages were looked at and the kernel is about to take them."""

    def happens(what: Callable[[], None]) -> None:
        take, left = response._Pipe.take, [what]

        def taking(pipe: response._Pipe, descriptor: int, offset: int, count: int) -> int:
            if left:
                left.pop()()
            return take(pipe, descriptor, offset, count)

        monkeypatch.setattr(response._Pipe, "take", taking)

    return happens


def test_what_was_looked_at_is_sent(block: Block, line: tuple[socket.socket, socket.socket]) -> None:
    server, client = line
    at = 0
    while at < SIZE_BYTES:
        sent = send_span(server.fileno(), block.span, at, SIZE_BYTES - at)
        assert sent
        assert received(client) == CONTENT[at : at + sent]
        at += sent


def test_1_4_a_page_that_is_exchanged_between_the_look_and_the_send_is_not_sent(
    block: Block,
    line: tuple[socket.socket, socket.socket],
    before_taking: Callable[[Callable[[], None]], None],
) -> None:
    """However long this thread waits for a processor in between."""
    server, client = line
    assert block.intact(0, SIZE_BYTES)
    before_taking(lambda: block.exchange(5 * PAGE_BYTES))
    assert send_span(server.fileno(), block.span, 0, STEP_BYTES) is None
    assert received(client) == b""


async def test_1_4_the_client_gets_what_was_written_all_the_same(
    block: Block,
    line: tuple[socket.socket, socket.socket],
    before_taking: Callable[[Callable[[], None]], None],
) -> None:
    server, client = line
    before_taking(lambda: block.exchange(0))
    sending = asyncio.create_task(FileSender(server.fileno(), block.span, is_fresh=True).send())
    content = bytearray()
    while len(content) < SIZE_BYTES:
        content += await asyncio.get_running_loop().sock_recv(client, STEP_BYTES)
    assert content == CONTENT
    await sending


def test_what_the_socket_does_not_take_is_not_sent_as_something_else(
    block: Block, line: tuple[socket.socket, socket.socket]
) -> None:
    server, client = line
    sent = send_span(server.fileno(), block.span, 0, STEP_BYTES)
    assert sent is not None
    assert 0 < sent < STEP_BYTES, "the socket takes less than all"
    with pytest.raises(BlockingIOError):
        send_span(server.fileno(), block.span, sent, STEP_BYTES)
    assert received(client) == CONTENT[:sent]
    assert send_span(server.fileno(), block.span, 2 * CHUNK_BYTES, 5_000) == 5_000
    assert received(client) == CONTENT[2 * CHUNK_BYTES :][:5_000]


@pytest.mark.parametrize("where", ["stayed", "give", "throw_away"])
def test_what_goes_wrong_on_the_way_leaves_nothing_in_the_pipe(
    block: Block, line: tuple[socket.socket, socket.socket], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = line

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "as it may be")

    with monkeypatch.context() as patched:
        patched.setattr(block if where == "stayed" else response._Pipe, where, fails)
        with pytest.raises(OSError, match="as it may be"):
            send_span(server.fileno(), block.span, 0, 70_000)
    arrived = received(client)
    assert arrived == (CONTENT[:70_000] if where == "throw_away" else b"")
    assert send_span(server.fileno(), block.span, 3 * CHUNK_BYTES, 5_000) == 5_000
    assert received(client) == CONTENT[3 * CHUNK_BYTES :][:5_000]


def test_a_user_with_many_pipes_gets_small_ones_that_serve(
    block: Block, line: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/sys/fs/pipe-user-pages-soft: then a pipe is two pages, and cannot be made larger."""
    server, client = line
    monkeypatch.setattr(response, "_of_thread", type(response._of_thread)())
    fcntl.fcntl(response._pipe_of_this_thread()._in, fcntl.F_SETPIPE_SZ, 2 * PAGE_BYTES)
    assert send_span(server.fileno(), block.span, 100, 50_000) == 50_000
    assert received(client) == CONTENT[100:50_100]


def test_a_file_that_ends_before_is_damage(block: Block, line: tuple[socket.socket, socket.socket]) -> None:
    """What there is of it has been sent by then, and is told."""
    server, client = line
    span = FileSpan(block.file.descriptor, 0, SIZE_BYTES + 10_000)
    assert send_span(server.fileno(), span, SIZE_BYTES - 5_000, 15_000) == 5_000
    assert received(client) == CONTENT[-5_000:]
    with pytest.raises(BlockDamaged, match="ends 10000 bytes early"):
        send_span(server.fileno(), span, SIZE_BYTES, 10_000)


def test_a_client_that_is_gone_is_told(block: Block, line: tuple[socket.socket, socket.socket]) -> None:
    server, client = line
    client.close()
    with pytest.raises(ConnectionError):
        send_span(server.fileno(), block.span, 0, 5_000)


def test_a_forked_process_has_a_pipe_of_its_own(block: Block, line: tuple[socket.socket, socket.socket]) -> None:
    """Two that shared one would send each other's bytes."""
    server, _ = line
    send_span(server.fileno(), block.span, 0, 5_000)
    parents = os.readlink(f"/proc/self/fd/{response._pipe_of_this_thread()._in}")
    child = os.fork()
    if not child:
        same = os.readlink(f"/proc/self/fd/{response._pipe_of_this_thread()._in}") == parents
        os._exit(1 if same else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
