"""Write-back: clauses 2.4, 4.3, 4.5-4.8, 5.6-5.8, 6.2-6.4, 7.8, 7.9, 8.4, 8.5, 9.1, 9.4, 9.5 (docs/semantics.md)."""

from __future__ import annotations

import asyncio
import base64
import os
import zlib
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.core.clock import Moment, SystemClock
from gateway.policy.slots import Grant, Prefix
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.writeback.journal.buckets import BucketCapabilities, Conditions, Honoured
from gateway.writeback.journal.records import State
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.asgi import ACCESS_KEY_ID, HOST, SECRET_ACCESS_KEY, call
from tests.support.asgi import Answer as Got
from tests.support.gateway_app import gateway_app
from tests.support.memory_origin import MemoryOrigin, store
from tests.support.memory_origin.faults import AlterHeaders, Answer, Fault, Unreachable, on
from tests.support.rest_is_slow import rest_is_slow
from tests.support.slots import slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, a_client


class SetClock(SystemClock):
    """One whose wall time is set."""

    def __init__(self, ahead_seconds: float = 0.0) -> None:
        self.ahead_seconds = ahead_seconds

    def now(self) -> float:
        return super().now() + self.ahead_seconds


def away(client: Client) -> Fault:
    """The origin does not answer, until `times` of this is 0."""
    return client.origin.inject(lambda _: True, Unreachable(), times=None)


def is_set_aside(tx: JournalTransaction) -> bool:
    """Whether the first of what is pending turned out not to be what was acknowledged."""
    turn = tx.turns.of(tx.writes.waiting(0, 1)[0].id)
    return turn is not None and turn.damaged


async def absorbed_upload(client: Client, name: str, parts: list[bytes]) -> str:
    """The ETag of an object that was acknowledged in parts."""
    upload_id = await client.create(name)
    etags = {number: await client.part(name, upload_id, number, body) for number, body in enumerate(parts, 1)}
    answer = await client.complete(name, upload_id, etags)
    assert answer.headers["x-forebay-cache"] == "absorbed"
    return answer.body.partition(b"<ETag>")[2].partition(b"<")[0].decode().replace("&quot;", '"')


async def test_2_4_what_was_acknowledged_is_seen_at_once(tmp_path: Path) -> None:
    """2.4 GET, ranges, HEAD, LIST and copies see it before the origin has it; after a restart, too."""
    parts = [os.urandom(PART_BYTES), b"the end"]

    async def scenario(client: Client) -> None:
        await client.learn()
        etag = await absorbed_upload(client, "back/m", parts)
        assert "back/m" not in client.origin.buckets["bucket"].objects
        await client.ask("PUT", "back/copy", headers={"x-amz-copy-source": "/bucket/back/m"})
        for name in ("back/m", "back/copy"):
            assert (await client.ask("HEAD", name)).headers["etag"] == etag
            assert (await client.ask("GET", name)).body == b"".join(parts)
        assert (await client.ask("GET", "back/m", headers={"Range": "bytes=-7"}, status=206)).body == b"the end"
        assert b"<Key>back/m</Key>" in (await client.ask("GET", "?list-type=2")).body

    async with a_client(tmp_path) as client:
        await scenario(client)
    async with a_client(tmp_path) as client:
        assert (await client.ask("GET", "back/m")).body == b"".join(parts)


async def test_2_4_a_read_meets_the_flush(tmp_path: Path) -> None:
    """2.4 Whoever reads while the object is flushed gets it, from here or from there."""
    async with a_client(tmp_path) as client:
        await client.learn()
        for number in range(20):
            await client.ask("PUT", f"back/{number}", b"%d" % number)
        async with client.flushing():
            while client.buffer.look(lambda tx: tx.counts()[0]):
                for number in range(20):
                    assert (await client.ask("GET", f"back/{number}")).body == b"%d" % number


async def test_2_4_parts_are_copied_of_what_was_acknowledged(tmp_path: Path) -> None:
    """2.4 By a range and on a condition, before the origin has the source; byte-equal when it has both."""
    source = os.urandom(1000)
    async with a_client(tmp_path) as client:
        await client.learn()
        there = await client.ask("PUT", "back/source", source)
        upload_id = await client.create("back/m")
        target = f"back/m?partNumber=1&uploadId={upload_id}"
        copy = {"x-amz-copy-source": "/bucket/back/source", "x-amz-copy-source-range": "bytes=10-19"}
        for condition, status in (("if-none-match", 412), ("if-match", 200)):
            headers = {**copy, f"x-amz-copy-source-{condition}": there.headers["etag"]}
            answer = await client.ask("PUT", target, headers=headers, status=status)
        assert answer.headers["x-forebay-cache"] == "absorbed"
        await client.complete("back/m", upload_id, {1: f'"{md5(source[10:20]).hexdigest()}"'})
        await client.flush()
        assert client.origin.data("bucket", "back/m") == source[10:20]


