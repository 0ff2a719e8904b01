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

from gateway.clock import Moment
from gateway.policy.slots import Prefix, Slot
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import Asked, OwnDoing, Priority, State, Turn, Write
from gateway.writeback.journal.schema import prepare
from gateway.writeback.order import placed
from tests.support.writeback import PlainPresence, key, part, pending, upload

pytestmark = pytest.mark.slow  # 100,000 rows are to be made

NOW = 1000.0
SLOT = Slot("slot", Prefix.parse("s3://bucket/"), write="back", buffer_bytes=1000)
STRICT = replace(SLOT, order="strict")

MANY = 100_000
STEPS_MAX = 6_000
"""A hundred of a look-up, some of a page of a listing: of 100,000 rows it would be a million."""

_SCANS = re.compile(r"^SCAN (?!.* USING (COVERING )?INDEX writes_aborting|CONSTANT)")
"""Without those of an index that has nothing but what is looked for."""

_SMALL = re.compile(r"\bnode\b|\bprofiles\b")
"""Tables of a row or two."""


@pytest.fixture(scope="module")
def connection() -> Iterator[sqlite3.Connection]:
    """A journal of many pending objects, of which some have failed, uploads, and what has ended."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        book = Book(connection, PlainPresence())
        connection.execute("BEGIN")
        for number in range(MANY):
            stored = book.acknowledge(pending(key(f"d{number % 100:02}/{number:06}"), f"f{number}"))
            if number % 3 == 0:
                book.wait(stored.id, Turn(stored.acknowledged_at), Turn(NOW + 9e4, 3, NOW, "refused", Priority.RETRY))
        for number in range(2_000):
            book.open_upload(upload(f"u{number}", key(f"d{number % 100:02}/u{number:06}")))
            book.put_part(f"u{number}", part(1, f"p{number}"), NOW)
            book.open_upload(upload(f"e{number}", key(f"e{number:06}")))
            book.abort(f"e{number}", NOW)
            book.did(key(f"own{number:06}"), OwnDoing(NOW, '"e"'))
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


def a_write(book: Book) -> Write:
    found = book.latest(key("d07/050007"))
    assert found is not None
    return found


def an_upload(book: Book) -> Write:
    found = book.upload("u7")
    assert found is not None
    return found


def _completed(book: Book) -> None:
    opened = an_upload(book)
    made = replace(pending(opened.key, parts=list(book.parts(opened.id)), multipart=True), upload_id="u7")
    assert book.complete(placed(made, SLOT)) is not None


def _completed_at_origin(book: Book) -> None:
    opened = an_upload(book)
    made = replace(pending(opened.key, parts=list(book.parts(opened.id)), multipart=True), upload_id="u7")
    assert book.complete_at_origin(made)
    book.answer(opened.id, "ServiceUnavailable", is_over=False)
    book.completed(opened.id, '"e"', NOW)


def _began(book: Book) -> None:
    asked = book.ask(key("d07/new"), "slot", Asked(0, Moment(NOW)))
    opened = book.open_upload(upload("new", key("d07/new")))
    book.begun(opened.id, "o", asked)
    book.put_part("new", part(1, "new"), NOW)
    book.part_sent(opened.id, replace(part(1, "new"), origin_etag='"e"'))
    book.rest(opened.id, Turn(NOW), Turn(NOW + 1, priority=Priority.UPLOAD))
    book.start_over(opened.id, NOW)
    book.abort("new", NOW)


def _sent(book: Book) -> None:
    write = a_write(book)
    book.change(replace(write, state=State.PUBLISHING), State.COMMITTED)
    book.acknowledge(pending(write.key, "following"))
    book.settle(write.id, '"e"', NOW)


def _looked(book: Book) -> None:
    for lane in book.lanes():
        for priority in Priority:
            book.due(lane, priority, NOW, 64)
    book.living(range(1, 100))


REQUESTS: dict[str, Callable[[Book], object]] = {
    "put": lambda book: book.acknowledge(pending(key("d07/new"), "new")),
    "put over pending": lambda book: book.acknowledge(pending(a_write(book).key, "new")),
    "delete": lambda book: book.bury(pending(a_write(book).key, deleted=True)),
    "read": lambda book: (a_write(book), list(book.parts(a_write(book).id, 0, 16)), book.earliest(key("d07/050007"))),
    "page": lambda book: book.listing("bucket", b"d50/", b"d51/", 20),
    "page behind": lambda book: book.listing("bucket", b"d99/099990", None, 20),
    "uploads": lambda book: next(book.uploads("bucket", "d50/", ("d50/u000650", ""))),
    "upload": _began,
    "complete": _completed,
    "complete at origin": _completed_at_origin,
    "repeated complete": lambda book: (book.ended("e7"), book.ended("u7"), book.ended("none")),
    "strict put": lambda book: book.acknowledge(placed(pending(key("d07/new"), "new"), STRICT)),
    "hurry": lambda book: book.hurry(a_write(book).key, NOW),
    "usage": lambda book: (book.usage("slot"), book.oldest("slot"), book.newest()),
    "known uploads": lambda book: (book.origin_upload_ids(key("d07/u000007")), book.asked(key("d07/u000007"))),
    "look": _looked,
    "taken up": lambda book: (book.write(a_write(book).id), book.turn(a_write(book).id), book.unsent_parts(5, 64)),
    "sent and settled": _sent,
    "failed": lambda book: book.wait(a_write(book).id, Turn(99.5), Turn(NOW, 1, NOW, "x", Priority.RETRY)),
    "conflict": lambda book: (
        book.keep(a_write(book).id, "x"),
        book.discard(a_write(book).id, NOW, only_conflict=True),
    ),
    "aborting": lambda book: (book.are_any_aborting(), book.aborting()),
    "taken over": lambda book: book.suspect_all(Moment(NOW), 1),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_takes_no_longer_for_what_else_is_pending(connection: sqlite3.Connection, request_: str) -> None:
    """Each on a journal as it was before."""
    book = Book(connection, PlainPresence())
    connection.execute("BEGIN")
    try:
        with watched(connection) as (steps, statements):
            REQUESTS[request_](book)
    finally:
        connection.execute("ROLLBACK")
    print(request_, steps)
    assert statements
    assert scans(connection, statements) == []
    assert steps[0] < STEPS_MAX


def test_a_marker_takes_steps_for_its_own_directory_alone(connection: sqlite3.Connection) -> None:
    """A thousand shards of a hundred thousand writes; and each of them that goes, once more at the most."""
    book = Book(connection, PlainPresence())
    connection.execute("BEGIN")
    try:
        with watched(connection) as (steps, statements):
            book.acknowledge(placed(pending(key("d07/_SUCCESS"), "marker"), SLOT))
    finally:
        connection.execute("ROLLBACK")
    assert scans(connection, statements) == []
    assert steps[0] < 40 * (MANY // 100)


def test_forgetting_takes_so_many_at_once(connection: sqlite3.Connection) -> None:
    """Writers wait meanwhile."""
    book = Book(connection, PlainPresence())
    connection.execute("BEGIN")
    try:
        with watched(connection) as (steps, _):
            assert book.forget_ended(NOW + 1e6, 100)
    finally:
        connection.execute("ROLLBACK")
    assert steps[0] < 60_000
