"""Uploads that the origin was asked for are found again, whatever became of the process or the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.errors import BufferRefused, BufferUnavailable
from gateway.objects import ObjectKey
from gateway.origin.client import OriginRequest
from gateway.s3.requests import Operation
from gateway.writeback.flushing.asking import asking
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.lost_uploads import CARRIED_OUT_SECONDS, LOOK_SECONDS, PAUSE_SECONDS, LostUploads
from gateway.writeback.flushing.upload_state import CLOCKS_APART_SECONDS
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Base, Ended, Intent, Upload
from tests.support.flushing import PART_BYTES, Buffer, with_buffer
from tests.support.memory_origin.faults import Answer, Hold, Unreachable, on
from tests.support.writeback import fixed, key

CREATE = Operation.CREATE_MULTIPART_UPLOAD
AT = key("dir/model")


class Node(Buffer):
    """A buffer in which uploads are asked for, lost, and found."""

    def lost_uploads(self) -> LostUploads:
        return LostUploads(self.journal, FlushRequests(self.origin, self.staging, self.threads), self.clock)

    async def ask(self, at: ObjectKey = AT) -> str:
        """Somebody's CreateMultipartUpload; the origin's id."""
        async with await self.origin.send(OriginRequest("POST", at.bucket, at.key, [("uploads", None)])):
            return next(reversed(self.bucket.uploads))

    async def intend(self, token: str, at: ObjectKey = AT, worker: int = 0) -> None:
        now = self.clock.now()
        await self.journal.change(lambda book: book.intend(Intent(token, worker, at, now)))

    async def die(self, worker: int = 0) -> None:
        """The process of a worker slot is gone, and the next one has begun."""
        now = self.clock.now()
        await self.journal.change(lambda book: book.suspect_all(now, worker))

    def left_intents(self) -> int:
        return self.journal.read(lambda book: len(book.intents(AT)))

    def orphans(self) -> set[str]:
        return set(self.journal.read(lambda book: book.orphan_ids(100)))

    async def look(self, after_seconds: float = CARRIED_OUT_SECONDS) -> None:
        await self.clock.advance(after_seconds)
        await self.lost_uploads().look()


def play(path: Path, scenario: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        node = Node(path)
        try:
            await scenario(node)
        finally:
            await node.close()

    asyncio.run(run())


def test_an_upload_whose_asker_died_is_aborted(tmp_path: Path) -> None:
    """The flush's process finds it by key and time, and the origin has nothing of it in the end."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        upload_id = await node.ask()
        await node.die()
        await node.look()
        assert (node.orphans(), node.left_intents()) == ({upload_id}, 0)
        node.start()
        await node.until(lambda: not node.bucket.uploads and not node.orphans())

    play(tmp_path, scenario)


def test_a_bucket_that_lets_nothing_be_aborted_keeps_no_other_from_it(tmp_path: Path) -> None:
    """Its rights may come back; until then it is asked now and then."""

    async def scenario(node: Node) -> None:
        upload_id = await node.ask()
        refusing = ObjectKey("refusing", "k")
        node.origin.inject(on(bucket="refusing"), Answer(403, "AccessDenied"), times=None)

        def orphan(book: Any) -> None:
            book.orphan(refusing, "0")  # before any id of the origin's
            book.orphan(AT, upload_id)

        await node.journal.change(orphan)
        node.start()
        await node.until(lambda: not node.bucket.uploads and node.orphans() == {"0"})

    play(tmp_path, scenario)


def test_one_that_was_never_asked_for_is_nothing(tmp_path: Path) -> None:
    """A process that died before it sent: there is nothing to abort, and nothing is remembered."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        await node.die()
        await node.look()
        assert (node.orphans(), node.left_intents()) == (set(), 0)

    play(tmp_path, scenario)


def test_the_origin_may_still_be_at_it(tmp_path: Path) -> None:
    """A request that was under way when its sender died may be carried out later: nothing is decided before."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        await node.die()
        await node.look(CARRIED_OUT_SECONDS - 1)
        assert (node.origin.count(), node.left_intents()) == (0, 1)
        upload_id = await node.ask()
        await node.look(1)
        assert node.orphans() == {upload_id}

    play(tmp_path, scenario)


@pytest.mark.parametrize("seconds_before", [CLOCKS_APART_SECONDS + 1, CLOCKS_APART_SECONDS - 1])
def test_what_was_begun_at_another_time_is_another_writers(tmp_path: Path, seconds_before: float) -> None:
    """The clocks of origin and gateway may differ by so much, and no more."""

    async def scenario(node: Node) -> None:
        upload_id = await node.ask()
        await node.clock.advance(seconds_before)
        await node.intend("t")
        await node.die()
        await node.look()
        assert node.orphans() == ({upload_id} if seconds_before < CLOCKS_APART_SECONDS else set())

    play(tmp_path, scenario)


