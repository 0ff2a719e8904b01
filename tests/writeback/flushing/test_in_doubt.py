"""Uploads that the origin was asked for are found again, whatever became of the process or the answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable
from gateway.core.model import ObjectKey
from gateway.origin.client import OriginRequest
from gateway.s3.requests import Operation
from gateway.writeback.flushing import state
from gateway.writeback.flushing.in_doubt import in_doubt
from gateway.writeback.flushing.state import TOLD_APART_SECONDS, UNLISTED_GIVEN_UP_SECONDS
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import CreateAttempt, ExpectedVersion, State, Write
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.uploads import CARRIED_OUT_SECONDS
from tests.support.flushing import PART_BYTES, Buffer
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import AlterHeaders, Answer, Hold, Unreachable, on
from tests.support.memory_origin.store import StoredPart
from tests.support.opening import Opening
from tests.support.writeback import key, spec

pytestmark = pytest.mark.usefixtures("looking_seldom")

CREATE = Operation.CREATE_MULTIPART_UPLOAD
LIST = Operation.LIST_MULTIPART_UPLOADS
AT = key("dir/model")


@pytest.fixture(autouse=True)
def short_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is to be done every second of them."""
    monkeypatch.setattr(state, "UNUSED_SECONDS", 15 * CARRIED_OUT_SECONDS)


class Node(Buffer):
    """A buffer in which uploads are asked for, lost, and found."""

    async def ask(self, at: ObjectKey = AT) -> str:
        """Somebody's CreateMultipartUpload; the origin's id."""
        async with await self.origin.send(OriginRequest("POST", at.bucket, at.key, [("uploads", None)])):
            return next(reversed(self.bucket.uploads))

    async def intend(self, at: ObjectKey = AT, worker: int = 0) -> int:
        asked = CreateAttempt(worker, Moment.of(self.clock))
        return await self.journal.change(lambda tx: tx.uploads.ask(at, "slot", asked))

    async def die(self, worker: int = 0) -> None:
        """The process of a worker slot is gone, and the next one has begun."""
        await self.journal.change(lambda tx: tx.uploads.mark_all_in_doubt(Moment.of(self.clock), worker))

    def asked(self) -> list[Write]:
        return list(self.journal.read(lambda tx: tx.uploads.asked(AT)))

    def to_be_aborted(self) -> set[str | None]:
        return {one.origin_upload_id for one in self.aborting() if one.asked is None}

    def aborting(self) -> list[Write]:
        return list(self.journal.read(lambda tx: tx.uploads.aborting()))

    async def found_out(self, within_seconds: float = 2 * CARRIED_OUT_SECONDS) -> None:
        """Let time pass until nothing is in doubt any more, and nothing to be aborted; what may be another's is looked
        at half a day later."""
        assert await self.passes(within_seconds, lambda: all(map(_is_perhaps_ours, self.aborting())), step=1.0)
        if self.aborting():
            await self.clock.advance(state.UNUSED_SECONDS)
            assert await self.passes(within_seconds, lambda: not self.aborting(), step=1.0)


def _is_perhaps_ours(one: Write) -> bool:
    return one.asked is not None and one.origin_upload_id is not None


@pytest.fixture
def node(tmp_path: Path) -> Opening:
    return Opening(lambda: Node(tmp_path))


async def test_an_upload_is_found_however_long_the_list_takes(node: Node) -> None:
    """The origin tells its age when it answers: it is no younger than the question then, but not another's for that."""
    await node.intend()
    await node.ask()
    await node.die()
    resume, reached = asyncio.Event(), asyncio.Event()
    node.origin.inject(on(LIST), Hold(resume, reached))
    node.start()
    assert await node.passes(2 * CARRIED_OUT_SECONDS, reached.is_set, step=1.0)
    await node.clock.advance(20.0)
    resume.set()
    await node.found_out()
    assert not node.bucket.uploads


async def test_an_upload_whose_asker_died_is_aborted(node: Node) -> None:
    """It is found by key and time, and the origin has nothing of it in the end."""
    await node.intend()
    await node.ask()
    await node.die()
    node.start()
    await node.found_out()
    assert not node.bucket.uploads


@pytest.mark.slow
async def test_a_bucket_that_lets_nothing_be_aborted_keeps_no_other_from_it(node: Node) -> None:
    """Its rights may come back; until then it is asked now and then."""
    upload_id = await node.ask()
    refusing = ObjectKey("refusing", "k")
    node.origin.inject(on(bucket="refusing"), Answer(403, "AccessDenied"), times=None)

    def orphan(tx: JournalTransaction) -> None:
        for name in ("0", "1", "2"):
            tx.writes.abort_at_origin(refusing, "slot", name, 1.0)
        tx.writes.abort_at_origin(AT, "slot", upload_id, 1.0)

    await node.journal.change(orphan)
    node.start()
    await node.until(lambda: not node.bucket.uploads and node.to_be_aborted() == {"0", "1", "2"})
    tried = node.origin.count()
    await node.passes(600.0, step=1.0)
    assert 10 <= node.origin.count() - tried <= 100


