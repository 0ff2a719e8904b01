"""The journal of several processes: durable when it says so, one change without the other, loud about a bad disk."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferRefused, BufferUnavailable, StartupError
from gateway.core.model import ObjectKey
from gateway.writeback.journal.journal import STEADY_SECONDS, Journal
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.schema import BUSY_SECONDS_MAX, connect
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.manual_clock import ManualClock
from tests.support.writeback import key, part, pending, upload


def with_journal(
    path: Path, scenario: Callable[[Journal, list[str]], Coroutine[Any, Any, None]], clock: Clock | None = None
) -> None:
    async def run() -> None:
        freed: list[str] = []
        journal = Journal(path, freed.extend, clock=clock)
        try:
            await scenario(journal, freed)
        finally:
            journal.close()

    asyncio.run(run())


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def latest(journal: Journal, at: ObjectKey) -> str | None:
    found = journal.read(lambda tx: tx.writes.latest(at))
    return found.etag if found is not None else None


def test_what_is_acknowledged_is_there_for_every_process(tmp_path: Path) -> None:
    """Two journals on one directory see each other's changes, and whether there is anything to look for."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        other = Journal(tmp_path, lambda _: None)
        try:
            assert not other.pending_keys.may_be(key("a"))
            stored = await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "x")))
            assert other.pending_keys.may_be(key("a"))
            assert latest(other, key("a")) == stored.etag
            await other.change(lambda tx: tx.writes.settle(stored.id, stored.etag, Moment(50.0)))
            await other.tidy()
            assert not journal.pending_keys.may_be(key("a"))
            assert latest(journal, key("a")) is None
        finally:
            other.close()

    with_journal(tmp_path, scenario)


HOLDER = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def stopped_while_writing(journal: Path) -> Iterator[None]:
    """A process that is stopped within a transaction, until this ends."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(journal)]) as holder:
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            holder.kill()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_process_stopped_while_it_writes_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Changes are refused within seconds, nothing of them is there; when the process is gone, they are taken again."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        with stopped_while_writing(tmp_path / "journal"):
            first = asyncio.create_task(journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "x"))))
            await asyncio.sleep(BUSY_SECONDS_MAX / 2)
            later = asyncio.create_task(journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "x"))))
            async with asyncio.timeout(BUSY_SECONDS_MAX):
                refusals = await asyncio.gather(first, later, return_exceptions=True)
            assert [type(one) for one in refusals] == [BufferRefused, BufferRefused]
            assert (latest(journal, key("a")), latest(journal, key("b"))) == (None, None)
        stored = await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "y")))
        assert latest(journal, key("a")) == stored.etag

    with_journal(tmp_path, scenario)


def test_who_looks_from_outside_takes_nothing_away(tmp_path: Path) -> None:
    """A process that opens the journal and closes it again is not the last: SQLite's locks of all others hold, and the
    log stays where they write.
    """
    look = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM files').fetchall(); c.close()"
    )

    async def scenario(journal: Journal, _: list[str]) -> None:
        others = [Journal(tmp_path, lambda _: None) for _ in range(2)]
        try:
            for name in ("a", "b"):
                await journal.change(lambda tx: tx.writes.acknowledge(pending(key(name), "x")))  # noqa: B023
                await asyncio.to_thread(
                    subprocess.run, [sys.executable, "-c", look, str(tmp_path / "journal")], check=True
                )
                assert "journal-wal" in modes(tmp_path)
            await others[0].change(lambda tx: tx.writes.acknowledge(pending(key("c"), "x")))
        finally:
            for other in others:
                other.close()

    with_journal(tmp_path, scenario)
    with_journal(tmp_path, _all_are_there)


async def _all_are_there(journal: Journal, _: list[str]) -> None:
    assert all(latest(journal, key(name)) for name in "abc")


def test_who_reads_on_at_the_end_is_told_so(tmp_path: Path) -> None:
    """Whatever still looks while the journal is being closed, by another thread, gets an error it knows."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "x")))
        journal.end_reads()
        closing = asyncio.create_task(asyncio.to_thread(journal.close))
        while not closing.done():
            with pytest.raises(BufferUnavailable):
                latest(journal, key("a"))
            await asyncio.sleep(0)

    with_journal(tmp_path, scenario)


