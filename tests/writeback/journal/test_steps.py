"""However much is pending, what S3 asks of the journal, and the reconciler's look, take a bounded number of SQLite's
steps, and every query finds its rows by an index.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from gateway.core.clock import Moment
from gateway.policy.slots import Prefix
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.records import CreateAttempt, Priority, State, Turn, Write
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.order import with_order
from tests.support.slots import Slot, slot_with
from tests.support.writeback import PlainPresence, key, part, pending, upload

pytestmark = pytest.mark.slow  # 20,000 rows are to be made

NOW = 1000.0
SLOT = Slot("slot", Prefix.parse("s3://bucket/"), write="back", buffer_bytes=1000)
STRICT = slot_with(SLOT, order="strict")

MANY = 20_000
STEPS_MAX = 6_000
"""A hundred of a look-up, some of a page of a listing: of 20,000 rows it would be 200,000."""

_SCANS = re.compile(r"^SCAN (?!.* USING (COVERING )?INDEX writes_aborting|CONSTANT)")
"""Without those of an index that has nothing but what is looked for."""

_SMALL = re.compile(r"\bnode\b|\bprofiles\b")
"""Tables of a row or two."""


@pytest.fixture(scope="module")
def connection() -> Iterator[sqlite3.Connection]:
    """A journal of many pending objects, of which some have failed, uploads, and what has ended."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        tx = JournalTransaction(connection, PlainPresence())
        connection.execute("BEGIN")
        for number in range(MANY):
            stored = tx.writes.acknowledge(pending(key(f"d{number % 100:02}/{number:06}"), f"f{number}"))
            if number % 3 == 0:
                tx.turns.wait(
                    stored.id, Turn(stored.acknowledged_at), Turn(NOW + 9e4, 3, NOW, "refused", Priority.RETRY)
                )
        for number in range(2_000):
            tx.uploads.begin(upload(f"u{number}", key(f"d{number % 100:02}/u{number:06}")))
            tx.uploads.put_part(f"u{number}", part(1, f"p{number}"), Moment(NOW))
            tx.uploads.begin(upload(f"e{number}", key(f"e{number:06}")))
            tx.uploads.abort(f"e{number}", Moment(NOW))
            tx.buckets.record_own_write(key(f"own{number:06}"), LastOwnWrite(NOW, '"e"'))
        connection.execute("COMMIT")
        yield connection


@contextmanager
def watched(connection: sqlite3.Connection) -> Iterator[tuple[list[int], list[str]]]:
    """The steps that are taken meanwhile, and the statements."""
    steps, statements = [0], list[str]()

    def step() -> int:
        steps[0] += 1
        return 0

    connection.set_progress_handler(step, 1)
    connection.set_trace_callback(statements.append)
    try:
        yield steps, statements
    finally:
        connection.set_progress_handler(None, 1)
        connection.set_trace_callback(None)


def scans(connection: sqlite3.Connection, statements: list[str]) -> list[str]:
    """What reads a table, or an index, from its beginning."""
    found = []
    for statement in statements:
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")) and not _SMALL.search(statement):
            plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            found += [f"{detail}: {statement}" for *_, detail in plan if _SCANS.match(detail)]
    return found


def a_write(tx: JournalTransaction) -> Write:
    found = tx.writes.latest(key("d07/010007"))
    assert found is not None
    return found


def an_upload(tx: JournalTransaction) -> Write:
    found = tx.uploads.upload("u7")
    assert found is not None
    return found


def _completed(tx: JournalTransaction) -> None:
    opened = an_upload(tx)
    made = replace(pending(opened.key, parts=list(tx.parts.of(opened.id)), multipart=True), upload_id="u7")
    assert tx.uploads.complete(with_order(made, SLOT)) is not None


def _completed_at_origin(tx: JournalTransaction) -> None:
    opened = an_upload(tx)
    made = replace(pending(opened.key, parts=list(tx.parts.of(opened.id)), multipart=True), upload_id="u7")
    assert tx.uploads.complete_at_origin(made)
    tx.uploads.answer(opened.id, "ServiceUnavailable", is_over=False)
    tx.uploads.completed(opened.id, '"e"', Moment(NOW))


def _began(tx: JournalTransaction) -> None:
    asked = tx.uploads.ask(key("d07/new"), "slot", CreateAttempt(0, Moment(NOW)))
    opened = tx.uploads.begin(upload("new", key("d07/new")))
    tx.uploads.begun(opened.id, "o", asked)
    tx.uploads.put_part("new", part(1, "new"), Moment(NOW))
    tx.uploads.part_sent(opened.id, replace(part(1, "new"), origin_etag='"e"'))
    tx.turns.rest(opened.id, Turn(NOW), Turn(NOW + 1, priority=Priority.UPLOAD))
    tx.writes.start_over(opened.id, NOW)
    tx.uploads.abort("new", Moment(NOW))


