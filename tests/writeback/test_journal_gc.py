"""In a process that runs for months nothing piles up, and reads do not go on asking for what was flushed long ago."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gateway.core.clock import Moment
from gateway.writeback.journal.journal import FORGET_SECONDS, TIDY_SECONDS, UNASKED_SECONDS
from gateway.writeback.journal.transaction import FORGOTTEN_AT_ONCE, JournalTransaction
from gateway.writeback.journal.writes import ENDED_KEPT_SECONDS
from tests.support.flushing import Buffer, with_buffer
from tests.support.writeback import key, upload


def test_reads_pass_soon_after_the_flush(tmp_path: Path) -> None:
    """What is still pending is asked for all the same."""

    async def scenario(buffer: Buffer) -> None:
        await buffer.put(key("k"), b"x")
        buffer.start()
        await buffer.flushed()
        await buffer.until(lambda: not buffer.journal.pending_keys.may_be(key("k")))
        await buffer.clock.advance(3 * TIDY_SECONDS)
        await buffer.kill()
        await buffer.put(key("other"), b"x")
        await buffer.journal.tidy()
        assert buffer.journal.pending_keys.may_be(key("other"))

    with_buffer(tmp_path, scenario)


def test_what_goes_without_a_flush_is_passed_in_the_end(tmp_path: Path) -> None:
    """Somebody has given it up."""

    async def scenario(buffer: Buffer) -> None:
        buffer.start()
        await buffer.clock.advance(0.0)  # it has begun
        await buffer.clock.advance(TIDY_SECONDS)
        kept = await buffer.put(key("k"), b"x")
        await buffer.journal.change(lambda tx: tx.writes.discard(kept.id, Moment(2.0), only_conflict=False))
        await buffer.clock.advance(UNASKED_SECONDS)
        await buffer.until(lambda: not buffer.journal.pending_keys.may_be(key("k")))

    with_buffer(tmp_path, scenario)


def test_what_nobody_repeats_is_forgotten(tmp_path: Path) -> None:
    """However much has ended, a day after it; what ended later stays."""

    async def scenario(buffer: Buffer) -> None:
        now = buffer.clock.now()

        def end(tx: JournalTransaction, at: float, name: str, count: int) -> None:
            for number in range(count):
                tx.uploads.begin(upload(f"{name}{number}", key("k")))
                assert tx.uploads.abort(f"{name}{number}", Moment(at))

        await buffer.journal.change(partial(end, at=now, name="early", count=FORGOTTEN_AT_ONCE + 1))
        await buffer.journal.change(partial(end, at=now + 2 * FORGET_SECONDS, name="late", count=1))
        await buffer.clock.advance(ENDED_KEPT_SECONDS - 1)
        buffer.start()
        await buffer.clock.advance(0.0)  # it has begun
        await buffer.clock.advance(1.0)
        assert buffer.journal.read(lambda tx: tx.uploads.ended("early0"))
        await buffer.clock.advance(FORGET_SECONDS)
        await buffer.until(lambda: not buffer.journal.read(lambda tx: tx.uploads.ended(f"early{FORGOTTEN_AT_ONCE}")))
        assert buffer.journal.read(lambda tx: tx.uploads.ended("late0"))

    with_buffer(tmp_path, scenario)