def test_nobody_else_may_read_the_journal(tmp_path: Path) -> None:
    """Its log and its index neither."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "x")))
        assert modes(tmp_path) == dict.fromkeys(("journal", "journal-wal", "journal-shm", "presence"), 0o600)

    with_journal(tmp_path, scenario)


def test_a_change_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    """Changes that share a commit stand each for itself; the failure reaches its own caller."""

    def fail(tx: JournalTransaction) -> None:
        tx.uploads.begin(upload("never", key("a")))
        never = tx.writes.acknowledge(pending(key("never"), "never"))
        assert tx.writes.discard(never.id, Moment(2.0), only_conflict=False)
        raise KeyError("no such thing")

    def begin(new: Write, tx: JournalTransaction) -> Write:
        return tx.uploads.begin(new)

    async def scenario(journal: Journal, freed: list[str]) -> None:
        changes = [journal.change(partial(begin, upload(f"u{n}", key("a")))) for n in range(20)]
        outcomes = await asyncio.gather(*changes, journal.change(fail), return_exceptions=True)
        assert [one for one in outcomes if isinstance(one, Exception)] == [outcomes[-1]]
        assert isinstance(outcomes[-1], KeyError)
        names = journal.read(lambda tx: [one.upload_id for one in tx.uploads.under("bucket")])
        assert names == sorted(f"u{n}" for n in range(20))
        assert freed == []

    with_journal(tmp_path, scenario)


@pytest.mark.slow
def test_many_changes_share_a_commit(tmp_path: Path) -> None:
    """What waits while a commit is under way goes into the next one: a sync of the disk for all of it."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        commits: list[str] = []
        journal._writer.set_trace_callback(commits.append)
        await asyncio.gather(
            *(journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "x"))) for _ in range(500))
        )
        assert commits.count("COMMIT") < 50
        assert journal.read(lambda tx: len(tx.writes.waiting(0, 1000))) == 1

    with_journal(tmp_path, scenario)


def test_files_are_given_back_after_the_commit(tmp_path: Path) -> None:
    """A file is unlinked when nothing durable names it any more, and not before."""

    async def scenario(journal: Journal, freed: list[str]) -> None:
        await journal.change(lambda tx: tx.uploads.begin(upload("u", key("a"))))
        await journal.change(lambda tx: tx.uploads.put_part("u", part(1, "p"), Moment(1.0)))
        assert freed == []
        await journal.change(lambda tx: tx.uploads.abort("u", Moment(1.0)))
        assert freed == ["p"]

    with_journal(tmp_path, scenario)


