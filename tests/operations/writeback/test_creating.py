"""CreateMultipartUpload in a slot that writes back leaves no upload at the origin that nobody knows."""

from __future__ import annotations

import asyncio
import gc
import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import pytest

from gateway.operations.writeback import put_object
from gateway.s3.requests import Operation
from gateway.writeback.journal.buckets import BucketCapabilities
from gateway.writeback.journal.records import CreateAttempt
from tests.support.asgi import call
from tests.support.memory_origin.faults import AlterHeaders, Answer, Effect, Hold, Unreachable, on
from tests.support.slots import slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, with_a_client, with_client
from tests.support.writeback import key

CREATE = Operation.CREATE_MULTIPART_UPLOAD


def questions(client: Client, name: str) -> list[CreateAttempt]:
    """What the origin was asked to begin, and nobody knows yet what came of it."""
    return [one.asked for one in client.buffer.look(lambda tx: tx.uploads.asked(key(name))) if one.asked is not None]


@pytest.mark.parametrize("known", [True, False])
@with_a_client()
async def test_no_answer_waits_for_what_lies_under_the_key(
    client: Client, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """A HEAD that hangs delays neither Create nor the first PutObject; nothing is learned of the bucket then."""
    monkeypatch.setattr(put_object, "ANSWER_SECONDS_MAX", 0.05)
    if known:
        await client.learn()
    held = asyncio.Event()
    client.origin.inject(on(Operation.HEAD_OBJECT), Hold(held), times=100)
    upload_id = await asyncio.wait_for(client.create("back/m"), 10.0)
    assert upload_id.startswith(client.buffer.node_id)
    await asyncio.wait_for(client.ask("PUT", "back/k", b"x"), 10.0)
    assert (client.buffer.look(lambda tx: tx.buckets.capabilities("bucket")) is not None) == known
    held.set()


HASHES = ("SHA1", "SHA256", "SHA512", "MD5", "XXHASH64", "XXHASH3", "XXHASH128")


@pytest.mark.parametrize(
    ("algorithm", "checksum_type"),
    [
        *((one, "FULL_OBJECT") for one in HASHES),
        ("CRC64NVME", "COMPOSITE"),
        ("crc64nvme", "composite"),
        ("CRC32", "PARTIAL"),
        ("CRC16", None),
        (None, "FULL_OBJECT"),
        (None, "COMPOSITE"),
    ],
)
@pytest.mark.parametrize("write", ["back", "scratch"])
def test_checksums_that_s3_refuses_are_refused_at_once(
    tmp_path: Path, algorithm: str | None, checksum_type: str | None, write: Literal["back", "scratch"]
) -> None:
    """S3 User Guide, "Checking object integrity": FULL_OBJECT is for CRCs, COMPOSITE for all but CRC64NVME. Also where
    the origin takes such an upload: nobody could send a part to it."""
    said = {"x-amz-checksum-algorithm": algorithm, "x-amz-checksum-type": checksum_type}
    headers = {name: value for name, value in said.items() if value is not None}

    async def scenario(client: Client) -> None:
        if write == "back":
            await client.learn()
        answer = await client.ask("POST", "back/m?uploads", headers=headers, status=400)
        assert b"<Code>InvalidRequest</Code>" in answer.body
        assert client.origin.count(CREATE) == 0

    with_client(tmp_path, scenario, [slot_with(SLOTS[0], write=write)])


@pytest.mark.parametrize(
    ("algorithm", "checksum_type"),
    [
        *((one, "COMPOSITE") for one in ("CRC32", "CRC32C", *HASHES)),
        *((one, "FULL_OBJECT") for one in ("CRC32", "CRC32C", "CRC64NVME")),
        ("CRC64NVME", None),
        (None, None),
    ],
)
@with_a_client()
async def test_checksums_that_s3_takes_are_taken(
    client: Client, algorithm: str | None, checksum_type: str | None
) -> None:
    """All others."""
    said = {"x-amz-checksum-algorithm": algorithm, "x-amz-checksum-type": checksum_type}
    await client.learn()
    upload_id = await client.create("back/m", {name: value for name, value in said.items() if value is not None})
    assert upload_id.startswith(client.buffer.node_id)


@with_a_client()
async def test_it_is_written_down_before_the_origin_is_asked(client: Client) -> None:
    """And forgotten when the upload is known of."""
    held, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(CREATE), Hold(held, reached))
    creating = asyncio.create_task(client.create("back/m"))
    await reached.wait()
    assert [one.in_doubt_since for one in questions(client, "back/m")] == [None]
    held.set()
    upload_id = await creating
    assert not questions(client, "back/m")
    assert client.buffer.look(lambda tx: tx.uploads.upload(upload_id)) is not None


