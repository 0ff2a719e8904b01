"""Opening and closing the catalog's directory: its format, and whether what lies there can be believed.

    FORMAT       "forebay catalog 1": any other content is refused, never misread
    ORIGIN       whose objects these are: the homes of buckets (model.Homes). The catalog of another main origin is
                 dropped; of buckets that have another home than before, all is forgotten
    BOOT         the kernel's boot id when the directory was last opened
    CLEAN        there while no process has the directory open and everything is synced to disk
    users.lock   shared by every process that has it open; opening.lock: held while one opens or closes
    epochs       invalidation epochs (entries.py)
    index/       the records (store.py)
    listing/     the listing index (listing/store.py)
    dirty/       own writes that it has not caught up with (listing/dirty_keys.py)
    answers/     small answers about buckets (bucket_metadata.py): dropped with the epochs that they are held against

Nothing is synced while in use, so all of it is dropped under another boot without CLEAN, and under the same one where
the disk has lost some of it. All of this blocks: it runs in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lmdb

from gateway.core.clock import Clock
from gateway.core.errors import StartupError, is_no_room, opening_failure, store_errors
from gateway.core.model import Homes
from gateway.disk.atomic_write import remove_durably, write_durably
from gateway.disk.file_lock import lock_within, try_lock
from gateway.disk.lmdb_environment import NEW_ENGINE, OLD_ENGINE, is_cut_short
from gateway.metadata import entries
from gateway.metadata.entries import InvalidationEpochs
from gateway.metadata.listing.dirty_keys import DirtyKeys
from gateway.metadata.listing.pages import END
from gateway.metadata.listing.store import ListingStore
from gateway.metadata.store import SIZE_BYTES_MAX, CatalogStore

FORMAT = b"forebay catalog 1\n"

ANSWERS = "answers"
ENVIRONMENTS = {"index": OLD_ENGINE, "listing": NEW_ENGINE, "dirty": NEW_ENGINE}
OPENING_SECONDS_MAX = 60.0
"""Another process opens in milliseconds, and drops everything in seconds. One that hangs is ended sooner."""

CLOSING_SECONDS_MAX = 10.0
"""Seconds after which a process leaves the catalog as it is, not closed in order."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_NOT_AN_INDEX = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)
"""LMDB's errors for files that it did not write or that are damaged."""


@dataclass(frozen=True, slots=True)
class OpenCatalog:
    """The catalog's directory, open. `boot` is the number by which entries know the boot that they are of."""

    epochs: InvalidationEpochs
    store: CatalogStore
    dirty: DirtyKeys
    listing: ListingStore
    boot: int
    path: Path
    users: int
    """The descriptor of users.lock."""

    def close(self) -> None:
        """Close. The last process to close makes everything durable and says so. Blocks."""
        with _opening(self.path, CLOSING_SECONDS_MAX):
            alone = try_lock(self.users)
            self.listing.close(sync=alone)
            self.dirty.close(sync=alone)
            self.store.close(sync=alone)
            if alone:
                self.epochs.sync()
            self.epochs.close()
            if alone:
                write_durably(self.path / "CLEAN", b"")
            os.close(self.users)


