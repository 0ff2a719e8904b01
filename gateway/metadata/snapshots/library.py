"""The snapshots of one cache directory: which there are, opening them once per process, deleting them.

    snapshots/<name>/MANIFEST    manifest.py
    snapshots/<name>/<id>.data   the objects (data.py)
    snapshots/.new-<mark>/       one in the making (staging.py), or given up
    snapshots/.gone-<id>/        one being deleted
    snapshots/changes            changes.py

One is there as a whole or not at all: it comes and goes by the renaming of its directory. It cannot be made again once
the origin has changed, so that nothing here is ever dropped because it is in doubt. All of this blocks.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb
from awscrt import checksums

from gateway.durable import sync_directory
from gateway.errors import NoSuchSnapshot, SnapshotError, SnapshotUnusable, StoreUnavailable
from gateway.metadata.snapshots.changes import Changes
from gateway.metadata.snapshots.data import SnapshotData
from gateway.metadata.snapshots.manifest import Manifest, unpack
from gateway.metadata.snapshots.names import valid_name

MANIFEST = "MANIFEST"
NEW, GONE = ".new-", ".gone-"

IDLE_MAX = 4
"""Snapshots that nobody reads and that stay open: to open one again, all of it would be read again."""

_READ_BYTES = 4 * 2**20
_NOT_WHAT_WAS_WRITTEN = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.NotFoundError,
)


@dataclass(slots=True)
class Snapshot:
    """One that is open: `data` may be read until whoever has opened it closes it."""

    manifest: Manifest
    data: SnapshotData
    users: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """One as a list of them shows it: `problem` says why it cannot be used."""

    name: str
    manifest: Manifest | None
    problem: str | None = None


class Library:
    """One process's view of the directory, which is made where it is missing; StoreUnavailable when that fails."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[str, Snapshot] = {}
        self._idle: dict[str, None] = {}
        self._opening = threading.Lock()
        self._lock = threading.Lock()  # never held for long: the event loop takes it too
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.changes = Changes(root / "changes")
        except OSError as error:
            raise StoreUnavailable(f"the snapshots in {root} cannot be used: {error}") from error

    def all(self) -> list[Listed]:
        """Every snapshot by name, those that cannot be used too."""
        return [self._listed(name) for name in sorted(os.listdir(self.root)) if self._is_snapshot(name)]

    def manifest(self, name: str) -> Manifest:
        """What is said of a snapshot; NoSuchSnapshot, SnapshotUnusable, StoreUnavailable."""
        try:
            return unpack((self.root / valid_name(name) / MANIFEST).read_bytes(), name)
        except FileNotFoundError:
            if (self.root / name).exists():
                raise SnapshotUnusable(f"snapshot {name!r} has no manifest; it is left as it is") from None
            raise NoSuchSnapshot(f"there is no snapshot {name!r}") from None
        except OSError as error:
            raise StoreUnavailable(f"snapshot {name!r} cannot be read: {error}") from error

    def glance(self, name: str) -> Manifest:
        """As `manifest`, and as `open` raises where that can be told without reading all of it."""
        manifest = self.manifest(name)
        try:
            size_bytes = self._data_path(manifest).stat().st_size
        except OSError as error:
            raise SnapshotUnusable(f"the data of snapshot {name!r} cannot be read: {error}") from error
        if size_bytes != manifest.data_size_bytes:
            raise SnapshotUnusable(f"the data of snapshot {name!r} is not whole; it is left as it is")
        return manifest

    @contextmanager
    def opened(self, name: str) -> Iterator[Snapshot]:
        """A snapshot for as long as the context lasts, kept for the next (`close`); raises as `open`."""
        snapshot = self.open(name)
        try:
            yield snapshot
        finally:
            self.close(snapshot, keep=True)

    def open(self, name: str) -> Snapshot:
        """A snapshot, to be closed again. The first to open it reads all of it, to see that it is what was written.

        NoSuchSnapshot, SnapshotUnusable, StoreUnavailable.
        """
        manifest = self.manifest(name)
        with self._opening:  # LMDB must not have an environment open twice in one process
            with self._lock:
                snapshot = self._open.get(manifest.id)
                if snapshot is not None:
                    return self._taken(snapshot)
            data = self._data(manifest)
            with self._lock:
                snapshot = self._open[manifest.id] = Snapshot(manifest, data)
                return self._taken(snapshot)

    def _taken(self, snapshot: Snapshot) -> Snapshot:
        snapshot.users += 1
        self._idle.pop(snapshot.manifest.id, None)
        return snapshot

    def close(self, snapshot: Snapshot, *, keep: bool = False) -> None:
        """Let go of one. Whoever lets go last closes its file, unless the process may `keep` it for who opens it next.

        A process that keeps any is the one that deletes snapshots: else a deleted one would take room for ever.
        """
        with self._lock:
            snapshot.users -= 1
            if snapshot.users == 0:
                self._idle[snapshot.manifest.id] = None
                self._close_idle(IDLE_MAX if keep else 0)

    def _close_idle(self, count_max: int) -> None:
        while len(self._idle) > count_max:
            snapshot_id = next(iter(self._idle))
            del self._idle[snapshot_id]
            self._open.pop(snapshot_id).data.close()

    def hold(self, snapshot: Snapshot) -> None:
        """Be one more who has it open, and closes it; NoSuchSnapshot when it was closed before."""
        with self._lock:
            if self._open.get(snapshot.manifest.id) is not snapshot:
                raise NoSuchSnapshot(f"snapshot {snapshot.manifest.name!r} was closed")
            snapshot.users += 1

    def delete(self, name: str) -> Manifest | None:
        """Delete a snapshot for good, one that cannot be used too; NoSuchSnapshot, StoreUnavailable."""
        manifest = None
        with suppress(SnapshotUnusable):
            manifest = self.manifest(name)
        gone = self.root / f"{GONE}{os.urandom(16).hex()}"
        try:
            os.rename(self.root / valid_name(name), gone)
            sync_directory(self.root)
            self.changes.tell()
            with self._lock:
                self._close_idle(0)
            shutil.rmtree(gone)
        except FileNotFoundError:
            raise NoSuchSnapshot(f"there is no snapshot {name!r}") from None
        except OSError as error:
            raise StoreUnavailable(f"snapshot {name!r} cannot be deleted: {error}") from error
        return manifest

    def sweep(self, marks: Collection[str]) -> None:
        """Clear away what a killed process has left, but for those in the making under `marks`.

        The background process alone does so, before it makes or deletes any.
        """
        kept = {f"{NEW}{mark}" for mark in marks}
        for name in os.listdir(self.root):
            if name.startswith((NEW, GONE)) and name not in kept:
                shutil.rmtree(self.root / name, ignore_errors=True)
        self.changes.tell()  # the one who was killed may not have come to it

    def shut(self) -> None:
        """Close what nobody reads; what a thread is in the midst of is closed by who has it open."""
        with self._lock:
            self._close_idle(0)
        self.changes.close()

    def _is_snapshot(self, name: str) -> bool:
        try:
            return (self.root / valid_name(name)).is_dir()
        except ValueError:
            return False

    def _listed(self, name: str) -> Listed:
        manifest = None
        try:
            manifest = self.manifest(name)
            return Listed(name, self.glance(name))
        except (SnapshotError, StoreUnavailable) as error:
            return Listed(name, manifest, str(error))

    def _data(self, manifest: Manifest) -> SnapshotData:
        path = self._data_path(manifest)
        try:
            if measure(path) != (manifest.data_size_bytes, manifest.data_crc32c):
                raise SnapshotUnusable(f"the data of snapshot {manifest.name!r} is damaged; it is left as it is")
            return SnapshotData(path)
        except FileNotFoundError:
            raise SnapshotUnusable(f"the data of snapshot {manifest.name!r} is gone") from None
        except (*_NOT_WHAT_WAS_WRITTEN, ValueError) as error:
            raise SnapshotUnusable(f"the data of snapshot {manifest.name!r} cannot be read: {error}") from error
        except (OSError, lmdb.Error) as error:
            raise StoreUnavailable(f"snapshot {manifest.name!r} cannot be opened: {error}") from error

    def _data_path(self, manifest: Manifest) -> Path:
        return self.root / manifest.name / data_name(manifest.id)


def data_name(snapshot_id: str) -> str:
    """The name of a snapshot's data: another for each, so that no path ever stands for two environments."""
    return f"{snapshot_id}.data"


def measure(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC32C of a file. Read, not mapped: a disk that fails says so."""
    size_bytes = crc = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            size_bytes, crc = size_bytes + len(piece), checksums.crc32c(piece, crc)
    return size_bytes, crc