@with_a_client()
async def test_its_age_is_told_by_no_clock_that_can_be_set(client: Client) -> None:
    """An upload to which no part has come expires in time, however far the wall clock was ahead when it began."""
    for away in (False, True):
        if away:
            await client.learn()
            client.origin.inject(lambda _: True, Unreachable(), times=None)
        upload_id = await client.create("back/m")
        upload = client.buffer.look(lambda tx, upload_id=upload_id: tx.uploads.upload(upload_id))  # type: ignore[misc]
        assert upload is not None
        assert upload.touched is not None
        assert (upload.touched.at, bool(upload.touched.boot_id)) == (upload.began_at, True)


def test_it_costs_two_commits(tmp_path: Path) -> None:
    """What is known of the bucket, and the upload, are in the second."""

    async def scenario(client: Client) -> None:
        steps = 0
        is_of_the_request = ContextVar("is_of_the_request", default=False)
        change = client.buffer.journal.change

        async def counted(step):  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += is_of_the_request.get()  # the process that flushes has commits of its own
            return await change(step)

        client.buffer.journal.change = counted  # type: ignore[method-assign]
        is_of_the_request.set(True)
        await client.create("back/m")
        assert steps == 2

    with_client(tmp_path, scenario)


@pytest.mark.parametrize(
    ("effect", "status", "suspects"),
    [
        (Answer(403, "AccessDenied"), 403, 0),
        (Answer(501, "NotImplemented"), 501, 0),
        (Answer(503, "SlowDown"), 200, 0),
        (Answer(500, "InternalError", late=True), 200, 1),
        (Unreachable(late=True), 200, 1),
    ],
    ids=str,
)
@with_a_client()
async def test_what_the_origin_does_not_say_is_to_be_found_out(
    client: Client, effect: Effect, status: int, suspects: int
) -> None:
    """A refusal is an answer. Where there was none, the upload goes on here, and the origin's is looked for."""
    await client.learn()
    client.origin.inject(on(CREATE), effect)
    await client.ask("POST", "back/m?uploads", status=status)
    assert [one.in_doubt_since is not None for one in questions(client, "back/m")] == [True] * suspects


@with_a_client()
async def test_an_upload_that_is_not_absorbed_is_its_clients_own(client: Client) -> None:
    """Its like is never looked for, nor aborted: nothing would tell it from one that was lost."""
    encrypted = {"x-amz-server-side-encryption": "aws:kms"}
    client.origin.inject(on(CREATE), AlterHeaders(encrypted), times=2)
    await client.create("back/first")
    held, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(CREATE, key="back/second"), Hold(held, reached))
    creating = asyncio.create_task(client.create("back/second"))
    await reached.wait()
    assert not questions(client, "back/second")
    held.set()
    assert await creating in client.origin.buckets["bucket"].uploads
    client.origin.inject(on(CREATE), AlterHeaders({"x-amz-server-side-encryption": "AES256"}))
    assert await client.create("back/third") in client.origin.buckets["bucket"].uploads
    await client.ask("PUT", "back/k", b"shows the ETags")
    assert await client.create("back/fourth") not in client.origin.buckets["bucket"].uploads


@with_a_client()
async def test_two_completes_begin_one_upload_at_the_origin(client: Client) -> None:
    """Both with a condition, of an upload that was begun with the origin away: one object, nothing left."""
    await client.learn()
    away = client.origin.inject(lambda _: True, Unreachable(), times=None)
    upload_id = await client.create("back/m")
    etag = await client.part("back/m", upload_id, 1, os.urandom(PART_BYTES))
    away.times = 0
    held, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(CREATE), Hold(held, reached))
    part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
    target = f"/bucket/back/m?uploadId={upload_id}"
    both = [
        asyncio.create_task(call(client.gateway.app, "POST", target, {"If-None-Match": "*"}, body)) for _ in range(2)
    ]
    await reached.wait()
    await until(lambda: any(one.done() for one in both))  # one of them is told to try again
    held.set()
    assert sorted(answer.status for answer in await asyncio.gather(*both)) == [200, 503]
    await client.flush()
    assert client.origin.count(CREATE) == 2
    assert not client.origin.buckets["bucket"].uploads


