"""What the log says of flushes: whatever is the matter is in it, and it is not flooded."""

from __future__ import annotations

from collections import Counter

from structlog.testing import capture_logs

from gateway.writeback.flushing.state import OTHERS
from gateway.writeback.flushing.telling import LINES_PER_MINUTE, Teller
from tests.support.writeback import key, pending, upload

MANY = 10 * LINES_PER_MINUTE


class Counts:
    """`FlushCounters`."""

    def __init__(self) -> None:
        self.seen = Counter[str]()

    def flushed(self, slot: str, size_bytes: int) -> None:
        self.seen["flushed"] += 1

    def flush_failed(self, slot: str) -> None:
        self.seen["failed"] += 1

    def flush_conflict(self, slot: str) -> None:
        self.seen["conflict"] += 1

    def flush_damaged(self, slot: str) -> None:
        self.seen["damaged"] += 1


def test_an_origin_that_is_away_does_not_flood_the_log() -> None:
    """Of many objects that fail some have lines, and the next line says how many had none. All are counted."""
    now, counts = 59.0, Counts()
    teller = Teller(counts, lambda: now)
    with capture_logs() as logs:
        for number in range(MANY):
            teller.failing(pending(key(str(number)), "x"), 1, "away")
    assert [one["object"] for one in logs] == [f"s3://bucket/{number}" for number in range(LINES_PER_MINUTE)]
    now = 61.0
    with capture_logs() as later:
        teller.failing(pending(key("late"), "x"), 2, "away")
        teller.failing(pending(key("later"), "x"), 2, "away")
    assert [one.get("lines_left_out") for one in later] == [MANY - LINES_PER_MINUTE, None]
    assert counts.seen["failed"] == MANY + 2


def test_what_goes_on_does_not_either() -> None:
    """All of it goes on at once when the origin is back; failures have room of their own."""
    teller = Teller(Counts(), lambda: 0.0)
    with capture_logs() as logs:
        for number in range(MANY):
            teller.goes_on(pending(key(str(number)), "x"))
        teller.failing(pending(key("k"), "x"), 1, "AccessDenied")
    assert Counter(one["log_level"] for one in logs) == {"info": LINES_PER_MINUTE, "warning": 1}


def test_failures_of_one_object_are_told_ever_less_often() -> None:
    """The first, the second, the fourth, …"""
    with capture_logs() as logs:
        for failures in range(1, 100):
            Teller(Counts(), lambda: 0.0).failing(pending(key("k"), "x"), failures, "AccessDenied")
    assert [one["failures"] for one in logs] == [1, 2, 4, 8, 16, 32, 64]


def test_every_conflict_and_damage_is_told() -> None:
    """Somebody has to do something about each."""
    counts = Counts()
    teller = Teller(counts, lambda: 0.0)
    with capture_logs() as logs:
        for number in range(MANY):
            teller.conflict(pending(key(str(number)), "x"), OTHERS)
            teller.damaged(number, f"s3://bucket/{number}", "slot", "checksum")
    assert len(logs) == 2 * MANY
    assert "forebay writeback resolve" in logs[0]["event"]
    assert logs[0]["reason"] == OTHERS
    assert (logs[1]["object"], logs[1]["slot"], logs[1]["reason"]) == ("s3://bucket/0", "slot", "checksum")
    assert counts.seen == {"conflict": MANY, "damaged": MANY}


def test_an_upload_that_is_ended_is_told() -> None:
    """With its id, so that its client's owner finds it, and why."""
    with capture_logs() as logs:
        Teller(Counts(), lambda: 0.0).expired(upload("u", key("k")), "the bucket has ended it")
    [told] = logs
    assert (told["upload_id"], told["object"], told["reason"]) == ("u", "s3://bucket/k", "the bucket has ended it")
