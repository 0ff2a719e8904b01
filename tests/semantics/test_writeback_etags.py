"""`etag = "local"`, for buckets whose ETags are no MD5s: clause 4.10 of docs/semantics.md."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gateway.core.model import ByteRange, FileSpan
from gateway.operations.context import RequestContext
from gateway.operations.pending_versions import _StagedReader
from gateway.s3.headers import md5s_etag, unquote
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.writeback.journal.records import State
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import Answer, Hold, Unreachable, on
from tests.support.memory_origin.store import StoredObject
from tests.support.slots import Slot, slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, a_client

LOCAL = [slot_with(SLOTS[0], etag="local")]
KMS = {"x-amz-server-side-encryption": "aws:kms"}


def md5_of(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def encrypted(client: Client) -> None:
    client.origin.buckets["bucket"].is_kms = True


def at_the_bucket(client: Client, name: str) -> str:
    return client.origin.buckets["bucket"].objects[name].etag


async def upload(client: Client, name: str, parts: Sequence[bytes], **headers: str) -> tuple[str, str]:
    """The ETag in the answer, and how the Complete was answered."""
    upload_id = await client.create(name, headers={n.replace("_", "-"): v for n, v in headers.items()})
    etags = {number: await client.part(name, upload_id, number, body) for number, body in enumerate(parts, 1)}
    answer = await client.complete(name, upload_id, etags)
    return text_of(answer.body, "ETag") or "", answer.headers["x-forebay-cache"]


async def test_4_10_writes_to_a_kms_bucket_are_absorbed_with_an_etag_of_this_node(tmp_path: Path) -> None:
    """4.10 PutObject, uploads, copies: GET, HEAD and LIST have it until the flush, and the bucket's from then on."""
    parts = [os.urandom(PART_BYTES), b"the end"]
    big = md5s_etag([hashlib.md5(part, usedforsecurity=False).digest() for part in parts])
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        put = await client.ask("PUT", "back/a", b"one")
        assert (put.headers["x-forebay-cache"], put.headers["etag"]) == ("absorbed", md5_of(b"one"))
        assert await upload(client, "back/b", parts) == (big, "absorbed")
        assert await upload(client, "back/k", parts, **{n.replace("-", "_"): v for n, v in KMS.items()}) == (
            big,
            "absorbed",
        )
        copied = await client.ask("PUT", "back/c", headers={"x-amz-copy-source": "/bucket/back/a"})
        assert copied.headers["x-forebay-cache"] == "absorbed"
        answered = {"back/a": md5_of(b"one"), "back/b": big, "back/k": big, "back/c": md5_of(b"one")}
        for name, etag in answered.items():
            assert (await client.ask("HEAD", name)).headers["etag"] == etag
        listed = (await client.ask("GET", "?list-type=2&prefix=back%2F")).body.replace(b"&quot;", b'"')
        assert all(etag.encode() in listed for etag in answered.values())
        gets = client.origin.count(Operation.GET_OBJECT)
        await client.flush()
        assert client.origin.count(Operation.GET_OBJECT) == gets  # nothing is read back to be compared
        listed = (await client.ask("GET", "?list-type=2&prefix=back%2F")).body.replace(b"&quot;", b'"')
        for name, etag in answered.items():
            now = at_the_bucket(client, name)
            assert now != etag
            assert (await client.ask("HEAD", name)).headers["etag"] == now
            assert now.encode() in listed
        got = await client.ask("GET", "back/b")
        assert (got.body, got.headers["etag"]) == (b"".join(parts), at_the_bucket(client, "back/b"))
        assert client.origin.data("bucket", "back/k") == b"".join(parts)


async def test_4_10_without_the_setting_they_go_through(tmp_path: Path) -> None:
    """4.10 4.7 So do uploads of other slots, also those begun when the slot said otherwise; and customer keys."""
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        begun = await client.create("back/b")
        part = await client.part("back/b", begun, 1, b"part")
        client.gateway.app.services.slots.apply_settings(SLOTS)
        completed = await client.complete("back/b", begun, {1: part})
        assert completed.headers["x-forebay-not-absorbed"] == "bucket-etags"
        assert text_of(completed.body, "ETag") == at_the_bucket(client, "back/b")
        assert (await client.ask("PUT", "back/a", b"one")).headers["x-forebay-not-absorbed"] == "bucket-etags"
        client.gateway.app.services.slots.apply_settings(LOCAL)
        customer = {"x-amz-server-side-encryption-customer-algorithm": "AES256"}
        created = await client.ask("POST", "back/c?uploads", headers=customer)
        assert created.headers["x-forebay-not-absorbed"] == "bucket-etags"