@with_a_client()
async def test_who_aborts_an_upload_that_the_origin_begins_waits_for_its_complete(client: Client) -> None:
    """Which is answered as it ends, and leaves nothing to be aborted; nobody is told anything else."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    await client.learn()
    away = client.origin.inject(lambda _: True, Unreachable(), times=None)
    upload_id = await client.create("back/m")
    etag = await client.part("back/m", upload_id, 1, b"x")
    away.times = 0
    held, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(CREATE), Hold(held, reached))
    completing = asyncio.create_task(client.complete("back/m", upload_id, {1: etag}, headers={"If-None-Match": "*"}))
    await reached.wait()
    aborting = asyncio.create_task(client.ask("DELETE", f"back/m?uploadId={upload_id}", status=404))
    await asyncio.sleep(0)
    held.set()
    await completing
    assert b"NoSuchUpload" in (await aborting).body
    assert client.origin.data("bucket", "back/m") == b"x"
    await client.flush()
    gc.collect()
    assert told == []


CUSTOMER_KEY = {
    "x-amz-server-side-encryption-customer-algorithm": "AES256",
    "x-amz-server-side-encryption-customer-key": "c2VjcmV0",
    "x-amz-server-side-encryption-customer-key-md5": "bWQ1",
}
KMS = {"x-amz-server-side-encryption": "aws:kms"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (CUSTOMER_KEY, 503),
        (KMS, 503),
        ({"x-amz-expected-bucket-owner": "1234"}, 503),
        ({"x-amz-storage-class": "GLACIER"}, 503),
        ({"x-amz-object-lock-legal-hold": "ON"}, 503),
        ({"x-amz-acl": "private"}, 503),  # most buckets take none but the one below
        ({"x-amz-grant-read": "id=1"}, 503),
        ({"x-amz-tagging": "a=b"}, 503),
        ({"x-amz-website-redirect-location": "/x"}, 503),
        ({"x-amz-checksum-algorithm": "BOGUS"}, 400),
        ({"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "COMPOSITE"}, 400),
        ({"x-amz-server-side-encryption": "AES256", "x-amz-acl": "bucket-owner-full-control"}, 200),
        ({"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"}, 200),
    ],
    ids=lambda value: "" if isinstance(value, int) else next(iter(value)),
)
def test_what_the_origin_must_judge_does_not_begin_without_it(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    """With the origin away: no key is written down, and no ETag answered that would be another one there."""

    async def scenario(client: Client) -> None:
        await client.learn()
        client.origin.inject(lambda _: True, Unreachable(), times=None)
        await client.ask("POST", "back/m?uploads", headers=headers, status=status)

    with_client(tmp_path, scenario)
    written = b"".join(one.read_bytes() for one in (tmp_path / "writeback").glob("journal*"))
    assert b"c2VjcmV0" not in written


@pytest.mark.parametrize("told", [{}, {"x-amz-server-side-encryption": "AES256"}], ids=["silent", "told"])
@pytest.mark.parametrize("is_md5", [True, False])
@with_a_client()
async def test_an_upload_does_not_make_etags_md5s_that_were_seen_to_be_none(
    client: Client, told: dict[str, str], is_md5: bool
) -> None:
    """4.5 Stores with ETags of their own tell SSE-S3, too. Where it is told, the next PutObject finds out."""
    now = client.gateway.app.services.clock.now()
    await client.buffer.journal.change(lambda tx: tx.buckets.learn("bucket", BucketCapabilities(False, False, now)))
    client.origin.inject(on(Operation.CREATE_MULTIPART_UPLOAD), AlterHeaders(told), times=None)
    if not is_md5:
        client.origin.inject(on(Operation.PUT_OBJECT), AlterHeaders({"etag": '"opaque"'}), times=None)
    for _ in range(2):
        await client.ask("POST", "back/m?uploads")
        capabilities = client.buffer.look(lambda tx: tx.buckets.capabilities("bucket"))
        assert capabilities is not None
        assert capabilities.may_look
        assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == "forwarded"
        if told and is_md5:
            break
    how = "absorbed" if told and is_md5 else "forwarded"
    assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == how


@pytest.mark.parametrize("default", [{}, KMS], ids=["plain", "kms"])
@with_a_client()
async def test_what_an_upload_says_of_its_own_encryption_tells_nothing_of_its_bucket(
    client: Client, default: dict[str, str]
) -> None:
    """PUTs that do not say it go on as the bucket's default has it: absorbed, or not."""
    other = {"x-amz-server-side-encryption": "AES256"} if default else KMS
    name = next(iter(other))
    client.origin.inject(lambda call: name in call.headers, AlterHeaders(other), times=None)
    client.origin.inject(lambda call: name not in call.headers, AlterHeaders(default), times=None)
    await client.learn()
    before = (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"]
    assert before == ("forwarded" if default else "absorbed")
    await client.create("back/m", other)
    assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == before


@pytest.mark.parametrize("is_away", [False, True])
@with_a_client()
async def test_what_a_create_says_of_its_sender_is_not_kept(client: Client, is_away: bool) -> None:
    """Neither in the journal nor in an export, and the origin hears of nobody's client or session when it is asked."""
    kept = {
        "content-type": "x/y",
        "x-amz-meta-a": "b",
        "x-amz-acl": "bucket-owner-full-control",
        "x-amz-checksum-algorithm": "CRC32",
    }
    sender = {
        "user-agent": "Boto3/1",
        "accept-encoding": "identity",
        "amz-sdk-invocation-id": "1",
        "x-amz-user-agent": "aws-sdk-js/3",
    }
    await client.learn()
    if is_away:
        client.origin.inject(on(CREATE), Unreachable())
    upload_id = await client.create("back/m", {**kept, **sender})
    upload = client.buffer.look(lambda tx: tx.uploads.upload(upload_id))
    assert upload is not None
    assert upload.spec.headers == kept