async def test_4_3_what_is_pending_fails_a_condition_at_once(tmp_path: Path) -> None:
    """4.3 412, 404 where it is deleted; what it does not fail is judged by the origin, which has it then."""
    async with a_client(tmp_path) as client:
        await client.learn()
        there = (await client.ask("PUT", "back/k", b"x")).headers["etag"]
        outage = away(client)
        for headers in ({"If-None-Match": "*"}, {"If-Match": '"another"'}):
            refused = await client.ask("PUT", "back/k", b"y", headers, 412)
            assert b"<Code>PreconditionFailed</Code>" in refused.body
        outage.times = 0
        async with client.flushing():
            await client.ask("PUT", "back/k", b"y", {"If-Match": there})
        assert client.origin.data("bucket", "back/k") == b"y"
        await client.ask("PUT", "back/k", b"z")
        outage.times = None
        deleting = asyncio.create_task(call(client.gateway.app, "DELETE", "/bucket/back/k"))
        await until(lambda: (last := client.pending("back/k")) is not None and last.deleted)
        refused = await client.ask("PUT", "back/k", b"y", {"If-Match": there}, 404)
        assert b"<Code>NoSuchKey</Code>" in refused.body
        deleting.cancel()
        await asyncio.gather(deleting, return_exceptions=True)


async def test_4_5_the_etag_and_all_that_was_fixed_are_the_origins(tmp_path: Path) -> None:
    """4.5 What HEAD says of an object while it is pending, it says when the origin has it; but for Last-Modified."""
    headers = {
        "content-type": "application/x-tar",
        "cache-control": "no-store",
        "x-amz-meta-step": "12",
        "x-amz-storage-class": "STANDARD_IA",
    }
    moving = {"last-modified", "date", "x-amz-request-id", "x-amz-id-2", "x-forebay-cache", "server", "connection"}
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/of-this-class", b"x", headers)
        stored = await client.ask("PUT", "back/k", b"content", headers)
        assert stored.headers["etag"] == f'"{md5(b"content").hexdigest()}"'
        before = await client.ask("HEAD", "back/k")
        await client.flush()
        after = await client.ask("HEAD", "back/k")
        fixed = [
            {name: value for name, value in one.headers.items() if name not in moving and "forebay" not in name}
            for one in (before, after)
        ]
        assert fixed[0] == fixed[1]
        assert fixed[0].items() >= {**headers, "etag": stored.headers["etag"], "content-length": "7"}.items()


async def test_4_6_limits_are_kept_before_anything_is_acknowledged(tmp_path: Path) -> None:
    """4.6 Too long a key, too much metadata, parts that are too small: S3's error, and nothing is pending."""
    async with a_client(tmp_path) as client:
        await client.learn()
        assert b"KeyTooLongError" in (await client.ask("PUT", "back/" + "k" * 1020, b"x", status=400)).body
        large = {"x-amz-meta-a": "x" * 2048}
        assert b"MetadataTooLarge" in (await client.ask("PUT", "back/k", b"x", large, status=400)).body
        upload_id = await client.create("back/m")
        etags = {number: await client.part("back/m", upload_id, number, b"small") for number in (1, 2)}
        assert b"EntityTooSmall" in (await client.complete("back/m", upload_id, etags, status=400)).body
        assert client.buffer.look(lambda tx: tx.counts()) == (0, 1)


@pytest.mark.parametrize("headers", [{"If-None-Match": "*"}, {"x-amz-tagging": "a=b"}, {"x-amz-acl": "private"}])
async def test_4_7_what_only_the_origin_can_judge_goes_through(tmp_path: Path, headers: dict[str, str]) -> None:
    """4.7 Its 200 is the origin's; so is that of the first write to a bucket."""
    async with a_client(tmp_path) as client:
        first = await client.ask("PUT", "back/first", b"x")
        assert first.headers["x-forebay-cache"] == "forwarded"
        assert (await client.ask("PUT", "back/second", b"x")).headers["x-forebay-cache"] == "absorbed"
        answer = await client.ask("PUT", "back/job/k", b"x", headers)
        assert answer.headers["x-forebay-cache"] == "forwarded"
        assert client.origin.data("bucket", "back/job/k") == b"x"