def _sent(tx: JournalTransaction) -> None:
    write = a_write(tx)
    tx.writes.change(replace(write, state=State.PUBLISHING), State.COMMITTED)
    tx.writes.acknowledge(pending(write.key, "following"))
    tx.writes.settle(write.id, '"e"', Moment(NOW))


def _looked(tx: JournalTransaction) -> None:
    for lane in tx.turns.lanes():
        for priority in Priority:
            tx.turns.due(lane, priority, NOW, 64)
    tx.turns.living(range(1, 100))


REQUESTS: dict[str, Callable[[JournalTransaction], object]] = {
    "put": lambda tx: tx.writes.acknowledge(pending(key("d07/new"), "new")),
    "put over pending": lambda tx: tx.writes.acknowledge(pending(a_write(tx).key, "new")),
    "delete": lambda tx: tx.writes.write_tombstone(pending(a_write(tx).key, deleted=True)),
    "read": lambda tx: (a_write(tx), list(tx.parts.of(a_write(tx).id, 0, 16)), tx.writes.earliest(key("d07/010007"))),
    "page": lambda tx: tx.writes.listing("bucket", b"d50/", b"d51/", 20),
    "page behind": lambda tx: tx.writes.listing("bucket", b"d99/019990", None, 20),
    "uploads": lambda tx: next(tx.uploads.under("bucket", "d50/", ("d50/u000650", ""))),
    "upload": _began,
    "complete": _completed,
    "complete at origin": _completed_at_origin,
    "repeated complete": lambda tx: (tx.uploads.ended("e7"), tx.uploads.ended("u7"), tx.uploads.ended("none")),
    "strict put": lambda tx: tx.writes.acknowledge(with_order(pending(key("d07/new"), "new"), STRICT)),
    "prioritise": lambda tx: tx.turns.prioritise(a_write(tx).key, NOW),
    "usage": lambda tx: (tx.files.usage("slot"), tx.writes.oldest("slot"), tx.writes.newest()),
    "known uploads": lambda tx: (
        tx.uploads.origin_upload_ids(key("d07/u000007")),
        tx.uploads.asked(key("d07/u000007")),
    ),
    "look": _looked,
    "taken up": lambda tx: (tx.writes.whole(a_write(tx).id), tx.turns.of(a_write(tx).id), tx.parts.unsent(5, 64)),
    "sent and settled": _sent,
    "failed": lambda tx: tx.turns.wait(a_write(tx).id, Turn(99.5), Turn(NOW, 1, NOW, "x", Priority.RETRY)),
    "conflict": lambda tx: (
        tx.writes.keep(a_write(tx).id, "x"),
        tx.writes.discard(a_write(tx).id, Moment(NOW), only_conflict=True),
    ),
    "aborting": lambda tx: (tx.uploads.are_any_aborting(), tx.uploads.aborting()),
    "taken over": lambda tx: tx.uploads.mark_all_in_doubt(Moment(NOW), 1),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_takes_no_longer_for_what_else_is_pending(connection: sqlite3.Connection, request_: str) -> None:
    """Each on a journal as it was before."""
    tx = JournalTransaction(connection, PlainPresence())
    connection.execute("BEGIN")
    try:
        with watched(connection) as (steps, statements):
            REQUESTS[request_](tx)
    finally:
        connection.execute("ROLLBACK")
    print(request_, steps)
    assert statements
    assert scans(connection, statements) == []
    assert steps[0] < STEPS_MAX


def test_a_marker_takes_steps_for_its_own_directory_alone(connection: sqlite3.Connection) -> None:
    """Hundreds of shards of thousands of writes; and each of them that goes, once more at the most."""
    tx = JournalTransaction(connection, PlainPresence())
    connection.execute("BEGIN")
    try:
        with watched(connection) as (steps, statements):
            tx.writes.acknowledge(with_order(pending(key("d07/_SUCCESS"), "marker"), SLOT))
    finally:
        connection.execute("ROLLBACK")
    assert scans(connection, statements) == []
    assert steps[0] < 40 * (MANY // 100)


def test_forgetting_takes_so_many_at_once(connection: sqlite3.Connection) -> None:
    """Writers wait meanwhile."""
    tx = JournalTransaction(connection, PlainPresence())
    connection.execute("BEGIN")
    try:
        with watched(connection) as (steps, _):
            assert tx.forget_ended(Moment(NOW + 1e6), 100)
    finally:
        connection.execute("ROLLBACK")
    assert steps[0] < 60_000
