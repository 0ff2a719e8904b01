"""Which conditions a bucket honours is found out once, remembered, and nothing of that is left; a request that is
refused with 501 tells the same."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace
from typing import cast

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import OriginUnreachable
from gateway.core.prefixes import Prefix
from gateway.origin.client import Origin, OriginRequest
from gateway.s3.requests import Operation
from gateway.writeback.flushing.condition_probe import (
    LEARNED_AGAIN_SECONDS,
    UNKNOWN_AGAIN_SECONDS,
    Probe,
    is_due,
    is_probe_key,
    probe_key,
)
from gateway.writeback.journal.buckets import BucketCapabilities, Conditions, Honoured
from gateway.writeback.journal.records import ExpectedVersion
from gateway.writeback.journal.uploads import CARRIED_OUT_SECONDS
from tests.support.flushing import Buffer
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import AlterBody, Answer, Delay, Hold, Unreachable, on
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.slots import Slot
from tests.support.writeback import key

_CONDITIONS = ("if-match", "if-none-match")
ALL_HONOURED = Conditions(Honoured.YES, Honoured.YES, Honoured.YES, 7.0)
MEANINGS = {
    "honoured": Honoured.YES,
    "ignored": Honoured.IGNORED,
    "refused": Honoured.REFUSED,
    "unquoted": Honoured.CREATES,
    "no if-match": Honoured.CREATES,
    "always fails": Honoured.REFUSED,
}


class Kind:
    """An origin that honours, ignores or refuses conditions, by the kind of request. `unquoted`: radosgw compares
    If-Match with the ETag without its quotes: so it never holds."""

    def __init__(self, origin: MemoryOrigin, put: str, complete: str, delete: str) -> None:
        self._origin = origin
        self._does: dict[Operation | None, str] = {
            Operation.PUT_OBJECT: put,
            Operation.COMPLETE_MULTIPART_UPLOAD: complete,
            Operation.DELETE_OBJECT: delete,
        }

    async def send(self, request: OriginRequest) -> MemoryResponse:
        plain = {name: value for name, value in request.headers.items() if name not in _CONDITIONS}
        does = self._does.get(self._operation(request), "honoured")
        if len(plain) == len(request.headers) or does == "honoured":
            return await self._origin.send(request)
        if does == "refused" or (does == "no if-match" and "if-match" in request.headers):
            return self._origin.refusal(Answer(501, "NotImplemented"))
        if does == "always fails" or (does == "unquoted" and '"' in request.headers.get("if-match", "")):
            return self._origin.refusal(Answer(412, "PreconditionFailed"))
        if does in ("unquoted", "no if-match"):
            return await self._origin.send(request)
        return await self._origin.send(
            OriginRequest(request.method, request.bucket, request.key, request.query, plain, request.body)
        )

    def _operation(self, request: OriginRequest) -> Operation | None:
        query = dict(request.query)
        if request.method == "PUT" and "partNumber" not in query:
            return Operation.PUT_OBJECT
        if request.method == "POST" and "uploadId" in query:
            return Operation.COMPLETE_MULTIPART_UPLOAD
        return Operation.DELETE_OBJECT if request.method == "DELETE" and not query else None

    async def aclose(self) -> None:
        return


AT = probe_key("bucket", "data/", "node")


@pytest.mark.parametrize(("put", "complete", "delete"), list(itertools.product(MEANINGS, repeat=3)))
async def test_each_kind_of_request_is_found_out(put: str, complete: str, delete: str) -> None:
    """And nothing is left: no object, no upload."""
    origin = MemoryOrigin(ManualClock())
    bucket = origin.create_bucket("bucket")
    found = await Probe(Kind(origin, put, complete, delete), AT, "slot").run(7.0)
    of_delete = min(MEANINGS[delete], Honoured.REFUSED)  # nothing is deleted on the condition that it is not there
    assert found == Conditions(MEANINGS[put], MEANINGS[complete], of_delete, 7.0)
    assert not bucket.objects
    assert not bucket.uploads
    assert {call.key for call in origin.calls} == {AT.key}


async def test_a_probe_takes_eleven_times_what_one_request_takes() -> None:
    """What belongs to the upload goes beside what belongs to the object: the first flush to a bucket waits for it."""
    clock = ManualClock()
    origin = MemoryOrigin(clock)
    origin.create_bucket("bucket")
    origin.inject(lambda _: True, Delay(10.0), times=None)
    probing = asyncio.create_task(Probe(origin, AT, "slot").run(7.0))
    while not probing.done():
        await clock.advance(1.0)
    assert await probing == ALL_HONOURED
    assert len(origin.calls) == 14
    assert clock.monotonic() <= 11 * 10.0 + 1.0


@pytest.mark.parametrize("number", range(1, 16))
@pytest.mark.parametrize("late", [False, True])
async def test_an_origin_that_goes_away_tells_nothing(number: int, late: bool) -> None:
    """At whatever request: nothing is concluded; it is asked again later."""
    origin = MemoryOrigin(ManualClock())
    origin.create_bucket("bucket")
    origin.inject(lambda call: call.number == number, Unreachable(late=late))
    found = await Probe(origin, AT, "slot").run(7.0)
    assert found is None or (found == ALL_HONOURED and len(origin.calls) < number)


@pytest.mark.parametrize("effect", [Answer(503, "SlowDown"), Answer(500)], ids=str)
async def test_an_origin_that_does_not_do_its_work_tells_nothing(effect: Answer) -> None:
    """Whatever it is asked."""
    for operation in (Operation.PUT_OBJECT, Operation.COMPLETE_MULTIPART_UPLOAD, Operation.DELETE_OBJECT):
        origin = MemoryOrigin(ManualClock())
        origin.create_bucket("bucket")
        origin.inject(on(operation), effect, times=None)
        assert await Probe(origin, AT, "slot").run(7.0) is None


async def test_a_complete_with_an_empty_etag_is_one() -> None:
    """radosgw answers so: it has carried it out, and the probe learns what it does with conditions."""
    origin = MemoryOrigin(ManualClock())
    bucket = origin.create_bucket("bucket")
    empty = AlterBody(lambda body: re.sub(rb"<ETag>[^<]*</ETag>", b"<ETag></ETag>", body))
    origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), empty, times=None)
    found = await Probe(Kind(origin, "honoured", "ignored", "honoured"), AT, "slot").run(7.0)
    assert found is not None
    assert (found.put, found.complete) == (Honoured.YES, Honoured.IGNORED)
    assert not bucket.uploads


async def test_without_the_right_to_write_nothing_is_known() -> None:
    """It is asked again sooner then."""
    origin = MemoryOrigin(ManualClock())
    origin.create_bucket("bucket")
    origin.inject(on(Operation.PUT_OBJECT), Answer(403, "AccessDenied"), times=None)
    found = await Probe(origin, AT, "slot").run(7.0)
    assert found == Conditions(learned_at=7.0)
    assert not is_due(found, 7.0 + UNKNOWN_AGAIN_SECONDS - 1)
    assert is_due(found, 7.0 + UNKNOWN_AGAIN_SECONDS)


def test_buckets_are_probed_again_some_day() -> None:
    """Origins are upgraded; and a clock that has gone back is no reason to wait."""
    known = Conditions(Honoured.YES, Honoured.IGNORED, Honoured.REFUSED, 1000.0)
    assert is_due(Conditions(), 1e9)
    assert not is_due(known, 1000.0)
    assert not is_due(known, 999.0 + LEARNED_AGAIN_SECONDS)
    assert is_due(known, 1000.0 + LEARNED_AGAIN_SECONDS)
    assert is_due(known, 999.0)


def test_the_key_is_under_the_prefix_of_its_slot_and_of_this_node() -> None:
    """Where the gateway may write, and no other node does."""
    assert AT.key.startswith("data/")
    assert is_probe_key(AT, "node")
    assert not is_probe_key(AT, "another")
    assert not is_probe_key(key("data/conditions-node"), "node")


async def know(buffer: Buffer) -> None:
    """The bucket absorbs; nobody has tried its conditions."""
    capabilities = BucketCapabilities(True, True, buffer.clock.now())
    await buffer.journal.change(lambda tx: tx.buckets.learn("bucket", capabilities))


def conditions(buffer: Buffer) -> Conditions:
    capabilities = buffer.journal.read(lambda tx: tx.buckets.capabilities("bucket"))
    assert capabilities is not None
    return capabilities.conditions


def probes(buffer: Buffer) -> int:
    return sum(1 for call in buffer.origin.calls if ".forebay/" in (call.key or ""))


async def test_a_bucket_is_probed_once_before_the_first_of_its_writes(buffer: Buffer) -> None:
    """However many come at once; the next process knows it. Nothing of it is left, and nothing is in doubt."""
    buffer.slots["slot"] = Slot("slot", Prefix("bucket", "data/"))
    await know(buffer)
    for number in range(20):
        await buffer.put(key(f"data/{number}"), b"x")
    buffer.start()
    await buffer.flushed()
    first = [call.key for call in buffer.origin.calls][: probes(buffer)]
    assert all((name or "").startswith("data/.forebay/") for name in first)
    assert len(buffer.origin.calls) - probes(buffer) == 20
    assert replace(conditions(buffer), learned_at=7.0) == ALL_HONOURED
    asked = probes(buffer)
    await buffer.kill()
    buffer.start()
    await buffer.put(key("data/late"), b"x")
    await buffer.flushed()
    assert probes(buffer) == asked
    assert sorted(buffer.bucket.objects) == sorted([*(f"data/{number}" for number in range(20)), "data/late"])
    assert not buffer.bucket.uploads
    assert not buffer.journal.read(lambda tx: tx.uploads.aborting())


@pytest.mark.slow
@pytest.mark.parametrize("operation", [Operation.PUT_OBJECT, Operation.CREATE_MULTIPART_UPLOAD, Operation.UPLOAD_PART])
async def test_a_probe_that_was_killed_leaves_nothing_in_the_end(buffer: Buffer, operation: Operation) -> None:
    """Its object and its upload are cleared away by the next process, once nothing can be under way any more."""
    await know(buffer)
    await buffer.put(key("k"), b"x")
    node, _ = buffer.journal.read(lambda tx: tx.node())
    at = probe_key("bucket", "", node)
    never, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(operation, key=at.key), Hold(never, reached))
    buffer.start()
    await buffer.until(reached.is_set)
    await buffer.kill()
    buffer.origin.put("bucket", at.key, b"")  # what was held has been carried out
    await buffer.journal.change(lambda tx: tx.uploads.mark_all_in_doubt(Moment.of(buffer.clock)))
    buffer.origin.inject(on(Operation.PUT_OBJECT, key=at.key), Answer(403, "AccessDenied"), times=None)
    buffer.start()
    await buffer.passes(2 * CARRIED_OUT_SECONDS)
    await buffer.until(lambda: list(buffer.bucket.objects) == ["k"] and not buffer.bucket.uploads)
    await buffer.until(lambda: not buffer.journal.read(lambda tx: tx.uploads.aborting()))


@pytest.mark.slow
async def test_the_object_of_a_killed_probe_goes_where_uploads_are_not_listed(buffer: Buffer) -> None:
    """Of the upload nobody can know."""
    await know(buffer)
    await buffer.put(key("k"), b"x")
    node, _ = buffer.journal.read(lambda tx: tx.node())
    at = probe_key("bucket", "", node)
    buffer.origin.inject(on(Operation.LIST_MULTIPART_UPLOADS), Answer(501, "NotImplemented"), times=None)
    never, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.CREATE_MULTIPART_UPLOAD, key=at.key), Hold(never, reached))
    buffer.start()
    await buffer.until(reached.is_set)
    await buffer.kill()
    buffer.origin.put("bucket", at.key, b"")  # what a process that is killed in truth has no time to remove
    await buffer.journal.change(lambda tx: tx.uploads.mark_all_in_doubt(Moment.of(buffer.clock)))
    found = replace(ALL_HONOURED, learned_at=buffer.clock.now())  # by others: no probe follows that would remove it
    await buffer.journal.change(lambda tx: tx.buckets.amend("bucket", conditions=found))
    buffer.start()
    await buffer.passes(2 * CARRIED_OUT_SECONDS)
    await buffer.until(lambda: not buffer.journal.read(lambda tx: tx.uploads.aborting()))
    assert list(buffer.bucket.objects) == ["k"]


@pytest.mark.slow
async def test_an_origin_that_was_away_at_the_probe_is_probed_again(buffer: Buffer) -> None:
    """Meanwhile writes go as where nothing is known: nothing waits for a probe."""
    await know(buffer)
    away = buffer.origin.inject(lambda call: ".forebay/" in (call.key or ""), Answer(503, "SlowDown"), times=None)
    await buffer.put(key("a"), b"x")
    buffer.start()
    await buffer.until(lambda: "a" in buffer.bucket.objects)
    assert conditions(buffer).put is Honoured.UNKNOWN
    buffer.origin.faults.remove(away)
    await buffer.put(key("b"), b"x")
    await buffer.passes(2 * CARRIED_OUT_SECONDS)
    await buffer.put(key("c"), b"x")
    await buffer.until(lambda: conditions(buffer).put is Honoured.YES)
    await buffer.until(lambda: sorted(buffer.bucket.objects) == ["a", "b", "c"])
    await buffer.until(lambda: not buffer.journal.read(lambda tx: tx.uploads.aborting()))


async def test_a_bucket_that_is_known_is_probed_while_its_writes_go_on(buffer: Buffer) -> None:
    """A week later, or when the clock was set back: nothing waits, and what others learn meanwhile of the bucket stays.

    What is found out was found out at its end, by the clock of then.
    """
    old = Conditions(Honoured.YES, Honoured.YES, Honoured.YES, buffer.clock.now() - LEARNED_AGAIN_SECONDS)
    await buffer.journal.change(lambda tx: tx.buckets.learn("bucket", BucketCapabilities(True, True, 0.0, old)))
    resume, reached = asyncio.Event(), asyncio.Event()
    node, _ = buffer.journal.read(lambda tx: tx.node())
    at = probe_key("bucket", "", node)
    buffer.origin.inject(on(Operation.DELETE_OBJECT, key=at.key), Hold(resume, reached))
    await buffer.put(key("k"), b"x")
    buffer.start()
    await buffer.flushed()
    await buffer.until(reached.is_set)
    assert conditions(buffer) == old
    await buffer.journal.change(lambda tx: tx.buckets.learn("bucket", BucketCapabilities(False, True, 0.0)))
    await buffer.passes(10.0)
    ends_at = buffer.clock.now()
    resume.set()
    await buffer.until(lambda: conditions(buffer) != old)
    assert conditions(buffer).learned_at >= ends_at
    capabilities = buffer.journal.read(lambda tx: tx.buckets.capabilities("bucket"))
    assert capabilities is not None
    assert not capabilities.md5_etags


class Closed:
    """An origin to which nobody can connect."""

    def __init__(self, origin: MemoryOrigin) -> None:
        self._origin = origin
        self.refused = 0

    async def send(self, request: OriginRequest) -> MemoryResponse:
        self.refused += 1
        raise OriginUnreachable("connection refused", may_be_done=False)


class HalfClosed(Closed):
    """One to which only what is about uploads gets; that is told of everything else when the first has been sent."""

    def __init__(self, origin: MemoryOrigin) -> None:
        super().__init__(origin)
        self._reached = asyncio.Event()

    async def send(self, request: OriginRequest) -> MemoryResponse:
        if request.query:
            self._reached.set()
            return await self._origin.send(request)
        await self._reached.wait()
        return await super().send(request)


async def test_one_request_that_never_got_there_says_nothing_of_the_one_beside_it() -> None:
    """The upload may have been begun."""
    origin = MemoryOrigin(ManualClock())
    origin.create_bucket("bucket")
    origin.inject(on(Operation.CREATE_MULTIPART_UPLOAD), Unreachable(late=True))
    half = HalfClosed(origin)
    probe = Probe(cast("Origin", half), AT, "slot")
    assert await probe.run(7.0) is None
    assert probe.has_asked


async def test_a_probe_that_never_got_there_has_left_nothing(buffer: Buffer) -> None:
    """So nothing is to be cleared away, for which a buffer would have to wait that is to go."""
    await know(buffer)
    await buffer.put(key("a"), b"x")
    closed = Closed(buffer.origin)
    buffer.start(cast("Origin", closed))
    await buffer.until(lambda: closed.refused > 3 and not buffer.journal.read(lambda tx: tx.uploads.aborting()))
    await buffer.kill()
    buffer.start()
    await buffer.until(lambda: not buffer.left())


@pytest.mark.slow
async def test_an_upload_of_a_probe_that_may_not_be_aborted_now_is_aborted_later(buffer: Buffer) -> None:
    """What was found out counts all the same."""
    await know(buffer)
    refused = buffer.origin.inject(on(Operation.ABORT_MULTIPART_UPLOAD), Answer(403, "AccessDenied"), times=None)
    await buffer.put(key("k"), b"x")
    buffer.start(cast("Origin", Kind(buffer.origin, "honoured", "refused", "honoured")))
    await buffer.flushed()
    assert conditions(buffer).complete is Honoured.REFUSED
    assert len(buffer.bucket.uploads) == 1
    buffer.origin.faults.remove(refused)
    assert await buffer.passes(3 * CARRIED_OUT_SECONDS, lambda: not buffer.bucket.uploads)
    await buffer.until(lambda: not buffer.journal.read(lambda tx: tx.uploads.aborting()))


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_bucket_that_refuses_what_holds_is_written_without_conditions(
    buffer: Buffer, *, is_known: bool
) -> None:
    """Also where it was taken for one that honours them: what it refuses under one that holds has the bucket
    probed again."""
    await know(buffer)
    if is_known:
        known = replace(ALL_HONOURED, learned_at=buffer.clock.now() - UNKNOWN_AGAIN_SECONDS)
        await buffer.journal.change(lambda tx: tx.buckets.amend("bucket", conditions=known))
    old = buffer.origin.put("bucket", "k", b"old")
    await buffer.put(key("k"), b"new", expected=ExpectedVersion.exactly(old))
    buffer.start(cast("Origin", Kind(buffer.origin, "unquoted", "honoured", "honoured")))
    await buffer.passes(60.0, lambda: buffer.bucket.objects["k"].etag != old, step=0.5)
    await buffer.flushed()
    assert conditions(buffer).put is Honoured.CREATES


@pytest.mark.slow
async def test_a_bucket_is_not_probed_again_at_each_refusal(buffer: Buffer) -> None:
    """Whatever it makes of conditions besides."""
    old = buffer.origin.put("bucket", "k", b"old")
    known = replace(ALL_HONOURED, learned_at=buffer.clock.now())
    await buffer.journal.change(lambda tx: tx.buckets.learn("bucket", BucketCapabilities(True, True, 1.0, known)))
    await buffer.put(key("k"), b"new", expected=ExpectedVersion.exactly(old))
    buffer.origin.inject(on(Operation.PUT_OBJECT, key="k"), Answer(412, "PreconditionFailed"), times=None)
    buffer.start()
    await buffer.passes(UNKNOWN_AGAIN_SECONDS / 2, step=10.0)
    assert not probes(buffer)
    assert await buffer.passes(UNKNOWN_AGAIN_SECONDS, lambda: probes(buffer) > 0, step=10.0)


class Versioned:
    """An origin whose bucket keeps versions, and markers of deletions."""

    def __init__(self, origin: MemoryOrigin) -> None:
        self._origin = origin
        self._numbers = itertools.count(1)
        self.kept: set[str | None] = set()

    async def send(self, request: OriginRequest) -> MemoryResponse:
        named = dict(request.query).get("versionId")
        if named is not None:
            assert request.method == "DELETE"
            self.kept.remove(named)
            return MemoryResponse(204, {"x-amz-version-id": named})
        response = await self._origin.send(request)
        names = {name for name, _ in request.query}
        makes = request.method in ("PUT", "DELETE", "POST") and not names & {"uploads", "partNumber"}
        if makes and response.status in (200, 204) and (request.method, names) != ("DELETE", {"uploadId"}):
            version_id = f"v{next(self._numbers)}"
            self.kept.add(version_id)
            response.headers = {**response.headers, "x-amz-version-id": version_id}
        return response


@pytest.mark.parametrize("meaning", [None, Answer(501, "NotImplemented")], ids=["honoured", "refused"])
async def test_no_version_of_the_object_is_left(meaning: Answer | None) -> None:
    """Nor a marker of its deletion, where the bucket keeps versions."""
    origin = MemoryOrigin(ManualClock())
    origin.create_bucket("bucket")
    if meaning is not None:
        origin.inject(lambda call: any(name in call.headers for name in _CONDITIONS), meaning, times=None)
    versioned = Versioned(origin)
    assert await Probe(cast("Origin", versioned), AT, "slot").run(7.0) is not None
    assert versioned.kept == set()