async def test_4_7_an_upload_that_only_this_node_has_takes_copies_here(tmp_path: Path) -> None:
    """4.7 Begun while the origin was away; the source is the origin's."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", "source", b"theirs")
        outage = away(client)
        upload_id = await client.create("back/m")
        outage.times = 0
        target = f"back/m?partNumber=1&uploadId={upload_id}"
        copied = await client.ask("PUT", target, headers={"x-amz-copy-source": "/bucket/source"})
        assert copied.headers["x-forebay-cache"] == "absorbed"
        done = await client.complete("back/m", upload_id, {1: f'"{md5(b"theirs").hexdigest()}"'})
        assert done.headers["x-forebay-cache"] == "absorbed"
        await client.flush()
        assert client.origin.data("bucket", "back/m") == b"theirs"


async def test_4_7_other_etags_than_were_answered_end_the_absorbing(tmp_path: Path) -> None:
    """4.7 When the flush finds that the bucket's default encryption was changed, the next write asks what holds now."""
    async with a_client(tmp_path) as client:
        await client.learn()
        encrypted = AlterHeaders({"x-amz-server-side-encryption": "aws:kms", "etag": '"no-md5"'})
        client.origin.inject(on(Operation.PUT_OBJECT), encrypted, times=None)
        assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == "absorbed"
        await client.flush()
        for _ in range(2):
            assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == "forwarded"


async def test_4_7_what_etags_of_objects_of_parts_are_only_such_objects_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.7 Some stores make their own for them, and MD5s for others: no PutObject has uploads be absorbed again."""
    monkeypatch.setattr("gateway.operations.writeback.put_object.LEARNED_AGAIN_SECONDS", 0.0)
    async with a_client(tmp_path) as client:

        async def upload(name: str) -> Got:
            upload_id = await client.create(name)
            return await client.complete(name, upload_id, {1: await client.part(name, upload_id, 1, b"x")})

        def is_told(answer: Got, name: str) -> bool:
            etag = client.origin.buckets["bucket"].objects[f"back/{name}"].etag
            return etag.replace('"', "&quot;").encode() in answer.body or etag.encode() in answer.body

        await client.learn()
        opened = await client.create("back/opened")
        etags = {1: await client.part("back/opened", opened, 1, b"x")}
        with monkeypatch.context() as patched:
            made = store._assembled
            patched.setattr(store, "_assembled", lambda *of: replace(made(*of), etag='"its-own"'))
            assert (await upload("back/first")).headers["x-forebay-cache"] == "absorbed"
            await client.flush_objects()
            for how in ("forwarded", "absorbed"):
                assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == how
            completed = await client.complete("back/opened", opened, etags)
            for answer, name in ((completed, "opened"), (await upload("back/second"), "second")):
                assert answer.headers["x-forebay-not-absorbed"] in ("bucket-etags", "upload-of-the-origin")
                assert is_told(answer, name)
        await upload("back/third")
        assert (await upload("back/fourth")).headers["x-forebay-cache"] == "absorbed"
        await client.flush()


async def test_4_8_create_is_the_origins_to_judge(tmp_path: Path) -> None:
    """4.8 Its refusal reaches the client; with the origin away the upload is begun here, and there when it is back."""
    async with a_client(tmp_path) as client:
        refusal = client.origin.inject(on(Operation.CREATE_MULTIPART_UPLOAD), Answer(403, "AccessDenied"), times=None)
        await client.ask("POST", "back/m?uploads", status=403)
        refusal.times = 0
        await client.learn()
        gone = away(client)
        await absorbed_upload(client, "back/m", [b"one part"])
        gone.times = 0
        await client.flush()
        assert client.origin.data("bucket", "back/m") == b"one part"
        assert not client.origin.buckets["bucket"].uploads


async def test_4_8_a_repeated_complete_is_answered_as_the_first(tmp_path: Path) -> None:
    """4.8 A client that has not heard the answer asks again, also when the object is flushed."""
    async with a_client(tmp_path) as client:
        upload_id = await client.create("back/m")
        etags = {1: await client.part("back/m", upload_id, 1, b"x")}
        first = await client.complete("back/m", upload_id, etags)
        assert (await client.complete("back/m", upload_id, etags)).body == first.body
        await client.flush()
        assert (await client.complete("back/m", upload_id, etags)).body == first.body


async def test_4_8_a_complete_is_remembered_for_a_day(tmp_path: Path) -> None:
    """4.8 With the checksums of the first answer, whether the origin has the object or not."""
    async with a_client(tmp_path) as client:
        await client.learn()
        upload_id = await client.create("back/m", {"x-amz-checksum-algorithm": "CRC32"})
        assert upload_id.startswith(client.buffer.node_id)
        value = base64.b64encode(zlib.crc32(b"x").to_bytes(4, "big")).decode()
        etags = {1: await client.part("back/m", upload_id, 1, b"x", x_amz_checksum_crc32=value)}
        first = await client.complete("back/m", upload_id, etags)
        assert b"<ChecksumCRC32>" in first.body
        assert (await client.complete("back/m", upload_id, etags)).body == first.body
        await client.flush()
        now = client.gateway.app.services.clock.now()
        await client.buffer.journal.change(lambda tx: tx.forget_ended(Moment(now + 86_300)))
        assert (await client.complete("back/m", upload_id, etags)).body == first.body
        await client.complete("back/m", upload_id, {1: '"another"'}, status=404)
        await client.buffer.journal.change(lambda tx: tx.forget_ended(Moment(now + 86_500)))
        await client.complete("back/m", upload_id, etags, status=404)


async def test_4_8_an_upload_expires(tmp_path: Path) -> None:
    """4.8 When no part of it has come for `upload_expiry`: nothing of it is left, here or at the origin."""
    slots = [slot_with(SLOTS[0], upload_expiry_seconds=3600.0)]
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        upload_id = await client.create("back/m")
        await client.part("back/m", upload_id, 1, b"x")
        async with client.flushing(ahead_seconds=3500.0):
            await until(lambda: client.origin.count(Operation.LIST_PARTS) == 1)  # whether the bucket has ended it
        await client.ask("GET", f"back/m?uploadId={upload_id}")
        async with client.flushing(expiries=True, ahead_seconds=8000.0):
            await until(lambda: not client.origin.buckets["bucket"].uploads)
        await client.ask("GET", f"back/m?uploadId={upload_id}", status=404)
        assert list(client.buffer.staging.names()) == []


async def test_4_8_an_upload_that_the_bucket_has_ended_is_ended(tmp_path: Path) -> None:
    """4.8 By rules of its own, when the client does nothing about it any more; before, it is begun anew."""
    async with a_client(tmp_path) as client:
        await client.learn()
        uploads = client.origin.buckets["bucket"].uploads
        upload_id = await client.create("back/m")
        uploads.clear()
        await client.part("back/m", upload_id, 1, b"x")
        async with client.flushing():
            await until(lambda: any(upload.parts for upload in uploads.values()))
        uploads.clear()
        async with client.flushing(expiries=True, ahead_seconds=700.0):
            await until(lambda: client.buffer.look(lambda tx: tx.uploads.upload(upload_id)) is None)
        assert list(client.buffer.staging.names()) == []


@pytest.mark.parametrize("code", rest_is_slow(["AccessDenied", "ExpiredToken", "InvalidAccessKeyId"], "AccessDenied"))
async def test_5_6_no_refusal_drops_what_was_acknowledged(tmp_path: Path, code: str) -> None:
    """5.6 It stays readable, and arrives when the origin takes it again."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"kept")
        refusal = client.origin.inject(lambda _: True, Answer(403, code), times=None)
        async with client.flushing():
            await until(lambda: client.origin.count(key="back/k") >= 3)
            assert (await client.ask("GET", "back/k")).body == b"kept"
            refusal.times = 0
            await until(lambda: client.pending("back/k") is None)
        assert client.origin.data("bucket", "back/k") == b"kept"


