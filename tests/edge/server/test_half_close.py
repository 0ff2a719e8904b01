"""Clients that end their side of the connection behind their request: some wait for the answer, some have left."""

from __future__ import annotations

import asyncio
import os

import pytest

from gateway import cancellation
from gateway.edge.server.cycle import in_task
from gateway.edge.server.s3_server import Message, Receive, Scope, Send
from tests.edge.server.apps import read_body, respond
from tests.support.serving import request, serving


class Waiting:
    """An application that answers when it is told to, and ends with its client."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await in_task()
        cancellation.register_request(anywhere=True)
        body = await read_body(receive)
        self.begun.set()
        await self.go_on.wait()
        await respond(send, scope["raw_path"] + body)


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_who_has_only_ended_its_side_gets_its_answer(method: str) -> None:
    """`shutdown(SHUT_WR)` behind the request, while the answer is not known yet."""

    async def scenario() -> None:
        app = Waiting()
        async with serving(app) as port:
            wire = await port.connect()
            await wire.say(request(method, "/b/k", b"body" if method == "PUT" else b""))
            wire.writer.write_eof()
            assert (await wire.head())[0] == 100
            app.go_on.set()
            assert (await wire.answer()).body == (b"/b/kbody" if method == "PUT" else b"/b/k")
            assert await wire.rest() == b""
            await port.connections(0)

    asyncio.run(scenario())


def test_an_old_client_is_not_asked() -> None:
    """HTTP/1.0 knows no interim response (RFC 9110, 15.2)."""

    async def scenario() -> None:
        app = Waiting()
        async with serving(app) as port:
            wire = await port.connect()
            await wire.say(b"GET /b/k HTTP/1.0\r\n\r\n")
            wire.writer.write_eof()
            await asyncio.wait_for(app.begun.wait(), 10)
            app.go_on.set()
            assert (await wire.answer()).body == b"/b/k"

    asyncio.run(scenario())


def test_all_that_was_asked_before_is_answered() -> None:
    """Several requests, then the end: one answer each. What is not whole gets none."""

    async def scenario() -> None:
        app = Waiting()
        async with serving(app) as port:
            wire = await port.connect()
            await wire.say(request("GET", "/b/1") + request("GET", "/b/2") + request("GET", "/b/3")[:-2])
            wire.writer.write_eof()
            assert (await wire.head())[0] == 100
            app.go_on.set()
            assert [(await wire.answer()).body for _ in range(2)] == [b"/b/1", b"/b/2"]
            assert await wire.rest() == b""

    asyncio.run(scenario())


def test_who_has_left_is_told_apart() -> None:
    """The same end of the stream, but nobody there: the request ends, and nothing is left."""

    async def scenario() -> None:
        app = Waiting()
        async with serving(app) as port:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                app.begun.clear()
                wire = await port.connect()
                await wire.say(request("GET"))
                await asyncio.wait_for(app.begun.wait(), 10)
                await wire.close()
                await port.requests(0)
                await port.connections(0)
            assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(scenario())


def test_an_application_that_does_not_ask_for_it_is_not_cancelled() -> None:
    """ASGI's own way: `receive` tells."""

    async def scenario() -> None:
        told: asyncio.Queue[Message] = asyncio.Queue()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await read_body(receive)
            await told.put(await receive())

        async with serving(app) as port:
            wire = await port.connect()
            await wire.say(request("GET"))
            await port.requests(1)
            await wire.close()
            assert (await asyncio.wait_for(told.get(), 10))["type"] == "http.disconnect"

    asyncio.run(scenario())
