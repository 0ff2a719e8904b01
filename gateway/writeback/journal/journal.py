"""The journal of the write-back buffer, as one process reads and writes it: a transaction at a time, many in a commit.

Changes run on the journal's own thread. Those that wait during a commit share the next one (group commit), each in its
own savepoint, so that one that fails takes no other with it. A change is acknowledged when it is on disk: SQLite has
synced its log (`synchronous = FULL`). Once a commit has failed in the disk, the journal takes nothing more over this
connection: a later sync may succeed although an earlier one has lost data. After a pause it opens a new connection,
whose first commit decides: SQLite writes it where the failed one lies in the log, so the failed one has happened by
then, or never will. Pauses grow.

Reads take microseconds, wait for no other process, and may run on the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import structlog

from gateway.core.clock import Clock, Moment, SystemClock
from gateway.core.errors import BufferRefused, BufferUnavailable
from gateway.s3.requests import PARTS_COUNT_MAX
from gateway.telemetry import metrics
from gateway.writeback.journal.records import Part
from gateway.writeback.journal.schema import connect, prepare
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.pending_key_filter import PendingKeyFilter

R = TypeVar("R")

CHANGES_PER_COMMIT_MAX = 256

PARTS_AT_ONCE = 32
"""Parts per read, which takes a third of a millisecond."""

_PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL})
"""Errors that lose nothing: the transaction was rolled back, and the next commit is reliable."""

_TRIED_BYTES = 1024 * 1024
"""More than most commits take: a file of this size meets a quota that a commit has met."""

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""Errors that no new connection mends: only a restart does, and says how."""

PAUSE_SECONDS = 1.0
PAUSE_SECONDS_MAX = 60.0
"""The first and the longest pause before the journal is opened anew; each is twice the last."""

STEADY_SECONDS = 300.0
"""A failure that comes back sooner than this continues with the last pause."""

_log = structlog.get_logger("forebay.writeback")

_Waiting = tuple[Callable[[JournalTransaction], Any], "Future[Any]"]
_Tell = Callable[["Future[Any]"], None]