def has_failed(tx: JournalTransaction) -> bool:
    """Whether the first of what is pending was tried, and not taken."""
    turn = tx.turns.of(tx.writes.waiting(0, 1)[0].id)
    return turn is not None and turn.attempts > 0


async def test_5_6_a_bucket_that_is_gone_is_no_conflict(tmp_path: Path) -> None:
    """5.6 5.12 What is to overwrite something waits for it to be back, a minute at most, and for nobody's decision."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"before")
        await client.flush()
        await client.ask("PUT", "back/k", b"kept")
        gone = client.origin.inject(lambda _: True, Answer(404, "NoSuchBucket"), times=None)
        asked = client.origin.count(key="back/k")
        async with client.flushing():
            await until(lambda: client.buffer.look(has_failed))
        assert client.origin.count(key="back/k") > asked
        gone.times = 0
        async with client.flushing(ahead_seconds=60.0):
            await until(lambda: client.pending("back/k") is None)
        assert client.origin.data("bucket", "back/k") == b"kept"


async def test_5_7_nothing_stays_of_what_was_not_acknowledged(tmp_path: Path) -> None:
    """5.7 A body that fails its check, a part without an upload, an aborted upload: no file, nothing at the origin."""
    async with a_client(tmp_path) as client:
        await client.learn()
        wrong = {"Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}
        await client.ask("PUT", "back/k", b"not empty", wrong, status=400)
        upload_id = await client.create("back/m")
        await client.part("back/m", upload_id, 1, b"x")
        await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
        await client.ask("PUT", f"back/m?partNumber=1&uploadId={upload_id}", b"late", status=404)
        await client.ask("GET", "back/k", status=404)
        await client.flush()
        assert not client.origin.buckets["bucket"].uploads


async def test_5_8_damaged_bytes_are_neither_read_nor_sent(tmp_path: Path) -> None:
    """5.8 They stay where they are, and the flush says so."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"as it was acknowledged")
        [name] = client.buffer.staging.names()
        path = tmp_path / "writeback" / "staged" / name
        path.write_bytes(path.read_bytes().replace(b"acknowledged", b"acknowledgeD"))
        answer = await call(client.gateway.app, "GET", "/bucket/back/k")
        assert not answer.complete or answer.status >= 500
        async with client.flushing(damages=True):
            await until(lambda: client.buffer.look(is_set_aside))
        assert "back/k" not in client.origin.buckets["bucket"].objects
        assert path.exists()


