"""Opening the buffer's directory: its format, whose it is, and what crashes have left. All of this blocks.

A buffer's writes were acknowledged for one origin and go to no other: buckets of the same names at another endpoint are
other buckets, of which nothing is known.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.clock import Moment
from gateway.durable import sync_directory, write_durably
from gateway.errors import BufferDamaged, BufferUnavailable, StartupError
from gateway.writeback.files.staged_file import DIRECTORY_MODE, Staging
from gateway.writeback.journal.integrity_check import check_journal
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.schema import connect_reading, is_new
from gateway.writeback.journal.view import JournalView

FORMAT = b"forebay writeback 1\n"

ORIGIN = "origin"
"""The file with the endpoint URL."""

ARRIVING = "arriving"
"""The file of `Reservations` (bounds/room.py): made anew when nobody has the buffer open."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was there: acknowledged objects, open uploads and uploads of the origin's that are to be aborted, or to be
    looked for, all kept; and files that nobody was told of, removed."""

    pending: int
    uploads: int
    orphans: int
    removed_files: int

    @property
    def is_nothing(self) -> bool:
        """Whether nothing would be lost with the buffer."""
        return not (self.pending or self.uploads or self.orphans)


def prepare(directory: Path) -> None:
    """Make the directory where it is not there. StartupError for one that is not ours, or of another version."""
    with _usable(directory):
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        found = _format(directory)
        if found is None:
            write_durably(directory / "FORMAT", FORMAT)
            sync_directory(directory.parent)
    if found not in (None, FORMAT):
        raise StartupError(
            f"{directory} has the write-back format {found!r}, this version reads {FORMAT!r}: what it holds is "
            "untouched; run the version that wrote it until everything is flushed"
        )


def recover(directory: Path, now: Moment) -> Recovered:
    """Put a buffer in order that no process has open: what was acknowledged stays, the rest goes.

    StartupError where acknowledged writes would be lost by it: then nothing is touched.
    """
    with _usable(directory):
        _remove_dropped(directory)
    prepare(directory)
    try:
        if not check_journal(directory):
            _refuse_without_journal(directory)
    except BufferDamaged as error:
        raise StartupError(
            f"{error}: nothing was changed; keep a copy of {directory} before anything else, and have "
            "`forebay writeback export` get out of it what is whole"
        ) from error
    journal = Journal(directory, lambda _: None)
    try:
        with _usable(directory):
            (directory / ARRIVING).unlink(missing_ok=True)
        removed = Staging(directory, 0).sweep(journal.unknown_files)
        pending, uploads = journal.recover(now)
        orphans = journal.read(lambda tx: tx.aborting_count())
    finally:
        journal.close()
    return Recovered(pending, uploads, orphans, removed)


def may_hold(directory: Path) -> bool:
    """Whether a buffer that cannot be opened may hold what the origin does not have. Takes no room, changes nothing."""
    journal, log = directory / "journal", directory / "journal-wal"
    if not journal.exists():
        return False
    is_in_log = log.exists() and log.stat().st_size > 0
    try:
        with closing(connect_reading(str(journal), without_log=not is_in_log)) as connection:
            if is_new(connection):
                return False
            view = JournalView(connection)
            return any(view.counts()) or view.aborting_count() > 0
    except sqlite3.Error:  # of the version before, or its log cannot be read: nobody knows
        return True


def keep_to_origin(directory: Path, endpoint_url: str, held: Recovered) -> None:
    """Return when the buffer is of this origin; one of another is made anew where it holds nothing.

    StartupError, and nothing is touched, where it does. BufferUnavailable when the disk fails.
    """
    with _usable(directory):
        named = _origin(directory)
        if named == endpoint_url:
            return
        if named is not None:
            if not held.is_nothing:
                raise StartupError(_of_another_origin(directory, named, endpoint_url, held))
            drop(directory)
            prepare(directory)
        write_durably(directory / ORIGIN, f"{endpoint_url}\n".encode())


def drop(directory: Path) -> None:
    """Remove a buffer that holds nothing, wholly or not at all, whatever is killed in between. BufferUnavailable."""
    with _usable(directory):
        _remove_dropped(directory)
        directory.rename(_dropped(directory))
        sync_directory(directory.parent)
        _remove_dropped(directory)


def _dropped(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.gone")


def _remove_dropped(directory: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(_dropped(directory))


def _origin(directory: Path) -> str | None:
    try:
        return (directory / ORIGIN).read_text("utf-8", "replace").removesuffix("\n")
    except FileNotFoundError:
        return None


def _of_another_origin(directory: Path, named: str, endpoint_url: str, held: Recovered) -> str:
    return (
        f"origin.endpoint_url is {endpoint_url!r}, and the write-back buffer {directory} holds what was acknowledged "
        f"for {named!r} and is not there yet ({held.pending} objects, {held.uploads} open uploads), or is to be "
        f"cleared away there, which takes minutes ({held.orphans} uploads and probes): nothing was changed. Start with "
        f"{named!r} and have it flushed (`forebay flush --wait`); where both are names of one and the same store, "
        f"write the new one into {directory / ORIGIN}"
    )


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BufferUnavailable(f"the write-back buffer {directory} cannot be used: {error}") from error


def _refuse_without_journal(directory: Path) -> None:
    """StartupError where staged files are left: a new journal would know none of them, and have them go.

    The journal's name is synced before any file is staged, so no power cut leaves it so.
    """
    left = sum(1 for _ in Staging(directory, 0).names())
    if left:
        raise StartupError(
            f"the write-back journal in {directory} is gone, or empty, and {left} staged files are left, which may be "
            "acknowledged writes: nothing was changed. Put the journal back (with journal-wal, if there was one); only "
            "when what the files hold is not needed any more, move the directory away"
        )


def _format(directory: Path) -> bytes | None:
    """None for a directory in which nothing is yet."""
    try:
        return (directory / "FORMAT").read_bytes()
    except FileNotFoundError:
        foreign = sorted(entry.name for entry in directory.iterdir() if entry.name != "FORMAT.new")
        if foreign:
            raise StartupError(
                f"{directory} is not empty and not a write-back buffer (it holds {foreign[0]!r})"
            ) from None
        return None
