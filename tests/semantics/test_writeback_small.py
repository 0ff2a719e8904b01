"""`write = "back"` in slots that may be behind the origin: writes that wait for this node's disk alone: clause 6.2."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.s3.requests import Operation
from gateway.writeback.journal.buckets import Conditions, Honoured
from gateway.writeback.journal.records import State, Write
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import Answer, Hold, Unreachable, on
from tests.support.memory_origin.store import StoredObject
from tests.support.slots import Slot, slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import SLOTS, Client, a_client, with_a_client

BEHIND: Sequence[Slot] = [slot_with(SLOTS[0], consistency="ttl", metadata_ttl_seconds=60.0)]
STRICT: Sequence[Slot] = [slot_with(SLOTS[0], consistency="strict")]
IMMUTABLE: Sequence[Slot] = [slot_with(SLOTS[0], consistency="immutable")]
LONG_AGO = 3600.0


def asked(client: Client, name: str = "back/k") -> list[Operation]:
    """What the bucket was asked about a key."""
    return [one.operation for one in client.origin.calls if one.key == name]


def pending(client: Client, name: str = "back/k") -> Write:
    found = client.pending(name)
    assert found is not None
    return found


def put_by_others(client: Client, data: bytes, age_seconds: float, etag: str = "") -> None:
    """Have others have written the key so long ago."""
    etag = etag or f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
    written = client.gateway.app.services.clock.now() - age_seconds
    client.origin.buckets["bucket"].put(StoredObject("back/k", BytesContent(data), etag, written))


async def hold_heads(client: Client) -> asyncio.Event:
    """Have the bucket not answer what it has, until the event is set."""
    released = asyncio.Event()
    client.origin.inject(on(Operation.HEAD_OBJECT), Hold(released), times=None)
    return released


@pytest.mark.parametrize("slots", [BEHIND, IMMUTABLE], ids=["ttl", "immutable"])
async def test_6_2_the_acknowledgement_waits_for_the_disk_alone(tmp_path: Path, slots: Sequence[Slot]) -> None:
    """6.2 The bucket does not say what it has, and the write is acknowledged; another slot waits a second for it."""
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        released = await hold_heads(client)
        answer = await client.ask("PUT", "back/k", b"ours")
        assert answer.headers["x-forebay-cache"] == "absorbed"
        assert not pending(client).expected.known
        assert len(client.gateway.app.services.unanswered) == 1
        released.set()
        await until(lambda: not client.gateway.app.services.unanswered)
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"ours"
        assert asked(client)[:2] == [Operation.HEAD_OBJECT, Operation.PUT_OBJECT]


@pytest.mark.parametrize("case", ["strict", "not honoured"])
async def test_6_2_elsewhere_it_waits_for_the_bucket(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6.2 In a strict slot, and where the bucket is not known to honour conditions; here for more than a second."""
    monkeypatch.setattr("gateway.operations.writeback.put_object.ANSWER_SECONDS_MAX", 600.0)
    async with a_client(tmp_path, STRICT if case == "strict" else BEHIND) as client:
        await client.learn()
        if case == "not honoured":
            ignored = Conditions(Honoured.IGNORED, learned_at=client.gateway.app.services.clock.now())
            await client.buffer.journal.change(lambda tx: tx.buckets.amend("bucket", conditions=ignored))
        reached = asyncio.Event()
        released = asyncio.Event()
        client.origin.inject(on(Operation.HEAD_OBJECT, key="back/k"), Hold(released, reached), times=None)
        asking = asyncio.create_task(client.ask("PUT", "back/k", b"ours"))
        await reached.wait()
        await until(lambda: len(list(client.buffer.staging.names())) == 1)
        assert client.pending("back/k") is None
        released.set()
        await asking
        assert pending(client).expected.known


@with_a_client(BEHIND)
async def test_6_2_what_is_remembered_is_not_asked_for(client: Client) -> None:
    """6.2 A GET has told the version, and an own write what it has put there: then one request brings the next one."""
    await client.learn()
    client.origin.put("bucket", "back/k", b"before")
    await client.ask("GET", "back/k")
    await client.gateway.catalog.settle()
    del client.origin.calls[:]
    await client.ask("PUT", "back/k", b"ours")
    assert asked(client) == []
    await client.flush()
    assert client.origin.data("bucket", "back/k") == b"ours"
    assert asked(client)[0] is Operation.PUT_OBJECT
    await client.gateway.catalog.settle()
    del client.origin.calls[:]
    await client.ask("PUT", "back/k", b"again")
    assert asked(client) == []
    await client.flush()
    assert client.origin.data("bucket", "back/k") == b"again"
    assert asked(client)[0] is Operation.PUT_OBJECT