def test_after_a_commit_that_failed_in_the_disk_its_connection_is_not_believed(tmp_path: Path) -> None:
    """No later commit of it is acknowledged, whatever the disk says then; reads go on."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "kept")))
        await fail(journal, sqlite3.SQLITE_IOERR_FSYNC)
        with pytest.raises(BufferRefused):
            await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "late")))
        assert latest(journal, key("a")) is not None
        assert latest(journal, key("b")) is None

    with_journal(tmp_path, scenario)


def test_a_journal_that_has_failed_takes_changes_again_when_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a new connection, whose first commit shows it; after 1, 2, 4, … 60 seconds. Told once, and once at the end.
    Files of what may have happened go when it is certain that it has not."""
    tries: list[float] = []

    async def scenario(journal: Journal, freed: list[str]) -> None:
        told: list[bool] = []
        monkeypatch.setattr(journal, "tell", lambda *, is_failing: told.append(is_failing))
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "kept")))

        def tried(path: str) -> sqlite3.Connection:
            tries.append(clock.monotonic())
            return failing(connect(path)) if len(tries) < 9 else connect(path)

        monkeypatch.setattr("gateway.writeback.journal.journal.connect", tried)
        with capture_logs() as lines:
            await fail(journal, sqlite3.SQLITE_IOERR_WRITE)
            journal.in_doubt += ["lost", "kept"]
            while len(tries) < 9:
                with pytest.raises(BufferRefused):
                    await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "late")))
                version = journal.pending_keys.version()
                await let_pass(journal, clock, 1.0)
        assert tries == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0, 243.0]
        assert (told, [line["log_level"] for line in lines]) == ([True, False], ["error", "info"])
        assert freed == ["lost"]
        assert journal.pending_keys.version() != version
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "taken")))
        assert latest(journal, key("b")) is not None
        await fail(journal, sqlite3.SQLITE_IOERR_WRITE)
        await let_pass(journal, clock, 59.0)
        assert journal.has_failed, "it was well for a moment only: the pauses go on"
        await let_pass(journal, clock, 1.0)
        assert not journal.has_failed
        await let_pass(journal, clock, STEADY_SECONDS)
        await fail(journal, sqlite3.SQLITE_IOERR_WRITE)
        await let_pass(journal, clock, 1.0)
        assert not journal.has_failed

    clock = ManualClock()
    with_journal(tmp_path, scenario, clock)


def test_what_lies_where_the_journal_was_is_not_taken_for_it(tmp_path: Path) -> None:
    """Another file system was mounted there, or nothing is there: no new journal is begun under a running gateway."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        await fail(journal, sqlite3.SQLITE_IOERR_WRITE)
        (tmp_path / "journal").rename(tmp_path / "elsewhere")
        await let_pass(journal, clock, 1.0)
        assert (journal.has_failed, (tmp_path / "journal").exists()) == (True, False)
        (tmp_path / "journal").write_bytes(b"")
        await let_pass(journal, clock, 2.0)
        assert (journal.has_failed, (tmp_path / "journal").stat().st_size) == (True, 0)
        (tmp_path / "elsewhere").replace(tmp_path / "journal")
        await let_pass(journal, clock, 4.0)
        assert not journal.has_failed

    clock = ManualClock()
    with_journal(tmp_path, scenario, clock)


def test_a_damaged_journal_is_not_opened_again(tmp_path: Path) -> None:
    """Each commit might make it worse: the next start says what to do."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        with capture_logs() as lines:
            await fail(journal, sqlite3.SQLITE_CORRUPT)
            await let_pass(journal, clock, 1000.0)
            with pytest.raises(BufferRefused):
                await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "late")))
        assert journal.has_failed
        assert ["damaged" in line["event"] for line in lines] == [True]

    clock = ManualClock()
    with_journal(tmp_path, scenario, clock)


