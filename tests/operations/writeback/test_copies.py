"""Copies where the source, or the upload into which a part is copied, is here."""

from __future__ import annotations

import asyncio
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import md5, sha256
from pathlib import Path

import pytest

from gateway.policy.slots import Prefix
from gateway.s3.headers import format_http_date
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.telemetry import metrics
from gateway.writeback.journal.records import Part
from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.counting import on_count
from tests.support.memory_origin.faults import Answer, CutBody, Effect, Fault, Hold, Unreachable, on
from tests.support.slots import Slot, slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, with_a_client, with_client

SOURCE = {"x-amz-copy-source": "/bucket/back/a"}
METADATA = {"x-amz-meta-step": "1", "Content-Type": "a/b"}


@with_a_client()
async def test_a_copy_is_there_at_once_and_at_the_origin_later(client: Client) -> None:
    """With the ETag that was answered and the source's metadata; the source may go meanwhile."""
    await client.learn()
    await client.ask("PUT", "back/a", b"content", METADATA)
    answer = await client.ask("PUT", "back/b", headers=SOURCE)
    assert answer.headers["x-forebay-cache"] == "absorbed"
    await client.ask("PUT", "back/a", b"overwritten")
    assert (await client.ask("GET", "back/b")).body == b"content"
    await client.flush()
    stored = client.origin.buckets["bucket"].object("back/b")
    assert client.origin.data("bucket", "back/b") == b"content"
    assert (stored.etag, stored.headers["x-amz-meta-step"]) == (text_of(answer.body, "ETag"), "1")
    assert client.origin.data("bucket", "back/a") == b"overwritten"
    assert client.origin.count(Operation.COPY_OBJECT) == 0


@with_a_client()
async def test_a_copy_whose_source_reaches_the_origin_meanwhile_is_made_there(client: Client) -> None:
    """2.4 Before, while and after it is flushed a copy sees it."""
    await client.learn()
    await client.ask("PUT", "back/a", b"content", METADATA)
    resume, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.HEAD_OBJECT, key="back/b"), Hold(resume, reached))
    copying = asyncio.create_task(client.ask("PUT", "back/b", headers=SOURCE))
    await reached.wait()
    await client.flush()
    resume.set()
    assert (await copying).headers["x-forebay-cache"] == "forwarded"
    assert client.origin.data("bucket", "back/b") == b"content"
    assert (await client.ask("GET", "back/b")).body == b"content"


@pytest.mark.parametrize("slot", ["back", "scratch"])
@with_a_client(slots=[*SLOTS, Slot("scratch", Prefix.parse("s3://bucket/scratch/"), write="scratch")])
async def test_a_copy_is_of_what_overwrites_its_source_meanwhile(
    client: Client, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the first version are gone, and the origin has neither: both are made here, by their conditions."""
    await client.learn()
    first = (await client.ask("PUT", f"{slot}/a", b"first")).headers["etag"]
    parts, bodies = client.buffer.journal.parts, iter([b"second", b"third"])

    async def overwritten(write_id: int) -> Sequence[Part]:
        for body in bodies:
            await client.ask("PUT", f"{slot}/a", body, {"x-amz-meta-of": body.decode()})
            break
        return await parts(write_id)

    monkeypatch.setattr(client.buffer.journal, "parts", overwritten)
    source = {"x-amz-copy-source": f"/bucket/{slot}/a"}
    answer = await client.ask("PUT", f"{slot}/b", headers=source)
    assert answer.headers["x-forebay-cache"] == "absorbed"
    got = await client.ask("GET", f"{slot}/b")
    assert (got.body, got.headers["x-amz-meta-of"]) == (b"third", "third")
    assert client.origin.count(Operation.COPY_OBJECT) == 0
    await client.ask("PUT", f"{slot}/b", headers={**source, "x-amz-copy-source-if-match": first}, status=412)


@with_a_client()
async def test_a_copy_of_an_upload_is_made_of_its_parts(client: Client) -> None:
    """No byte is staged again; what the origin has of the source's upload is not taken for the copy's."""
    upload_id = await client.create("back/a", METADATA)
    bodies = {number: os.urandom(PART_BYTES + number) for number in (1, 2)}
    etags = {number: await client.part("back/a", upload_id, number, body) for number, body in bodies.items()}
    await client.complete("back/a", upload_id, etags)
    answer = await client.ask("PUT", "back/b", headers=SOURCE)
    assert len(list(client.buffer.staging.names())) == 2
    await client.flush()
    bucket = client.origin.buckets["bucket"]
    assert bucket.object("back/b").etag == bucket.object("back/a").etag == text_of(answer.body, "ETag")
    assert client.origin.data("bucket", "back/b") == bodies[1] + bodies[2]
    assert not bucket.uploads


@with_a_client()
async def test_metadata_is_copied_or_replaced(client: Client) -> None:
    """As the directive says; a copy onto itself must change something."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x", METADATA)
    replaced = {**SOURCE, "x-amz-metadata-directive": "REPLACE", "x-amz-meta-step": "2"}
    await client.ask("PUT", "back/b", headers=replaced)
    assert (await client.ask("HEAD", "back/b")).headers["x-amz-meta-step"] == "2"
    assert (await client.ask("HEAD", "back/b")).headers["content-type"] == "binary/octet-stream"
    assert b"InvalidRequest" in (await client.ask("PUT", "back/a", headers=SOURCE, status=400)).body
    await client.ask("PUT", "back/a", headers={**replaced, "x-amz-meta-step": "3"})
    assert (await client.ask("HEAD", "back/a")).headers["x-amz-meta-step"] == "3"
    wrong = {**SOURCE, "x-amz-metadata-directive": "PERHAPS"}
    assert b"InvalidArgument" in (await client.ask("PUT", "back/b", headers=wrong, status=400)).body
    await client.flush()
    assert client.origin.data("bucket", "back/a") == client.origin.data("bucket", "back/b") == b"x"


