"""The relay gives a near server the distance of a far one, and changes no byte.

Times are only bounded from below: a relay that shapes can never be early, a slow machine may be late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.demo.bucket import Shape, ShapingRelay
from tests.support.connections import answering

_UNSHAPED = 1e12  # bytes per second


@asynccontextmanager
async def _relayed(shape: Shape, answer: Callable[[bytes], bytes]) -> AsyncIterator[int]:
    """The port of a relay to a server that answers each line with `answer(line)`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(answer(line))
            await writer.drain()

    async with answering(handle, limit=1 << 24) as port:
        relay = ShapingRelay(port, shape)
        try:
            yield await relay.start()
        finally:
            await relay.stop()


async def _ask(port: int, lines: list[bytes], answer_bytes: int) -> tuple[list[bytes], float]:
    """The answers to `lines` over one connection, one after the other, and the seconds that took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()
    answers = []
    for line in lines:
        writer.write(line)
        answers.append(await reader.readexactly(answer_bytes))
    seconds = time.monotonic() - begun
    writer.close()
    await writer.wait_closed()
    return answers, seconds


def test_every_answer_of_a_connection_waits_for_the_first_byte_time() -> None:
    """Three requests over one connection take at least three times the first-byte time."""

    async def scenario() -> float:
        async with _relayed(Shape(0.05, _UNSHAPED), lambda _: b"ok") as port:
            return (await _ask(port, [b"one\n", b"two\n", b"three\n"], 2))[1]

    assert asyncio.run(scenario()) >= 3 * 0.05


def test_connections_wait_side_by_side() -> None:
    """The first-byte time is a distance, not a queue: forty requests at once take far less than forty such times."""

    async def scenario() -> float:
        async with _relayed(Shape(0.2, _UNSHAPED), lambda _: b"ok") as port:
            begun = time.monotonic()
            await asyncio.gather(*(_ask(port, [b"go\n"], 2) for _ in range(40)))
            return time.monotonic() - begun

    assert 0.2 <= asyncio.run(scenario()) < 40 * 0.2 / 2


@pytest.mark.parametrize("direction", ["down", "up"])
def test_bandwidth_bounds_each_direction(direction: str) -> None:
    """A megabyte over a connection of 5 MB/s takes at least 0.2 s, whichever way it goes."""
    size = 1_000_000
    lines, answer = ([b"go\n"], b"x" * size) if direction == "down" else ([b"x" * (size - 1) + b"\n"], b"!")

    async def scenario() -> float:
        async with _relayed(Shape(0.0, 5e6), lambda _: answer) as port:
            return (await _ask(port, lines, len(answer)))[1]

    assert asyncio.run(scenario()) >= size / 5e6


def test_bytes_pass_unchanged_and_the_end_is_passed_on() -> None:
    """What the server sends before it closes arrives whole, and then the connection ends."""
    content = random.Random(7).randbytes(3_000_000)

    async def scenario() -> bytes:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(content)

        async with answering(handle) as port:
            relay = ShapingRelay(port, Shape(0.001, _UNSHAPED))
            reader, writer = await asyncio.open_connection("127.0.0.1", await relay.start())
            writer.write(b"go\n")
            received = await reader.read()
            writer.close()
            await relay.stop()
            return received

    assert asyncio.run(scenario()) == content


def test_a_dead_server_ends_the_connection() -> None:
    """A client of a server that is gone fails at once instead of waiting."""

    async def scenario() -> bytes:
        gone = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
        port = gone.sockets[0].getsockname()[1]
        gone.close()
        await gone.wait_closed()
        relay = ShapingRelay(port, Shape(0.0, _UNSHAPED))
        reader, writer = await asyncio.open_connection("127.0.0.1", await relay.start())
        writer.write(b"hello")
        try:
            async with asyncio.timeout(10):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()
            await relay.stop()

    assert asyncio.run(scenario()) == b""
