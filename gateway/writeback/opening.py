"""Opening the buffer's directory: its format, and what crashes have left. All of this blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.clock import Moment
from gateway.durable import sync_directory, write_durably
from gateway.errors import BufferDamaged, BufferUnavailable, StartupError
from gateway.writeback.files.staged_file import DIRECTORY_MODE, Staging
from gateway.writeback.journal.checking import check_journal
from gateway.writeback.journal.journal import Journal

FORMAT = b"forebay writeback 1\n"

ARRIVING = "arriving"
"""The file of `Reservations` (bounds/bounds.py): made anew when nobody has the buffer open."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was there: acknowledged objects, open uploads and uploads of the origin's that are to be aborted, or to be
    looked for, all kept; and files that nobody was told of, removed."""

    pending: int
    uploads: int
    orphans: int
    removed_files: int


def prepare(directory: Path) -> None:
    """Make the directory where it is not there. StartupError for one that is not ours, or of another version."""
    try:
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        found = _format(directory)
        if found is None:
            write_durably(directory / "FORMAT", FORMAT)
            sync_directory(directory.parent)
    except OSError as error:
        raise BufferUnavailable(f"the write-back buffer {directory} cannot be used: {error}") from error
    if found not in (None, FORMAT):
        raise StartupError(
            f"{directory} has the write-back format {found!r}, this version reads {FORMAT!r}: what it holds is "
            "untouched; run the version that wrote it until everything is flushed"
        )


def recover(directory: Path, now: Moment | float) -> Recovered:
    """Put a buffer in order that no process has open: what was acknowledged stays, the rest goes.

    A plain number is of the wall clock. StartupError where acknowledged writes would be lost by it: then nothing is
    touched.
    """
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
        _forget_arriving(directory)
        removed = Staging(directory, 0).sweep(journal.knows_file)
        pending, uploads = journal.recover(now)
        orphans = journal.read(lambda book: book.aborting_count())
    finally:
        journal.close()
    return Recovered(pending, uploads, orphans, removed)


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


def _forget_arriving(directory: Path) -> None:
    try:
        (directory / ARRIVING).unlink(missing_ok=True)
    except OSError as error:
        raise BufferUnavailable(f"the write-back buffer {directory} cannot be used: {error}") from error


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