def test_what_was_begun_long_after_it_became_a_suspect_is_another_writers(tmp_path: Path) -> None:
    """Also where the origin could not be asked meanwhile."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        await node.die()
        await node.clock.advance(CLOCKS_APART_SECONDS + 1)
        await node.ask()
        await node.look(0)
        assert (node.orphans(), node.left_intents()) == (set(), 0)

    play(tmp_path, scenario)


def test_what_cannot_be_told_apart_from_another_writers_is_left_and_told(tmp_path: Path) -> None:
    """Of two that may be ours one is not: neither is aborted, and a person can read which they are."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        both = [await node.ask(), await node.ask()]
        await node.die()
        with capture_logs() as logs:
            await node.look()
        assert (node.orphans(), node.left_intents()) == (set(), 0)
        assert [(one["key"], one["upload_ids"]) for one in logs] == [(AT.key, both)]

    play(tmp_path, scenario)


def test_as_many_as_were_asked_for_are_all_ours(tmp_path: Path) -> None:
    """Several uploads of one key may be lost at once."""

    async def scenario(node: Node) -> None:
        for token in ("t1", "t2", "t3"):
            await node.intend(token)
        both = {await node.ask(), await node.ask()}
        await node.die()
        await node.look()
        assert (node.orphans(), node.left_intents()) == (both, 0)

    play(tmp_path, scenario)


def test_what_is_known_of_is_left_alone(tmp_path: Path) -> None:
    """Open uploads, pending objects, what is to be aborted anyway; and other keys that begin with this one."""

    async def scenario(node: Node) -> None:
        ids = [await node.ask() for _ in range(4)]
        await node.ask(key(AT.key + "/below"))

        def know(book: Any) -> None:
            book.open_upload(Upload("open", fixed(AT), Base(), 1.0, ids[0]))
            book.open_upload(Upload("aborted", fixed(AT), Base(), 1.0, ids[1]))
            book.abort(Ended("aborted", AT, 1.0, None))

        await node.journal.change(know)
        await node.upload(AT, [PART_BYTES, 3], origin_upload_id=ids[2])
        await node.intend("t")
        await node.die()
        await node.look()
        assert (node.orphans(), node.left_intents()) == ({ids[1], ids[3]}, 0)

    play(tmp_path, scenario)


def test_nothing_is_decided_while_somebody_asks_for_the_same_key(tmp_path: Path) -> None:
    """What the origin lists may be the upload that a living process has just begun, and not noted yet."""

    async def scenario(node: Node) -> None:
        await node.intend("dead", worker=1)
        await node.intend("living", worker=2)
        living = await node.ask()
        await node.die(worker=1)
        await node.look()
        assert (node.orphans(), node.left_intents()) == (set(), 2)

        def note(book: Any) -> None:
            book.forget_intent("living")
            book.open_upload(Upload("u", fixed(AT), Base(), 1.0, living))

        await node.journal.change(note)
        await node.look(0)
        assert (node.orphans(), node.left_intents()) == (set(), 0)

    play(tmp_path, scenario)


@pytest.mark.parametrize("effect", [Unreachable(), Answer(503, "SlowDown"), Answer(403, "AccessDenied")], ids=str)
def test_an_origin_that_does_not_list_is_asked_again(tmp_path: Path, effect: Answer | Unreachable) -> None:
    """Nothing is forgotten while it is away; and it is not asked all the time."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        upload_id = await node.ask()
        await node.die()
        node.origin.inject(on(Operation.LIST_MULTIPART_UPLOADS), effect, times=2)
        running = asyncio.create_task(node.lost_uploads().run())
        await node.clock.advance(CARRIED_OUT_SECONDS + PAUSE_SECONDS / 2)
        assert (node.origin.count(Operation.LIST_MULTIPART_UPLOADS), node.left_intents()) == (1, 1)
        await node.until(lambda: node.left_intents() == 0)
        assert node.orphans() == {upload_id}
        assert node.origin.count(Operation.LIST_MULTIPART_UPLOADS) == 3
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert PAUSE_SECONDS > 10 * LOOK_SECONDS
    play(tmp_path, scenario)


def test_a_bucket_that_is_gone_has_no_uploads(tmp_path: Path) -> None:
    """There is nothing to be found out any more."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        await node.die()
        del node.origin.buckets["bucket"]
        await node.look()
        assert node.left_intents() == 0

    play(tmp_path, scenario)


