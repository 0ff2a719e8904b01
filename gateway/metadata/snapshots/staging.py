"""A snapshot in the making: under a name that is none, until all of it is on disk. All of this blocks.

Objects that a killed process has written stay: what makes the snapshot goes on behind the last of them. Nothing is
synced meanwhile, so that after a boot all begins anew.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb
import orjson

from gateway.durable import sync_directory, write_durably
from gateway.errors import SnapshotConflict, SnapshotError, StoreUnavailable
from gateway.metadata.opening import BOOT_ID
from gateway.metadata.snapshots.data import SnapshotData
from gateway.metadata.snapshots.library import MANIFEST, NEW, Library, data_name, measure
from gateway.metadata.snapshots.manifest import Manifest, pack
from gateway.metadata.snapshots.names import valid_name
from gateway.s3.list_result import ListedEntry

_BEGUN = "BEGUN"


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the objects come from: the name to be, the prefix, the origin, the job, and when it was begun."""

    name: str
    prefix: str
    origin: str
    started_at: float
    made_by: str = ""


class Staging:
    """Use `begin`; then add, and `publish` or `discard`, or `leave` for another process to go on."""

    def __init__(self, library: Library, directory: Path, origins: Origins, snapshot_id: str) -> None:
        self.origins = origins
        self._library = library
        self._directory = directory
        self._id = snapshot_id
        self._path = directory / data_name(snapshot_id)
        self._data = SnapshotData(self._path, writable=True)

    @classmethod
    def begin(cls, library: Library, mark: str, origins: Origins) -> Staging:
        """Go on with what is there under `mark`, where it is of this boot, or begin.

        `origins` of what is gone on with are those that it was begun with. SnapshotConflict when there is a snapshot of
        that name, StoreUnavailable when the disk fails.
        """
        if (library.root / valid_name(origins.name)).exists():
            raise _exists(origins.name)
        directory = library.root / f"{NEW}{mark}"
        try:
            begun = _begun(directory)
            if begun is None:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(mode=0o700)
                begun = origins, os.urandom(16).hex()
                write_durably(directory / _BEGUN, _packed(*begun))
            return cls(library, directory, *begun)
        except (OSError, lmdb.Error) as error:
            raise _failure(error) from error

    def last_key(self) -> bytes | None:
        """The greatest key that is there."""
        return self._data.last_key()

    def totals(self) -> tuple[int, int]:
        """How many objects there are, and their sizes together, in bytes."""
        return self._data.count(), self._data.totals()[0]

    def append(self, entries: Sequence[ListedEntry]) -> None:
        """Add objects behind all others, in order; SnapshotError, StoreUnavailable."""
        try:
            self._data.append(entries)
        except lmdb.Error as error:
            raise _failure(error) from error

    def insert(self, entries: Sequence[ListedEntry]) -> int | None:
        """Add objects in any order; the place in `entries` of the first that is there already. StoreUnavailable."""
        try:
            return self._data.insert(entries)
        except lmdb.Error as error:
            raise _failure(error) from error

    def publish(self, ended_at: float, *, expected: tuple[int, str] | None = None) -> Manifest:
        """Make it the snapshot, durably; how it is known from then on.

        `expected` are the number of objects and the digest that it must have: SnapshotError otherwise.
        SnapshotConflict when another has come first, StoreUnavailable when the disk fails.
        """
        try:
            objects, (size_bytes, digest) = self._data.count(), self._data.totals()
            if expected is not None and expected != (objects, digest):
                raise SnapshotError(
                    f"there are {objects} objects with digest {digest}, where {expected[0]} with {expected[1]} are "
                    "said to be: some of it is missing or has been changed"
                )
            manifest = self._written(objects, size_bytes, digest, ended_at)
            os.rename(self._directory, self._library.root / manifest.name)
            sync_directory(self._library.root)
        except (OSError, lmdb.Error) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _exists(self.origins.name) from None
            raise _failure(error) from error
        self._library.changes.tell()
        return manifest

    def leave(self) -> None:
        """Close it as it is."""
        self._data.close()

    def discard(self) -> None:
        """Give it up."""
        self._data.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _written(self, objects: int, size_bytes: int, digest: str, ended_at: float) -> Manifest:
        """Everything is on disk when this returns, under the name that is none."""
        self._data.sync()
        self._data.close()
        data_size_bytes, crc = measure(self._path)
        origins = self.origins
        manifest = Manifest(
            self._id,
            origins.name,
            origins.prefix,
            origins.origin,
            origins.started_at,
            ended_at,
            objects,
            size_bytes,
            digest,
            data_size_bytes,
            crc,
            origins.made_by,
        )
        with suppress(FileNotFoundError):
            (self._directory / _BEGUN).unlink()
        write_durably(self._directory / MANIFEST, pack(manifest))
        return manifest


def made_by(library: Library, name: str, job_id: str) -> Manifest | None:
    """The snapshot of that name, where this job has made it already."""
    try:
        manifest = library.manifest(name)
    except SnapshotError:
        return None
    return manifest if manifest.made_by == job_id else None


def _packed(origins: Origins, snapshot_id: str) -> bytes:
    return orjson.dumps({"boot": BOOT_ID.read_text(), "id": snapshot_id, "origins": origins})


def _begun(directory: Path) -> tuple[Origins, str] | None:
    try:
        document = orjson.loads((directory / _BEGUN).read_bytes())
        if document["boot"] != BOOT_ID.read_text():
            return None
        return Origins(**document["origins"]), document["id"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _exists(name: str) -> SnapshotConflict:
    return SnapshotConflict(f"there is a snapshot {name!r} already: delete it, or take another name")


def _failure(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the snapshot cannot be written: {error}")