@pytest.mark.parametrize("there_before", [True, False])
async def test_6_2_somebody_elses_write_is_never_overwritten(tmp_path: Path, *, there_before: bool) -> None:
    """6.2 Neither one that took the place of what was there, nor one of a new key; ours is kept and readable."""
    async with a_client(tmp_path) as client:
        await client.learn()
        if there_before:
            client.origin.put("bucket", "back/k", b"before")
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        assert client.origin.data("bucket", "back/k") == b"theirs"
        assert (await client.ask("GET", "back/k")).body == b"ours"


async def test_6_2_own_writes_are_no_surprise(tmp_path: Path) -> None:
    """6.2 An upload that was begun before this gateway changed its key, and is completed after, is no conflict."""
    async with a_client(tmp_path) as client:
        upload_id = await client.create("back/k")
        etags = {1: await client.part("back/k", upload_id, 1, b"last")}
        await client.ask("PUT", "back/k", b"absorbed and flushed")
        await client.flush_objects()
        await client.ask("PUT", "back/k", b"written through", {"x-amz-acl": "private"})
        await client.complete("back/k", upload_id, etags)
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"last"


async def test_6_2_what_the_origin_has_refused_changes_nothing(tmp_path: Path) -> None:
    """6.2 A copy of nothing, then a write while the origin is away: what lies there is still known to be our own."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/first", headers={"x-amz-copy-source": "/bucket/nowhere"}, status=404)
        gone = away(client)
        await client.ask("PUT", "back/first", b"second")
        gone.times = 0
        await client.flush()
        assert client.origin.data("bucket", "back/first") == b"second"


async def test_6_2_what_this_gateway_has_put_there_is_expected_though_nobody_could_look(tmp_path: Path) -> None:
    """6.2 A copy that the origin has made, then a write while it is away: no conflict; one of others is one."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", "elsewhere", b"copied")
        for name, theirs in (("back/ours", False), ("back/theirs", True)):
            await client.ask("PUT", name, headers={"x-amz-copy-source": "/bucket/elsewhere"})
            gone = away(client)
            await client.ask("PUT", name, b"second")
            gone.times = 0
            if theirs:
                client.origin.put("bucket", name, b"theirs")
                await client.flush_until_conflict(name)
            else:
                await client.flush()
        assert client.origin.data("bucket", "back/ours") == b"second"
        assert client.origin.data("bucket", "back/theirs") == b"theirs"


@pytest.mark.parametrize("ahead_seconds", [600.0, -600.0])
async def test_6_2_a_wrong_clock_overwrites_nothing_of_others(tmp_path: Path, ahead_seconds: float) -> None:
    """6.2 A node whose wall clock is ten minutes off, and a write that was absorbed while the origin was away: what is
    older is expected, what came after is a conflict."""
    of_the_origin = SetClock()
    origin = MemoryOrigin(of_the_origin)
    origin.create_bucket("bucket")
    async with a_client(tmp_path, origin=origin, clock=SetClock(ahead_seconds)) as client:
        await client.learn()
        of_the_origin.ahead_seconds = -60.0
        origin.put("bucket", "back/old", b"older")
        of_the_origin.ahead_seconds = 0.0
        gone = away(client)
        for name in ("back/old", "back/k"):
            await client.ask("PUT", name, b"ours")
        gone.times = 0
        origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        async with client.flushing(conflicts=True):
            await until(lambda: client.pending("back/old") is None)
        assert origin.data("bucket", "back/k") == b"theirs"
        assert origin.data("bucket", "back/old") == b"ours"