@pytest.mark.parametrize("directive", ["COPY", "REPLACE"])
@with_a_client()
async def test_tags_are_copied_whatever_becomes_of_the_metadata(client: Client, directive: str) -> None:
    """They have a directive of their own."""
    upload_id = await client.create("back/a", {"x-amz-tagging": "a=1&b=2"})
    etags = {1: await client.part("back/a", upload_id, 1, b"x")}
    await client.complete("back/a", upload_id, etags)
    await client.ask("PUT", "back/b", headers={**SOURCE, "x-amz-metadata-directive": directive})
    copy = client.pending("back/b")
    assert copy is not None
    assert copy.spec.headers["x-amz-tagging"] == "a=1&b=2"
    assert (await client.ask("HEAD", "back/b")).headers["x-amz-tagging-count"] == "2"


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ({"x-amz-copy-source-if-match": '"other"'}, 412),
        ({"x-amz-copy-source-if-none-match": "*"}, 412),
        ({"x-amz-copy-source-if-modified-since": "Thu, 01 Jan 2015 00:00:00 GMT"}, 200),
    ],
    ids=str,
)
@with_a_client()
async def test_conditions_on_the_source_are_judged_here(client: Client, condition: dict[str, str], status: int) -> None:
    """By the state that was acknowledged last."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    await client.ask("PUT", "back/b", headers={**SOURCE, **condition}, status=status)
    assert (client.pending("back/b") is not None) == (status == 200)


@pytest.mark.parametrize("more", [{"x-amz-acl": "private"}, {"x-amz-tagging-directive": "REPLACE"}], ids=str)
@with_a_client()
async def test_what_the_origin_must_judge_waits_for_the_source(client: Client, more: dict[str, str]) -> None:
    """Rights and tags: the source is flushed, and the origin copies."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    async with client.flushing():
        answer = await client.ask("PUT", "back/b", headers={**SOURCE, **more})
    assert answer.headers["x-forebay-cache"] == "forwarded"
    assert client.origin.data("bucket", "back/b") == b"x"


@with_a_client()
async def test_a_deleted_source_is_no_source(client: Client) -> None:
    """The tombstone is settled first: then the origin answers 404."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    async with client.flushing():
        await client.ask("DELETE", "back/a", status=204)
        await client.ask("PUT", "back/b", headers=SOURCE, status=404)


def parts_of(client: Client, upload_id: str) -> list[Part]:
    """What of an upload is here."""
    upload = client.buffer.look(lambda tx: tx.uploads.upload(upload_id))
    assert upload is not None
    return client.buffer.look(lambda tx: list(tx.parts.of(upload.id)))


async def copied(
    client: Client,
    upload_id: str,
    number: int,
    source: str,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    **named: str,
) -> tuple[str, Got]:
    """The part's ETag, and the answer."""
    given = {**(headers or {}), **{name.replace("_", "-"): value for name, value in named.items()}}
    target = f"back/m?partNumber={number}&uploadId={upload_id}"
    answer = await client.ask("PUT", target, headers={"x-amz-copy-source": f"bucket/{source}", **given}, status=status)
    return text_of(answer.body, "ETag") or "", answer


