"""Opens the buffer's directory: checks its format and its homes, and removes what crashes have left. All of it blocks.

A bucket's writes were acknowledged for one home and go to no other: a bucket of the same name at another endpoint is
another bucket, and nothing learned before applies to it.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, BufferUnavailable, StartupError
from gateway.core.model import Homes
from gateway.disk.atomic_write import sync_directory, write_durably
from gateway.writeback.journal.integrity_check import check_journal
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.schema import connect_reading, is_new
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.staged_file import DIRECTORY_MODE, Staging

FORMAT = b"forebay writeback 1\n"

ORIGIN = "origin"
"""The file with the homes of buckets (model.Homes)."""

ARRIVING = "arriving"
"""The file of `Reservations` (room.py): made anew when no process has the buffer open."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The contents of a recovered buffer: acknowledged objects, open uploads, and `orphans`. `buckets` are theirs.

    `orphans` are uploads at the origin that the flush must abort or look for. `removed_files` were never acknowledged.
    """

    pending: int
    uploads: int
    orphans: int
    removed_files: int
    buckets: frozenset[str] = frozenset()
    local: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_nothing(self) -> bool:
        return not (self.pending or self.uploads or self.orphans)


def prepare(directory: Path) -> None:
    """Make the directory if it is missing. StartupError if it is not a buffer, or of another version."""
    with _usable(directory):
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        try:
            found = (directory / "FORMAT").read_bytes()
        except FileNotFoundError:
            foreign = sorted(entry.name for entry in directory.iterdir() if entry.name != "FORMAT.new")
            if foreign:
                raise StartupError(
                    f"{directory} is not empty and not a write-back buffer (it holds {foreign[0]!r}): move that away"
                ) from None
            found = FORMAT
            write_durably(directory / "FORMAT", FORMAT)
            sync_directory(directory.parent)
    if found != FORMAT:
        raise StartupError(
            f"{directory} has the write-back format {found!r}, this version reads {FORMAT!r}: what it holds is "
            "untouched; run the version that wrote it until everything is flushed"
        )


def recover(directory: Path, now: Moment) -> Recovered:
    """Recover a buffer that no process has open: keep what was acknowledged, remove the rest.

    StartupError, before any change, if that would lose acknowledged writes.
    """
    with _usable(directory):
        _remove_dropped(directory)
    prepare(directory)
    try:
        if not check_journal(directory):
            _refuse_without_journal(directory)
    except BufferDamaged as error:
        raise StartupError(
            f"{error}: nothing was changed. Make a copy of {directory} before anything else, then save what is whole "
            "with `forebay writeback export`"
        ) from error
    with closing(Journal(directory, lambda _: None)) as journal:
        with _usable(directory):
            (directory / ARRIVING).unlink(missing_ok=True)
        removed = Staging(directory, 0).sweep(journal.unknown_files)
        pending, uploads = journal.recover(now)
        orphans = journal.read(lambda tx: tx.uploads.aborting_count())
        buckets = journal.read(lambda tx: tx.writes.buckets_in_use())
        usages = journal.read(lambda tx: tx.files.usages())
    local = {slot: usage.local_objects for slot, usage in usages.items() if usage.local_objects}
    return Recovered(pending, uploads, orphans, removed, buckets, local)


def may_hold(directory: Path) -> bool:
    """Return whether an unopenable buffer may hold data that the origin lacks. Changes nothing, takes no room."""
    journal, log = directory / "journal", directory / "journal-wal"
    if not journal.exists():
        return False
    is_in_log = log.exists() and log.stat().st_size > 0
    try:
        with closing(connect_reading(str(journal), without_log=not is_in_log)) as connection:
            if is_new(connection):
                return False
            view = JournalTransaction(connection)
            return any(view.counts()) or view.uploads.aborting_count() > 0
    except sqlite3.Error:  # an earlier version, or an unreadable log: unknown
        return True


def keep_to_homes(directory: Path, homes: Homes, held: Recovered) -> None:
    """Return when all that the buffer holds belongs to the present homes of its buckets.

    For buckets whose home has changed and that hold nothing here, forget what was learned of them. StartupError, before
    any change, if the buffer holds something for a changed home. BufferUnavailable when the disk fails.
    """
    with _usable(directory):
        before = None
        with suppress(FileNotFoundError):
            before = Homes.from_text((directory / ORIGIN).read_text("utf-8", "replace").removesuffix("\n"))
        if before == homes:
            return
        if before is not None:
            moved = sorted(bucket for bucket in held.buckets if before.of(bucket) != homes.of(bucket))
            if moved:
                raise StartupError(_of_another_home(directory, moved, before, homes, held))
            if held.is_nothing and before.main != homes.main:
                drop(directory)
                prepare(directory)
            else:
                with closing(Journal(directory, lambda _: None)) as journal:
                    journal.forget_buckets(lambda bucket: before.of(bucket) != homes.of(bucket))
        write_durably(directory / ORIGIN, f"{homes.to_text()}\n".encode())


def drop(directory: Path) -> None:
    """Remove a buffer that holds nothing, wholly or not at all, even if killed in between. BufferUnavailable."""
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


_NAMED_MAX = 5


def _of_another_home(directory: Path, moved: Sequence[str], before: Homes, homes: Homes, held: Recovered) -> str:
    if before.main != homes.main and all(before.of(bucket) == before.main for bucket in moved):
        said, named = f"origin.endpoint_url is {homes.main!r}", repr(before.main)
        line = f"write the new one into {directory / ORIGIN}"
    else:
        told = [f"{bucket!r} is at {homes.of(bucket)!r}, and was at {before.of(bucket)!r}" for bucket in moved]
        more = f", and {len(told) - _NAMED_MAX} buckets more" if len(told) > _NAMED_MAX else ""
        said = f"the bucket {', the bucket '.join(told[:_NAMED_MAX])}{more}"
        named = "the endpoint of before"
        line = f"write the new one behind the bucket's name into {directory / ORIGIN}"
    return (
        f"{said}, and the write-back buffer {directory} holds what was acknowledged "
        f"for {named} and is not there yet ({held.pending} objects, {held.uploads} open uploads), or is to be "
        f"cleared away there, which takes minutes ({held.orphans} uploads and probes): nothing was changed. Start with "
        f"{named} and have it flushed (`forebay flush --wait`); where both are names of one and the same store, "
        f"{line}"
    )


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BufferUnavailable(f"the write-back buffer {directory} cannot be used: {error}") from error


def _refuse_without_journal(directory: Path) -> None:
    """Raise StartupError when staged files are left: a new journal would not know them, and sweeps would remove them.

    The journal's name is synced before any file is staged, so no power cut causes this.
    """
    left = sum(1 for _ in Staging(directory, 0).names())
    if left:
        raise StartupError(
            f"the write-back journal in {directory} is gone, or empty, and {left} staged files are left, which may be "
            "acknowledged writes: nothing was changed. Put the journal back (with journal-wal, if there was one). Move "
            "the directory away only if nobody needs what the files hold"
        )
