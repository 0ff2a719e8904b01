"""What the log says of flushes: whatever is the matter is in it, and it is not flooded."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from structlog.testing import capture_logs

from gateway.core.clock import Moment
from gateway.telemetry import metrics
from gateway.writeback.flushing.flush_logger import FLUSHED_LINES_PER_SECOND, LINES_PER_MINUTE, FlushLogger
from gateway.writeback.flushing.state import OTHERS
from tests.support.counting import by_label, counted
from tests.support.manual_clock import ManualClock
from tests.support.writeback import key, pending, upload

MANY = 10 * LINES_PER_MINUTE


def test_an_origin_that_is_away_does_not_flood_the_log() -> None:
    """Of many objects that fail some have lines, and the next line says how many had none. All are counted."""
    clock = ManualClock()
    asyncio.run(clock.advance(59.0))
    logger = FlushLogger(clock)
    with capture_logs() as logs:
        for number in range(MANY):
            logger.failing(pending(key(str(number)), "x"), 1, "away", "unreachable")
    assert [one["object"] for one in logs] == [f"s3://bucket/{number}" for number in range(LINES_PER_MINUTE)]
    asyncio.run(clock.advance(2.0))
    with capture_logs() as later:
        logger.failing(pending(key("late"), "x"), 2, "away", "unreachable")
        logger.failing(pending(key("later"), "x"), 2, "away", "unreachable")
    assert [one.get("lines_left_out") for one in later] == [MANY - LINES_PER_MINUTE, None]
    assert counted(metrics.WRITEBACK_FLUSH_FAILURES) == MANY + 2


def test_a_journal_that_takes_nothing_does_not_either() -> None:
    """Each write is tried again every few seconds, and fails on this node."""
    clock = ManualClock()
    logger = FlushLogger(clock)
    with capture_logs() as logs:
        for number in range(MANY):
            logger.not_looked_after(f"s3://bucket/{number}", "slot", "disk I/O error")
        asyncio.run(clock.advance(60.0))
        logger.not_looked_after("s3://bucket/late", "slot", "disk I/O error")
    assert [one["log_level"] for one in logs] == ["error"] * (LINES_PER_MINUTE + 1)
    assert logs[-1]["lines_left_out"] == MANY - LINES_PER_MINUTE


def test_what_goes_on_does_not_either() -> None:
    """All of it goes on at once when the origin is back; failures have room of their own."""
    logger = FlushLogger(ManualClock())
    with capture_logs() as logs:
        for number in range(MANY):
            logger.goes_on(pending(key(str(number)), "x"))
        logger.failing(pending(key("k"), "x"), 1, "AccessDenied", "refused")
    assert Counter(one["log_level"] for one in logs) == {"info": LINES_PER_MINUTE, "warning": 1}


def test_manifests_do_not_either() -> None:
    """Those that wait and those that nobody understands share their lines."""
    logger = FlushLogger(ManualClock())
    with capture_logs() as logs:
        for number in range(MANY):
            logger.not_understood(pending(key(str(number)), "x"), "it is no JSON")
            logger.awaits_files(pending(key(str(number)), "x"), "waits for 1 file of 2 that it names, such as s3://b/k")
    assert Counter(one["log_level"] for one in logs) == {"info": LINES_PER_MINUTE / 2, "warning": LINES_PER_MINUTE / 2}
    assert {one["reason"].partition(" ")[0] for one in logs} == {"it", "waits"}


def test_failures_of_one_object_are_told_ever_less_often() -> None:
    """The first, the second, the fourth, …"""
    with capture_logs() as logs:
        for failures in range(1, 100):
            FlushLogger(ManualClock()).failing(pending(key("k"), "x"), failures, "AccessDenied", "refused")
    assert [one["failures"] for one in logs] == [1, 2, 4, 8, 16, 32, 64]


def test_every_conflict_and_damage_is_told() -> None:
    """Somebody has to do something about each."""
    logger = FlushLogger(ManualClock())
    with capture_logs() as logs:
        for number in range(MANY):
            logger.conflict(pending(key(str(number)), "x"), OTHERS)
            logger.damaged(number, f"s3://bucket/{number}", "slot", "checksum")
    assert len(logs) == 2 * MANY
    assert "forebay writeback resolve" in logs[0]["event"]
    assert logs[0]["reason"] == OTHERS
    assert (logs[1]["object"], logs[1]["slot"], logs[1]["reason"]) == ("s3://bucket/0", "slot", "checksum")
    assert metrics.WRITEBACK_CONFLICTS.value("slot") == metrics.WRITEBACK_DAMAGED.value("slot") == MANY


def test_an_upload_that_is_ended_is_told() -> None:
    """With its id, so that its client's owner finds it, and why."""
    with capture_logs() as logs:
        FlushLogger(ManualClock()).expired(upload("u", key("k")), "the bucket has ended it")
    [told] = logs
    assert (told["upload_id"], told["object"], told["reason"]) == ("u", "s3://bucket/k", "the bucket has ended it")