@with_a_client()
async def test_parts_are_copied_by_the_origin_and_uploaded_here(client: Client) -> None:
    """Of one upload some, by the whole or by a range; byte-equal in the end, with the ETag that was answered."""
    await client.learn()
    source = os.urandom(PART_BYTES + 100)
    client.origin.put("bucket", "source", source)
    upload_id = await client.create("back/m")
    own = os.urandom(PART_BYTES)
    etags = {1: await client.part("back/m", upload_id, 1, own)}
    etags[2], _ = await copied(client, upload_id, 2, "source")
    etags[3], _ = await copied(client, upload_id, 3, "source", x_amz_copy_source_range="bytes=10-29")
    listed = await client.ask("GET", f"back/m?uploadId={upload_id}")
    assert [b"<Size>%d</Size>" % size in listed.body for size in (PART_BYTES, PART_BYTES + 100, 20)] == [True] * 3
    done = await client.complete("back/m", upload_id, etags)
    assert client.origin.data("bucket", "back/m") == own + source + source[10:30]
    assert client.origin.buckets["bucket"].object("back/m").etag == text_of(done.body, "ETag")
    assert not client.origin.buckets["bucket"].uploads


def away(client: Client) -> Fault:
    return client.origin.inject(lambda _: True, Unreachable(), times=None)


async def pending_source(client: Client, name: str = "back/source") -> bytes:
    """A source in two parts that only this node has; its bytes."""
    upload_id = await client.create(name)
    bodies = {1: os.urandom(PART_BYTES), 2: os.urandom(1000)}
    etags = {number: await client.part(name, upload_id, number, body) for number, body in bodies.items()}
    await client.complete(name, upload_id, etags)
    return bodies[1] + bodies[2]


@with_a_client()
async def test_what_is_pending_is_copied_here(client: Client) -> None:
    """2.4 By the whole and by a range across its parts, with the origin away from the first request to the last."""
    await client.learn()
    outage = away(client)
    source = await pending_source(client)
    upload_id = await client.create("back/m")
    first, last = PART_BYTES - 10, PART_BYTES + 19
    whole, answer = await copied(client, upload_id, 1, "back/source")
    assert (whole, answer.headers["x-forebay-cache"]) == (f'"{md5(source).hexdigest()}"', "absorbed")
    part, _ = await copied(client, upload_id, 2, "back/source", x_amz_copy_source_range=f"bytes={first}-{last}")
    done = await client.complete("back/m", upload_id, {1: whole, 2: part})
    assert done.headers["x-forebay-cache"] == "absorbed"
    content = source + source[first : last + 1]
    assert (await client.ask("GET", "back/m")).body == content
    outage.times = 0
    await client.flush()
    assert client.origin.data("bucket", "back/m") == content
    assert client.origin.buckets["bucket"].object("back/m").etag == text_of(done.body, "ETag")


@with_a_client()
async def test_a_copied_part_takes_the_place_of_another(client: Client) -> None:
    """As one that is uploaded does; nothing of the one before is left."""
    await client.learn()
    await client.ask("PUT", "back/source", b"pending")
    upload_id = await client.create("back/m")
    await client.part("back/m", upload_id, 1, b"here, and not sent yet")
    etag, _ = await copied(client, upload_id, 1, "back/source")
    assert len(list(client.buffer.staging.names())) == 2
    await client.complete("back/m", upload_id, {1: etag})
    await client.flush()
    assert client.origin.data("bucket", "back/m") == b"pending"


