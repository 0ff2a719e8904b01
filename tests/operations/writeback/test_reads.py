"""Reads of pending objects, and conditions that name them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

import pytest

from gateway.core.model import ByteRange
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.writeback.journal import records
from tests.support.asgi import Answer, call
from tests.support.asgi import Answer as Got
from tests.support.memory_origin.faults import Unreachable
from tests.support.slots import Slot
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, with_a_client

_OF_ONE_ANSWER = {
    "date",
    "x-amz-request-id",
    "x-amz-id-2",
    "x-forebay-origin-request-id",
    "x-forebay-cache",
    "last-modified",
}
_OF_ERRORS = {"content-type", "content-length"}

QUESTIONS: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("", {"Range": "bytes=0-0"}),
    ("", {"Range": "bytes=5242870-5242890"}),
    ("", {"Range": "bytes=-7"}),
    ("", {"Range": "bytes=100000000-"}),
    ("", {"Range": "bytes=3-1"}),
    ("", {"If-Match": '"other"'}),
    ("", {"If-None-Match": "*"}),
    ("", {"If-Modified-Since": "Thu, 01 Jan 2015 00:00:00 GMT"}),
    ("", {"x-amz-checksum-mode": "ENABLED"}),
    ("", {"x-amz-te": "append-md5"}),
    ("?partNumber=1", {}),
    ("?partNumber=1", {"x-amz-checksum-mode": "ENABLED"}),
    ("?partNumber=2", {}),
    ("?partNumber=3", {}),
    ("?partNumber=0", {}),
    ("?response-content-type=a%2Fb&response-cache-control=no-store", {}),
]


SOME = os.urandom(PART_BYTES)


def crc32(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def told(answer: Answer) -> tuple[int, Mapping[str, str], str]:
    """All of an answer that does not belong to the one request, the body by its digest."""
    ignored = _OF_ONE_ANSWER | (_OF_ERRORS if answer.status >= 400 else set())
    if answer.status == 304:
        ignored = ignored | {"cache-control"}  # RFC 9110, 15.4.5 has it there, and not every origin
    headers = {name: value for name, value in answer.headers.items() if name not in ignored}
    return answer.status, headers, "" if answer.status >= 400 else hashlib.sha256(answer.body).hexdigest()


async def ask_everything(client: Client, name: str) -> list[tuple[int, Mapping[str, str], str]]:
    return [
        told(await call(client.gateway.app, method, f"/bucket/{name}{query}", headers))
        for query, headers in QUESTIONS
        for method in ("GET", "HEAD")
    ]


@pytest.mark.slow
@with_a_client()
async def test_pending_and_flushed_objects_answer_alike(client: Client) -> None:
    """Every header and byte, for ranges, parts, conditions, overrides and checksums."""
    await client.learn()
    metadata = {"x-amz-meta-step": "1", "Content-Type": "text/x", "x-amz-checksum-crc32": crc32(b"single")}
    await client.ask("PUT", "back/single", b"single", metadata)
    upload_id = await client.create("back/multi", {"Cache-Control": "max-age=3"})
    etags = {n: await client.part("back/multi", upload_id, n, os.urandom(PART_BYTES + n)) for n in (1, 2)}
    await client.complete("back/multi", upload_id, etags)
    full = {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"}
    upload_id = await client.create("back/checked", full)
    etags = {n: await client.part("back/checked", upload_id, n, SOME, x_amz_checksum_crc32=crc32(SOME)) for n in (1, 2)}
    await client.complete("back/checked", upload_id, etags)
    names = ("back/single", "back/multi", "back/checked")
    before = [await ask_everything(client, name) for name in names]
    assert client.origin.count(Operation.GET_OBJECT) == 0
    await client.flush()
    after = [await ask_everything(client, name) for name in names]
    for pending, flushed in zip(before, after, strict=True):
        for question, one, other in zip([q for q in QUESTIONS for _ in "12"], pending, flushed, strict=True):
            assert one == other, question


@with_a_client()
async def test_the_last_write_is_read_with_the_origin_away(client: Client) -> None:
    """Overwritten, deleted and written again: each answer is of the last acknowledged state."""
    await client.learn()
    client.origin.inject(lambda _: True, Unreachable(), times=None)
    for body in (b"one", b"two", b""):
        await client.ask("PUT", "back/k", body)
        answer = await client.ask("GET", "back/k")
        assert (answer.body, answer.headers["x-forebay-cache"]) == (body, "hit")
    deleting = asyncio.create_task(call(client.gateway.app, "DELETE", "/bucket/back/k"))
    while (shown := client.pending("back/k")) is None or not shown.deleted:  # noqa: ASYNC110 - a commit on a thread
        await asyncio.sleep(0.001)
    assert b"NoSuchKey" in (await client.ask("GET", "back/k", status=404)).body
    await client.ask("HEAD", "back/k", status=404)
    await client.ask("PUT", "back/k", b"again")
    assert (await client.ask("GET", "back/k")).body == b"again"
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)


@pytest.mark.parametrize("files_left", [0, 1])
@with_a_client()
async def test_a_read_goes_on_where_the_flush_has_taken_the_files(
    client: Client, files_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of the version that was begun, from the cache or the origin by its ETag."""
    upload_id = await client.create("back/m")
    bodies = {number: os.urandom(PART_BYTES) for number in (1, 2)}
    etags = {number: await client.part("back/m", upload_id, number, body) for number, body in bodies.items()}
    await client.complete("back/m", upload_id, etags)
    pending = client.pending("back/m")
    assert pending is not None
    kept = [client.buffer.staging.path(part.file).read_bytes() for part in pending.parts[:files_left]]
    await client.flush()
    for part, left in zip(pending.parts, kept, strict=False):
        client.buffer.staging.path(part.file).write_bytes(left)
    looked_up_before(client, pending, monkeypatch)
    assert (await client.ask("GET", "back/m")).body == bodies[1] + bodies[2]
    looked_up_before(client, pending, monkeypatch)
    some = await client.ask("GET", "back/m", headers={"Range": f"bytes=10-{PART_BYTES + 5}"}, status=206)
    assert some.body == (bodies[1] + bodies[2])[10 : PART_BYTES + 6]