@pytest.mark.parametrize("effect", [None, Answer(403, "AccessDenied")], ids=["parts", "parts that nobody may list"])
async def test_one_that_has_parts_or_may_have_is_another_writers(node: Node, effect: Answer | None) -> None:
    """Our request was not carried out, and another writer has begun one at that time: it is never aborted."""
    await node.intend()
    theirs = await node.ask()
    node.bucket.uploads[theirs].parts[1] = StoredPart(1, BytesContent(b"theirs"), '"e"', node.clock.now(), {})
    if effect is not None:
        node.origin.inject(on(Operation.LIST_PARTS), effect, times=None)
    await node.die()
    node.start()
    with capture_logs() as logs:
        await node.found_out()
    assert set(node.bucket.uploads) == {theirs}
    assert any(one["event"] == "an upload may be left at the origin" for one in logs)


@pytest.mark.slow
async def test_one_that_may_be_another_writers_is_left_alone_for_half_a_day(node: Node) -> None:
    """Who has just begun one has no parts yet. It keeps no buffer from another origin meanwhile."""
    await node.intend()
    upload_id = await node.ask()
    await node.die()
    node.start()
    await node.passes(10 * CARRIED_OUT_SECONDS, step=1.0)
    assert set(node.bucket.uploads) == {upload_id}
    assert node.journal.read(lambda tx: (len(tx.uploads.aborting()), tx.uploads.aborting_count())) == (1, 0)
    assert node.origin.count(Operation.LIST_PARTS) == 0


async def test_one_that_was_never_asked_for_is_nothing(node: Node) -> None:
    """A process that died before it sent: there is nothing to abort, and nothing is remembered."""
    await node.intend()
    await node.die()
    node.start()
    await node.found_out()
    assert node.origin.count(Operation.ABORT_MULTIPART_UPLOAD) == 0


@pytest.mark.slow
async def test_the_origin_may_still_be_at_it(node: Node) -> None:
    """A request that was under way when its sender died may be carried out later: nothing is decided before."""
    await node.intend()
    await node.die()
    node.start()
    await node.passes(CARRIED_OUT_SECONDS - 2, step=1.0)
    assert (node.origin.count(), len(node.asked())) == (0, 1)
    await node.ask()
    await node.found_out()
    assert not node.bucket.uploads