def test_every_flushed_object_has_a_line() -> None:
    """An audit trail: what the origin has, which version, how long it was on this node only; deletions too."""
    clock = ManualClock()
    logger = FlushLogger(clock)
    acknowledged_at = clock.now() - 12.5
    put = replace(pending(key("k"), "xyz"), sequence=7, acknowledged_at=acknowledged_at)
    deleted = replace(pending(key("gone"), deleted=True), sequence=8, acknowledged_at=clock.now() + 60.0)
    with capture_logs() as logs:
        logger.settled(put, '"e"', 0.25)
        logger.settled(deleted, None, 1.0)
    about = {"log_level": "info", "slot": "slot"}
    assert logs == [
        {
            **about,
            "event": "an object was flushed",
            "object": "s3://bucket/k",
            "sequence": 7,
            "bytes": 3,
            "etag": '"e"',
            "age_seconds": 12.5,
            "attempt_seconds": 0.25,
        },
        {
            **about,
            "event": "a deletion was flushed",
            "object": "s3://bucket/gone",
            "sequence": 8,
            "bytes": 0,
            "etag": None,
            "age_seconds": 0.0,  # the clock was set back since
            "attempt_seconds": 1.0,
        },
    ]


def test_many_flushed_objects_share_a_line() -> None:
    """So many a second have their own, the others are summed; nothing is left out, not at the end either."""

    async def run() -> None:
        clock = ManualClock()
        logger = FlushLogger(clock)
        running = asyncio.create_task(logger.run())
        await asyncio.sleep(0)
        for _ in range(FLUSHED_LINES_PER_SECOND + 5):
            logger.settled(pending(key("k"), "xyz"), '"e"', 0.1)
        logger.settled(pending(key("k"), deleted=True), None, 0.1)
        await clock.advance(1.0)
        [summed] = [one for one in logs if one["event"] == "objects were flushed"]
        assert (summed["objects"], summed["deletions"], summed["bytes"]) == (6, 1, 15)
        assert len(logs) == FLUSHED_LINES_PER_SECOND + 1
        await clock.advance(5.0)
        assert len(logs) == FLUSHED_LINES_PER_SECOND + 1
        for _ in range(FLUSHED_LINES_PER_SECOND + 1):
            logger.settled(pending(key("k"), "xyz"), '"e"', 0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (logs[-1]["event"], logs[-1]["objects"]) == ("objects were flushed", 1)
        assert metrics.WRITEBACK_FLUSHED_OBJECTS.value("slot") == 2 * FLUSHED_LINES_PER_SECOND + 7

    with capture_logs() as logs:
        asyncio.run(run())


def test_why_flushes_fail_and_how_long_they_take_is_counted() -> None:
    """By a name of few; the time runs from the acknowledgement, whenever the last attempt began."""
    clock = ManualClock()
    logger = FlushLogger(clock)
    write = replace(pending(key("k"), "x"), acknowledged_at=clock.now(), acknowledged=Moment.of(clock))
    logger.failing(write, 1, "no answer", "unreachable")
    logger.failing(write, 2, "AccessDenied", "credentials")
    asyncio.run(clock.advance(7200.0))
    logger.settled(write, '"x"', 0.5)
    assert by_label(metrics.WRITEBACK_FLUSH_FAILURES, "reason") == {"unreachable": 1, "credentials": 1}
    total, _ = metrics.WRITEBACK_FLUSH_SECONDS.kept()["slot",]
    assert (total.get(), counted(metrics.WRITEBACK_FLUSH_SECONDS)) == (7200.0, 1)