def test_many_uploads_under_keys_that_begin_with_it_are_no_hindrance(tmp_path: Path) -> None:
    """The listing of the key is read to its end, over pages, and not further."""

    async def scenario(node: Node) -> None:
        await node.intend("t")
        upload_id = await node.ask()
        for number in range(2500):
            await node.ask(key(f"{AT.key}{number}"))
        await node.die()
        await node.look()
        assert node.orphans() == {upload_id}
        assert node.origin.count(Operation.LIST_MULTIPART_UPLOADS) == 1

    play(tmp_path, scenario)


def test_an_intent_ends_with_the_change_that_notes_its_upload(tmp_path: Path) -> None:
    """No moment is without either; one that was refused is forgotten, one whose answer was lost is a suspect."""

    async def scenario(node: Node) -> None:
        async with asking(node.journal, AT, node.clock) as one:
            assert node.left_intents() == 1
            one.sent()
            await one.note(lambda book: book.open_upload(Upload("u", fixed(AT), Base(), 1.0, "o")))
            assert node.left_intents() == 0
        async with asking(node.journal, AT, node.clock) as one:
            one.sent()
            one.refused()
        assert node.left_intents() == 0
        async with asking(node.journal, AT, node.clock):
            pass
        assert node.left_intents() == 0
        async with asking(node.journal, AT, node.clock) as one:
            one.sent()
        assert [one.suspect_since for one in node.journal.read(lambda book: book.intents(AT))] == [node.clock.now()]

    play(tmp_path, scenario)


def test_without_a_journal_the_origin_is_not_asked(tmp_path: Path) -> None:
    """An upload that could not be written down would be forgotten."""

    async def scenario(node: Node) -> None:
        node.journal._failure = BufferRefused("the disk is broken")
        with pytest.raises(BufferUnavailable):
            async with asking(node.journal, AT, node.clock):
                raise AssertionError("asked")

    play(tmp_path, scenario)


def test_a_flush_that_is_cancelled_while_it_asks_leaves_a_suspect(tmp_path: Path) -> None:
    """Also where the origin carries it out after that."""

    async def scenario(node: Node) -> None:
        await node.upload(AT, [PART_BYTES, 3])
        reached, go_on = asyncio.Event(), asyncio.Event()
        node.origin.inject(on(CREATE), Hold(go_on, reached))
        node.start()
        await reached.wait()
        await node.kill()
        assert len(node.journal.read(lambda book: book.suspected("", 9))) == 1
        go_on.set()

    play(tmp_path, scenario)


@pytest.mark.parametrize("effect", [Unreachable(late=True), Answer(500, late=True)], ids=str)
def test_a_flush_whose_answers_were_lost_leaves_no_upload_in_the_end(
    tmp_path: Path, effect: Answer | Unreachable
) -> None:
    """Each of its tries may have begun one."""

    async def scenario(buffer: Buffer) -> None:
        stored = await buffer.upload(AT, [PART_BYTES, 3])
        buffer.origin.inject(on(CREATE), effect, times=3)
        buffer.start()
        await buffer.flushed()
        assert buffer.bucket.object(AT.key).etag == stored.etag
        assert len(buffer.bucket.uploads) == 3
        requests = FlushRequests(buffer.origin, buffer.staging, buffer.threads)
        finding = LostUploads(buffer.journal, requests, buffer.clock)
        running = asyncio.create_task(finding.run())
        await buffer.until(lambda: not buffer.bucket.uploads)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_buffer(tmp_path, scenario)


def test_the_next_process_of_a_worker_slot_takes_over_what_the_last_has_left(tmp_path: Path) -> None:
    """And of no other slot, whose process lives; the recovery of all takes over all."""
    for worker in (1, 2):
        journal = Journal(tmp_path, lambda _: None, worker)
        intent = Intent(f"t{worker}", worker, AT, 1.0)
        asyncio.run(journal.change(lambda book: book.intend(intent)))  # noqa: B023
        journal.close()
    journal = Journal(tmp_path, lambda _: None, 1)
    journal.take_over(7.0)
    since = {one.token: one.suspect_since for one in journal.read(lambda book: book.intents(AT))}
    assert since == {"t1": 7.0, "t2": None}
    journal.recover(9.0)
    since = {one.token: one.suspect_since for one in journal.read(lambda book: book.intents(AT))}
    assert since == {"t1": 7.0, "t2": 9.0}
    journal.close()
