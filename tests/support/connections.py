"""A server of a test's own, on the test's event loop, of which nothing is left when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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
