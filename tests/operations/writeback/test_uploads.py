"""Writes in a slot with `write = "back"`: what is acknowledged here, what goes through; both end at the origin."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import zlib
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.model import ObjectKey
from gateway.operations.writeback.past_the_buffer import PATIENCE_SECONDS
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.writeback.buffer import WritebackBuffer
from tests.support.asgi import call
from tests.support.gateway_app import gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import AlterHeaders, Answer, Hold, Unreachable, on
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, with_a_client, with_client
from tests.support.writeback import key, pending

ABSORBED = "absorbed"


def md5_of(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


@with_a_client()
async def test_the_first_write_goes_through_and_the_next_are_absorbed(client: Client) -> None:
    """The bucket's own answer tells what its ETags are; from then on the origin is not waited for."""
    first = await client.ask("PUT", "back/a", b"one")
    assert first.headers["x-forebay-cache"] == "forwarded"
    assert client.origin.data("bucket", "back/a") == b"one"
    second = await client.ask("PUT", "back/b", b"two", {"x-amz-meta-step": "7", "Content-Type": "text/plain"})
    assert (second.headers["x-forebay-cache"], second.headers["etag"]) == (ABSORBED, md5_of(b"two"))
    assert client.origin.count(Operation.PUT_OBJECT) == 1
    await client.flush()
    assert client.origin.data("bucket", "back/b") == b"two"
    assert client.origin.buckets["bucket"].object("back/b").headers["x-amz-meta-step"] == "7"


@with_a_client()
async def test_other_slots_write_through(client: Client) -> None:
    """Write-back is a right of its slot."""
    await client.learn()
    assert (await client.ask("PUT", "through", b"x")).headers["x-forebay-cache"] == "forwarded"
    assert client.pending("through") is None


@pytest.mark.parametrize(
    "headers",
    [
        {"If-None-Match": "*"},
        {"If-Match": '"x"'},
        {"x-amz-acl": "private"},
        {"x-amz-expected-bucket-owner": "1234"},
        {"x-amz-storage-class": "GLACIER"},
        {"x-amz-server-side-encryption": "AES256"},
        {"x-amz-something-new": "1"},
        {"x-amz-tagging": "a=b"},
    ],
    ids=lambda headers: next(iter(headers)),
)
@with_a_client()
async def test_what_only_the_origin_can_judge_goes_through(client: Client, headers: dict[str, str]) -> None:
    """Conditions, rights, owners, classes, keys, and what this version does not know."""
    await client.learn()
    answer = await call(client.gateway.app, "PUT", "/bucket/back/k", headers, b"x")
    assert answer.headers.get("x-forebay-cache") == "forwarded"
    assert client.origin.count(Operation.PUT_OBJECT) == 2
    assert client.pending("back/k") is None


@with_a_client()
async def test_a_bucket_whose_etags_are_no_md5_is_never_absorbed(client: Client) -> None:
    """What would be answered could not be kept: writes go through, uploads have the origin's ids."""
    client.origin.inject(lambda _: True, AlterHeaders({"x-amz-server-side-encryption": "aws:kms"}), times=None)
    for _ in range(2):
        assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == "forwarded"
    upload_id = await client.create("back/m")
    assert upload_id in client.origin.buckets["bucket"].uploads
    etag = await client.part("back/m", upload_id, 1, b"part")
    await client.complete("back/m", upload_id, {1: etag})
    assert client.origin.data("bucket", "back/m") == b"part"


@with_a_client()
async def test_a_body_that_is_not_as_promised_leaves_nothing(client: Client) -> None:
    """A wrong digest, a wrong checksum, a broken off body: an error, no file, no journal entry."""
    await client.learn()
    wrong = base64.b64encode(hashlib.md5(b"other", usedforsecurity=False).digest()).decode()
    await client.ask("PUT", "back/k", b"x", {"Content-MD5": wrong}, status=400)
    await client.ask("PUT", "back/k", b"x", {"x-amz-checksum-crc32": "AAAAAA=="}, status=400)
    await client.ask("PUT", "back/k", b"x", {"x-amz-content-sha256": "0" * 64}, status=400)
    await client.ask("PUT", "back/k", b"x", {"x-amz-meta-long": "y" * 3000}, status=400)
    assert client.pending("back/k") is None
    assert list(client.buffer.staging.names()) == []


