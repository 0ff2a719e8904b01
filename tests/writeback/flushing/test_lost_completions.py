"""What the origin has completed and nobody heard of is over here, too; whatever may still be of use stays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.origin.client import OriginRequest
from gateway.s3.headers import multipart_etag, unquote
from gateway.s3.requests import Operation
from gateway.writeback.flushing.early_parts import EarlyParts
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.lost_completions import (
    FIRST_LOOK_SECONDS,
    GIVEN_UP_SECONDS,
    PAUSE_SECONDS,
    LostCompletions,
)
from gateway.writeback.journal.records import Base, Ended, OwnDoing, Part, PendingObject, Upload
from tests.support.flushing import PART_BYTES, Buffer
from tests.support.memory_origin.faults import Answer, Unreachable, on
from tests.support.writeback import fixed, key

AT = key("dir/model")
UPLOAD = "ours"


class Node(Buffer):
    """A buffer with an upload whose parts the origin has, and which it was asked to complete."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.parts: list[Part] = []
        self.finding = LostCompletions(
            self.journal, FlushRequests(self.origin, self.staging, self.threads), self, self.clock
        )

    async def publish(self, pending: PendingObject, etag: str | None) -> None:
        await self.observer.publish(pending, etag)
        await self.when_published()

    async def when_published(self) -> None:
        """What happens then; tests give another."""

    async def begin(self) -> None:
        async with await self.origin.send(OriginRequest("POST", AT.bucket, AT.key, [("uploads", None)])):
            origin_upload_id = next(reversed(self.bucket.uploads))
        upload = Upload(UPLOAD, fixed(AT), Base(absent=True), 1.0, origin_upload_id)
        await self.journal.change(lambda book: book.open_upload(upload))
        for number, size in enumerate((PART_BYTES, 3), 1):
            self.parts.append(await self.part(number, os.urandom(size)))
        early = EarlyParts(self.tools(), self.clock)
        early.look()
        await self.until(lambda: not self.journal.read(lambda book: book.slots_with_unsent()))
        await early.stop()

    async def part(self, number: int, content: bytes) -> Part:
        part = Part(number, self.stage(content), self.clock.now())
        assert await self.journal.change(lambda book: book.put_part(UPLOAD, part))
        return part

    @property
    def etag(self) -> str:
        return multipart_etag([part.file.etag for part in self.parts]) or ""

    async def ask(self) -> Ended:
        """It is written down that the origin is to complete it."""
        listed = [(part.number, unquote(part.file.etag)) for part in self.parts]
        asked = Ended(UPLOAD, AT, self.clock.now(), self.etag, listed)
        await self.journal.change(lambda book: book.begin_completing(asked))
        return asked

    async def complete(self, parts: list[Part] | None = None) -> None:
        """The origin does so."""
        upload = self.journal.read(lambda book: book.upload(UPLOAD))
        assert upload is not None
        made = PendingObject(
            0, upload.fixed, upload.base, 0.0, "", 0, parts or self.parts, True, False, UPLOAD, upload.origin_upload_id
        )
        await FlushRequests(self.origin, self.staging, self.threads).complete(made, {})
        assert not self.bucket.uploads

    async def look(self, after_seconds: float = FIRST_LOOK_SECONDS) -> None:
        await self.clock.advance(after_seconds)
        await self.finding.look()

    @property
    def is_open(self) -> bool:
        return self.journal.read(lambda book: book.upload(UPLOAD)) is not None

    @property
    def is_asked(self) -> bool:
        return self.journal.read(lambda book: book.completing(UPLOAD)) is not None

    def asked_of_origin(self) -> int:
        return self.origin.count(Operation.LIST_PARTS)


