"""A snapshot in the making: under a name that is none, until all of it is on disk. All of this blocks.

Objects that a killed process has written stay: what makes the snapshot goes on behind the last of them. Nothing is
synced meanwhile, so that after a boot all begins anew.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

import lmdb
import orjson

from gateway.core.errors import SnapshotConflict, SnapshotError, store_errors
from gateway.disk.atomic_write import sync_directory, write_durably
from gateway.metadata.listing.pages import END, Listed, key_successor
from gateway.metadata.listing.records import etag_and_size, pack, pack_template, unpack_template
from gateway.metadata.listing.store import Cursor, Table
from gateway.metadata.opening import BOOT_ID
from gateway.metadata.snapshots.object_file import Layout, ObjectFileWriter
from gateway.metadata.snapshots.store import (
    BYTES_MAX,
    MANIFEST,
    NEW,
    Manifest,
    SnapshotStore,
    data_name,
    valid_name,
)
from gateway.s3.list_result import EntryTemplate, ListedEntry

_BEGUN = "BEGUN"
_TABLE = "objects"
"""The file of the ObjectTable."""

_ROWS_AT_ONCE = 4096
_FAILED = "the snapshot cannot be written"


@dataclass(frozen=True, slots=True)
class Origins:
    """The future snapshot's name, the prefix and origin of its objects, the job, and its start."""

    name: str
    prefix: str
    origin: str
    started_at: float
    made_by: str = ""


class SnapshotStaging:
    """Use `begin`; then add, and `publish` or `discard`, or `leave` for another process to go on."""

    def __init__(self, store: SnapshotStore, directory: Path, origins: Origins, snapshot_id: str) -> None:
        self.origins = origins
        self._store = store
        self._directory = directory
        self._id = snapshot_id
        self._table = ObjectTable(directory / _TABLE)

    @classmethod
    def begin(cls, store: SnapshotStore, mark: str, origins: Origins) -> SnapshotStaging:
        """Continue a staging of this boot under `mark`, or begin one.

        A continued staging keeps the `origins` with which it began. Raises SnapshotConflict when there is a snapshot of
        that name, StoreUnavailable when the disk fails.
        """
        directory, name = store.root / f"{NEW}{mark}", valid_name(origins.name)
        with store_errors(_FAILED, lmdb.Error):
            if (store.root / name).exists():
                raise _exists(name)
            begun = _begun(directory)
            if begun is None:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(mode=0o700)
                begun = origins, os.urandom(16).hex()
                record = {"boot": BOOT_ID.read_text(), "id": begun[1], "origins": origins}
                write_durably(directory / _BEGUN, orjson.dumps(record))
            return cls(store, directory, *begun)

    def last_key(self) -> bytes | None:
        """Return the greatest key that is there; StoreUnavailable."""
        with store_errors(_FAILED, lmdb.Error):
            return self._table.last_key()

    def totals(self) -> tuple[int, int]:
        """Return the number of objects and their total size in bytes; raise StoreUnavailable."""
        with store_errors(_FAILED, lmdb.Error):
            sizes = [sum(etag_and_size(record)[1] for _, record in rows) for rows in self._batches()]
            return self._table.count(), sum(sizes)

    def append(self, entries: Sequence[ListedEntry]) -> None:
        """Add objects behind all others, in order; SnapshotError, StoreUnavailable."""
        with store_errors(_FAILED, lmdb.Error):
            self._table.append(entries)

    def insert(self, entries: Sequence[ListedEntry]) -> int | None:
        """Add objects in any order; the number in `entries` of the first that is there already. StoreUnavailable."""
        with store_errors(_FAILED, lmdb.Error):
            return self._table.insert(entries)

    def publish(self, ended_at: float, *, expected: tuple[int, str] | None = None) -> Manifest:
        """Make it the snapshot, durably; how it is known from then on.

        `expected` are the number of objects and the digest that it must have: SnapshotError otherwise.
        SnapshotConflict when another has come first, StoreUnavailable when the disk fails.
        """
        with store_errors(_FAILED, lmdb.Error):
            objects, size_bytes, digest, layout = self._write_data()
            if expected is not None and expected != (objects, digest):
                raise SnapshotError(
                    f"there are {objects} objects with digest {digest}, where {expected[0]} with {expected[1]} are "
                    "said to be: some of it is missing or has been changed"
                )
            if size_bytes > BYTES_MAX:
                raise SnapshotError(f"the objects are said to have {size_bytes} bytes, more than there can be")
            manifest = Manifest(
                id=self._id,
                ended_at=ended_at,
                objects=objects,
                size_bytes=size_bytes,
                digest=digest,
                layout=layout,
                **asdict(self.origins),
            )
            self._seal(manifest)
        self._store.changes.tell()
        return manifest

    def leave(self) -> None:
        """Close the staging, for another process to continue."""
        self._table.close()

    def discard(self) -> None:
        self._table.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_data(self) -> tuple[int, int, str, Layout]:
        """Write all to disk, in order. Return number of objects, total size, digest (store.py) and layout."""
        objects, size_bytes, digest = 0, 0, sha256()
        with (self._directory / data_name(self._id)).open("wb") as file:
            writer = ObjectFileWriter(file)
            for rows in self._batches():
                writer.add(rows)
                versions = [(key, *etag_and_size(record)) for key, record in rows]
                digest.update(b"".join([b"%b\0%b\0%d\n" % (key, etag.encode(), size) for key, etag, size in versions]))
                objects += len(rows)
                size_bytes += sum(size for _, _, size in versions)
            layout = writer.finish(self._table.templates)
            file.flush()
            os.fsync(file.fileno())
        return objects, size_bytes, digest.hexdigest(), layout

    def _seal(self, manifest: Manifest) -> None:
        """From the renaming on it is a snapshot; a process that is killed before has left what is none."""
        self._table.close()
        for name in (_BEGUN, _TABLE):
            (self._directory / name).unlink(missing_ok=True)
        write_durably(self._directory / MANIFEST, manifest.pack())
        try:
            os.rename(self._directory, self._store.root / manifest.name)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _exists(manifest.name) from None
            raise
        sync_directory(self._store.root)

    def _batches(self) -> Iterator[list[Listed]]:
        start = b""
        while rows := self._table.read(start, END, _ROWS_AT_ONCE):
            yield rows
            start = key_successor(rows[-1][0])