@with_a_client()
async def test_conditions_on_a_pending_source_are_judged_here(client: Client) -> None:
    """By its ETag and the time of its acknowledgement: every failure is a 412, and no part is stored."""
    await client.learn()
    etag = (await client.ask("PUT", "back/source", b"pending")).headers["etag"]
    upload_id = await client.create("back/m")
    away(client)
    past, future = format_http_date(1.0), format_http_date(4_000_000_000.0)
    name = "x-amz-copy-source-if-"
    for failing in (("match", '"other"'), ("none-match", etag), ("unmodified-since", past)):
        _, refused = await copied(client, upload_id, 1, "back/source", 412, {name + failing[0]: failing[1]})
        assert b"<Code>PreconditionFailed</Code>" in refused.body
    assert parts_of(client, upload_id) == []
    for number, holding in enumerate((("match", etag), ("none-match", '"other"'), ("unmodified-since", future)), 1):
        await copied(client, upload_id, number, "back/source", headers={name + holding[0]: holding[1]})


@with_a_client()
async def test_what_is_no_part_of_the_source_is_refused(client: Client) -> None:
    """A range behind its end, a source that is deleted here, an upload that is over: as S3 says it, at once."""
    await client.learn()
    await client.ask("PUT", "back/first", b"pending")  # over what the origin has
    upload_id = await client.create("back/m")
    away(client)
    for asked in ("bytes=0-7", "bytes=3-", "bytes=3-1"):
        _, refused = await copied(client, upload_id, 1, "back/first", 400, x_amz_copy_source_range=asked)
        assert b"<Code>InvalidArgument</Code>" in refused.body
    deleting = asyncio.create_task(call(client.gateway.app, "DELETE", "/bucket/back/first"))
    await until(lambda: (last := client.pending("back/first")) is not None and last.deleted)
    _, refused = await copied(client, upload_id, 1, "back/first", 404)
    assert b"<Code>NoSuchKey</Code>" in refused.body
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
    _, refused = await copied(client, upload_id, 1, "back/first", 404)
    assert b"<Code>NoSuchUpload</Code>" in refused.body
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)


@with_a_client()
async def test_the_checksum_that_create_has_announced_is_made(client: Client) -> None:
    """As S3 makes it: in the answer and in ListParts, and Complete takes it."""
    await client.learn()
    source = await pending_source(client)
    upload_id = await client.create("back/m", {"x-amz-checksum-algorithm": "SHA256"})
    etag, answer = await copied(client, upload_id, 1, "back/source")
    checksum = b64encode(sha256(source).digest()).decode()
    assert text_of(answer.body, "ChecksumSHA256") == checksum
    assert checksum.encode() in (await client.ask("GET", f"back/m?uploadId={upload_id}")).body
    done = await client.complete("back/m", upload_id, {1: etag})
    assert (text_of(done.body, "ChecksumSHA256") or "").endswith("-1")
    await client.flush()
    assert client.origin.data("bucket", "back/m") == source


@pytest.mark.parametrize("is_cached", [True, False])
@with_a_client()
async def test_an_upload_that_the_origin_does_not_have_takes_copies_here(client: Client, *, is_cached: bool) -> None:
    """Begun while it was away: the source is read as by everybody's GET, from the cache where it lies there."""
    await client.learn()
    source = os.urandom(PART_BYTES + 100)
    theirs = client.origin.put("bucket", "source", source)
    if is_cached:
        assert (await client.ask("GET", "source")).body == source
        client.origin.inject(on(Operation.GET_OBJECT), Unreachable(), times=None)
    outage = away(client)
    upload_id = await client.create("back/m")
    _, refused = await copied(client, upload_id, 1, "source", 503)
    outage.times = 0
    whole, answer = await copied(client, upload_id, 1, "source", x_amz_copy_source_if_match=theirs)
    assert (whole, answer.headers["x-forebay-cache"]) == (f'"{md5(source).hexdigest()}"', "absorbed")
    part, _ = await copied(client, upload_id, 2, "source", x_amz_copy_source_range="bytes=10-29")
    _, refused = await copied(client, upload_id, 3, "nothing", 404)
    assert b"<Code>NoSuchKey</Code>" in refused.body
    assert client.origin.count(Operation.UPLOAD_PART_COPY) == 0
    await client.complete("back/m", upload_id, {1: whole, 2: part})
    await client.flush()
    assert client.origin.data("bucket", "back/m") == source + source[10:30]