async def test_6_2_a_clock_that_is_set_meanwhile_overwrites_nothing_of_others(tmp_path: Path) -> None:
    """6.2 Whichever way: how long ago the write was, the monotonic clock tells."""
    clock = SetClock()
    origin = MemoryOrigin(SystemClock())
    origin.create_bucket("bucket")
    async with a_client(tmp_path, origin=origin, clock=clock) as client:
        await client.learn()
        for number, ahead_seconds in enumerate((600.0, -600.0)):
            clock.ahead_seconds = 0.0
            gone = away(client)
            await client.ask("PUT", f"back/{number}", b"ours")
            gone.times = 0
            origin.put("bucket", f"back/{number}", b"theirs")
            clock.ahead_seconds = ahead_seconds
            await client.flush_until_conflict(f"back/{number}")
            assert origin.data("bucket", f"back/{number}") == b"theirs"


async def test_6_3_an_origin_without_conditions_is_asked_before(tmp_path: Path) -> None:
    """6.3 501 to a condition: the object is sent without one, if the key is as expected a moment before."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.inject(
            lambda call: call.operation is Operation.PUT_OBJECT and "if-none-match" in call.headers,
            Answer(501, "NotImplemented"),
            times=None,
        )
        await client.ask("PUT", "back/k", b"x")
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"x"


async def test_6_4_no_late_flush_brings_back_what_was_deleted(tmp_path: Path) -> None:
    """6.4 With the origin away the DELETE is answered 503, the object is gone here, and there when it is back."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/first", b"over the one at the origin")
        gone = away(client)
        deleting = asyncio.create_task(client.ask("DELETE", "back/first", status=204))
        await until(lambda: (last := client.pending("back/first")) is not None and last.deleted)
        await client.ask("GET", "back/first", status=404)
        gone.times = 0
        async with client.flushing():
            await deleting
        assert "back/first" not in client.origin.buckets["bucket"].objects


async def test_6_4_of_what_the_origin_never_had_a_deletion_is_done_at_once(tmp_path: Path) -> None:
    """6.4 Also with the origin away; neither the object nor a deletion is sent."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"x")
        upload_id = await client.create("back/m")
        await client.complete("back/m", upload_id, {1: await client.part("back/m", upload_id, 1, b"x")})
        gone = away(client)
        asked = len(client.origin.calls)
        for name in ("back/k", "back/m"):
            answer = await client.ask("DELETE", name, status=204)
            assert answer.headers["x-forebay-cache"] == "absorbed"
        assert len(client.origin.calls) == asked
        gone.times = 0
        await client.flush()
        sent = {call.operation for call in client.origin.calls[asked:]}
        assert sent <= {Operation.ABORT_MULTIPART_UPLOAD, Operation.HEAD_OBJECT, Operation.GET_OBJECT}
        for name in ("back/k", "back/m"):
            await client.ask("GET", name, status=404)


async def test_6_4_what_others_wrote_where_nothing_was_stays(tmp_path: Path) -> None:
    """6.4 The deletion was answered at once; what they have written since is a conflict, and nobody deletes it."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.ask("DELETE", "back/k", status=204)
        await client.flush_until_conflict("back/k")
        assert client.origin.data("bucket", "back/k") == b"theirs"


@pytest.mark.parametrize("honoured", [Honoured.YES, Honoured.IGNORED, Honoured.REFUSED])
async def test_6_4_a_deletion_deletes_nothing_of_others(tmp_path: Path, honoured: Honoured) -> None:
    """6.4 What they have written meanwhile stays; the client is told that somebody must decide."""
    async with a_client(tmp_path) as client:
        await client.learn()
        known = BucketCapabilities(
            True, True, 0.0, Conditions(honoured, honoured, honoured, client.gateway.app.services.clock.now())
        )
        await client.buffer.journal.change(lambda tx: tx.buckets.learn("bucket", known))
        await client.ask("PUT", "back/first", b"ours")
        client.origin.put("bucket", "back/first", b"theirs")
        async with client.flushing(conflicts=True):
            refused = await client.ask("DELETE", "back/first", status=409)
        assert b"<Code>OperationAborted</Code>" in refused.body
        assert client.origin.data("bucket", "back/first") == b"theirs"
        left = client.buffer.look(lambda tx: tx.writes.waiting(0, 10))
        assert [one.state for one in left] == [State.CONFLICT]