@pytest.mark.parametrize("is_asked", [False, True])
async def test_6_2_what_others_delete_after_the_write_is_a_conflict_only_for_who_knew_the_version(
    tmp_path: Path, is_asked: bool
) -> None:
    """6.2 An absence has no age: after a remembered version the flush puts the object there again."""
    async with a_client(tmp_path, STRICT if is_asked else BEHIND) as client:
        await client.learn()
        client.origin.put("bucket", "back/k", b"before")
        await client.ask("GET", "back/k")
        await client.gateway.catalog.settle()
        await client.ask("PUT", "back/k", b"ours")
        client.origin.buckets["bucket"].remove("back/k")
        await client.flush_startable()
        if is_asked:
            assert pending(client).state is State.CONFLICT
        else:
            assert client.origin.data("bucket", "back/k") == b"ours"


@with_a_client(BEHIND)
async def test_6_2_what_a_listing_names_or_leaves_out_is_not_asked_for(client: Client) -> None:
    """6.2 An absence is remembered for a write whatever `negative_ttl` says; 6.4: what is deleted is over at once."""
    await client.learn()
    client.origin.put("bucket", "back/k", b"before")
    await client.ask("GET", "?list-type=2&prefix=back%2F")
    await client.gateway.catalog.settle()
    del client.origin.calls[:]
    for name in ("back/k", "back/new", "back/gone"):
        await client.ask("PUT", name, b"ours")
    assert client.origin.calls == []
    with_nothing = client.origin.inject(lambda _: True, Unreachable(), times=None)
    await client.ask("DELETE", "back/gone", status=204)
    client.origin.faults.remove(with_nothing)
    await client.flush()
    assert client.origin.data("bucket", "back/k") == client.origin.data("bucket", "back/new") == b"ours"
    assert "back/gone" not in client.origin.buckets["bucket"].objects
    assert [asked(client, name)[0] for name in ("back/k", "back/new")] == [Operation.PUT_OBJECT] * 2


@pytest.mark.parametrize("knows", [True, False], ids=["remembered", "unknown"])
@pytest.mark.parametrize("theirs_seconds", [-LONG_AGO, -1.0, 1.0], ids=["long before", "just before", "after"])
async def test_6_2_nothing_that_others_write_afterwards_is_overwritten(
    tmp_path: Path, theirs_seconds: float, *, knows: bool
) -> None:
    """6.2 Whatever is remembered, also if they come while the write is acknowledged and nothing is known yet."""
    async with a_client(tmp_path, BEHIND) as client:
        await client.learn()
        put_by_others(client, b"before", 2 * LONG_AGO)
        if knows:
            await client.ask("GET", "back/k")
            await client.gateway.catalog.settle()
        else:
            await hold_heads(client)
        if theirs_seconds < 0:
            put_by_others(client, b"theirs", -theirs_seconds)
        await client.ask("PUT", "back/k", b"ours")
        if theirs_seconds > 0:
            client.origin.put("bucket", "back/k", b"theirs")
        client.origin.faults.clear()
        if theirs_seconds == -LONG_AGO:
            await client.flush()
            assert client.origin.data("bucket", "back/k") == b"ours"
            return
        await client.flush_until_conflict("back/k")
        assert client.origin.data("bucket", "back/k") == b"theirs"
        assert (await client.ask("GET", "back/k")).body == b"ours"


@pytest.mark.parametrize("theirs", ["none", "before", "after"])
async def test_6_4_a_deletion_waits_where_nobody_knows_what_the_bucket_has(tmp_path: Path, theirs: str) -> None:
    """6.4 It is gone here at once, and answered when the bucket has nothing of it; what others have written stays."""
    async with a_client(tmp_path, BEHIND) as client:
        await client.learn()
        if theirs == "before":
            put_by_others(client, b"theirs", LONG_AGO)
        await hold_heads(client)
        await client.ask("PUT", "back/k", b"ours")
        if theirs == "after":
            client.origin.put("bucket", "back/k", b"theirs")
        client.origin.faults.clear()
        client.origin.inject(lambda _: True, Unreachable(), times=None)
        status = 409 if theirs == "after" else 204
        deleting = asyncio.create_task(client.ask("DELETE", "back/k", status=status))
        await until(lambda: pending(client).deleted)
        await client.ask("GET", "back/k", status=404)
        assert not deleting.done()
        client.origin.faults.clear()
        async with client.flushing(conflicts=True):
            await deleting
        left = client.origin.buckets["bucket"].objects.get("back/k")
        assert (left is not None) is (theirs == "after")
        assert Operation.PUT_OBJECT not in asked(client)


