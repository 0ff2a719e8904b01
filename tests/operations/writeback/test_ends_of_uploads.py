"""Uploads that are here: their ends, what only the origin can judge of them, and 10,000 parts in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.s3.requests import Operation
from gateway.writeback.journal.records import Part, Priority
from gateway.writeback.staged_file import StagedFile
from tests.support.asgi import call
from tests.support.loop_steps import longest_step
from tests.support.memory_origin.faults import Answer, Call, Hold, Unreachable, on
from tests.support.waiting import until
from tests.support.write_back_gateway import Client, with_a_client
from tests.support.writeback import md5


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
        await until(lambda: client.pending("back/m") is None)
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


OWNER = "x-amz-expected-bucket-owner"
RIGHT, WRONG = {OWNER: "111122223333"}, {OWNER: "444455556666"}


def _names_another(call: Call) -> bool:
    return call.headers.get(OWNER, RIGHT[OWNER]) != RIGHT[OWNER]


@with_a_client()
async def test_another_owner_is_refused_and_the_upload_stays(client: Client) -> None:
    """Of every request about it; the owner for which the origin has begun the upload is not asked for again."""
    client.origin.inject(_names_another, Answer(403, "AccessDenied"), times=None)
    for named in ({}, RIGHT):
        upload_id = await client.create("back/m", named)
        part, upload = f"back/m?partNumber=1&uploadId={upload_id}", f"back/m?uploadId={upload_id}"
        await client.ask("PUT", part, b"x", WRONG, status=403)
        etag = (await client.ask("PUT", part, b"x", RIGHT)).headers["etag"]
        await client.ask("GET", upload, headers=WRONG, status=403)
        await client.ask("DELETE", upload, headers=WRONG, status=403)
        await client.complete("back/m", upload_id, {1: etag}, status=403, headers=WRONG)
        assert client.pending("back/m") is None
        asked = client.origin.count(Operation.HEAD_BUCKET)
        await client.complete("back/m", upload_id, {1: etag}, headers=RIGHT)
        assert client.origin.count(Operation.HEAD_BUCKET) == asked + (not named)
        await client.flush()


@with_a_client()
async def test_an_upload_that_is_open_here_is_never_denied(client: Client) -> None:
    """A parameter that is not known is refused as such: the origin has the upload by another id, and is not asked."""
    await client.learn()
    upload_id = await client.create("back/m")
    target = f"back/m?partNumber=1&uploadId={upload_id}"
    refused = await client.ask("PUT", f"{target}&unheard-of=1", b"x", status=501)
    assert b"NotImplemented" in refused.body
    await client.complete("back/m", upload_id, {1: (await client.ask("PUT", target, b"x")).headers["etag"]})


PARTS = 10_000
PART_BYTES = 512 * 1024**2

LINES_MAX = 15_000
"""A millisecond or so: a line for each part is 10,000."""


async def put_parts(client: Client, upload_id: str) -> dict[int, str]:
    """Parts that the origin has, with files that are nowhere; their ETags."""
    etags: dict[int, str] = {}
    for first in range(1, PARTS + 1, 500):
        files = {n: StagedFile(f"w0/{n:032x}", PART_BYTES, md5(b"%d" % n)) for n in range(first, first + 500)}
        parts = [Part(n, file, 1.0, {"crc64nvme": "AAAAAAAAAAA="}, '"there"') for n, file in files.items()]
        await asyncio.gather(*(client.buffer.put_part(upload_id, part) for part in parts))
        etags |= {n: file.etag for n, file in files.items()}
    return etags


@pytest.mark.slow
@with_a_client()
async def test_it_is_listed_completed_and_flushed_in_steps(client: Client) -> None:
    """ListParts, Complete with a checksum of the whole, a HEAD of a part, and the Complete that the origin is sent."""
    create = {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
    upload_id = await client.create("back/m", create)
    etags = await put_parts(client, upload_id)
    with longest_step() as longest:
        page = await client.ask("GET", f"back/m?uploadId={upload_id}&part-number-marker=8998")
    assert page.body.count(b"<Part>") == 1000
    assert b"<NextPartNumberMarker>9998</NextPartNumberMarker>" in page.body
    assert longest.lines < LINES_MAX, str(longest)
    with longest_step() as longest:
        completed = await client.complete("back/m", upload_id, etags)
    assert b"<ChecksumCRC64NVME>" in completed.body
    assert longest.lines < LINES_MAX, str(longest)
    with longest_step() as longest:
        head = await client.ask("HEAD", "back/m?partNumber=9999", status=206)
    assert head.headers["x-amz-mp-parts-count"] == str(PARTS)
    assert longest.lines < LINES_MAX, str(longest)
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(), times=None)
    with longest_step() as longest:
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.COMPLETE_MULTIPART_UPLOAD) > 0)
    assert longest.lines < LINES_MAX, str(longest)