async def test_6_4_the_deletion_of_a_conflict_changes_nothing(tmp_path: Path) -> None:
    """6.4 409: what is there stays there, what is here stays here, and readable."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        async with client.flushing(conflicts=True):
            refused = await client.ask("DELETE", "back/k", status=409)
        assert b"<Code>OperationAborted</Code>" in refused.body
        assert client.origin.count(Operation.DELETE_OBJECT, key="back/k") == 0
        assert client.origin.data("bucket", "back/k") == b"theirs"
        assert (await client.ask("GET", "back/k")).body == b"ours"


async def test_7_8_what_the_origin_must_answer_waits_for_the_flush(tmp_path: Path) -> None:
    """7.8 Tags, versions, a LIST of versions: of what was acknowledged; 409 where a conflict is in the way."""
    async with a_client(tmp_path) as client:
        await client.learn()
        async with client.flushing():
            for question in ("back/k?tagging", "?versions"):
                await client.ask("PUT", "back/k", question.encode())
                answer = await call(client.gateway.app, "GET", f"/bucket/{question}")
                assert answer.headers["x-forebay-cache"] == "forwarded"
                assert client.origin.data("bucket", "back/k") == question.encode()
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        assert b"OperationAborted" in (await client.ask("GET", "back/k?tagging", status=409)).body


@pytest.mark.parametrize(
    ("method", "target", "waits"),
    [
        ("PUT", "", False),
        ("PUT", "?tagging", False),
        ("PUT", "?lifecycle&x-id=PutBucketLifecycleConfiguration", False),
        ("DELETE", "?cors", False),
        ("GET", "?tagging", False),
        ("OPTIONS", "", False),
        ("GET", "?versions", True),
        ("DELETE", "", True),
        ("DELETE", "?unknown", True),
        ("PUT", "?unknown", True),
        ("POST", "", True),
        ("POST", "?tagging", True),
        ("POST", "back/form?x", True),
    ],
)
async def test_7_8_what_is_about_the_objects_of_a_bucket_waits_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, target: str, *, waits: bool
) -> None:
    """7.8 What is about its settings does not, nor does CreateBucket. What is not known waits."""
    monkeypatch.setattr("gateway.operations.writeback.past_the_buffer.PATIENCE_SECONDS", 0.1)
    headers = {"content-type": "multipart/form-data; boundary=x"} if method == "POST" else {}
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/pending", b"x")
        before = len(client.origin.calls)
        answer = await call(client.gateway.app, method, f"/bucket{'/' * bool(target[:1].isalpha())}{target}", headers)
        assert (b"is not at the origin yet" in answer.body) == waits
        assert (len(client.origin.calls) == before) == waits


async def test_7_9_a_flush_is_the_gateways_own(tmp_path: Path) -> None:
    """7.9 Who may not write is refused before anything is acknowledged; later nobody's rights are asked for."""
    readers = Grant((Prefix("bucket"),), read_only=True)
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"x")
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"x"
        assert {one.signed_by for one in client.origin.calls} == {None}
    async with gateway_app(tmp_path / "readers", slots=SLOTS, writeback=True, grant=readers) as gateway:
        assert (await call(gateway.app, "PUT", "/bucket/back/k", body=b"x")).status == 403
        assert not gateway.origin.calls


async def test_8_4_writes_go_on_with_the_origin_away(tmp_path: Path) -> None:
    """8.4 And arrive when it is back."""
    async with a_client(tmp_path) as client:
        await client.learn()
        gone = away(client)
        await client.ask("PUT", "back/k", b"meanwhile")
        assert (await client.ask("GET", "back/k")).body == b"meanwhile"
        gone.times = 0
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"meanwhile"


async def test_8_5_nothing_is_deleted_while_the_buffer_cannot_be_used(tmp_path: Path) -> None:
    """8.5 503 in slots with write-back; other slots, and other requests, go on."""
    many = b"<Delete><Object><Key>back/k</Key></Object></Delete>"
    async with gateway_app(tmp_path, slots=SLOTS, buffer_closed=True) as gateway:
        for key in ("back/k", "through"):
            assert (await call(gateway.app, "PUT", f"/bucket/{key}", body=b"x")).status == 200
        assert (await call(gateway.app, "DELETE", "/bucket/back/k")).status == 503
        assert (await call(gateway.app, "POST", "/bucket?delete", {}, many)).status == 503
        assert (await call(gateway.app, "DELETE", "/bucket/through")).status == 204
        assert gateway.origin.data("bucket", "back/k") == b"x"


