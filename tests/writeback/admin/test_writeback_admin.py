"""What is pending is shown as it is, flushed when somebody asks, and decided by people where nobody else can."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.api.documents import AbortedDocument, Document, PendingObjects
from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable, NothingPending, NotToBeDecided, OriginUnreachable
from gateway.core.model import Claim, ObjectKey
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin
from gateway.writeback.flushing.flush_task import LONGEST_PAUSE_SECONDS
from gateway.writeback.flushing.state import OTHERS
from gateway.writeback.journal.buckets import Honoured
from gateway.writeback.journal.records import ExpectedVersion, Priority, State, Turn, Write, WriteSpec
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.flushing import HEADERS, PART_BYTES
from tests.support.memory_origin.faults import Answer, Hold, Unreachable, on
from tests.support.writeback import key, part
from tests.support.writeback_admin import AdminHarness, with_harness

EVERYTHING = Prefix("")


def names(page: PendingObjects) -> list[str]:
    return [one.key for one in page.objects]


async def all_pages(
    ask: Callable[[Prefix, str, int], Coroutine[Any, Any, Document]], prefix: Prefix, count: int, what: str
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = (await ask(prefix, after, count)).document()
        assert len(page[what]) <= count
        found += page[what]
        after = page["next"]
    return found


async def test_what_is_pending_comes_in_pages_in_the_order_of_keys(harness: AdminHarness) -> None:
    """Whatever the size of the pages and the prefix: each once, all buckets, and nothing that is not under it."""
    keys = [
        ObjectKey(bucket, name) for bucket in ("a", "bucket") for name in ("a", "a/b", "a/c", "a0", "é", "\U0010ffff")
    ]
    for one in reversed(keys):
        await harness.buffer.put(one, b"x")
    await harness.buffer.delete(key("a"))
    for count in (1, 2, 5, 1000):
        for prefix in map(
            Prefix.parse, ("s3://", "s3://a", "s3://bucket/a", "s3://bucket/a/", "s3://bucket/é", "s3://z")
        ):
            found = await all_pages(harness.admin.objects, prefix, count, "objects")
            shown = [(one["bucket"], one["key"]) for one in found]
            assert shown == [one for one in keys if prefix.covers(one.bucket, one.key)]
    [deleted] = [one for one in found_all(await harness.admin.objects(EVERYTHING, "", 100)) if one["deleted"]]
    assert (deleted["key"], deleted["etag"], deleted["bytes"]) == ("a", None, 0)
    for bad in ("x", "W10=", "WzEsMl0=", "!"):
        with pytest.raises(ValueError, match="token"):
            await harness.admin.objects(EVERYTHING, bad, 1)


def found_all(page: PendingObjects) -> list[dict[str, Any]]:
    return [one.document() for one in page.objects]


async def test_a_page_is_found_by_index(harness: AdminHarness) -> None:
    """However much lies before it; figures of a prefix, too."""
    for number in range(100):
        await harness.buffer.put(key(f"k{number:03}"), b"x")
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    await harness.admin.objects(EVERYTHING, "", 1)
    connection = harness.queries._rows
    costs = []
    for name in ("k000", "k098"):
        place = ("bucket", name, 0)
        connection.set_progress_handler(count, 1)
        steps = 0
        assert len(await harness.queries.page(Prefix("bucket", "k"), place, 1)) == 1
        connection.set_progress_handler(None, 0)
        costs.append(steps)
    assert max(costs) < 1.5 * min(costs)
    for prefix in (EVERYTHING, Prefix("bucket", "k05")):
        connection.set_progress_handler(count, 1)
        steps = 0
        await harness.queries.flush(prefix, 2**60)
        connection.set_progress_handler(None, 0)
        costs.append(steps)
    assert costs[-1] < costs[-2] / 4  # a tenth of the objects lies under it


async def test_an_upload_is_shown_with_what_the_origin_has_of_it(harness: AdminHarness) -> None:
    """Parts and bytes that were sent, and that it is being sent; open uploads by themselves."""
    stored = await harness.buffer.upload(key("model"), [PART_BYTES, 1000, 3])
    sent = replace(stored.parts[0], origin_etag='"x"')
    await harness.buffer.journal.change(lambda tx: tx.uploads.part_sent(stored.id, sent))
    [shown] = found_all(await harness.admin.objects(EVERYTHING, "", 10))
    assert (shown["state"], shown["parts"], shown["parts_sent"], shown["bytes_sent"]) == (
        "sending",
        3,
        1,
        PART_BYTES,
    )
    assert (await harness.progress()).bytes_sent == PART_BYTES
    began_at = harness.buffer.clock.now()
    for upload_id in ("u2", "u1", "u3"):
        await harness.open_upload("open", upload_id)
    await harness.buffer.journal.change(lambda tx: tx.uploads.put_part("u2", part(1, "p"), Moment(9.0)))
    found = await all_pages(harness.admin.uploads, Prefix("bucket", "o"), 2, "uploads")
    assert [(one["upload_id"], one["parts"], one["bytes"], one["touched_at"]) for one in found] == [
        ("u1", 0, 0, began_at),
        ("u2", 1, 1, 9.0),
        ("u3", 0, 0, began_at),
    ]
    assert {one["initiated_at"] for one in found} == {began_at}
    left = await harness.progress(Prefix("bucket", "o"))
    assert (left.open_uploads, left.open_upload_bytes) == (3, 1)
    assert (await harness.progress(Prefix("bucket", "model"))).open_uploads == 0
    summary = await harness.admin.summary()
    assert (summary.objects, summary.bytes, summary.open_uploads) == (1, PART_BYTES + 1003, 3)
    [slot] = summary.slots
    assert (slot.staged_bytes, slot.buffer_bytes) == (PART_BYTES + 1004, 1000)
    assert summary.open_upload_bytes == slot.open_upload_bytes == 1
    assert slot.oldest_upload_touched_at == 9.0
    assert summary.slots[0].oldest_acknowledged_at == summary.oldest_acknowledged_at == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("effect", [Unreachable(), Answer(403, "AccessDenied"), Answer(404, "NoSuchBucket")], ids=str)
async def test_a_flush_that_waits_is_tried_at_once(harness: AdminHarness, effect: Answer | Unreachable) -> None:
    """Without letting the pause pass that its failures have led to; and only what is asked for."""
    fault = harness.buffer.origin.inject(on(Operation.PUT_OBJECT), effect, times=None)
    for name in ("a/1", "b/1"):
        await harness.buffer.put(key(name), b"x")
    harness.start()
    await harness.buffer.until(lambda: all(turn.attempts > 9 for turn in turns(harness)))
    await harness.buffer.still()  # what is just being tried has failed
    now = harness.buffer.clock.now()
    await harness.buffer.at_once(lambda: all(turn.due_at is not None and turn.due_at > now for turn in turns(harness)))
    shown, is_away = found_all(await harness.admin.objects(EVERYTHING, "", 10)), isinstance(effect, Unreachable)
    state = "waiting for the bucket" if is_away else "failed"
    assert [(one["key"], one["state"]) for one in shown] == [("a/1", state), ("b/1", state)]
    assert found_all(await harness.admin.problems(EVERYTHING, "", 10)) == ([] if is_away else shown)
    assert all(one["failures"] > 9 for one in shown)
    assert not isinstance(effect, Answer) or {one["reason"].partition(":")[0] for one in shown} == {effect.code}
    slot = (await harness.admin.summary()).slots[0]
    held_up = (slot.failing, slot.waiting_for_bucket)
    assert (held_up, slot.reason) == ((0, 2) if is_away else (2, 0), shown[-1]["reason"])
    harness.buffer.origin.faults.remove(fault)
    left = await harness.admin.flush(Prefix("bucket", "a/"))
    assert (left.objects, left.stuck, left.held_up) == (1, 0, 1)
    assert (left.failing, left.waiting_for_bucket) == ((0, 1) if is_away else (1, 0))
    assert [one.state for one in left.problems] == [state]
    assert left.origin_away is isinstance(effect, Unreachable)
    await settled_without_time(harness, "a/1")
    assert [one.key.key for one in harness.buffer.left()] == ["b/1"]
    assert (await harness.progress(Prefix("bucket", "a/"))).objects == 0
    await harness.buffer.clock.advance(LONGEST_PAUSE_SECONDS)
    await harness.buffer.until(lambda: harness.buffer.left() == [])


def turns(harness: AdminHarness) -> list[Turn]:
    """How all that is pending fares."""
    journal = harness.buffer.journal
    found = [journal.read(lambda tx: tx.turns.of(one.id)) for one in harness.buffer.left()]  # noqa: B023
    return [one for one in found if one is not None]


async def settled_without_time(harness: AdminHarness, name: str) -> None:
    """The origin gets it while the clock stands still."""
    for _ in range(2000):
        if name not in [one.key.key for one in harness.buffer.left()]:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it waits for the clock")


async def test_a_flush_is_about_what_was_acknowledged_by_then(harness: AdminHarness) -> None:
    """What comes later under the same prefix is not waited for."""
    await harness.buffer.put(key("a"), b"x")
    begun = await harness.admin.flush(Prefix("bucket"))
    await harness.buffer.put(key("b"), b"x")
    assert (begun.through, begun.objects, begun.prefix) == (1, 1, "s3://bucket/")
    assert (await harness.progress(Prefix("bucket"), begun.through)).objects == 1
    assert (await harness.progress(Prefix("bucket"))).objects == 2


async def test_a_flush_is_about_what_takes_the_place_of_what_was_acknowledged_by_then(harness: AdminHarness) -> None:
    """The origin has neither; of a marker as of anything else."""
    for name, behind in (("a", None), ("_SUCCESS", "")):
        await harness.buffer.put(key(name), b"x", behind=behind)
    begun = await harness.admin.flush(Prefix("bucket"))
    failed = await harness.buffer.put(key("a"), b"y")
    await fail(harness, failed)
    await harness.buffer.put(key("_SUCCESS"), b"y", behind="")
    await harness.buffer.put(key("b"), b"x")
    left = await harness.progress(Prefix("bucket"), begun.through)
    assert (left.objects, left.failing, [one.key for one in left.problems]) == (2, 1, ["a"])


async def test_ours_takes_the_place_of_exactly_what_is_there_now(harness: AdminHarness) -> None:
    """Clause 6.5: a third write, before or during the flush, is a conflict again; otherwise ours arrives."""
    await harness.conflict("k")
    found = await harness.admin.resolve(key("k"), "keep-ours", None)
    assert found.etag_at_origin == harness.buffer.bucket.object("k").etag
    harness.buffer.origin.put("bucket", "k", b"a third")
    await harness.buffer.until(lambda: len(harness.buffer.observer.conflicts) == 2)
    assert harness.buffer.origin.data("bucket", "k") == b"a third"
    await harness.admin.resolve(key("k"), "keep-ours", None)
    await harness.buffer.flushed()
    assert harness.buffer.origin.data("bucket", "k") == b"ours"
    assert len(harness.buffer.observer.conflicts) == 2


async def test_ours_comes_back_where_others_have_deleted_it(harness: AdminHarness) -> None:
    """Also an upload whose parts the origin has thrown away."""
    await harness.buffer.upload(key("k"), [PART_BYTES, 3], origin_upload_id="long gone")
    harness.buffer.origin.put("bucket", "k", b"theirs")
    harness.start()
    await harness.buffer.until(lambda: bool(harness.buffer.observer.conflicts))
    harness.buffer.bucket.objects.clear()
    assert (await harness.admin.resolve(key("k"), "keep-ours", 1)).etag_at_origin is None
    await harness.buffer.flushed()
    assert len(harness.buffer.origin.data("bucket", "k")) == PART_BYTES + 3


async def test_ours_is_given_up_and_everybody_told(harness: AdminHarness) -> None:
    """Clause 6.5: its bytes go, what the origin has stays, and whoever remembers the key is told to ask again."""
    await harness.conflict("k")
    settled, claims = list[Claim](), harness.buffer.left()[0].claims
    tools = replace(harness.tools, settled=settled.extend)
    admin = WritebackAdmin(harness.queries, tools, harness.reconciler, {"slot": 1000})
    await admin.resolve(key("k"), "keep-theirs", None)
    assert settled == claims
    assert harness.buffer.observer.published == [("k", None)]
    assert harness.buffer.left() == []
    await harness.buffer.flushed()
    assert harness.buffer.origin.data("bucket", "k") == b"theirs"
    await harness.buffer.put(key("k"), b"next", expected=ExpectedVersion((harness.buffer.bucket.object("k").etag,)))
    await harness.buffer.flushed()
    assert harness.buffer.origin.data("bucket", "k") == b"next"


@pytest.mark.parametrize("decision", ["keep-ours", "keep-theirs", "discard"])
async def test_nobody_decides_about_what_is_on_its_way(harness: AdminHarness, decision: str) -> None:
    """Nor about another object than the one that was looked at, nor about none."""
    stored = await harness.buffer.put(key("k"), b"ours")
    with pytest.raises(NotToBeDecided, match="on its way"):
        await harness.admin.resolve(key("k"), decision, None)
    with pytest.raises(NothingPending, match="or a newer write is"):
        await harness.admin.resolve(key("k"), decision, stored.sequence + 1)
    with pytest.raises(NothingPending):
        await harness.admin.resolve(key("other"), decision, None)
    with pytest.raises(ValueError, match="keep-ours, keep-theirs, discard"):
        await harness.admin.resolve(key("k"), "toss a coin", None)
    assert len(harness.buffer.left()) == 1
    with pytest.raises(NothingPending):
        await NoWriteback().resolve(key("k"), decision, None)


async def test_an_origin_that_does_not_answer_leaves_the_conflict(harness: AdminHarness) -> None:
    """What would be overwritten must be known."""
    await harness.conflict("k")
    for effect in (Unreachable(), Answer(403, "AccessDenied")):
        for operation in (Operation.HEAD_OBJECT, Operation.GET_OBJECT):  # a refused HEAD is asked again by GET
            harness.buffer.origin.inject(on(operation), effect)
        with pytest.raises(OriginUnreachable, match="does not say"):
            await harness.admin.resolve(key("k"), "keep-ours", None)
    assert [one.state for one in harness.buffer.left()] == [State.CONFLICT]


async def test_what_is_damaged_can_be_given_up_and_holds_nobody_up(tmp_path: Path, harness: AdminHarness) -> None:
    """It is named, what waits behind it counts as stuck, and after the decision that goes on."""
    stored = await harness.buffer.put(key("k"), os.urandom(100))
    marked = replace(stored, state=State.PUBLISHING)
    await harness.buffer.journal.change(lambda tx: tx.writes.change(marked, State.COMMITTED))
    with (tmp_path / "staged" / stored.parts[0].file.name).open("r+b") as damaged:
        damaged.write(os.urandom(100))
    await harness.buffer.put(key("k"), b"behind")
    await harness.buffer.put(key("other"), b"other")
    harness.start()
    await harness.buffer.until(lambda: len(harness.buffer.left()) == 2 and bool(harness.buffer.observer.damages))
    left = await harness.progress()
    assert (left.objects, left.stuck, left.damaged, left.failing) == (2, 2, 1, 0)
    assert (left.problems[0].state, "damaged in its chunk" in (left.problems[0].reason or "")) == (
        "damaged",
        True,
    )
    with pytest.raises(NotToBeDecided):
        await harness.admin.resolve(key("k"), "keep-theirs", None)
    await harness.admin.resolve(key("k"), "discard", stored.sequence)
    await harness.buffer.flushed()
    assert harness.buffer.origin.data("bucket", "k") == b"behind"
    assert (await harness.progress()).stuck == 0


async def test_what_was_given_up_on_its_way_may_still_arrive(harness: AdminHarness) -> None:
    """The origin refuses for ever, somebody gives up; had it arrived all the same, it would be no surprise."""
    await harness.buffer.learn()
    harness.buffer.origin.inject(on(Operation.PUT_OBJECT), Unreachable(late=True), times=1)
    head = harness.buffer.origin.inject(on(Operation.HEAD_OBJECT), Unreachable(), times=None)
    await harness.buffer.put(key("k"), b"ours")
    harness.start()
    await harness.buffer.until(lambda: bool(harness.buffer.observer.failures))
    assert harness.buffer.left()[0].state is State.PUBLISHING
    await harness.buffer.put(key("k"), b"behind")
    await harness.admin.resolve(key("k"), "discard", None)
    assert harness.buffer.origin.data("bucket", "k") == b"ours"
    harness.buffer.origin.faults.remove(head)
    await harness.buffer.flushed()
    assert harness.buffer.origin.data("bucket", "k") == b"behind"
    assert harness.buffer.observer.conflicts == []


async def test_what_waits_behind_a_conflict_is_stuck_with_it(harness: AdminHarness) -> None:
    """So nobody waits for it; when theirs is kept, it becomes a conflict itself."""
    first = await harness.buffer.put(key("k"), b"one")
    await harness.buffer.journal.change(
        lambda tx: tx.writes.change(replace(first, state=State.PUBLISHING), State.COMMITTED)
    )
    await harness.buffer.put(key("k"), b"two")
    harness.buffer.origin.put("bucket", "k", b"theirs")
    harness.start()
    await harness.buffer.until(lambda: len(harness.buffer.observer.conflicts) == 1)
    left = await harness.progress()
    assert (left.objects, left.conflicts, left.stuck) == (2, 1, 2)
    await harness.admin.resolve(key("k"), "keep-theirs", None)
    await harness.buffer.until(lambda: len(harness.buffer.observer.conflicts) == 2)
    left = await harness.progress()
    assert (left.objects, left.conflicts, left.stuck) == (1, 1, 1)


async def test_problems_come_in_pages_in_the_order_of_acknowledgement(harness: AdminHarness) -> None:
    """Conflicts, what is damaged, and what fails."""
    stored = [await harness.buffer.put(key(f"k{9 - number}"), b"x") for number in range(10)]
    journal = harness.buffer.journal
    for one in stored[::3]:
        await journal.change(lambda tx, one=one: tx.writes.keep(one.id, OTHERS))  # type: ignore[misc]
    for one in stored[1::3]:
        await fail(harness, one)
    await journal.change(lambda tx: tx.turns.quarantine(stored[2].id, "how"))
    expected = [one.key.key for n, one in enumerate(stored) if n % 3 < 2 or n == 2]
    for count in (1, 2, 3, 100):
        found = await all_pages(harness.admin.problems, EVERYTHING, count, "objects")
        assert [one["key"] for one in found] == expected
    assert names(await harness.admin.problems(Prefix("bucket", "k7"), "", 10)) == ["k7"]
    assert names(await harness.admin.problems(Prefix("else"), "", 10)) == []


async def fail(harness: AdminHarness, write: Write, reason: str = "why") -> None:
    """It has failed, since a time."""

    def wait(tx: JournalTransaction) -> None:
        seen = tx.turns.of(write.id)
        assert seen is not None
        tx.turns.wait(write.id, seen, Turn(harness.buffer.clock.now() + 60.0, 2, 50.0, reason, Priority.RETRY))

    await harness.buffer.journal.change(wait)


async def test_a_journal_that_cannot_be_read_ends_nothing(tmp_path: Path, harness: AdminHarness) -> None:
    """Who asks is told, and answered when it is there."""
    queries = CheckpointQueries(tmp_path / "later")
    admin = WritebackAdmin(queries, harness.tools, harness.reconciler, {"slot": 1000})
    try:
        with pytest.raises(BufferUnavailable, match="cannot be read"):
            await admin.summary()
        (tmp_path / "later").symlink_to(tmp_path)
        assert (await admin.summary()).objects == 0
    finally:
        queries.close()


async def test_that_nothing_is_pending_is_never_remembered(harness: AdminHarness) -> None:
    """Whoever stops the machine by it loses nothing that was acknowledged a moment before; other figures may be old."""
    assert (await harness.admin.summary()).objects == 0
    await harness.buffer.put(key("k"), b"x")
    assert (await harness.admin.summary()).objects == 1
    await harness.buffer.put(key("other"), b"x")
    assert (await harness.admin.summary()).objects == 1


async def test_a_damaged_row_is_shown_and_can_be_given_up(tmp_path: Path, harness: AdminHarness) -> None:
    """Of what the journal has lost about an object, its key is left."""
    stored = await harness.buffer.put(key("k"), b"x")
    with sqlite3.connect(tmp_path / "journal") as other:
        other.execute("UPDATE writes SET record = zeroblob(60)")
    other.close()
    [shown] = found_all(await harness.admin.objects(EVERYTHING, "", 10))
    assert (shown["key"], shown["state"], shown["etag"], shown["bytes"]) == ("k", "damaged", None, 1)
    assert "is damaged" in shown["reason"]
    assert (await harness.admin.summary()).objects == 1
    await harness.buffer.put(key("other"), b"other")
    harness.start()
    journal = harness.buffer.journal
    await harness.buffer.until(lambda: journal.read(lambda tx: tx.writes.latest(key("other"))) is None)
    await harness.buffer.until(lambda: harness.buffer.observer.damages == ["k"])
    left = await harness.progress()
    assert (left.objects, left.damaged, left.stuck) == (1, 1, 1)
    await harness.admin.resolve(key("k"), "discard", stored.sequence)
    assert list(harness.buffer.staging.names()) == []
    assert (await harness.admin.objects(EVERYTHING, "", 10)).objects == []


async def test_what_is_fixed_is_of_no_matter_to_the_figures(harness: AdminHarness) -> None:
    """Slots in which nothing is pending are there with zeros; others as soon as they have something."""
    [slot] = (await harness.admin.summary()).slots
    assert (slot.slot, slot.objects, slot.oldest_acknowledged_at, slot.reason) == (
        "slot",
        0,
        None,
        None,
    )
    await harness.buffer.put(key("k"), b"xyz", spec=WriteSpec(key("k"), HEADERS, "gone"))
    await harness.buffer.clock.advance(5)
    slots = (await harness.admin.summary()).slots
    assert [(one.slot, one.objects, one.bytes) for one in slots] == [("gone", 1, 3), ("slot", 0, 0)]
    assert (await NoWriteback().summary()).slots == []


async def test_no_desk_says_that_nothing_is_pending(harness: AdminHarness) -> None:
    """In the same form."""
    none, admin = NoWriteback(), harness.admin
    assert await none.flush(EVERYTHING) == await admin.flush(EVERYTHING)
    assert await none.objects(EVERYTHING, "", 1) == await admin.objects(EVERYTHING, "", 1)
    assert await none.problems(EVERYTHING, "", 1) == await admin.problems(EVERYTHING, "", 1)
    assert await none.uploads(EVERYTHING, "", 1) == await admin.uploads(EVERYTHING, "", 1)
    assert (await none.summary()).document().keys() == (await admin.summary()).document().keys()


def test_how_a_write_fares_is_shown_and_outlives_the_process(tmp_path: Path) -> None:
    """Failures, since when, why, and what it waits for; a conflict says why, too."""

    async def before(harness: AdminHarness) -> None:
        await harness.buffer.learn()
        stored = await harness.buffer.put(key("step/1"), b"x")
        await fail(harness, stored, "AccessDenied")
        await harness.buffer.put(key("step/manifest.json"), b"{}", behind="step/")
        kept = await harness.buffer.put(key("kept"), b"x")
        await harness.buffer.journal.change(lambda tx: tx.writes.keep(kept.id, OTHERS))

    async def after(harness: AdminHarness) -> None:
        shown = {one["key"]: one for one in found_all(await harness.admin.objects(EVERYTHING, "", 10))}
        failing, marker, conflict = shown["step/1"], shown["step/manifest.json"], shown["kept"]
        assert (failing["failures"], failing["failing_since"], failing["reason"]) == (2, 50.0, "AccessDenied")
        assert marker["waits_for"] == failing["sequence"]
        assert (marker["failures"], marker["reason"]) == (0, None)
        assert (conflict["state"], conflict["reason"]) == ("conflict", OTHERS)
        [slot] = (await harness.admin.summary()).slots
        assert (slot.failing, slot.conflicts, slot.reason) == (1, 1, "AccessDenied")

    with_harness(tmp_path, before)
    with_harness(tmp_path, after)


async def test_what_is_known_of_buckets_is_shown(harness: AdminHarness) -> None:
    """Whether their ETags are MD5s, and what they make of conditions."""
    assert (await harness.admin.summary()).buckets == []
    await harness.buffer.learn(Honoured.IGNORED)
    await harness.buffer.clock.advance(5)
    [shown] = (await harness.admin.summary()).document()["buckets"]
    expected = {"put": "ignored", "complete": "ignored", "delete": "ignored"}
    assert shown == {"bucket": "bucket", "md5_etags": True, "conditions": expected}


async def test_open_uploads_are_aborted_with_their_bytes(harness: AdminHarness) -> None:
    """Here at once, and at the origin; their room is free. Those that have ended, or are none, are told as such."""
    for upload_id in ("u", "v", "stays"):
        await harness.open_upload("k", upload_id)
    now, journal = harness.buffer.clock.now(), harness.buffer.journal
    stored = replace(part(1, "p"), file=harness.buffer.stage(b"bytes"))
    await journal.change(lambda tx: tx.uploads.put_part("u", stored, Moment(now)))
    harness.start()
    await harness.buffer.until(lambda: len(harness.buffer.bucket.uploads) == 3)
    with capture_logs() as logs:
        ended = await harness.admin.abort(["u", "no such", "v"])
    assert ended == AbortedDocument(aborted=["u", "v"], not_open=["no such"])
    assert [(one["object"], one["upload_id"], one["bytes"]) for one in logs if "operator" in one["event"]] == [
        ("s3://bucket/k", "u", 5),
        ("s3://bucket/k", "v", 0),
    ]
    assert [one.upload_id for one in (await harness.admin.uploads(EVERYTHING, "", 10)).uploads] == ["stays"]
    assert journal.read(lambda tx: tx.files.usage("slot").staged_bytes) == 0
    assert not await journal.change(lambda tx: tx.uploads.put_part("u", stored, Moment(now)))
    await harness.buffer.until(lambda: len(harness.buffer.bucket.uploads) == 1)
    assert list(harness.buffer.staging.names()) == []
    for admin in (harness.admin, NoWriteback()):
        assert await admin.abort(["u"]) == AbortedDocument(aborted=[], not_open=["u"])


async def test_a_damaged_upload_can_be_aborted(tmp_path: Path, harness: AdminHarness) -> None:
    """Nothing else would ever end it: its bytes go."""
    await harness.open_upload("k", "u")
    stored = replace(part(1, "p"), file=harness.buffer.stage(b"bytes"))
    await harness.buffer.journal.change(lambda tx: tx.uploads.put_part("u", stored, Moment(9.0)))
    with sqlite3.connect(tmp_path / "journal") as other:
        other.execute("UPDATE writes SET record = zeroblob(60)")
    other.close()
    assert (await harness.admin.abort(["u"])).aborted == ["u"]
    assert (await harness.admin.uploads(EVERYTHING, "", 10)).uploads == []
    assert list(harness.buffer.staging.names()) == []


async def test_what_a_marker_waits_for_that_is_stuck_makes_it_stuck(harness: AdminHarness) -> None:
    """So that nobody waits for either."""
    shard = await harness.buffer.put(key("step/1"), b"x")
    await harness.buffer.put(key("step/manifest.json"), b"{}", behind="step/")
    await harness.buffer.journal.change(lambda tx: tx.writes.keep(shard.id, OTHERS))
    left = await harness.progress()
    assert (left.objects, left.conflicts, left.stuck) == (2, 1, 2)


async def test_what_waits_for_what_fails_is_held_up_with_it(harness: AdminHarness) -> None:
    """It is not stuck: it goes on when the other does."""
    shard = await harness.buffer.put(key("step/1"), b"x")
    await harness.buffer.put(key("step/manifest.json"), b"{}", behind="step/")
    await harness.buffer.put(key("other"), b"x")
    await fail(harness, shard)
    left = await harness.progress()
    assert (left.objects, left.failing, left.held_up, left.stuck) == (3, 1, 2, 0)


async def test_how_long_an_attempt_takes_is_told(harness: AdminHarness) -> None:
    """The longest that is under way under the prefix, of what is waited for: an open upload is not."""
    await harness.buffer.learn()
    reached, resume, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
    harness.buffer.origin.inject(on(Operation.CREATE_MULTIPART_UPLOAD), Hold(never))
    harness.buffer.origin.inject(on(Operation.PUT_OBJECT), Hold(resume, reached))
    await harness.open_upload("a/open", "u")
    await harness.buffer.put(key("a/1"), b"x")
    harness.start()
    await harness.buffer.until(reached.is_set)
    for prefix, expected in ((EVERYTHING, 7.0), (Prefix("bucket", "b"), None)):
        before = (await harness.progress(prefix)).longest_attempt_seconds
        await harness.buffer.clock.advance(7.0)
        after = (await harness.progress(prefix)).longest_attempt_seconds
        elapsed = after if after is None or before is None else after - before
        assert elapsed == pytest.approx(expected)
    resume.set()
    await harness.buffer.flushed()
    await harness.buffer.at_once(lambda: harness.reconciler.attempts(EVERYTHING).longest_seconds is None)
    assert (await harness.progress()).longest_attempt_seconds is None