@with_a_client()
async def test_checksums_are_answered_kept_and_replayed(client: Client) -> None:
    """The origin stores the checksum that the client gave."""
    await client.learn()
    value = base64.b64encode(zlib.crc32(b"body").to_bytes(4, "big")).decode()
    answer = await client.ask("PUT", "back/k", b"body", {"x-amz-checksum-crc32": value})
    assert answer.headers["x-amz-checksum-crc32"] == value
    await client.flush()
    assert client.origin.buckets["bucket"].object("back/k").checksums["x-amz-checksum-crc32"] == value


@pytest.mark.slow
@with_a_client()
async def test_an_upload_is_absorbed_whole(client: Client) -> None:
    """Parts out of order, one sent again, one left out: the ETag answered is the one that the origin shows."""
    upload_id = await client.create("back/model", {"x-amz-meta-step": "9"})
    bodies = {number: os.urandom(PART_BYTES + number) for number in (7, 2, 3)}
    etags = {number: await client.part("back/model", upload_id, number, body) for number, body in bodies.items()}
    bodies[2] = os.urandom(PART_BYTES)
    etags[2] = await client.part("back/model", upload_id, 2, bodies[2])
    done = await client.complete("back/model", upload_id, {2: etags[2], 7: etags[7]})
    again = await client.complete("back/model", upload_id, {2: etags[2], 7: etags[7]})
    assert done.body == again.body
    assert client.origin.count(Operation.UPLOAD_PART) == 0
    await client.flush()
    stored = client.origin.buckets["bucket"].object("back/model")
    assert client.origin.data("bucket", "back/model") == bodies[2] + bodies[7]
    assert (stored.etag, stored.headers["x-amz-meta-step"]) == (text_of(done.body, "ETag"), "9")
    assert not client.origin.buckets["bucket"].uploads
    after = await client.complete("back/model", upload_id, {2: etags[2], 7: etags[7]})
    assert after.body == done.body


@with_a_client()
async def test_complete_checks_what_s3_checks(client: Client) -> None:
    """Unknown parts, other ETags, small parts, wrong sizes: an error of S3's, and the upload stays open."""
    upload_id = await client.create("back/m")
    etags = {number: await client.part("back/m", upload_id, number, b"small") for number in (1, 2)}
    codes = [
        ((await client.complete("back/m", upload_id, {1: '"' + "0" * 32 + '"'}, 400)).body, b"InvalidPart"),
        ((await client.complete("back/m", upload_id, {3: etags[1]}, 400)).body, b"InvalidPart"),
        ((await client.complete("back/m", upload_id, etags, 400)).body, b"EntityTooSmall"),
        ((await client.complete("back/m", upload_id, {}, 400)).body, b"MalformedXML"),
        ((await client.complete("back/m", upload_id, {2: etags[2], 1: etags[1]}, 400)).body, b"InvalidPartOrder"),
    ]
    assert all(b"<Code>" + code + b"</Code>" in body for body, code in codes)
    target, body = (
        f"back/m?uploadId={upload_id}",
        b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>",
    )
    body += etags[1].encode() + b"</ETag></Part></CompleteMultipartUpload>"
    await client.ask("POST", target, body, {"x-amz-mp-object-size": "4"}, 400)
    await client.ask("POST", target, body, {"x-amz-mp-object-size": "5"})
    await client.flush()
    assert client.origin.data("bucket", "back/m") == b"small"


@with_a_client()
async def test_an_aborted_upload_leaves_nothing_anywhere(client: Client) -> None:
    """Its files go at once, the origin's upload soon; its id is known no more."""
    upload_id = await client.create("back/m")
    await client.part("back/m", upload_id, 1, b"x")
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
    for method, query, body in (("PUT", "partNumber=1&", b"x"), ("DELETE", "", b""), ("GET", "", b"")):
        answer = await client.ask(method, f"back/m?{query}uploadId={upload_id}", body, status=404)
        assert b"NoSuchUpload" in answer.body
    await client.flush()
    assert not client.origin.buckets["bucket"].uploads


@with_a_client()
async def test_parts_are_listed_by_the_page(client: Client) -> None:
    """Numbers, sizes and ETags; from any marker, so many at a time."""
    upload_id = await client.create("back/m")
    for number in (3, 1, 9):
        await client.part("back/m", upload_id, number, bytes(number))
    first = await client.ask("GET", f"back/m?uploadId={upload_id}&max-parts=2")
    assert first.body.count(b"<Part>") == 2
    assert b"<IsTruncated>true</IsTruncated>" in first.body
    assert b"<NextPartNumberMarker>3</NextPartNumberMarker>" in first.body
    second = await client.ask("GET", f"back/m?uploadId={upload_id}&part-number-marker=3")
    assert b"<PartNumber>9</PartNumber>" in second.body
    assert b"<Size>9</Size>" in second.body
    assert b"<IsTruncated>false</IsTruncated>" in second.body


