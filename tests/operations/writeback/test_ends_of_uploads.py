"""An upload ends once, however many requests want to end it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.s3.requests import Operation
from gateway.writeback.journal.records import Priority
from tests.support.asgi import call
from tests.support.memory_origin.faults import Answer, Hold, on
from tests.support.write_back_gateway import Client, eventually, with_a_client


class Held:
    """The first call of a coroutine function waits, before it does anything, until `go` is set."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, *arguments: Any) -> Any:
        if not self.reached.is_set():
            self.reached.set()
            await self.go.wait()
        return await self._function(*arguments)


async def uploaded(client: Client, name: str, body: bytes) -> tuple[str, dict[int, str]]:
    await client.learn()
    upload_id = await client.create(name)
    return upload_id, {1: await client.part(name, upload_id, 1, body)}


@with_a_client()
async def test_a_late_complete_brings_back_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two at once the second is answered as the first, and what was acknowledged in between stays."""
    upload_id, etags = await uploaded(client, "back/m", b"old")
    late = Held(client.buffer.complete)
    monkeypatch.setattr(client.buffer, "complete", late)
    second = asyncio.create_task(client.complete("back/m", upload_id, etags))
    await late.reached.wait()
    first = await client.complete("back/m", upload_id, etags)
    sending, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Hold(resume, sending))
    async with client.flushing():
        await sending.wait()  # so its files are still there
        await client.ask("PUT", "back/m", b"new")
        late.go.set()
        assert (await second).body == first.body
        assert (await client.ask("GET", "back/m")).body == b"new"
        resume.set()
        await eventually(lambda: client.pending("back/m") is None)
    assert client.origin.data("bucket", "back/m") == b"new"


@pytest.mark.parametrize("effect", [None, Answer(500, "InternalError")], ids=["sent", "failed"])
@with_a_client()
async def test_what_is_completed_has_an_objects_turn(client: Client, effect: Answer | None) -> None:
    """Also where a part of it was just on its way, or failed: it is no open upload any more, which others precede."""
    upload_id, etags = await uploaded(client, "back/m", b"body")
    sending, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.UPLOAD_PART, key="back/m"), Hold(resume, sending))
    if effect is not None:
        client.origin.inject(on(Operation.UPLOAD_PART, key="back/m"), effect)
    async with client.flushing():
        await sending.wait()
        await client.complete("back/m", upload_id, etags)
        client.reconciler.flushes = False
        resume.set()
        await client.reconciler.drain()
    write = client.pending("back/m")
    assert write is not None
    turn = client.buffer.look(lambda tx: tx.turns.of(write.id))
    assert turn is not None
    assert turn.priority in (Priority.SMALL, Priority.RETRY)
    await client.flush()
    assert client.origin.data("bucket", "back/m") == b"body"


@with_a_client()
async def test_an_abort_that_comes_too_late_is_told_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is completed stays so, and a repeated Complete is answered as the first."""
    upload_id, etags = await uploaded(client, "back/m", b"body")
    late = Held(client.buffer.abort)
    monkeypatch.setattr(client.buffer, "abort", late)
    aborting = asyncio.create_task(call(client.gateway.app, "DELETE", f"/bucket/back/m?uploadId={upload_id}"))
    await late.reached.wait()
    first = await client.complete("back/m", upload_id, etags)
    late.go.set()
    assert (await aborting).status == 404
    assert (await client.complete("back/m", upload_id, etags)).body == first.body
    await client.flush()
    assert client.origin.data("bucket", "back/m") == b"body"


@with_a_client()
async def test_a_complete_after_an_abort_makes_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered NoSuchUpload, though it had found the upload open."""
    upload_id, etags = await uploaded(client, "back/m", b"body")
    late = Held(client.buffer.complete)
    monkeypatch.setattr(client.buffer, "complete", late)
    completing = asyncio.create_task(client.complete("back/m", upload_id, etags, status=404))
    await late.reached.wait()
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
    late.go.set()
    await completing
    assert client.pending("back/m") is None