@with_a_client(BEHIND)
async def test_6_2_a_late_answer_is_not_believed(client: Client) -> None:
    """6.2 It may be about what others wrote after the acknowledgement."""
    await client.learn()
    released = await hold_heads(client)
    await client.ask("PUT", "back/k", b"ours")
    client.origin.put("bucket", "back/k", b"theirs")
    released.set()
    await until(lambda: not client.gateway.app.services.unanswered)
    await client.flush_until_conflict("back/k")
    assert client.origin.data("bucket", "back/k") == b"theirs"


@with_a_client(BEHIND)
async def test_6_2_an_object_of_parts_that_was_listed_is_overwritten(client: Client) -> None:
    """6.2 Its date says when its upload began; a listing of long ago shows that it was there before the write."""
    await client.learn()
    put_by_others(client, b"before", LONG_AGO, '"0123456789abcdef0123456789abcdef-2"')
    await client.ask("GET", "?list-type=2&prefix=back%2F")
    await client.gateway.catalog.settle()
    await client.ask("PUT", "back/k", b"ours")
    await client.flush()
    assert client.origin.data("bucket", "back/k") == b"ours"


@with_a_client(BEHIND)
async def test_6_2_an_origin_that_is_away_keeps_no_write_waiting_and_loses_none(client: Client) -> None:
    """6.2 A write of a new key is there when the origin is back, and one of what others wrote meanwhile is kept."""
    await client.learn()
    away = client.origin.inject(lambda _: True, Unreachable(), times=None)
    for name in ("back/new", "back/theirs"):
        assert (await client.ask("PUT", name, b"ours")).headers["x-forebay-cache"] == "absorbed"
    client.origin.put("bucket", "back/theirs", b"theirs")
    client.origin.faults.remove(away)
    await client.flush_until_conflict("back/theirs")
    await client.flush_startable()
    assert client.origin.data("bucket", "back/new") == b"ours"
    assert client.origin.data("bucket", "back/theirs") == b"theirs"


@with_a_client(BEHIND)
async def test_4_7_a_late_refusal_tells_that_the_gateway_may_not_look(client: Client) -> None:
    """4.7 The write is acknowledged; the next one goes through, and its client is told."""
    await client.learn()
    released = await hold_heads(client)
    client.origin.inject(on(Operation.HEAD_OBJECT), Answer(403, "AccessDenied"), times=None)
    await client.ask("PUT", "back/k", b"ours")
    released.set()
    await until(lambda: not _may_look(client))
    answer = await client.ask("PUT", "back/other", b"x")
    assert answer.headers["x-forebay-not-absorbed"] == "bucket-unreadable"


def _may_look(client: Client) -> bool:
    known = client.buffer.look(lambda tx: tx.buckets.capabilities("bucket"))
    return known is not None and known.may_look


@with_a_client(BEHIND)
async def test_6_2_late_questions_are_few_and_end_with_the_worker(client: Client, monkeypatch: Any) -> None:
    """6.2 With too many under way, the origin is not asked; none of them outlives the worker."""
    monkeypatch.setattr("gateway.operations.writeback.put_object.UNANSWERED_MAX", 2)
    await client.learn()
    await hold_heads(client)
    for number in range(4):
        await client.ask("PUT", f"back/{number}", b"ours")
    services = client.gateway.app.services
    assert len(services.unanswered) == 2
    left = list(services.unanswered)
    await services.close()
    assert all(one.done() for one in left)


@pytest.mark.parametrize("acl", ["private", "bucket-owner-full-control", "public-read"])
async def test_4_7_an_acl_that_the_bucket_has_taken_is_absorbed_and_sent(tmp_path: Path, acl: str) -> None:
    """4.7 The first PutObject with it goes through; the flush of later ones sends it, of uploads too."""
    async with a_client(tmp_path, BEHIND) as client:
        await client.learn()
        headers = {"x-amz-acl": acl}
        first = await client.ask("PUT", "back/first", b"x", headers)
        assert first.headers["x-forebay-not-absorbed"] == "acl"
        assert (await client.ask("PUT", "back/k", b"x", headers)).headers["x-forebay-cache"] == "absorbed"
        shown = await client.ask("GET", "back/k")
        assert "x-amz-acl" not in shown.headers
        other = await client.ask("PUT", "back/o", b"x", {"x-amz-acl": "bucket-owner-read"})
        assert other.headers["x-forebay-not-absorbed"] == "acl"
        with_away = client.origin.inject(lambda _: True, Unreachable(), times=None)
        upload_id = await client.create("back/parts", headers)
        client.origin.faults.remove(with_away)
        etag = await client.part("back/parts", upload_id, 1, b"part")
        await client.complete("back/parts", upload_id, {1: etag})
        del client.origin.calls[:]
        await client.flush()
        sent = [one for one in client.origin.calls if one.key in ("back/k", "back/parts")]
        with_acl = {one.operation for one in sent if one.headers.get("x-amz-acl") == acl}
        assert with_acl == {Operation.PUT_OBJECT, Operation.CREATE_MULTIPART_UPLOAD}