def test_a_full_disk_passes(tmp_path: Path) -> None:
    """A commit for which there is no room is refused, and the next one is tried."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        real, journal._writer = (
            journal._writer,
            cast(sqlite3.Connection, _Failing(journal._writer, sqlite3.SQLITE_FULL)),
        )
        with pytest.raises(BufferUnavailable):
            await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "lost")))
        told = [journal.problem]
        journal._writer = real
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "late")))
        assert latest(journal, key("b")) is not None
        assert [one is None for one in (*told, journal.problem)] == [False, True]

    with_journal(tmp_path, scenario)


@pytest.mark.parametrize(("number", "passes"), [(errno.EDQUOT, True), (errno.EIO, False)])
def test_a_quota_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, passes: bool) -> None:
    """SQLite says the same of it as of a disk that fails: what a write of our own is told decides. Room that was set
    aside is given up for it."""

    def refused(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    async def scenario(journal: Journal, _: list[str]) -> None:
        real, journal._writer = journal._writer, failing(journal._writer)

        def make_room() -> bool:
            journal._writer = real
            return True

        journal.make_room = make_room
        if passes:
            await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "kept")))
            assert latest(journal, key("b")) is not None
        else:
            with pytest.raises(BufferUnavailable):
                await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "lost")))
        assert journal.has_failed is not passes

    monkeypatch.setattr("gateway.writeback.journal.journal.TemporaryFile", refused)
    with_journal(tmp_path, scenario)


def test_a_journal_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Newer or foreign: what it holds stays as it is, and the message says what to do."""
    Journal(tmp_path, lambda _: None).close()
    connection = sqlite3.connect(tmp_path / "journal")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (tmp_path / "journal").read_bytes()
    with pytest.raises(StartupError, match="version 99"):
        Journal(tmp_path, lambda _: None)
    assert (tmp_path / "journal").read_bytes() == before


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    """The connection of readers refuses each change."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        stored = await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "one")))
        with pytest.raises(BufferUnavailable, match="readonly"):
            journal.read(lambda tx: tx.writes.settle(stored.id, '"e"', Moment(2.0)))
        assert latest(journal, key("a")) == stored.etag

    with_journal(tmp_path, scenario)


def test_a_reader_sees_one_moment(tmp_path: Path) -> None:
    """A look at several rows is at one state of the journal, whatever is committed meanwhile."""

    async def scenario(journal: Journal, _: list[str]) -> None:
        first = await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "one")))
        other = Journal(tmp_path, lambda _: None)

        def look(tx: JournalTransaction) -> tuple[int, int]:
            before = len(tx.writes.waiting(0, 10))
            other._change_alone(lambda inner: inner.writes.acknowledge(pending(key("b"), "two")))
            return before, len(tx.writes.waiting(0, 10))

        try:
            assert journal.read(look) == (1, 1)
            assert [one.sequence > first.sequence for one in journal.read(lambda tx: tx.writes.waiting(1, 10))] == [
                True
            ]
        finally:
            other.close()

    with_journal(tmp_path, scenario)


def failing(real: sqlite3.Connection, code: int = sqlite3.SQLITE_IOERR_WRITE) -> sqlite3.Connection:
    return cast(sqlite3.Connection, _Failing(real, code))


async def fail(journal: Journal, code: int) -> None:
    """The next commit fails in the disk."""
    journal._writer = failing(journal._writer, code)
    with pytest.raises(BufferUnavailable) as raised:
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "lost")))
    assert not isinstance(raised.value, BufferRefused), "it may have happened"
    await asyncio.sleep(0)


async def let_pass(journal: Journal, clock: ManualClock, seconds: float) -> None:
    """Each second, and what the journal's thread then does."""
    for _ in range(round(seconds)):
        await clock.advance(1.0)
        await asyncio.wrap_future(journal._thread.submit(lambda: None))
        await clock.advance(0.0)


class _Failing:
    """A connection whose commits fail."""

    def __init__(self, real: sqlite3.Connection, code: int) -> None:
        self._real = real
        self._code = code

    def execute(self, statement: str, *values: Any) -> Any:
        if statement == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self._code
            raise error
        return self._real.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_files_that_a_process_had_no_time_to_remove_are_removed_by_the_next(tmp_path: Path) -> None:
    """Killed between a commit and the unlink of what it freed, whoever comes knows of it; and only of that."""

    async def scenario(journal: Journal, freed: list[str]) -> None:
        first = await journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), "first")))
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "second")))
        await journal.change(lambda tx: tx.writes.settle(first.id, first.etag, Moment(50.0)))
        assert freed == ["first"]
        assert journal.read(lambda tx: tx.files.left_behind()) == ["first"]
        removed: list[str] = []
        other = Journal(tmp_path, removed.extend, worker=1)
        other.inherit(Moment(60.0))
        other.close()
        assert removed == ["first"]
        assert journal.read(lambda tx: tx.files.left_behind()) == []
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("b"), "third")))
        assert journal.read(lambda tx: tx.files.left_behind()) == ["second"]
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("c"), "fourth")))
        assert journal.read(lambda tx: tx.files.left_behind()) == []

    with_journal(tmp_path, scenario)