async def test_4_10_where_it_can_be_foretold_the_etag_is_the_buckets(tmp_path: Path) -> None:
    """4.10 4.5 In a bucket that makes MD5s nothing changes."""
    async with a_client(tmp_path, LOCAL) as client:
        await client.learn()
        put = await client.ask("PUT", "back/a", b"one")
        pending = client.pending("back/a")
        assert pending is not None
        assert not pending.is_etag_local
        await client.flush()
        assert at_the_bucket(client, "back/a") == put.headers["etag"]


async def test_4_10_conditions_may_name_either_etag(tmp_path: Path) -> None:
    """4.10 A reader in ranges, a copy, and a conditional write that saw the object before its flush go on behind it."""
    parts = [os.urandom(PART_BYTES), b"the end"]
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        big, _ = await upload(client, "back/b", parts)
        first = await client.ask("GET", "back/b", headers={"Range": "bytes=0-9", "If-Match": big}, status=206)
        assert first.headers["etag"] == big
        await client.flush()
        now = at_the_bucket(client, "back/b")
        for name in (big, now, unquote(big), f'"other", {big}'):
            rest = {"Range": "bytes=10-19", "If-Match": name}
            got = await client.ask("GET", "back/b", headers=rest, status=206)
            assert got.body == b"".join(parts)[10:20]
            assert got.headers["etag"] == (now if name == now else big)  # as the reader knows it
            assert (await client.ask("HEAD", "back/b", headers={"If-Match": name})).headers["etag"] in (now, big)
        await client.ask("GET", "back/b", headers={"If-Match": '"other"'}, status=412)
        assert (await client.ask("HEAD", "back/b", headers={"If-None-Match": big}, status=304)).body == b""
        source = {"x-amz-copy-source": "/bucket/back/b", "x-amz-copy-source-if-match": big}
        await client.ask("PUT", "back/copy", headers=source)
        await client.ask("PUT", "back/b", b"swapped", {"If-Match": big})
        assert client.origin.data("bucket", "back/b") == b"swapped"
        await client.ask("PUT", "back/b", b"again", {"If-Match": big}, status=412)
        await client.ask("GET", "back/b", headers={"If-Match": big}, status=412)


async def test_4_10_a_condition_on_what_is_pending_holds_when_it_was_flushed_for_it(tmp_path: Path) -> None:
    """4.10 4.3 PutObject and CompleteMultipartUpload with If-Match of the ETag that their client was told."""
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        one = (await client.ask("PUT", "back/a", b"one")).headers["etag"]
        async with client.flushing():
            await client.ask("PUT", "back/a", b"two", {"If-Match": one})
        assert client.origin.data("bucket", "back/a") == b"two"
        three = (await client.ask("PUT", "back/a", b"three")).headers["etag"]
        upload_id = await client.create("back/a")
        part = await client.part("back/a", upload_id, 1, b"four")
        async with client.flushing():
            await client.complete("back/a", upload_id, {1: part}, headers={"If-Match": three})
        assert client.origin.data("bucket", "back/a") == b"four"
        await client.ask("PUT", "back/a", b"x", {"If-Match": one}, status=412)


async def test_4_10_a_download_goes_on_when_its_object_is_flushed_under_another_etag(tmp_path: Path) -> None:
    """4.10 1.1 The staged files are gone in the midst of it: the rest comes as the bucket's version, the same bytes."""
    parts = [os.urandom(PART_BYTES), os.urandom(PART_BYTES), b"the end"]
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        await upload(client, "back/b", parts)
        pending = client.pending("back/b")
        assert pending is not None
        context = SimpleNamespace(services=client.gateway.app.services, buffer=client.buffer, slot=LOCAL[0])
        whole = ByteRange(0, pending.size_bytes - 1)
        reader = _StagedReader(cast("RequestContext", context), pending, whole)
        await reader.start()
        await client.flush()
        got = bytearray()
        async for piece in reader.body():
            assert isinstance(piece, (bytes, memoryview, FileSpan))
            if isinstance(piece, FileSpan):
                async for data in piece.read():
                    got += data
            else:
                got += piece
        assert bytes(got) == b"".join(parts)


@pytest.mark.parametrize("name", ["back/put", "back/upload"])
async def test_4_10_a_lost_answer_is_found_out_by_the_bytes(tmp_path: Path, name: str) -> None:
    """4.10 5.6 6.2 The bucket has it under an ETag that nobody has told this node: no conflict, and no second write."""
    parts = [os.urandom(PART_BYTES), b"the end"]
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        is_put = name == "back/put"
        if is_put:
            await client.ask("PUT", name, b"one")
        else:
            await upload(client, name, parts)
        operation = Operation.PUT_OBJECT if is_put else Operation.COMPLETE_MULTIPART_UPLOAD
        client.origin.inject(on(operation, key=name), Unreachable(late=True))
        count = client.origin.count(operation, key=name)
        await client.flush()
        assert client.origin.count(operation, key=name) == count + 1
        assert client.origin.data("bucket", name) == (b"one" if is_put else b"".join(parts))
        await client.ask("PUT", name, b"next")
        await client.flush()
        assert client.origin.data("bucket", name) == b"next"