@with_a_client()
async def test_bad_part_numbers_and_checksums_are_refused(client: Client) -> None:
    """As S3 does, before anything is stored."""
    upload_id = await client.create("back/m", {"x-amz-checksum-algorithm": "CRC32"})
    for number in ("0", "10001", "x", "", "-1"):
        answer = await client.ask("PUT", f"back/m?partNumber={number}&uploadId={upload_id}", b"x", status=400)
        assert b"InvalidArgument" in answer.body
    target = f"back/m?partNumber=1&uploadId={upload_id}"
    await client.ask("PUT", target, b"x", {"x-amz-checksum-sha1": "AAAAAAAAAAAAAAAAAAAAAAAAAAA="}, status=400)
    assert list(client.buffer.staging.names()) == []


@with_a_client()
async def test_a_composite_checksum_is_the_origins(client: Client) -> None:
    """Told in Complete's answer as the origin would, and found there after the flush."""
    upload_id = await client.create("back/m", {"x-amz-checksum-algorithm": "SHA256"})
    body = b"part"
    value = base64.b64encode(hashlib.sha256(body).digest()).decode()
    etag = await client.part("back/m", upload_id, 1, body, x_amz_checksum_sha256=value)
    done = await client.complete("back/m", upload_id, {1: etag})
    await client.flush()
    stored = client.origin.buckets["bucket"].object("back/m")
    assert stored.checksums["x-amz-checksum-sha256"] == text_of(done.body, "ChecksumSHA256")


@with_a_client()
async def test_uploads_begun_at_the_origin_stay_there(client: Client) -> None:
    """Whoever began one past the buffer goes on past it."""
    await client.learn()
    begun = await call(client.gateway.app, "POST", "/bucket/through?uploads")
    upload_id = text_of(begun.body, "UploadId") or ""
    etag = await client.part("through", upload_id, 1, b"x")
    await client.complete("through", upload_id, {1: etag})
    assert client.origin.data("bucket", "through") == b"x"


def test_with_the_origin_away_known_buckets_go_on(tmp_path: Path) -> None:
    """PUT and uploads are absorbed, and arrive when it is back; a bucket of which nothing is known answers 503."""

    async def scenario(client: Client) -> None:
        await client.learn()
        away = client.origin.inject(lambda _: True, Unreachable(), times=None)
        await client.ask("PUT", "back/k", b"one")
        upload_id = await client.create("back/m")
        etag = await client.part("back/m", upload_id, 1, b"two")
        await client.complete("back/m", upload_id, {1: etag})
        away.times = 0
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"one"
        assert client.origin.data("bucket", "back/m") == b"two"

    with_client(tmp_path, scenario)

    async def unknown(client: Client) -> None:
        client.origin.inject(lambda _: True, Unreachable(), times=None)
        await client.ask("POST", "back/m?uploads", status=503)

    with_client(tmp_path / "unknown", unknown)


@with_a_client()
async def test_a_deleted_object_is_gone_at_once_and_for_good(client: Client) -> None:
    """Also where the origin had one before, and where a flush is just on its way."""
    await client.learn()
    await client.ask("PUT", "back/first", b"over the one at the origin")
    held, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.PUT_OBJECT, key="back/first"), Hold(held, reached))
    async with client.flushing():
        await reached.wait()
        deleting = asyncio.create_task(client.ask("DELETE", "back/first", status=204))
        await until(lambda: (shown := client.pending("back/first")) is not None and shown.deleted)
        held.set()
        await deleting
    assert "back/first" not in client.origin.buckets["bucket"].objects
    assert client.pending("back/first") is None


@with_a_client()
async def test_requests_for_the_origin_wait_for_the_flush(client: Client) -> None:
    """Tags, copies from and onto the key, conditional writes: each finds the object that was acknowledged."""
    await client.learn()
    async with client.flushing():
        await client.ask("PUT", "back/a", b"one")
        await client.ask("PUT", "copy", headers={"x-amz-copy-source": "bucket/back/a"})
        assert client.origin.data("bucket", "copy") == b"one"
        await client.ask("PUT", "back/b", b"two")
        await client.ask("PUT", "back/b", headers={"x-amz-copy-source": "bucket/copy"})
        assert client.origin.data("bucket", "back/b") == b"one"
        await client.ask("PUT", "back/c", b"three")
        await client.ask("PUT", "back/c", b"four", {"If-None-Match": "*"}, status=412)
        await client.ask("PUT", "back/d", b"five")
        await client.ask("GET", "back/d?tagging")