@with_a_client(BEHIND)
async def test_4_7_an_acl_that_the_bucket_refuses_is_refused_as_it_comes(client: Client) -> None:
    """4.7 Each time; one that was taken before and is refused at the flush, or written through, goes through again."""
    await client.learn()
    headers, code = {"x-amz-acl": "private"}, "AccessControlListNotSupported"
    refusing = client.origin.inject(on(Operation.PUT_OBJECT), Answer(400, code), times=None)
    for _ in range(2):
        answer = await client.ask("PUT", "back/k", b"x", headers, status=400)
        assert code.encode() in answer.body
    assert client.buffer.look(lambda tx: tx.counts()) == (0, 0)
    client.origin.faults.remove(refusing)
    await client.ask("PUT", "back/k", b"x", headers)
    assert (await client.ask("PUT", "back/k", b"y", headers)).headers["x-forebay-cache"] == "absorbed"
    client.origin.inject(on(Operation.PUT_OBJECT), Answer(400, code), times=None)
    async with client.flushing():
        await until(lambda: client.buffer.look(lambda tx: _is_forgotten(tx)))
    assert (await client.ask("PUT", "back/l", b"x", headers, status=400)).headers["x-forebay-not-absorbed"]
    assert (await client.ask("GET", "back/k")).body == b"y"


@pytest.mark.parametrize("name", ["back/k", "back/k//k"])
async def test_4_7_what_the_flush_learns_of_an_acl_says_nothing_of_writes_without_it(tmp_path: Path, name: str) -> None:
    """4.7 5.12 A refused ACL holds up no write without it, of the same key or of one like it."""
    async with a_client(tmp_path, BEHIND) as client:
        await client.learn()
        headers, code = {"x-amz-acl": "public-read"}, "AccessControlListNotSupported"
        await client.ask("PUT", "back/taken", b"x", headers)
        await client.ask("PUT", name, b"with ACL", headers)
        client.origin.inject(lambda call: "x-amz-acl" in call.headers, Answer(400, code), times=None)
        async with client.flushing():
            await until(lambda: client.buffer.look(lambda tx: _is_forgotten(tx)))
        for one in (name, f"{name}-like"):
            answer = await client.ask("PUT", one, b"without ACL")
            assert answer.headers["x-forebay-cache"] == "absorbed"
        await client.flush()
        assert client.origin.data("bucket", name) == b"without ACL"


@with_a_client(BEHIND)
async def test_5_12_a_key_that_is_refused_whatever_its_class_is_asked_about(client: Client) -> None:
    """5.12 Also if the bucket takes that class of other keys."""
    await client.learn()
    headers = {"x-amz-storage-class": "STANDARD_IA"}
    await client.ask("PUT", "back/a", b"x", headers)
    await client.ask("PUT", "back/k//1", b"x", headers)
    client.origin.inject(lambda call: "//" in (call.key or ""), Answer(400, "InvalidArgument"), times=None)
    async with client.flushing():
        await until(lambda: client.buffer.look(lambda tx: _is_forgotten(tx)))
    await client.ask("PUT", "back/b", b"x", headers)
    assert (await client.ask("PUT", "back/c", b"x", headers)).headers["x-forebay-cache"] == "absorbed"
    refused = await client.ask("PUT", "back/k//2", b"x", headers, status=400)
    assert refused.headers["x-forebay-not-absorbed"] == "key"


def _is_forgotten(tx: JournalTransaction) -> bool:
    known = tx.buckets.capabilities("bucket")
    return known is not None and not known.accepted


@with_a_client([slot_with(SLOTS[0], write="scratch")])
async def test_11_4_rights_are_given_to_nothing_that_stays_here(client: Client) -> None:
    """11.4 Only the origin could give them."""
    for acl in ("private", "bucket-owner-full-control"):
        await client.ask("PUT", "back/k", b"x", {"x-amz-acl": acl}, status=501)
        await client.ask("POST", "back/k?uploads=", headers={"x-amz-acl": acl}, status=501)


@with_a_client(BEHIND)
async def test_4_3_conditions_are_judged_by_the_origin(client: Client) -> None:
    """4.3 A write with one is never acknowledged by what is remembered."""
    await client.learn()
    await client.ask("GET", "?list-type=2&prefix=back%2F")
    client.origin.put("bucket", "back/k", b"theirs")
    answer = await client.ask("PUT", "back/k", b"ours", {"If-None-Match": "*"}, status=412)
    assert answer.headers["x-forebay-not-absorbed"] == "condition"
    assert client.pending("back/k") is None
