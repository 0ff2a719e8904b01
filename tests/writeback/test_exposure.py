"""What only this node has is told as it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.core.errors import BufferUnavailable
from gateway.policy.slots import Prefix
from gateway.telemetry import metrics
from gateway.writeback import room
from gateway.writeback.bounds import EXPOSURE_SECONDS
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.room import MARGIN_BYTES
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot
from tests.support.writeback import key, part, pending, upload

SLOT = Slot("slot", Prefix.parse("s3://bucket/"), write="back", buffer_bytes=1000)


TOLD = (
    metrics.WRITEBACK_BUFFER_BYTES,
    metrics.WRITEBACK_USED_BYTES,
    metrics.WRITEBACK_PENDING_BYTES,
    metrics.WRITEBACK_PENDING_OBJECTS,
    metrics.WRITEBACK_LOCAL_BYTES,
    metrics.WRITEBACK_LOCAL_OBJECTS,
    metrics.WRITEBACK_EXPOSURE_BYTES,
)


def told() -> tuple[float, ...]:
    return tuple(metric.value("slot") for metric in TOLD)


def oldest_seconds() -> float:
    return metrics.WRITEBACK_OLDEST_SECONDS.value("slot")


def test_pending_and_arriving_writes_are_told_with_the_age_of_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects, parts of open uploads, deletions; a conflict counts as bytes, but has no age; errors pass."""

    async def scenario() -> None:
        clock = ManualClock()
        buffer = await WritebackBuffer.open(tmp_path, 0, [SLOT], clock=clock)
        running = asyncio.create_task(buffer.bounds.tell_exposure())
        bounds = buffer.bounds.of("slot")
        assert bounds is not None
        await clock.advance(EXPOSURE_SECONDS)
        assert (told(), oldest_seconds()) == ((1000, 0, 0, 0, 0, 0, 0), 0.0)
        first = await buffer.acknowledge(replace(pending(key("a"), "x" * 10), acknowledged_at=clock.now()))
        await buffer.journal.change(lambda tx: tx.uploads.begin(upload("u", key("b"))))
        await buffer.put_part("u", part(1, "y" * 7))
        await clock.advance(5.0)
        await buffer.acknowledge(replace(pending(key("c"), deleted=True), acknowledged_at=clock.now()))
        assert await bounds.take("key", 100, 0) is None
        await clock.advance(25.0)
        assert told() == (1000, 117, 17, 2, 0, 0, 0)
        assert oldest_seconds() == pytest.approx(30.0, abs=EXPOSURE_SECONDS)
        with monkeypatch.context() as patch:
            patch.setattr(buffer.journal, "read", _fail)
            await clock.advance(EXPOSURE_SECONDS)
        await buffer.journal.change(lambda tx: tx.writes.keep(first.id, "others"))
        await clock.advance(EXPOSURE_SECONDS)
        assert told()[3] == 2
        assert oldest_seconds() == pytest.approx(27.0, abs=3 * EXPOSURE_SECONDS)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await buffer.close()

    asyncio.run(scenario())


def test_a_disk_without_room_is_told_once_and_so_is_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log, and to whoever counts: nothing else tells of it while no write comes."""
    free_bytes = MARGIN_BYTES

    async def scenario() -> list[str]:
        nonlocal free_bytes
        clock = ManualClock()
        monkeypatch.setattr(room, "_free_bytes", lambda _: free_bytes)
        buffer = await WritebackBuffer.open(tmp_path, 0, [SLOT], clock=clock)
        running = asyncio.create_task(buffer.bounds.tell_exposure())
        with capture_logs() as logs:
            for now_free_bytes, is_full in ((MARGIN_BYTES, False), (MARGIN_BYTES - 1, True), (0, True), (2**30, False)):
                free_bytes = now_free_bytes
                await clock.advance(EXPOSURE_SECONDS)
                assert metrics.WRITEBACK_DISK_FULL.value() == is_full
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await buffer.close()
        return [one["event"] for one in logs]

    events = asyncio.run(scenario())
    assert [event.partition(":")[0] for event in events] == ["the disk is full", "the disk has room again"]


def _fail(_: object) -> None:
    raise BufferUnavailable("no")