def looked_up_before(client: Client, pending: records.Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look finds what was pending a moment before; those after it find what is."""
    looks, look = iter([pending]), client.buffer.pending
    monkeypatch.setattr(client.buffer, "pending", lambda key: next(looks, None) or look(key))


BOTH = [*SLOTS, Slot("scratch", Prefix.parse("s3://bucket/scratch/"), write="scratch")]


async def overwritten(client: Client, name: str, first: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the next request find a write that was overwritten since; return its ETag."""
    etag = (await client.ask("PUT", name, first)).headers["etag"]
    pending = client.pending(name)
    assert pending is not None
    await client.ask("PUT", name, b"second")
    looked_up_before(client, pending, monkeypatch)
    return etag


@pytest.mark.parametrize("name", ["back/k", "scratch/k"])
@with_a_client(slots=BOTH)
async def test_what_was_overwritten_since_it_was_looked_up_is_read_as_it_is_then(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request to the origin, which never had the first version; who names that is told that it is gone."""
    await client.learn()
    for headers, query, status, body in (
        ({}, "", 200, b"second"),
        ({"Range": "bytes=1-3"}, "", 206, b"eco"),
        ({}, "?partNumber=1", 206, b"second"),
    ):
        await overwritten(client, name, b"the first one", monkeypatch)
        asked = client.origin.count()
        answer = await client.ask("GET", f"{name}{query}", headers=headers, status=status)
        assert (answer.body, client.origin.count()) == (body, asked)
    etag = await overwritten(client, name, b"the first one", monkeypatch)
    refused = await client.ask("GET", name, headers={"Range": "bytes=1-3", "If-Match": etag}, status=412)
    assert b"<Code>PreconditionFailed</Code>" in refused.body
    await client.ask("DELETE", name, status=204)
    pending = client.pending(name)
    await client.ask("PUT", name, b"third")
    assert pending is not None
    looked_up_before(client, pending, monkeypatch)
    await client.ask("GET", name, status=404)  # as it was when it was asked for


@with_a_client()
async def test_a_read_of_what_is_overwritten_for_ever_ends(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """503, which clients repeat; no attempt asks the origin."""
    await client.learn()
    await client.ask("PUT", "back/k", b"first")
    pending = client.pending("back/k")
    await client.ask("PUT", "back/k", b"second")
    asked = client.origin.count()
    monkeypatch.setattr(client.buffer, "pending", lambda _: pending)
    assert b"<Code>SlowDown</Code>" in (await client.ask("GET", "back/k", status=503)).body
    assert client.origin.count() == asked


@pytest.mark.parametrize("name", ["back/m", "scratch/m"])
@with_a_client(slots=BOTH)
async def test_a_read_breaks_off_where_its_version_is_overwritten(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.1 Bytes of it are out already, and the origin never had it: nothing is asked there, and nothing mixed."""
    await client.learn()
    upload_id = await client.create(name)
    bodies = {number: os.urandom(PART_BYTES) for number in (1, 2)}
    etags = {number: await client.part(name, upload_id, number, body) for number, body in bodies.items()}
    await client.complete(name, upload_id, etags)
    asked, pieces = client.origin.count(Operation.GET_OBJECT), client.buffer.pieces

    async def then_overwritten(pending: records.Write, byte_range: ByteRange) -> AsyncGenerator[memoryview, None]:
        async with aclosing(pieces(pending, byte_range)) as real:
            async for piece in real:
                yield piece
                if client.pending(name) == client.buffer.look(lambda tx: tx.writes.get(pending.id)):
                    await client.ask("PUT", name, b"second")

    monkeypatch.setattr(client.buffer, "pieces", then_overwritten)
    answer = await call(client.gateway.app, "GET", f"/bucket/{name}")
    assert (answer.status, answer.complete, answer.body) == (200, False, bodies[1])
    assert client.origin.count(Operation.GET_OBJECT) == asked


@pytest.mark.parametrize("headers", [{"x-amz-expected-bucket-owner": "1"}, {"Origin": "http://page.example"}])
@with_a_client()
async def test_what_only_the_origin_can_judge_waits_for_it(client: Client, headers: dict[str, str]) -> None:
    """The flush comes first, then the origin answers."""
    await client.learn()
    async with client.flushing():
        await client.ask("PUT", "back/k", b"x")
        answer = await client.ask("GET", "back/k", headers=headers)
    assert answer.body == b"x"
    assert client.pending("back/k") is None


IF_ABSENT = {"If-None-Match": "*"}
OTHER = {"If-Match": '"0123456789abcdef0123456789abcdef"'}

Write = Callable[[Client, Mapping[str, str], int], Awaitable[Got]]


async def put(client: Client, headers: Mapping[str, str], status: int) -> Got:
    return await client.ask("PUT", "back/k", b"new", headers, status)


async def copy(client: Client, headers: Mapping[str, str], status: int) -> Got:
    await client.ask("PUT", "back/source", b"new")
    source = {"x-amz-copy-source": "/bucket/back/source"}
    return await client.ask("PUT", "back/k", headers={**source, **headers}, status=status)


async def complete(client: Client, headers: Mapping[str, str], status: int) -> Got:
    upload_id = await client.create("back/k")
    etags = {1: await client.part("back/k", upload_id, 1, b"new")}
    answer = await client.complete("back/k", upload_id, etags, status, headers)
    assert (client.buffer.look(lambda tx: tx.uploads.upload(upload_id)) is not None) == (status != 200)
    return answer


WRITES = pytest.mark.parametrize("write", [put, copy, complete])


def away(client: Client) -> None:
    client.origin.inject(lambda _: True, Unreachable(), times=None)


@WRITES
@pytest.mark.parametrize("condition", [IF_ABSENT, OTHER], ids=["if-none-match", "if-match"])
@with_a_client()
async def test_what_is_pending_fails_it_at_once(client: Client, write: Write, condition: Mapping[str, str]) -> None:
    """412, with the origin away, and nothing is changed."""
    await client.learn()
    await client.ask("PUT", "back/k", b"pending")
    away(client)
    refused = await write(client, condition, 412)
    name = next(iter(condition))
    assert b"<Code>PreconditionFailed</Code>" in refused.body
    assert f"<Condition>{name}</Condition>".encode() in refused.body
    assert (await client.ask("GET", "back/k")).body == b"pending"


@WRITES
@with_a_client()
async def test_what_is_deleted_is_not_there_to_match(client: Client, write: Write) -> None:
    """404 NoSuchKey as S3 says it, while the origin, which is away, has the object still."""
    await client.learn()
    there = (await client.ask("PUT", "back/k", b"there")).headers["etag"]
    await client.flush()
    await client.ask("PUT", "back/k", b"pending")
    away(client)
    deleting = asyncio.create_task(call(client.gateway.app, "DELETE", "/bucket/back/k"))
    await until(lambda: (last := client.pending("back/k")) is not None and last.deleted)
    refused = await write(client, {"If-Match": there}, 404)
    assert b"<Code>NoSuchKey</Code>" in refused.body
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)


@WRITES
@with_a_client()
async def test_what_is_pending_does_not_fail_is_the_origins_to_judge(client: Client, write: Write) -> None:
    """Once it has what is pending: others may have written the key."""
    await client.learn()
    etag = (await client.ask("PUT", "back/k", b"pending")).headers["etag"]
    async with client.flushing():
        answer = await write(client, {"If-Match": etag}, 200)
        assert answer.headers["x-forebay-not-absorbed"] == "condition"
        assert client.origin.data("bucket", "back/k") == b"new"
        refused = await write(client, IF_ABSENT, 412)
    assert refused.headers["x-forebay-not-absorbed"] == "condition"


@with_a_client()
async def test_no_byte_of_the_body_is_read(client: Client) -> None:
    """So `100 Continue` is not said, either, and who waits for it need not send."""
    await client.learn()
    await client.ask("PUT", "back/k", b"pending")

    async def asked() -> None:
        raise AssertionError("the body was asked for")

    body = bytes(PART_BYTES)
    refused = await call(client.gateway.app, "PUT", "/bucket/back/k", IF_ABSENT, body, before_piece=asked)
    assert (refused.status, refused.headers["connection"]) == (412, "close")


@with_a_client()
async def test_a_named_owner_is_the_origins_to_judge_first(client: Client) -> None:
    """Whoever names another one is not told what is there."""
    await client.learn()
    await client.ask("PUT", "back/k", b"pending")
    headers = {**IF_ABSENT, "x-amz-expected-bucket-owner": "111122223333"}
    async with client.flushing():
        refused = await client.ask("PUT", "back/k", b"new", headers, 412)
    assert refused.headers["x-forebay-not-absorbed"] == "condition"
    assert client.pending("back/k") is None


@with_a_client()
async def test_a_complete_that_is_repeated_is_answered_as_the_first(client: Client) -> None:
    """What is pending by now was written after it."""
    await client.learn()
    upload_id = await client.create("back/k")
    etags = {1: await client.part("back/k", upload_id, 1, b"new")}
    first = await client.complete("back/k", upload_id, etags, headers=IF_ABSENT)
    await client.ask("PUT", "back/k", b"pending")
    away(client)
    again = await client.complete("back/k", upload_id, etags, headers=IF_ABSENT)
    assert again.body == first.body