def made_by(store: SnapshotStore, name: str, job_id: str) -> Manifest | None:
    """Return the snapshot of that name, where this job has made it already."""
    try:
        manifest = store.manifest(name)
    except SnapshotError:
        return None
    return manifest if manifest.made_by == job_id else None


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


TEMPLATES_MAX = 2**16

_MAP_BYTES = 256 * 2**30
"""Address space, and no memory: a thousand million objects and more."""


class ObjectTable:
    """The environment. All of it blocks; lmdb.Error when the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self._environment = lmdb.open(
            str(path),
            map_size=_MAP_BYTES,
            max_dbs=2,
            max_readers=1024,
            subdir=False,
            lock=False,
            sync=False,
            mode=0o600,
            lib_version=1,
        )
        try:
            self._entries: Table = self._environment.open_db(b"entries")
            self._templates: Table = self._environment.open_db(b"forms")
            with self._environment.begin() as transaction:
                self.templates = [unpack_template(packed) for _, packed in transaction.cursor(db=self._templates)]
        except BaseException:
            self._environment.close()
            raise
        self._numbers = {template: number for number, template in enumerate(self.templates)}

    def close(self) -> None:
        self._environment.close()

    def append(self, entries: Sequence[ListedEntry]) -> None:
        """Add objects, in order and behind all that are there; SnapshotError otherwise. All of them or none."""
        with self._environment.begin(write=True) as transaction:
            rows = self._rows(transaction, entries)
            _, added = transaction.cursor(db=self._entries).putmulti(rows, append=True)
            if added != len(rows):  # keys that are not behind the last one are passed over
                raise SnapshotError("the objects did not come in the order of their keys")

    def insert(self, entries: Sequence[ListedEntry]) -> int | None:
        """Add objects in any order; the number in `entries` of the first whose key is there already."""
        with self._environment.begin(write=True) as transaction:
            for number, (key, record) in enumerate(self._rows(transaction, entries)):
                if not transaction.put(key, record, db=self._entries, overwrite=False):
                    return number
        return None

    def add_missing(self, entries: Sequence[ListedEntry]) -> None:
        """Add those objects whose keys are not there yet, in any order."""
        with self._environment.begin(write=True) as transaction:
            rows = sorted(self._rows(transaction, entries))
            transaction.cursor(db=self._entries).putmulti(rows, overwrite=False)

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        """Return the first `count` keys and records of [start, stop), in order."""
        with self._environment.begin() as transaction:
            cursor: Cursor = transaction.cursor(db=self._entries)
            # An empty key is none for LMDB; "\0" is the least there is.
            if not cursor.set_range(start or b"\0"):
                return []
            return [row for row in islice(cursor, count) if row[0] < stop]

    def count(self) -> int:
        with self._environment.begin() as transaction:
            return int(transaction.stat(self._entries)["entries"])

    def last_key(self) -> bytes | None:
        """Return the greatest key."""
        with self._environment.begin() as transaction:
            cursor: Cursor = transaction.cursor(db=self._entries)
            return bytes(cursor.key()) if cursor.last() else None

    def _rows(self, transaction: lmdb.Transaction, entries: Sequence[ListedEntry]) -> list[Listed]:
        return [(entry.key, pack(entry, self._number(transaction, entry.template))) for entry in entries]

    def _number(self, transaction: lmdb.Transaction, template: EntryTemplate) -> int:
        number = self._numbers.get(template)
        if number is None:
            number = len(self.templates)
            if number >= TEMPLATES_MAX:
                raise SnapshotError(
                    f"owner, storage class and checksums of the objects differ in more than {TEMPLATES_MAX} ways"
                )
            transaction.put(number.to_bytes(2, "big"), pack_template(template), db=self._templates)
            self.templates.append(template)
            self._numbers[template] = number
        return number