def play(path: Path, scenario: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        node = Node(path)
        try:
            await node.begin()
            await scenario(node)
        finally:
            await node.close()

    asyncio.run(run())


def test_what_the_origin_has_done_is_over_here(tmp_path: Path) -> None:
    """Published, then remembered for who repeats it; its parts go, and what lies under the key is our own."""

    async def scenario(node: Node) -> None:
        asked = await node.ask()
        await node.complete()
        await node.look()
        assert not node.is_open
        assert not node.is_asked
        assert not list(node.staging.names())
        assert node.observer.published == [(AT.key, node.etag)]
        looked_at = node.clock.now()
        assert node.journal.read(lambda book: book.ended(UPLOAD)) == replace(asked, ended_at=looked_at)
        assert node.journal.read(lambda book: book.own_doing(AT)) == OwnDoing(looked_at, node.etag)

    play(tmp_path, scenario)


def test_nothing_is_done_before_it_is_published(tmp_path: Path) -> None:
    """A process that dies in between publishes again."""

    async def scenario(node: Node) -> None:
        async def die() -> None:
            raise asyncio.CancelledError

        await node.ask()
        await node.complete()
        node.when_published = die  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await node.look()
        assert node.is_open
        assert node.is_asked

    play(tmp_path, scenario)


def test_the_origin_is_given_time(tmp_path: Path) -> None:
    """It is asked seldom, and less and less, for as long as it may still be at it; then nobody looks any more."""

    async def scenario(node: Node) -> None:
        await node.ask()
        times = []
        while node.is_asked:
            before = node.asked_of_origin()
            await node.look(1.0)
            times += [node.clock.now()] * (node.asked_of_origin() - before)
        waits = [after - before for before, after in pairwise(times)]
        assert waits == sorted(waits)
        assert 8 <= len(times) <= 12
        assert node.is_open
        assert len(node.parts) == len(list(node.staging.names()))

    play(tmp_path, scenario)


def test_what_is_done_late_is_found(tmp_path: Path) -> None:
    """The origin works at a large object for half an hour."""

    async def scenario(node: Node) -> None:
        await node.ask()
        for seconds in (5, 5, 10, 20, 40, 80, 160, 320, 640, 600):
            await node.look(seconds)
        assert node.is_open
        await node.complete()
        await node.look(700)
        assert not node.is_open

    play(tmp_path, scenario)


def test_an_upload_that_the_origin_has_given_up_stays(tmp_path: Path) -> None:
    """Nothing of it, or something else, lies under the key: its parts are of use to who completes it anew."""

    async def scenario(node: Node) -> None:
        await node.ask()
        node.bucket.uploads.clear()
        await node.look()
        node.origin.put(AT.bucket, AT.key, b"theirs")
        await node.look(GIVEN_UP_SECONDS)
        assert node.is_open
        assert not node.is_asked
        assert len(list(node.staging.names())) == 2
        assert not node.observer.published

    play(tmp_path, scenario)


def test_an_upload_that_is_open_there_stays_whatever_lies_under_the_key(tmp_path: Path) -> None:
    """Also the very same bytes: others may have put them there."""

    async def scenario(node: Node) -> None:
        kept = dict(node.bucket.uploads)
        await node.ask()
        await node.complete()
        node.bucket.uploads.update(kept)
        await node.look()
        assert node.is_open
        assert not node.observer.published

    play(tmp_path, scenario)


def test_an_upload_with_which_the_client_goes_on_stays(tmp_path: Path) -> None:
    """A part that was acknowledged since is not thrown away."""

    async def scenario(node: Node) -> None:
        await node.ask()
        await node.complete()
        await node.clock.advance(1.0)
        await node.part(3, b"more")
        await node.look()
        assert node.is_open
        assert len(list(node.staging.names())) == 3

    play(tmp_path, scenario)


def test_one_that_has_ended_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    """Its client has repeated the Complete, or aborted, while the origin was being asked."""

    async def scenario(node: Node) -> None:
        await node.ask()
        await node.complete()
        aborted = Ended(UPLOAD, AT, node.clock.now(), None)

        async def abort() -> None:
            await node.journal.change(lambda book: book.abort(aborted))

        node.when_published = abort  # type: ignore[method-assign]
        await node.look()
        ended = node.journal.read(lambda book: book.ended(UPLOAD))
        assert ended is not None
        assert ended.etag is None
        assert not node.is_asked

    play(tmp_path, scenario)


def test_what_this_gateway_has_written_since_counts(tmp_path: Path) -> None:
    """What is found out late takes the place of nothing that was done later."""

    async def scenario(node: Node) -> None:
        await node.ask()
        await node.complete()
        later = OwnDoing(node.clock.now() + 100, '"later"')
        await node.journal.change(lambda book: book.did(AT, later))
        await node.look()
        assert not node.is_open
        assert node.journal.read(lambda book: book.own_doing(AT)) == later

    play(tmp_path, scenario)


@pytest.mark.parametrize("effect", [Unreachable(), Answer(503, "SlowDown"), Answer(403, "AccessDenied")], ids=str)
def test_an_origin_that_does_not_say_is_asked_again(tmp_path: Path, effect: Answer | Unreachable) -> None:
    """Not at once; and nothing is concluded from it."""

    async def scenario(node: Node) -> None:
        await node.ask()
        await node.complete()
        node.origin.inject(on(Operation.LIST_PARTS), effect)
        await node.look()
        await node.look(PAUSE_SECONDS - 1)
        assert node.asked_of_origin() == 1
        assert node.is_open
        await node.look(1)
        assert not node.is_open

    play(tmp_path, scenario)


def test_a_look_that_fails_comes_again(tmp_path: Path) -> None:
    """The origin has no such upload, and does not say what lies under the key."""

    async def scenario(node: Node) -> None:
        await node.ask()
        await node.complete()
        node.origin.inject(on(Operation.HEAD_OBJECT), Unreachable())
        await node.look()
        assert node.is_open
        await node.look(PAUSE_SECONDS)
        assert not node.is_open

    play(tmp_path, scenario)


def test_an_origin_that_is_away_for_long_is_still_asked(tmp_path: Path) -> None:
    """Whoever gives up has been told something."""

    async def scenario(node: Node) -> None:
        await node.ask()
        await node.complete()
        away = node.origin.inject(lambda _: True, Unreachable(), times=None)
        await node.look()
        await node.look(2 * GIVEN_UP_SECONDS)
        assert node.is_asked
        away.times = 0
        await node.look(PAUSE_SECONDS)
        assert not node.is_open

    play(tmp_path, scenario)


def test_a_damaged_row_stops_nothing(tmp_path: Path) -> None:
    """It is told, and nothing of the upload goes."""

    async def scenario(node: Node) -> None:
        await node.ask()
        await node.complete()
        await node.journal.change(lambda book: book._rows.execute("UPDATE completing SET record = X'00'") and None)
        with capture_logs() as logs:
            await node.look()
        assert [one["log_level"] for one in logs] == ["error"]
        assert node.is_open
        await node.look(GIVEN_UP_SECONDS)
        assert node.is_open
        assert not node.journal.read(lambda book: book.all_completing("", 9))

    play(tmp_path, scenario)


def test_who_is_asked_for_twice_is_doubted_until_the_last(tmp_path: Path) -> None:
    """A refusal ends what it answers, not what was asked before or after it."""

    async def scenario(node: Node) -> None:
        first, second = Ended(UPLOAD, AT, 1.0, node.etag), Ended(UPLOAD, AT, 2.0, node.etag)
        assert not await node.journal.change(lambda book: book.begin_completing(first))
        assert await node.journal.change(lambda book: book.begin_completing(second))
        await node.journal.change(lambda book: book.end_completing(UPLOAD, 1.0))
        assert node.is_asked
        await node.journal.change(lambda book: book.end_completing(UPLOAD, 2.0))
        assert not node.is_asked

    play(tmp_path, scenario)
