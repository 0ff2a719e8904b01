"""What is pending reads as it will once it is flushed, and once it was deleted, it is gone."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import zlib
from collections.abc import Mapping

import pytest

from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.memory_origin.faults import Unreachable
from tests.support.write_back_gateway import PART_BYTES, Client, with_a_client

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
    monkeypatch.setattr(client.buffer, "pending", lambda _: pending)  # as it was looked up a moment before
    assert (await client.ask("GET", "back/m")).body == bodies[1] + bodies[2]
    some = await client.ask("GET", "back/m", headers={"Range": f"bytes=10-{PART_BYTES + 5}"}, status=206)
    assert some.body == (bodies[1] + bodies[2])[10 : PART_BYTES + 6]


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