async def test_9_1_a_write_that_goes_through_says_why(tmp_path: Path) -> None:
    """9.1 Also where it fails; what is absorbed says nothing."""
    async with a_client(tmp_path) as client:
        outage = away(client)
        failed = await client.ask("PUT", "back/k", b"x", status=503)
        assert failed.headers["x-forebay-not-absorbed"] == "bucket-unknown"
        outage.times = 0
        for headers, reason in (
            ({}, "bucket-unknown"),
            ({"If-None-Match": "*"}, "condition"),
            ({"x-amz-tagging": "a=b"}, "header"),
            ({"x-amz-copy-source": "/bucket/back/0"}, "source-of-the-origin"),
        ):
            number = len(client.origin.buckets["bucket"].objects)
            answer = await client.ask("PUT", f"back/{number}", b"", headers)
            assert answer.headers["x-forebay-not-absorbed"] == reason
        assert "x-forebay-not-absorbed" not in (await client.ask("PUT", "back/k", b"x")).headers


async def test_9_4_what_is_pending_has_no_version(tmp_path: Path) -> None:
    """9.4 A question for a version is the origin's to answer, once it has the object."""
    async with a_client(tmp_path) as client:
        await client.learn()
        stored = await client.ask("PUT", "back/k", b"x")
        assert "x-amz-version-id" not in stored.headers
        assert "x-amz-version-id" not in (await client.ask("HEAD", "back/k")).headers
        async with client.flushing():
            await call(client.gateway.app, "GET", "/bucket/back/k?versionId=1")
        assert client.origin.data("bucket", "back/k") == b"x"


async def test_9_5_uploads_are_listed_by_our_ids(tmp_path: Path) -> None:
    """9.5 The origin's upload behind one of ours is not listed."""
    async with a_client(tmp_path) as client:
        upload_id = await client.create("back/m")
        listed = (await client.ask("GET", "?uploads")).body.decode()
        assert listed.count("<UploadId>") == 1
        assert f"<UploadId>{upload_id}</UploadId>" in listed
        [at_origin] = client.origin.buckets["bucket"].uploads
        assert at_origin not in listed


def presigned(method: str, target: str) -> str:
    """The target, signed in its query: what SDKs have moved there from the headers counts, too."""
    request = AWSRequest(method, f"http://{HOST}/bucket/{target}")
    S3SigV4QueryAuth(Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY), "s3", "us-east-1", 60).add_auth(request)
    return str(request.url).removeprefix(f"http://{HOST}/bucket/")


async def put_presigned(client: Client, method: str, target: str, body: bytes = b"", status: int = 200) -> Got:
    answer = await call(client.gateway.app, method, f"/bucket/{presigned(method, target)}", {}, body, sign=False)
    assert answer.status == status, answer.body
    return answer


async def test_4_7_headers_in_the_query_of_a_presigned_write_count_as_headers(tmp_path: Path) -> None:
    """4.7 4.5 PutObject, CreateMultipartUpload, UploadPart: absorbed with them, verified by them, or it says why."""
    async with a_client(tmp_path) as client:
        await client.learn()
        put = await put_presigned(client, "PUT", "back/a?x-amz-meta-Step=7&X-Amz-Storage-Class=STANDARD", b"x")
        assert put.headers["x-forebay-cache"] == "absorbed"
        assert (await client.ask("HEAD", "back/a")).headers["x-amz-meta-step"] == "7"
        judged = await put_presigned(client, "PUT", "back/b?x-amz-tagging=k%3Dv&x-amz-meta-a=1", b"x")
        assert judged.headers["x-forebay-not-absorbed"] == "header"
        wrong = base64.b64encode(bytes(4)).decode().replace("=", "%3D")
        await put_presigned(client, "PUT", f"back/a?x-amz-checksum-crc32={wrong}", b"other", status=400)
        created = await put_presigned(client, "POST", "back/c?uploads&x-amz-meta-step=8")
        upload_id = text_of(created.body, "UploadId") or ""
        crc = base64.b64encode(zlib.crc32(b"part").to_bytes(4, "big")).decode().replace("=", "%3D")
        part = f"back/c?partNumber=1&uploadId={upload_id}&x-amz-checksum-crc32={crc}&x-amz-sdk-checksum-algorithm=CRC32"
        sent = await put_presigned(client, "PUT", part, b"part")
        assert sent.headers["x-forebay-cache"] == "absorbed"
        await client.complete("back/c", upload_id, {1: sent.headers["etag"]})
        await client.flush()
        stored = client.origin.buckets["bucket"].objects
        assert [stored[name].headers["x-amz-meta-step"] for name in ("back/a", "back/c")] == ["7", "8"]
        twice = "back/a?x-amz-meta-step=1&x-amz-meta-step=2"
        assert (await client.ask("PUT", twice, b"x", status=501)).headers["x-forebay-not-absorbed"] == "header"
