"""A server of a test's own, on the test's event loop or a thread, of which nothing is left when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from queue import SimpleQueue
from ssl import SSLContext

_READY_SECONDS = 30.0

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_PIECE_BYTES = 2**16


@asynccontextmanager
async def answering(answer: Answer, *, limit: int = 2**16, ssl: SSLContext | None = None) -> AsyncIterator[int]:
    """The port at which `answer` talks to each connection, and closes it when it returns.

    Leaving cancels it and waits for the end of every connection, also of those that have just been accepted: one left
    open would be found by whichever test runs when memory is tidied, and fail that.
    """
    talks = set[asyncio.Task[None]]()
    writers = set[asyncio.StreamWriter]()
    is_over = False

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await answer(reader, writer)
        finally:
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_over:
            writer.transport.abort()
            return
        writers.add(writer)
        talks.add(asyncio.create_task(talk(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0, limit=limit, ssl=ssl)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        is_over = True
        server.close()
        for task in talks:
            task.cancel()
        ends = await asyncio.gather(*talks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


@contextmanager
def answering_aside(answer: Answer, *, limit: int = 2**16, ssl: SSLContext | None = None) -> Iterator[int]:
    """As `answering`, on a thread and an event loop of its own."""
    ports, ended = SimpleQueue[int](), threading.Event()

    async def serve() -> None:
        async with answering(answer, limit=limit, ssl=ssl) as port:
            ports.put(port)
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="answering aside")
    thread.start()
    try:
        yield ports.get(timeout=_READY_SECONDS)
    finally:
        ended.set()
        thread.join()


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Pass on what comes, until its end."""
    while piece := await source.read(_PIECE_BYTES):
        sink.write(piece)
        await sink.drain()


def relay(port_of_now: Callable[[], int], back: Answer = pump) -> Answer:
    """Return what passes connections on to the port of now, and passes back by `back` what comes from there."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port_of_now())
        pumps = {asyncio.ensure_future(one) for one in (pump(reader, far_writer), back(far_reader, writer))}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in pumps:
                one.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far_writer.transport.abort()

    return talk