def open_directory(
    path: Path, homes: Homes, *, process: int = 0, size_bytes_max: int = SIZE_BYTES_MAX, clock: Clock | None = None
) -> OpenCatalog:
    """Open or create the catalog of the objects at `homes`, as the process of this number (heartbeats.py).

    StartupError is a mistake to be put right, StoreUnavailable a disk that fails.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opening(path, OPENING_SECONDS_MAX):
            return _open(path, homes, process, size_bytes_max, clock)
    except (OSError, lmdb.Error) as error:
        raise opening_failure(f"the catalog {path}", error) from error


def discard_catalog(path: Path) -> None:
    """Make the next process that opens the catalog drop everything; raise StoreUnavailable when the disk fails."""
    with store_errors(f"the catalog {path} cannot be dropped"):
        if path.is_dir():  # a new disk has none
            remove_durably(path / "BOOT", path / "CLEAN")


def _open(path: Path, homes: Homes, process: int, size_bytes_max: int, clock: Clock | None) -> OpenCatalog:
    _refuse_other_formats(path)
    users = os.open(path / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        boot = BOOT_ID.read_bytes()
        if not _believable(path, homes, boot, users):
            _drop(path, users)
        moved = _moved(path, homes)
        if moved and not try_lock(users):
            raise StartupError(
                f"the catalog {path} was written for other homes of the buckets, and other processes use it: "
                "stop them first"
            )
        remove_durably(path / "CLEAN")  # after a reboot it would make the unsynced catalog trusted
        opened = _open_with_room(path, users, partial(_open_files, path, users, boot, process, size_bytes_max, clock))
        for bucket in moved:  # ORIGIN says so only then: who is killed does it again
            opened.epochs.change_bucket(bucket)
            opened.listing.forget(bucket, b"", END)
        _keep(path / "ORIGIN", homes.to_text().encode())
        _keep(path / "BOOT", boot)
        fcntl.flock(users, fcntl.LOCK_SH)
        return opened
    except BaseException:
        os.close(users)
        raise


def _open_with_room(path: Path, users: int, open_files: Callable[[], OpenCatalog]) -> OpenCatalog:
    """Open the catalog; if the disk is too full and no other process has it open, drop it to make room."""
    try:
        return _open_or_create(path, users, open_files)
    except (OSError, lmdb.Error) as error:
        if not (is_no_room(error) and try_lock(users)):
            raise
    _drop(path, users)
    return _open_or_create(path, users, open_files)


def _open_or_create(path: Path, users: int, open_files: Callable[[], OpenCatalog]) -> OpenCatalog:
    """Made anew where they are missing, or are not what they should be."""
    try:
        for name in ENVIRONMENTS:
            os.stat(path / name / "data.mdb")  # LMDB would make one that is gone anew, and the others be believed
        return open_files()
    except (*_NOT_AN_INDEX, FileNotFoundError):
        _drop(path, users)
    for name in ENVIRONMENTS:
        (path / name).mkdir(mode=0o700)
    entries.create(path / "epochs")
    return open_files()


def _open_files(
    path: Path, users: int, boot: bytes, process: int, size_bytes_max: int, clock: Clock | None
) -> OpenCatalog:
    with ExitStack() as stack:
        epochs = InvalidationEpochs(path / "epochs", process, clock)
        stack.callback(epochs.close)
        store = CatalogStore(path / "index", epochs, size_bytes_max=size_bytes_max)
        stack.callback(store.close)
        dirty = DirtyKeys(path / "dirty")
        stack.callback(dirty.close)
        listing = ListingStore(path / "listing", epochs, dirty, told=store.listed)
        stack.callback(listing.close)
        if try_lock(users):
            dirty.recover()
        stack.pop_all()
        return OpenCatalog(epochs, store, dirty, listing, zlib.crc32(boot), path, users)


def _refuse_other_formats(path: Path) -> None:
    found = _read(path / "FORMAT")
    if found is None:
        write_durably(path / "FORMAT", FORMAT)
    elif found != FORMAT:
        raise StartupError(
            f"{path} has the catalog format {found[:40]!r}, this version reads {FORMAT!r}: "
            "run the version that wrote it, or empty the directory (Forebay learns it again)"
        )


def _believable(path: Path, homes: Homes, boot: bytes, users: int) -> bool:
    whole = (path / "CLEAN").exists() or (
        _read(path / "BOOT") == boot
        and not (try_lock(users) and any(is_cut_short(path / name, engine) for name, engine in ENVIRONMENTS.items()))
    )
    before = _homes_before(path)
    return whole and before is not None and before.main == homes.main


def _homes_before(path: Path) -> Homes | None:
    found = _read(path / "ORIGIN")
    return None if found is None else Homes.from_text(found.decode("utf-8", "replace"))


def _moved(path: Path, homes: Homes) -> list[str]:
    before = _homes_before(path) or homes
    return sorted(bucket for bucket in {*before.by_bucket, *homes.by_bucket} if before.of(bucket) != homes.of(bucket))


def _drop(path: Path, users: int) -> None:
    """Forget everything. BOOT goes first: a drop that is killed half-way is begun again."""
    if not try_lock(users):
        raise StartupError(f"the catalog {path} cannot be read while other processes use it: stop them first")
    remove_durably(path / "BOOT", path / "CLEAN")
    if (path / ANSWERS).exists():
        shutil.rmtree(path / ANSWERS)  # before the epochs, which begin again
    (path / "epochs").unlink(missing_ok=True)
    for name in ENVIRONMENTS:
        shutil.rmtree(path / name, ignore_errors=True)


@contextmanager
def _opening(path: Path, seconds_max: float) -> Iterator[None]:
    """Alone among the processes that open or close the directory; BlockingIOError when one stays at it for too long."""
    descriptor = os.open(path / "opening.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_within(descriptor, seconds_max):
            raise BlockingIOError(errno.EAGAIN, "another process hangs while it opens or closes it")
        yield
    finally:
        os.close(descriptor)


def _keep(path: Path, content: bytes) -> None:
    if _read(path) != content:
        write_durably(path, content)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
