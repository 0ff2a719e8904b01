"""Requests that are answered in the call that brings them, and those that go on in a task: over real sockets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import BlockDamaged, ClientDisconnected
from gateway.core.model import FileSpan
from gateway.edge.cycle import RESPONSE, in_task, step
from gateway.edge.response import EncodedResponse
from gateway.edge.s3_server import Receive, Scope, Send
from tests.edge.apps import read_body
from tests.support.serving import request, talking
from tests.support.waiting import until

LENGTH = b"content-length"


class Application:
    """Answers with what it was given, `/slow` and bodies in a task; notes how each request ended."""

    def __init__(self, response: EncodedResponse | None = None) -> None:
        self.response = response
        self.at_once: list[bool] = []
        self.ends: list[tuple[int, BaseException | None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.at_once.append(asyncio.current_task() is None)
        response = self.response or EncodedResponse(200, [(LENGTH, b"3")], b"x-made: once\r\n", b"now")
        if scope["path"] == "/slow":
            await in_task()
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
        if scope["method"] == "PUT":
            response = EncodedResponse(200, [], b"", await read_body(receive), 4)
        try:
            await send({"type": RESPONSE, "response": response})
        except BaseException as error:
            self.ends.append((response.sent_bytes, error))
            raise
        self.ends.append((response.sent_bytes, None))


def of_file(path: Path, descriptor: int, *, claimed_bytes: int | None = None) -> EncodedResponse:
    """A response whose body is a file."""
    count = path.stat().st_size if claimed_bytes is None else claimed_bytes
    return EncodedResponse(200, [(LENGTH, str(count).encode())], b"", FileSpan(descriptor, 0, count))


LARGE = os.urandom(12 * 1024**2 + 17)
"""More than a socket's buffers take at once."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    return path


async def test_what_is_there_is_sent_without_a_task() -> None:
    """The response is whole, with the server's own fields, and the connection goes on."""
    app = Application()
    async with talking(app) as (_, wire):
        for _ in range(3):
            await wire.say(request("GET", "/now"))
            answer = await wire.answer()
            assert (answer.status, answer.body, answer.headers["x-made"]) == (200, b"now", "once")
            assert "date" in answer.headers
        await wire.close()
    assert (app.at_once, app.ends) == ([True] * 3, [(3, None)] * 3)


async def test_what_must_be_waited_for_goes_on_in_a_task_from_where_it_was() -> None:
    """Nothing is begun twice; in the task there is what needs one."""
    app = Application()
    async with talking(app, request("GET", "/slow")) as (_, wire):
        assert (await wire.answer()).body == b"now"
        await wire.say(request("GET", "/now"))
        assert (await wire.answer()).body == b"now"
        await wire.close()
    assert (app.at_once, app.ends) == ([True] * 2, [(3, None)] * 2)


async def test_requests_with_a_body_and_pipelined_ones_are_left_to_tasks() -> None:
    """Their bytes must be waited for, or others' answers come first; all are answered in order."""
    app = Application()
    async with talking(app, request("PUT", "/now", b"body") + request("GET", "/now") * 2000) as (_, wire):
        bodies = [(await wire.answer()).body for _ in range(2001)]
        await wire.close()
    assert bodies == [b"body"] + [b"now"] * 2000
    assert app.at_once[:2] == [False] * 2


async def of_steps(first: asyncio.Future[str], second: asyncio.Future[str]) -> None:
    try:
        await first
    except ValueError:
        second.set_result("told")
        raise
    second.set_result(await first + " and here")


@pytest.mark.parametrize("wanted", [False, True])
async def test_a_coroutine_goes_on_from_where_it_waited(wanted: bool) -> None:
    """With results, errors and cancellation as if it had been a task all along."""
    loop = asyncio.get_running_loop()

    async def begun(first: asyncio.Future[str], second: asyncio.Future[str]) -> asyncio.Task[None]:
        async def running() -> None:
            if wanted:
                await in_task()
            await of_steps(first, second)

        made: asyncio.Future[asyncio.Task[None]] = loop.create_future()

        def outside_a_task() -> None:
            rest = step(running())
            assert rest is not None
            made.set_result(asyncio.ensure_future(rest))

        loop.call_soon(outside_a_task)
        return await made

    first, second = loop.create_future(), loop.create_future()
    task = await begun(first, second)
    first.set_result("there")
    await task
    assert second.result() == "there and here"

    first, second = loop.create_future(), loop.create_future()
    task = await begun(first, second)
    first.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await task
    assert second.result() == "told"

    first, second = loop.create_future(), loop.create_future()
    task = await begun(first, second)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert first.cancelled()