class Journal:
    """The journal as the process of a worker slot uses it.

    `freed` takes the files that nothing refers to, once that is durable.
    """

    def __init__(
        self, directory: Path, freed: Callable[[list[str]], None], worker: int = 0, clock: Clock | None = None
    ) -> None:
        self._path = str(directory / "journal")
        try:
            self._writer = connect(self._path)
            prepare(self._writer)
            self._reader = connect(self._path)
            self._reader.execute("PRAGMA query_only = ON")
            self._view = JournalTransaction(self._reader)
            self._inode = _inode(self._path)
            self.pending_keys = PendingKeyFilter(directory / "presence")
        except (sqlite3.Error, OSError) as error:
            raise BufferUnavailable(f"the write-back journal in {directory} cannot be opened: {error}") from error
        self.worker = worker
        self._freed = freed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writeback-journal")
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._removed: list[str] = []
        self.in_doubt: list[str] = []
        """Staged files of changes whose outcome is unknown. Once it is certain, those that the journal does not know
        are removed. Event loop only."""
        self._failure: str | None = None
        self._refusal: str | None = None
        self._is_damaged = False
        self._is_ending = False
        self._clock = clock or SystemClock()
        self._mending: asyncio.Task[None] | None = None
        self._pause_seconds = PAUSE_SECONDS
        self._mended_at = -math.inf
        self.make_room: Callable[[], bool] = lambda: False
        """Makes room on a full disk; returns whether a retry is worthwhile."""

    @property
    def has_failed(self) -> bool:
        """Return whether it takes no changes now, since a commit has failed in the disk."""
        return self._failure is not None

    @property
    def problem(self) -> str | None:
        """Return why it takes no changes, or refused the last one, as on a full disk; None if it takes them."""
        return self._failure or self._refusal

    @staticmethod
    def tell(*, is_failing: bool) -> None:
        """Set the metric of this process's journal."""
        metrics.WRITEBACK_JOURNAL_STATE.set(is_failing, "failing")
        metrics.WRITEBACK_JOURNAL_STATE.set(not is_failing, "well")

    # Reads

    def read(self, look: Callable[[JournalTransaction], R]) -> R:
        """Return what `look` finds in the journal as it is now. Event loop only."""
        try:
            self._reader.execute("BEGIN")
            try:
                return look(self._view)
            finally:
                self._reader.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise BufferUnavailable(f"the write-back journal cannot be read: {error}") from error

    async def parts(self, write_id: int, after: int = 0, count_max: int = PARTS_COUNT_MAX) -> list[Part]:
        """Return at most `count_max` parts of a write behind the number `after`, in order. Event loop only.

        Between pages other tasks run, so changes to the write meanwhile may show in part. A write that has ended lacks
        parts.
        """
        found: list[Part] = []
        while len(found) < count_max:
            after, count = found[-1].number if found else after, min(PARTS_AT_ONCE, count_max - len(found))
            page = self.read(lambda tx: list(tx.parts.of(write_id, after, count_max=count)))  # noqa: B023
            found += page
            if len(page) < count:
                break
            await asyncio.sleep(0)
        return found

    def unknown_files(self, names: Sequence[str]) -> Sequence[str]:
        """Return the staged files in which nothing is acknowledged. Not while other threads read."""
        return self.read(lambda tx: tx.files.unknown(names))

    # Changes

    async def change(self, step: Callable[[JournalTransaction], R]) -> R:
        """Carry out a change, and return when it is durable. BufferUnavailable when it may not be.

        It may have happened even so: the files that it named must stay, except after BufferRefused.
        """
        future: Future[R] = Future()
        with self._lock:
            self._waiting.append((step, future))
            first = len(self._waiting) == 1
        if first:
            self._thread.submit(self._commit_waiting)
        outcome = asyncio.wrap_future(future)
        outcome.add_done_callback(self._mend_if_failed)
        return await asyncio.shield(outcome)

    def recover(self, now: Moment) -> tuple[int, int]:
        """Recover a journal that no other process has open; return the numbers of pending writes and open uploads.

        Blocks. BufferUnavailable when the disk does not take it.
        """

        def put_right(tx: JournalTransaction) -> None:
            while tx.forget_ended(now):
                pass
            tx.files.recount()
            tx.uploads.mark_all_in_doubt(now)

        self._remove(self.read(lambda tx: tx.files.left_behind()))
        self._change_alone(put_right)
        self._tidy()
        return self.read(lambda tx: tx.counts())

    def forget_buckets(self, buckets: Callable[[str], bool]) -> None:
        """Forget facts about buckets; no other process may have the journal open. Blocks. BufferUnavailable."""
        self._change_alone(lambda tx: tx.buckets.forget(buckets))

    def inherit(self, now: Moment) -> None:
        """Take over a worker slot from a dead process: its requests to the origin are in doubt. Blocks.

        Also remove files that any process had no time to remove.
        """
        self._remove(self.read(lambda tx: tx.files.left_behind()))
        with suppress(BufferRefused):  # then the next start does it
            self._change_alone(lambda tx: tx.uploads.mark_all_in_doubt(now, self.worker))

    def _change_alone(self, step: Callable[[JournalTransaction], object]) -> None:
        try:
            with self._transaction() as tx:
                step(tx)
        except sqlite3.Error as error:
            raise _not_written(error) from error

    async def tidy(self) -> None:
        """Clear the hash slots in which nothing is pending any more, so that their reads skip the journal."""
        await asyncio.wrap_future(self._thread.submit(self._tidy))

    def end_reads(self) -> None:
        """Make reads raise BufferUnavailable. Event loop only, like reads: closing during one crashes the process."""
        self._is_ending = True
        if self._mending is not None:
            self._mending.cancel()
        self._reader.close()

    def close(self) -> None:
        """Finish waiting changes, and close. Blocks."""
        self._thread.shutdown(wait=True)
        self._reader.close()
        self._writer.close()
        self.pending_keys.close()

    def _commit_waiting(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting[:CHANGES_PER_COMMIT_MAX], self._waiting[CHANGES_PER_COMMIT_MAX:]
            if self._waiting:
                self._thread.submit(self._commit_waiting)
        try:
            if self._failure is not None:
                raise BufferRefused(f"the write-back journal takes no writes now: {self._failure}")
            tx, outcomes = self._commit_with_room(batch)
        except (sqlite3.Error, BufferUnavailable) as error:
            failure = self._failed(error)
            for _, future in [*batch, *self._refused_with(error)]:
                future.set_exception(failure)
            return
        self._refusal = None
        if tx.turns.has_due:
            self.pending_keys.bump_version()
        if tx.files.freed:
            self._remove(tx.files.freed)
        for (_, future), tell in zip(batch, outcomes, strict=True):
            tell(future)

    def _refused_with(self, error: Exception) -> list[_Waiting]:
        """Return the changes that came while another process held the journal: they would wait as long again."""
        if _primary_code(error) != sqlite3.SQLITE_BUSY:
            return []
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def _commit_with_room(self, batch: list[_Waiting]) -> tuple[JournalTransaction, list[_Tell]]:
        try:
            return self._commit(batch)
        except sqlite3.Error as error:
            if self._meets_a_quota(error):
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
            if _primary_code(error) != sqlite3.SQLITE_FULL or not self.make_room():
                raise
        return self._commit(batch)

    def _meets_a_quota(self, error: sqlite3.Error) -> bool:
        """Return whether a write has met a quota: SQLite knows only ENOSPC. Nothing was synced, so nothing is lost."""
        if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_IOERR_WRITE:
            return False
        try:
            with TemporaryFile(dir=os.path.dirname(self._path)) as file:
                file.write(bytes(_TRIED_BYTES))
        except OSError as refused:
            return refused.errno == errno.EDQUOT
        return False

    def _commit(self, batch: list[_Waiting]) -> tuple[JournalTransaction, list[_Tell]]:
        with self._transaction() as tx:
            return tx, [self._carry_out(tx, step) for step, _ in batch]

    @contextmanager
    def _transaction(self) -> Iterator[JournalTransaction]:
        """Yield a transaction that writes, committed at the end."""
        tx = JournalTransaction(self._writer, self.pending_keys)
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            tx.files.removed(self._removed)
            yield tx
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise
        self._removed.clear()

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files, and note them for the next commit: their removal is not worth a commit of its own."""
        self._freed(list(names))
        self._removed += names

    def _carry_out(self, tx: JournalTransaction, step: Callable[[JournalTransaction], Any]) -> _Tell:
        freed = len(tx.files.freed)
        self._writer.execute("SAVEPOINT change")
        try:
            result = step(tx)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 - it is raised where the change was asked for
            self._writer.execute("ROLLBACK TO change")
            del tx.files.freed[freed:]
            failure = error
            return lambda future: future.set_exception(failure)
        finally:
            if self._writer.in_transaction:
                self._writer.execute("RELEASE change")
        return lambda future: future.set_result(result)

    def _failed(self, error: Exception) -> BufferUnavailable:
        if isinstance(error, BufferUnavailable):
            return error
        failure = _not_written(error)
        if isinstance(failure, BufferRefused):
            self._refusal = str(error)
        else:
            self._is_damaged = _primary_code(error) in _DAMAGED
            self._failure = str(error)
        return failure

    # After a commit has failed in the disk

    def _mend_if_failed(self, change: asyncio.Future[Any]) -> None:
        if not change.cancelled():
            change.exception()  # retrieved: its caller may be gone
        if self._failure is None or self._mending is not None or self._is_ending:
            return
        self._mending = asyncio.create_task(self._mend(), name="write-back journal")
        self.tell(is_failing=True)
        _log.error(
            "the write-back journal takes no writes: it is damaged, start the gateway again"
            if self._is_damaged
            else "the write-back journal takes no writes until the disk takes and syncs them: Forebay tries again",
            error=self._failure,
        )

    async def _mend(self) -> None:
        if self._is_damaged:
            return  # reported already: this stays the journal's task
        if self._clock.monotonic() - self._mended_at >= STEADY_SECONDS:
            self._pause_seconds = PAUSE_SECONDS
        try:
            while self._failure is not None:
                await self._clock.sleep(self._pause_seconds)
                self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
                if await asyncio.wrap_future(self._thread.submit(self._reopen, names := self.in_doubt[:])):
                    del self.in_doubt[: len(names)]
        finally:
            self._mending = None
        self._mended_at = self._clock.monotonic()
        self.tell(is_failing=False)
        self.pending_keys.bump_version()
        _log.info("the write-back journal takes writes again")

    def _reopen(self, in_doubt: Sequence[str]) -> bool:
        """Take changes again if a new connection's commit succeeds. On the journal's thread, as all changes."""
        try:
            if _inode(self._path) != self._inode:
                raise OSError("another file lies where the journal was")
            self._writer.close()
            self._writer = connect(self._path)
            self._commit_with_room([(JournalTransaction.count_reopening, Future())])
            tx = JournalTransaction(self._writer, self.pending_keys)
            unknown = tx.files.unknown(in_doubt) if in_doubt else ()
        except (sqlite3.Error, OSError) as error:
            self._failure = str(error)
            return False
        self._failure = None
        self._remove(unknown)
        return True

    def _tidy(self) -> None:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self.pending_keys.keep(JournalTransaction(self._writer).writes.hash_slots())
            finally:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise BufferUnavailable(f"the write-back journal cannot be read: {error}") from error


def _inode(path: str) -> tuple[int, int]:
    """Return the file's identity: after another mount, a new journal would know nothing of the old one's."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _primary_code(error: Exception) -> int:
    """Return SQLite's primary error code."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _not_written(error: Exception) -> BufferUnavailable:
    kind = BufferRefused if _primary_code(error) in _PASSING else BufferUnavailable
    failure = kind(f"the write-back journal cannot be written: {error}")
    failure.__cause__ = error
    return failure


TIDY_SECONDS = 2.0
"""Seconds after flushes. Writers wait meanwhile, so it takes at most a fiftieth of their time."""

UNASKED_SECONDS = 60.0
"""Seconds between two runs in any case: something may have left without a flush."""

FORGET_SECONDS = 600.0

_SHARE = 50.0


class JournalGC:
    """The collector of one buffer, in the process that flushes. `needed`: something was flushed since its last run."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self.needed = True

    async def run(self) -> None:
        pause_seconds, began = TIDY_SECONDS, self._clock.monotonic()
        unasked_at, forget_at = began + UNASKED_SECONDS, began
        while True:
            with suppress(BufferUnavailable):  # the journal's writers report it
                began = self._clock.monotonic()
                if self.needed or began >= unasked_at:
                    unasked_at = began + UNASKED_SECONDS
                    self.needed = False
                    await self._journal.tidy()
                    pause_seconds = max(TIDY_SECONDS, _SHARE * (self._clock.monotonic() - began))
                if self._clock.monotonic() >= forget_at:
                    forget_at = self._clock.monotonic() + FORGET_SECONDS
                    forget = partial(JournalTransaction.forget_ended, now=Moment.of(self._clock))
                    while await self._journal.change(forget):
                        pass
            await self._clock.sleep(pause_seconds)