@with_a_client()
async def test_a_part_is_of_one_version_of_its_source(client: Client) -> None:
    """Where others change it between the look and the bytes: an error that is tried again, and nothing is kept."""
    await client.learn()
    client.origin.put("bucket", "source", os.urandom(100_000))
    outage = away(client)
    upload_id = await client.create("back/m")
    outage.times = 0
    reached, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.GET_OBJECT), Hold(resume, reached))
    copying = asyncio.create_task(copied(client, upload_id, 1, "source", 503))
    await reached.wait()
    client.origin.put("bucket", "source", b"another")
    resume.set()
    await copying
    assert list(client.buffer.staging.names()) == []
    etag, _ = await copied(client, upload_id, 1, "source")
    assert etag == f'"{md5(b"another").hexdigest()}"'


@pytest.mark.parametrize("effect", [CutBody(10), Unreachable()], ids=str)
@with_a_client()
async def test_a_source_that_breaks_off_leaves_nothing(client: Client, effect: Effect) -> None:
    """Neither file nor room; then it works."""
    await client.learn()
    client.origin.put("bucket", "source", os.urandom(PART_BYTES))
    outage = away(client)
    upload_id = await client.create("back/m")
    outage.times = 0
    broken = client.origin.inject(on(Operation.GET_OBJECT), effect, times=None)
    await copied(client, upload_id, 1, "source", 503)
    broken.times = 0
    assert list(client.buffer.staging.names()) == []
    bounds = client.buffer.bounds.of("back")
    assert bounds is not None
    assert bounds.used_bytes() == 0
    await copied(client, upload_id, 1, "source")


def test_without_room_the_origin_copies_what_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has it. Into an upload that it does not have it cannot: SlowDown, with the time to wait."""
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_BEFORE_THROUGH_SECONDS", 0.03)
    slots = [slot_with(SLOTS[0], buffer_bytes=100_000)]
    full = asyncio.Event()
    on_count(monkeypatch, metrics.WRITEBACK_THROUGH, lambda _, __, reason: full.set() if reason == "full" else None)

    async def scenario(client: Client) -> None:
        await client.learn()
        upload_id = await client.create("back/m")
        outage = away(client)
        unknown = await client.create("back/m")
        content = os.urandom(60_000)
        await client.ask("PUT", "back/source", content)
        _, refused = await copied(client, unknown, 1, "back/source", 503)
        assert b"<Code>SlowDown</Code>" in refused.body
        assert int(refused.headers["retry-after"]) >= 1
        outage.times = 0
        client.origin.inject(on(Operation.PUT_OBJECT, key="back/source"), Hold(full))
        async with client.flushing():
            etag, answer = await copied(client, upload_id, 1, "back/source")
        assert (answer.headers["x-forebay-cache"], answer.headers["x-forebay-not-absorbed"]) == ("forwarded", "full")
        await client.complete("back/m", upload_id, {1: etag})
        assert client.origin.data("bucket", "back/m") == content

    with_client(tmp_path, scenario, slots)


@with_a_client()
async def test_errors_of_the_copy_are_the_origins(client: Client) -> None:
    """No such source, a 5xx, a part on its way: an error, and nothing is noted; then it works."""
    await client.learn()
    client.origin.put("bucket", "source", b"content")
    upload_id = await client.create("back/m")
    _, missing = await copied(client, upload_id, 1, "nothing", 404)
    assert b"NoSuchKey" in missing.body
    client.origin.inject(on(Operation.UPLOAD_PART_COPY), Answer(503, "SlowDown"))
    await copied(client, upload_id, 1, "source", 503)
    client.origin.inject(on(Operation.LIST_PARTS), Unreachable())
    await copied(client, upload_id, 1, "source", 503)
    assert parts_of(client, upload_id) == []
    await client.part("back/m", upload_id, 2, b"here, and not sent yet")
    _, overtaking = await copied(client, upload_id, 2, "source", 503)
    assert b"SlowDown" in overtaking.body
    etag, _ = await copied(client, upload_id, 1, "source")
    await client.complete("back/m", upload_id, {1: etag})
    assert client.origin.data("bucket", "back/m") == b"content"


@with_a_client()
async def test_an_upload_that_the_origin_does_not_have_takes_no_copies_that_only_it_can_make(client: Client) -> None:
    """Begun while it was away: told so, with what to do."""
    await client.learn()
    client.origin.put("bucket", "source", b"content")
    outage = away(client)
    upload_id = await client.create("back/m")
    outage.times = 0
    _, refused = await copied(client, upload_id, 1, "source", 503, x_amz_source_expected_bucket_owner="111122223333")
    assert b"begin another" in refused.body
    assert refused.headers["x-forebay-not-absorbed"] == "header"