async def test_an_answer_to_head_has_no_body() -> None:
    """RFC 9110, 9.3.2."""
    app = Application()
    async with talking(app, request("HEAD", "/now")) as (_, wire):
        answer = await wire.answer(to_head=True)
        assert (answer.body, answer.headers["content-length"]) == (b"", "3")
        await wire.say(request("GET", "/now"))
        assert (await wire.answer()).body == b"now"
        await wire.close()


async def test_a_client_that_wants_to_close_is_closed_on() -> None:
    """RFC 9112, 9.6."""
    async with talking(Application(), request("GET", "/now", b"", "connection: close")) as (_, wire):
        answer = await wire.answer()
        assert (answer.body, answer.headers["connection"]) == (b"now", "close")
        assert await wire.rest() == b""


async def test_a_file_that_the_client_takes_slowly_is_sent_to_its_end(large: Path) -> None:
    """What the socket does not take at once follows in a task, and the next request is answered behind it."""
    with large.open("rb") as file:
        app = Application(of_file(large, file.fileno()))
        async with talking(app) as (_, wire):
            for _ in range(2):
                await wire.say(request("GET", "/now"))
                assert (await wire.answer()).body == LARGE
            await wire.close()
        assert app.ends == [(len(LARGE), None)] * 2


async def test_a_file_that_ends_early_ends_the_connection(large: Path) -> None:
    """1.3 Never a short body that looks whole; the application hears of it."""
    with large.open("rb") as file:
        app = Application(of_file(large, file.fileno(), claimed_bytes=len(LARGE) + 1))
        async with talking(app, request("GET", "/now")) as (_, wire):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await wire.answer()
    [(sent_bytes, error)] = app.ends
    assert sent_bytes == len(LARGE)
    assert isinstance(error, BlockDamaged)


async def test_a_file_that_is_gone_before_the_first_byte_ends_the_connection(tmp_path: Path) -> None:
    """The head is out: nothing else can be said."""
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with empty.open("rb") as file:
        app = Application(of_file(empty, file.fileno(), claimed_bytes=10))
        async with talking(app, request("GET", "/now")) as (_, wire):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await wire.answer()
    assert isinstance(app.ends[0][1], BlockDamaged)


async def test_a_client_that_leaves_in_the_midst_of_a_file_is_told_of(large: Path) -> None:
    """The application gives back what it holds for the answer."""
    with large.open("rb") as file:
        app = Application(of_file(large, file.fileno()))
        async with talking(app, request("GET", "/now")) as (_, wire):
            await wire.close()
            await until(lambda: bool(app.ends))
    [(sent_bytes, error)] = app.ends
    assert sent_bytes < len(LARGE)
    assert isinstance(error, ClientDisconnected)


async def test_a_head_that_cannot_be_sent_is_an_internal_error() -> None:
    """No value may forge a response; the application hears why."""
    app = Application(EncodedResponse(200, [(LENGTH, b"3"), (b"x-bad", b"a\r\nb: c")], b"", b"now"))
    async with talking(app, request("GET", "/now")) as (_, wire):
        answer = await wire.answer()
        assert answer.status == 500
    assert isinstance(app.ends[0][1], RuntimeError)


async def test_a_request_begun_by_the_end_of_another_has_a_task_of_its_own() -> None:
    """Pipelined requests: what ends one of them, or is registered for it, is not the other's."""
    tasks: list[asyncio.Task[Any] | None] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await in_task()
        tasks.append(asyncio.current_task())
        await asyncio.sleep(0)
        tasks.append(asyncio.current_task())
        await send({"type": RESPONSE, "response": EncodedResponse(200, [(LENGTH, b"0")], b"", b"")})

    async with talking(application, request("GET") * 3) as (_, wire):
        for _ in range(3):
            assert (await wire.answer()).status == 200
    assert len(set(tasks)) == 3
    assert tasks[0::2] == tasks[1::2]