def test_what_waits_too_long_is_told_so(tmp_path: Path) -> None:
    """503 to be tried again, with the origin away; 409 where somebody must decide a conflict first."""
    clock = ManualClock()

    async def scenario() -> None:
        async with gateway_app(tmp_path, slots=SLOTS, writeback=True, clock=clock, allow_unsigned=True) as gateway:
            client = Client(gateway)
            stored = await client.buffer.acknowledge(pending(key("back/k"), "x"))
            asking = asyncio.create_task(call(gateway.app, "GET", "/bucket/back/k?tagging", sign=False))
            while not asking.done():
                await clock.advance(PATIENCE_SECONDS / 10)
            assert (await asking).status == 503
            await client.buffer.journal.change(lambda tx: tx.writes.keep(stored.id, "others have changed it"))
            answer = await call(gateway.app, "GET", "/bucket/back/k?tagging", sign=False)
            assert answer.status == 409
            assert b"OperationAborted" in answer.body

    asyncio.run(scenario())


def test_all_that_a_request_waits_for_takes_no_longer_than_one_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source of a copy, the keys of its marker's directory, the key itself: 503 comes while clients wait for it."""
    clock = ManualClock()

    async def no_thread(_: WritebackBuffer, __: ObjectKey) -> None:
        """The clock goes on while the journal's thread works, and would have to wait for it."""

    monkeypatch.setattr(WritebackBuffer, "prioritise", no_thread)

    async def scenario() -> None:
        async with gateway_app(tmp_path, slots=SLOTS, writeback=True, clock=clock, allow_unsigned=True) as gateway:
            client = Client(gateway)
            source = await client.buffer.acknowledge(pending(key("back/source"), "x"))
            await client.buffer.acknowledge(pending(key("back/shard"), "x"))
            began, headers = clock.monotonic(), {"x-amz-copy-source": "bucket/back/source"}
            asking = asyncio.create_task(call(gateway.app, "PUT", "/bucket/back/_SUCCESS", headers=headers, sign=False))
            while clock.monotonic() < began + PATIENCE_SECONDS * 0.8:
                await clock.advance(PATIENCE_SECONDS / 10)
            await client.buffer.journal.change(
                lambda tx: tx.writes.discard(source.id, Moment(clock.now()), only_conflict=False)
            )
            while not asking.done():
                await clock.advance(PATIENCE_SECONDS / 10)
            assert (await asking).status == 503
            assert clock.monotonic() <= began + 1.2 * PATIENCE_SECONDS

    asyncio.run(scenario())


@with_a_client()
async def test_errors_of_create_are_the_origins(client: Client) -> None:
    """Rights and headers are its to judge: its answer is passed on, and nothing is begun here."""
    client.origin.inject(on(Operation.CREATE_MULTIPART_UPLOAD), Answer(403, "AccessDenied"))
    answer = await client.ask("POST", "back/m?uploads", status=403)
    assert b"<Code>AccessDenied</Code>" in answer.body
    assert client.buffer.look(lambda tx: tx.counts()) == (0, 0)


@with_a_client()
async def test_a_full_disk_acknowledges_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """503, and what was there stays."""
    await client.learn()

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    answer = await client.ask("PUT", "back/k", b"x", status=503)
    monkeypatch.undo()
    assert b"ServiceUnavailable" in answer.body
    assert client.pending("back/k") is None
    assert list(client.buffer.staging.names()) == []


@with_a_client()
async def test_the_memory_origin_is_what_these_tests_think(client: Client) -> None:
    """An absorbed object is compared with what the same request writes through."""
    assert isinstance(client.origin, MemoryOrigin)
    await client.learn()
    await client.ask("PUT", "back/k", b"same", {"Content-Type": "a/b"})
    await client.ask("PUT", "through", b"same", {"Content-Type": "a/b"})
    await client.flush()
    bucket = client.origin.buckets["bucket"]
    assert bucket.object("back/k").headers == bucket.object("through").headers
    assert bucket.object("back/k").etag == bucket.object("through").etag