async def test_4_10_others_are_still_others(tmp_path: Path) -> None:
    """4.10 6.2 What somebody else has put there meanwhile is a conflict, also of the same length."""
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        await client.ask("PUT", "back/a", b"ours")
        client.origin.inject(on(Operation.PUT_OBJECT, key="back/a"), Answer(503, "SlowDown"))
        client.origin.put("bucket", "back/a", b"them")
        await client.flush_until_conflict("back/a")
        assert client.origin.data("bucket", "back/a") == b"them"


async def test_4_10_later_writes_expect_what_the_flush_has_made(tmp_path: Path) -> None:
    """4.10 6.2 One is acknowledged while the one before is on its way, and a deletion behind it."""
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        release, reached = asyncio.Event(), asyncio.Event()
        await client.ask("PUT", "back/a", b"one")
        client.origin.inject(on(Operation.PUT_OBJECT, key="back/a"), Hold(release, reached))
        async with client.flushing():
            await reached.wait()
            await client.ask("PUT", "back/a", b"two")
            release.set()
            await until(lambda: client.pending("back/a") is None)
            assert client.origin.data("bucket", "back/a") == b"two"
            await client.ask("PUT", "back/a", b"three")
            await client.ask("DELETE", "back/a", status=204)
        assert "back/a" not in client.origin.buckets["bucket"].objects


@pytest.mark.slow
async def test_4_10_parts_past_a_full_buffer_are_known_by_their_md5(tmp_path: Path) -> None:
    """4.10 5.10 The client is told MD5s of all parts, and the bucket its own ETags; UploadPartCopy is staged here."""
    slots: list[Slot] = [slot_with(LOCAL[0], buffer_bytes=PART_BYTES + 1000)]
    parts = [os.urandom(PART_BYTES), os.urandom(PART_BYTES), b"the end"]
    async with a_client(tmp_path, slots) as client:
        encrypted(client)
        await client.learn()
        source = client.origin.put("bucket", "elsewhere", b"copied")
        upload_id = await client.create("back/b")
        etags = {1: await client.part("back/b", upload_id, 1, parts[0])}
        through = await client.ask("PUT", f"back/b?partNumber=2&uploadId={upload_id}", parts[1])
        assert through.headers["x-forebay-cache"] == "forwarded"
        etags[2] = through.headers["etag"]
        assert etags[2] == md5_of(parts[1])
        etags[3] = await client.part("back/b", upload_id, 3, parts[2])
        completed = await client.complete("back/b", upload_id, etags)
        assert text_of(completed.body, "ETag") == at_the_bucket(client, "back/b")
        assert client.origin.data("bucket", "back/b") == b"".join(parts)
        await client.flush()
        upload_id = await client.create("back/c")
        target = f"back/c?partNumber=1&uploadId={upload_id}"
        copied = await client.ask("PUT", target, headers={"x-amz-copy-source": "/bucket/elsewhere"})
        assert text_of(copied.body, "ETag") == source
        await client.complete("back/c", upload_id, {1: source})
        await client.flush()
        assert client.origin.data("bucket", "back/c") == b"copied"


async def test_4_10_a_complete_at_the_origin_whose_answer_is_lost(tmp_path: Path) -> None:
    """4.10 4.4 The bytes decide, as no ETag can."""
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        upload_id = await client.create("back/b")
        part = await client.part("back/b", upload_id, 1, b"part")
        client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(late=True))
        completed = await client.complete("back/b", upload_id, {1: part}, headers={"If-None-Match": "*"})
        assert text_of(completed.body, "ETag") == at_the_bucket(client, "back/b")


async def test_4_10_a_killed_flush_is_found_out(tmp_path: Path) -> None:
    """4.10 5.1 The next process finds what the one before it has sent: by its bytes."""
    async with a_client(tmp_path, LOCAL) as client:
        encrypted(client)
        await client.learn()
        await client.ask("PUT", "back/a", b"one")
        pending = client.pending("back/a")
        assert pending is not None
        assert pending.is_etag_local
        marked = replace(pending, state=State.PUBLISHING)
        await client.buffer.journal.change(lambda tx: tx.writes.change(marked, State.COMMITTED))
        client.origin.create_bucket("bucket").put(
            StoredObject("back/a", BytesContent(b"one"), '"of-the-bucket"', client.gateway.app.services.clock.now())
        )
        puts = client.origin.count(Operation.PUT_OBJECT, key="back/a")
        await client.flush()
        assert client.origin.count(Operation.PUT_OBJECT, key="back/a") == puts
        assert (await client.ask("HEAD", "back/a")).headers["etag"] == '"of-the-bucket"'