@pytest.mark.parametrize("seconds_before", [TOLD_APART_SECONDS + 3, TOLD_APART_SECONDS - 2])
async def test_what_was_begun_at_another_time_is_another_writers(node: Node, seconds_before: float) -> None:
    """Where the origin tells the time, by its own clock, to a few seconds; both may be wrong altogether."""
    await node.ask()
    await node.clock.advance(seconds_before)
    await node.intend()
    await node.die()
    node.start()
    await node.found_out()
    assert len(node.bucket.uploads) == (1 if seconds_before > TOLD_APART_SECONDS else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds_before", "is_ours"), [(100.0, True), (130.0, False)])
async def test_an_origin_that_does_not_tell_the_time_is_given_two_minutes(
    node: Node, seconds_before: float, is_ours: bool
) -> None:
    """Its clock and ours may differ by so much."""
    node.origin.inject(on(LIST), AlterHeaders({"date": ""}), times=None)
    await node.ask()
    await node.clock.advance(seconds_before)
    await node.intend()
    await node.die()
    node.start()
    await node.found_out()
    assert len(node.bucket.uploads) == (0 if is_ours else 1)


async def test_what_was_begun_long_after_it_became_a_suspect_is_another_writers(node: Node) -> None:
    """Also where the origin could not be asked meanwhile."""
    await node.intend()
    await node.die()
    await node.clock.advance(10 * CARRIED_OUT_SECONDS)
    await node.ask()
    node.start()
    await node.found_out()
    assert len(node.bucket.uploads) == 1


async def test_what_cannot_be_told_apart_from_another_writers_is_told(node: Node) -> None:
    """Of two that may be ours one is not: it has parts half a day later. A person can read which they are."""
    await node.intend()
    theirs, ours = await node.ask(), await node.ask()
    both = {theirs, ours}
    node.bucket.uploads[theirs].parts[1] = StoredPart(1, BytesContent(b"theirs"), '"e"', node.clock.now(), {})
    await node.die()
    with capture_logs() as logs:
        node.start()
        await node.found_out()
    assert set(node.bucket.uploads) == {theirs}
    [told] = [one for one in logs if "upload_ids" in one]
    assert (told["key"], set(told["upload_ids"])) == (AT.key, both)


async def test_as_many_as_were_asked_for_are_all_ours(node: Node) -> None:
    """Several uploads of one key may be lost at once."""
    for _ in range(3):
        await node.intend()
    for _ in range(2):
        await node.ask()
    await node.die()
    node.start()
    await node.found_out()
    assert not node.bucket.uploads


async def test_what_is_known_of_is_left_alone(node: Node) -> None:
    """Open uploads, pending objects; and other keys that begin with this one."""
    ids = [await node.ask() for _ in range(3)]
    below = await node.ask(key(AT.key + "/below"))
    now = node.clock.now()
    opened = Write(spec(AT), ExpectedVersion(), now, upload_id="open", origin_upload_id=ids[0])
    await node.journal.change(lambda tx: tx.uploads.begin(opened))
    pending = await node.upload(AT, [PART_BYTES, 3], origin_upload_id=ids[1])
    for operation in (Operation.HEAD_OBJECT, Operation.GET_OBJECT):
        node.origin.inject(on(operation), Answer(403, "AccessDenied"), times=None)
    await node.intend()
    await node.die()
    node.start()
    await node.found_out()
    assert set(node.bucket.uploads) == {ids[0], ids[1], below}
    assert [one.id for one in node.left()] == [pending.id]


@pytest.mark.slow
async def test_nothing_is_decided_while_somebody_asks_for_the_same_key(node: Node) -> None:
    """What the origin lists may be the upload that a living process has just begun, and not noted yet."""
    await node.intend(worker=1)
    living = await node.intend(worker=2)
    upload_id = await node.ask()
    await node.die(worker=1)
    node.start()
    await node.passes(3 * CARRIED_OUT_SECONDS, step=1.0)
    assert (set(node.bucket.uploads), len(node.asked())) == ({upload_id}, 2)
    opened = Write(spec(AT), ExpectedVersion(), node.clock.now(), upload_id="u", origin_upload_id=upload_id)
    await node.journal.change(lambda tx: tx.uploads.begin(opened, living))
    await node.found_out()
    assert set(node.bucket.uploads) == {upload_id}


@pytest.mark.parametrize("effect", [Unreachable(), Answer(503, "SlowDown"), Answer(403, "AccessDenied")], ids=str)
@pytest.mark.slow
async def test_an_origin_that_does_not_list_is_asked_again(node: Node, effect: Answer | Unreachable) -> None:
    """Nothing is forgotten while it is away; and it is not asked all the time."""
    await node.intend()
    await node.ask()
    await node.die()
    fault = node.origin.inject(on(LIST), effect, times=None)
    node.start()
    await node.passes(UNLISTED_GIVEN_UP_SECONDS / 2, step=2.0)
    assert 10 <= node.origin.count(LIST) <= 300
    assert len(node.asked()) == 1
    node.origin.faults.remove(fault)
    await node.found_out()
    assert not node.bucket.uploads


@pytest.mark.parametrize(
    ("effect", "after_seconds"),
    [
        (Answer(501, "NotImplemented"), 2 * CARRIED_OUT_SECONDS),
        (Answer(405, "MethodNotAllowed"), 2 * CARRIED_OUT_SECONDS),
        (Answer(403, "AccessDenied"), UNLISTED_GIVEN_UP_SECONDS + 2 * CARRIED_OUT_SECONDS),
    ],
    ids=str,
)
@pytest.mark.slow
async def test_a_bucket_that_never_lists_is_given_up(node: Node, effect: Answer, after_seconds: float) -> None:
    """At once where it cannot, after an hour where it may not; with a line in the log, and not before."""
    await node.intend()
    upload_id = await node.ask()
    await node.die()
    node.origin.inject(on(LIST), effect, times=None)
    with capture_logs() as logs:
        node.start()
        await node.passes(after_seconds * 0.8 if effect.code == "AccessDenied" else 50.0, step=2.0)
        assert len(node.asked()) == 1
        assert not [one for one in logs if "may be left at the origin" in one["event"]]
        await node.found_out(after_seconds)
    [told] = [one for one in logs if "may be left at the origin" in one["event"]]
    assert told["object"] == str(AT)
    assert effect.code in told["reason"]
    assert set(node.bucket.uploads) == {upload_id}


@pytest.mark.slow
async def test_an_origin_that_is_away_for_long_is_still_asked(node: Node) -> None:
    """That it does not answer is no refusal."""
    await node.intend()
    await node.ask()
    await node.die()
    away = node.origin.inject(on(LIST), Answer(503, "SlowDown"), times=None)
    node.start()
    await node.passes(UNLISTED_GIVEN_UP_SECONDS + 600.0, step=5.0)
    assert len(node.asked()) == 1
    node.origin.faults.remove(away)
    await node.found_out()
    assert not node.bucket.uploads


async def test_a_bucket_that_is_gone_has_no_uploads(node: Node) -> None:
    """There is nothing to be found out any more."""
    await node.intend()
    await node.die()
    del node.origin.buckets["bucket"]
    node.start()
    await node.found_out()


async def test_many_uploads_under_keys_that_begin_with_it_are_no_hindrance(node: Node) -> None:
    """The listing of the key is read to its end, over pages, and not further."""
    await node.intend()
    upload_id = await node.ask()
    for number in range(2500):
        await node.ask(key(f"{AT.key}{number}"))
    await node.die()
    node.start()
    await node.found_out()
    assert upload_id not in node.bucket.uploads
    assert len(node.bucket.uploads) == 2500
    assert node.origin.count(LIST) == 1


async def test_a_question_ends_with_the_change_that_notes_its_upload(node: Node) -> None:
    """No moment is without either; one that was refused is forgotten, one whose answer was lost is a suspect."""
    async with in_doubt(node.journal, AT, "slot", node.clock) as one:
        assert [row.id for row in node.asked()] == [one.id]
        opened = Write(spec(AT), ExpectedVersion(), 1.0, upload_id="u", origin_upload_id="o")
        await node.journal.change(lambda tx: tx.uploads.begin(opened, one.id))
        one.is_over = True
        assert not node.asked()
    async with in_doubt(node.journal, AT, "slot", node.clock) as one:
        one.is_refused = True
    assert not node.asked()
    with pytest.raises(ZeroDivisionError):
        async with in_doubt(node.journal, AT, "slot", node.clock):
            raise ZeroDivisionError
    suspects = [row.asked.in_doubt_since for row in node.asked() if row.asked is not None]
    assert [one.at for one in suspects if one is not None] == [node.clock.now()]


async def test_without_a_journal_the_origin_is_not_asked(node: Node) -> None:
    """An upload that could not be written down would be forgotten."""
    node.journal._failure = "the disk is broken"
    with pytest.raises(BufferUnavailable):
        async with in_doubt(node.journal, AT, "slot", node.clock):
            raise AssertionError("asked")


async def test_a_flush_that_is_cut_off_while_it_asks_leaves_a_suspect(node: Node) -> None:
    """Also where the origin carries it out after that: it has nothing of it in the end."""
    await node.upload(AT, [PART_BYTES, 3])
    reached, resume = asyncio.Event(), asyncio.Event()
    node.origin.inject(on(CREATE), Hold(resume, reached))
    node.start()
    await node.until(reached.is_set)
    await node.kill()
    assert [one.asked is not None and one.asked.in_doubt_since is not None for one in node.asked()] == [True]
    await node.ask()
    node.start()
    await node.flushed()
    await node.found_out()
    assert not node.bucket.uploads


@pytest.mark.parametrize("effect", [Unreachable(late=True), Answer(500, late=True)], ids=str)
async def test_a_flush_whose_answers_were_lost_leaves_no_upload_in_the_end(
    node: Node, effect: Answer | Unreachable
) -> None:
    """Each of its tries may have begun one."""
    stored = await node.upload(AT, [PART_BYTES, 3])
    node.origin.inject(on(CREATE), effect, times=3)
    node.start()
    await node.flushed()
    assert node.bucket.object(AT.key).etag == stored.etag
    await node.found_out(10 * CARRIED_OUT_SECONDS)
    assert not node.bucket.uploads


def test_the_next_process_of_a_worker_slot_takes_over_what_the_last_has_left(tmp_path: Path) -> None:
    """And of no other slot, whose process lives; the recovery of all takes over all."""
    for worker in (1, 2):
        journal = Journal(tmp_path, lambda _: None, worker)
        asked = CreateAttempt(worker, Moment(1.0))
        asyncio.run(journal.change(lambda tx: tx.uploads.ask(AT, "slot", asked)))  # noqa: B023
        journal.close()
    journal = Journal(tmp_path, lambda _: None, 1)
    journal.inherit(Moment(7.0))
    assert _suspects(journal) == {1: 7.0, 2: None}
    journal.recover(Moment(9.0))
    assert _suspects(journal) == {1: 7.0, 2: 9.0}
    journal.close()


def _suspects(journal: Journal) -> dict[int, float | None]:
    found = [one for one in journal.read(lambda tx: tx.uploads.asked(AT)) if one.state is State.ABORTING]
    return {
        one.asked.worker: None if one.asked.in_doubt_since is None else one.asked.in_doubt_since.at
        for one in found
        if one.asked is not None
    }
