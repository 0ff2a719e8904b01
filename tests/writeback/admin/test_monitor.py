"""What is pending, open and remembered is told as metrics, as it is, and again and again."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.telemetry import metrics
from gateway.writeback.admin.monitor import LOOK_SECONDS, STATES, PendingMonitor
from gateway.writeback.admin.queries import PendingQueries
from gateway.writeback.flushing.state import OTHERS
from gateway.writeback.journal.records import Priority, Turn
from tests.support.manual_clock import ManualClock
from tests.support.opening import Opening
from tests.support.writeback import key, part
from tests.support.writeback_admin import AdminHarness


class LookingClock:
    """The buffer's clock, as the monitor has it: it is known when the monitor sleeps, so when no look is under way."""

    def __init__(self, clock: ManualClock) -> None:
        self.now, self.monotonic = clock.now, clock.monotonic
        self.sleeps_seconds = 0.0
        self.asleep = asyncio.Event()
        self._clock = clock

    async def sleep(self, seconds: float) -> None:
        self.sleeps_seconds = seconds
        self.asleep.set()
        await self._clock.sleep(seconds)
        self.asleep.clear()


class Monitored:
    """A buffer whose monitor runs; what it has told last."""

    def __init__(self, path: Path) -> None:
        self.harness = AdminHarness(path)
        self._overview = PendingQueries(path / "seen")
        self._path = path
        self._clock = LookingClock(self.harness.buffer.clock)
        monitor = PendingMonitor(self._overview, ["slot"], self._clock)
        self._running = asyncio.create_task(monitor.run())

    @property
    def problems(self) -> dict[tuple[str, str], float]:
        kept = metrics.WRITEBACK_NOT_FLUSHED.kept()
        return {(slot, state): number.get() for (slot, state), number in kept.items()}

    @property
    def conflict_age_seconds(self) -> float:
        return metrics.WRITEBACK_OLDEST_CONFLICT_SECONDS.value("slot")

    @property
    def uploads(self) -> tuple[float, float, float]:
        """Of slot `slot`: their number, their bytes, and the longest time without a part."""
        counted = (
            metrics.WRITEBACK_OPEN_UPLOADS,
            metrics.WRITEBACK_OPEN_UPLOAD_BYTES,
            metrics.WRITEBACK_OPEN_UPLOAD_IDLE,
        )
        uploads, size_bytes, idle_seconds = (metric.value("slot") for metric in counted)
        return uploads, size_bytes, idle_seconds

    @property
    def remembered(self) -> tuple[float, float]:
        """Uploads that have ended, and own writes."""
        remembered = metrics.WRITEBACK_REMEMBERED
        return remembered.value("ended-upload"), remembered.value("own-write")

    def let_see(self) -> None:
        """From now on the journal can be read."""
        (self._path / "seen").symlink_to(self._path)

    async def looked(self) -> None:
        """It has looked once more. No time passes while it looks."""
        async with asyncio.timeout(60):
            await self._clock.asleep.wait()
            metrics.WRITEBACK_JOURNAL_BYTES.set(0)
            await self.harness.buffer.clock.advance(self._clock.sleeps_seconds)
            self.looked_at = self.harness.buffer.clock.now()
            await self._clock.asleep.wait()
        assert metrics.WRITEBACK_JOURNAL_BYTES.value() > 0

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.harness.close()
        self._overview.close()


@pytest.fixture
def one(tmp_path: Path) -> Opening:
    return Opening(lambda: Monitored(tmp_path))


async def test_what_does_not_get_to_the_origin_is_counted_by_state(one: Monitored) -> None:
    """And is told to be gone when it is."""
    journal = one.harness.buffer.journal
    stored = [await one.harness.buffer.put(key(f"{number}"), b"x") for number in range(7)]
    failed = Turn(0.0, 2, 50.0, "why", Priority.RETRY)
    for write in stored[:4]:
        await journal.change(lambda tx, write=write: tx.writes.keep(write.id, OTHERS))  # type: ignore[misc]
    waits = Turn(0.0, 2, None, "no answer", Priority.RETRY)
    await journal.change(lambda tx: tx.turns.wait(stored[6].id, tx.turns.of(stored[6].id), waits))  # type: ignore[arg-type]
    for write in stored[4:6]:
        await journal.change(lambda tx, write=write: tx.turns.wait(write.id, tx.turns.of(write.id), failed))  # type: ignore[misc]
    await journal.change(lambda tx: tx.turns.quarantine(stored[3].id, "how"))
    one.let_see()
    await one.looked()
    for write in stored:
        await journal.change(lambda tx, write=write: tx.writes.settle(write.id, write.etag, Moment(1.0)))  # type: ignore[misc]
    before, age_seconds = dict(one.problems), one.conflict_age_seconds
    assert age_seconds == pytest.approx(
        one.harness.buffer.clock.now() - stored[0].acknowledged_at, abs=2 * LOOK_SECONDS
    )
    assert age_seconds >= LOOK_SECONDS
    await one.looked()
    assert one.conflict_age_seconds == 0.0
    assert one.problems == {("slot", state): 0 for state in STATES}
    assert before == {("slot", state): count for state, count in zip(STATES, (4, 1, 2, 1), strict=True)}
    assert STATES == ("conflict", "damaged", "failing", "waiting for the bucket")


async def test_a_journal_that_cannot_be_read_ends_nothing(one: Monitored) -> None:
    """It is looked at again, and seen when it is there."""
    await one.harness.buffer.clock.advance(3 * LOOK_SECONDS)
    assert one.problems == {}
    one.let_see()
    await one.looked()
    assert set(one.problems) == {("slot", state) for state in STATES}


async def test_open_uploads_are_told_with_what_they_take_and_how_long_nobody_has_gone_on(
    one: Monitored, tmp_path: Path
) -> None:
    """Of the one that was left alone longest; a damaged row hides none of the others."""
    buffer = one.harness.buffer
    one.let_see()
    await one.looked()
    assert one.uploads == (0, 0, 0.0)
    began_at = buffer.clock.now()
    for upload_id in ("u1", "u2", "u3"):
        await one.harness.open_upload("k", upload_id)
    with sqlite3.connect(tmp_path / "journal") as other:
        other.execute("UPDATE writes SET record = zeroblob(60) WHERE upload_id = 'u1'")
    other.close()
    await buffer.clock.advance(100.0)
    stored = replace(part(1, "p"), file=buffer.stage(b"bytes"))
    now = buffer.clock.now()
    await buffer.journal.change(lambda tx: tx.uploads.put_part("u2", stored, Moment(now)))
    await one.looked()
    uploads, size_bytes, idle_seconds = one.uploads
    assert (uploads, size_bytes) == (3, 5)
    assert idle_seconds == pytest.approx(one.looked_at - began_at)
    assert one.looked_at - began_at >= 100.0
    await one.harness.admin.abort(["u1", "u2", "u3"])
    await one.looked()
    assert one.uploads == (0, 0, 0.0)
    assert one.remembered == (2, 0)  # of the damaged one nothing is left to remember
    assert metrics.WRITEBACK_JOURNAL_BYTES.value() >= (tmp_path / "journal").stat().st_size > 0
    await buffer.put(key("k"), b"x")
    one.harness.start()
    await buffer.flushed()
    await one.looked()
    assert one.remembered == (2, 1)
