"""A row of the journal that is damaged is told of once, left where it is, and stops nothing but what it is about."""

from __future__ import annotations

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from gateway.origin.client import OriginRequest
from gateway.writeback.flushing.early_parts import EarlyParts
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.lost_uploads import CARRIED_OUT_SECONDS, PAUSE_SECONDS, LostUploads
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Base, Intent, Part, Upload
from gateway.writeback.opening import recover
from tests.support.flushing import Buffer, with_buffer
from tests.support.writeback import fixed, key

AT = key("k")


async def damage(buffer: Buffer, table: str, column: str, value: str) -> None:
    """Another record than was written lies there."""
    change = f"UPDATE {table} SET record = X'0000' WHERE {column} = ?"
    await buffer.journal.change(lambda book: book._rows.execute(change, (value,)).rowcount)


async def begin_at_origin(buffer: Buffer) -> str:
    async with await buffer.origin.send(OriginRequest("POST", AT.bucket, AT.key, [("uploads", None)])):
        return next(reversed(buffer.bucket.uploads))


def unsent(book: Book) -> list[str]:
    """The uploads of which the origin does not have all parts."""
    found = [""]
    while (upload_id := book.next_with_unsent("slot", found[-1])) is not None:
        found.append(upload_id)
    return found[1:]


def test_an_upload_that_cannot_be_read_keeps_no_other_from_being_sent(tmp_path: Path) -> None:
    """Its parts rest; those of others go, whichever comes first."""

    async def scenario(buffer: Buffer) -> None:
        for name in ("1", "2", "3"):
            upload = Upload(name, fixed(AT), Base(absent=True), 1.0, await begin_at_origin(buffer))
            await buffer.journal.change(lambda book: book.open_upload(upload))  # noqa: B023
            part = Part(1, buffer.stage(name.encode()), 1.0)
            await buffer.journal.change(lambda book: book.put_part(name, part))  # noqa: B023
        await damage(buffer, "uploads", "upload_id", "2")
        early = EarlyParts(buffer.tools(), buffer.clock)
        running = asyncio.create_task(early.run())
        await buffer.until(lambda: buffer.journal.read(unsent) == ["2"])
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_buffer(tmp_path, scenario)


def test_an_intent_that_cannot_be_read_keeps_no_other_from_being_found_out(tmp_path: Path) -> None:
    """Only of its own key nothing can be decided."""

    async def scenario(buffer: Buffer) -> None:
        upload_id = await begin_at_origin(buffer)
        for token, at in (("1", key("other")), ("2", AT), ("3", key("other"))):
            intent = Intent(token, 0, at, buffer.clock.now())
            await buffer.journal.change(lambda book: book.intend(intent))  # noqa: B023
        await damage(buffer, "intents", "token", "1")
        await buffer.journal.change(lambda book: book.suspect_all(buffer.clock.now()))
        await buffer.clock.advance(CARRIED_OUT_SECONDS)
        finding = LostUploads(
            buffer.journal, FlushRequests(buffer.origin, buffer.staging, buffer.threads), buffer.clock
        )
        with capture_logs() as logs:
            await finding.look()
            await buffer.clock.advance(PAUSE_SECONDS)
            await finding.look()
        assert [one["log_level"] for one in logs] == ["error"]
        assert list(buffer.journal.read(lambda book: book.orphan_ids(9))) == [upload_id]
        assert buffer.journal.read(lambda book: book.suspected("", 9)) == ["1", "3"]

    with_buffer(tmp_path, scenario)


def test_an_orphan_that_cannot_be_read_keeps_no_other_from_being_aborted(tmp_path: Path) -> None:
    """Nor anything from being flushed."""

    async def scenario(buffer: Buffer) -> None:
        upload_id = await begin_at_origin(buffer)
        await buffer.journal.change(lambda book: book.orphan(AT, "0"))  # before any id of the origin's
        await buffer.journal.change(lambda book: book.orphan(AT, upload_id))
        await damage(buffer, "orphans", "origin_upload_id", "0")
        await buffer.put(key("object"), b"bytes")
        with capture_logs() as logs:
            buffer.start()
            await buffer.until(lambda: not buffer.bucket.uploads and not buffer.left())
            await buffer.clock.advance(60.0)
        assert [one["log_level"] for one in logs] == ["error"]
        assert buffer.journal.read(lambda book: book.orphan_ids(9)) == ["0"]

    with_buffer(tmp_path, scenario)


def test_the_gateway_starts_with_such_rows(tmp_path: Path) -> None:
    """They are kept; what they are about is found out by nobody."""

    async def scenario(buffer: Buffer) -> None:
        await buffer.journal.change(lambda book: book.orphan(AT, "0"))
        await buffer.journal.change(lambda book: book.intend(Intent("t", 1, AT, 1.0)))
        await damage(buffer, "orphans", "origin_upload_id", "0")
        await damage(buffer, "intents", "token", "t")

    (tmp_path / "FORMAT").write_bytes(b"forebay writeback 1\n")
    with_buffer(tmp_path, scenario)
    assert recover(tmp_path, 7.0).orphans == 2
    journal = Journal(tmp_path, lambda _: None, 1)
    journal.take_over(8.0)
    assert journal.read(lambda book: book.suspected("", 9)) == ["t"]
    journal.close()
