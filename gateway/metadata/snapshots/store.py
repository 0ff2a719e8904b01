"""The snapshots of one cache directory: which there are, opening them, deleting them.

    snapshots/<name>/MANIFEST    "forebay snapshot 1", the CRC32C of the rest as hexadecimal digits, LF, JSON
    snapshots/<name>/<id>.data   the objects (object_file.py)
    snapshots/.new-<mark>/       one in the making (staging.py), or given up
    snapshots/.gone-<id>/        one being deleted
    snapshots/changes            a number that grows whenever a snapshot comes or goes

One is there as a whole or not at all: it comes and goes by the renaming of its directory. It cannot be made again once
the origin has changed, so that nothing here is ever dropped because it is in doubt. All of this blocks.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from awscrt import checksums

from gateway.core.errors import NoSuchSnapshot, SnapshotError, SnapshotUnusable, StoreUnavailable
from gateway.disk.atomic_write import map_shared, sync_directory
from gateway.metadata.snapshots.object_file import Layout, ObjectFile, ObjectFileExtent
from gateway.policy.slots import Prefix

FORMAT_VERSION = 1
_MAGIC = "forebay snapshot"

SNAPSHOT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ALLOWED = "letters, digits, `-`, `_`, `.`; at most 64, the first a letter or a digit"

TIME_MAX = 253_402_300_799
"""The last second of the year 9999: dates are written in no later ones."""

BYTES_MAX = 2**63 - 1

_NAME = re.compile(SNAPSHOT_NAME[:-1] + r"\Z")


def valid_name(name: str) -> str:
    """Return the name; ValueError when it is invalid. It becomes a directory's: no other may ever reach the disk."""
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is no name of a snapshot: {ALLOWED.replace('`', '')}")
    return name


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot.

    It holds the `objects` whose keys began with `prefix` (`s3://bucket/prefix`) at `origin`, listed between
    `started_at` and `ended_at` (seconds since 1970), `size_bytes` all together. `digest` is the SHA-256, in hexadecimal
    digits, of key, NUL, ETag, NUL, size, LF of each object in the order of their keys: two snapshots of the same
    objects have the same. `id` is another for every snapshot ever made, and names its data, whose `layout` says where
    what lies in it, with checksums. `made_by` is the job that has made it, empty for an imported one.
    """

    id: str
    name: str
    prefix: str
    origin: str
    started_at: float
    ended_at: float
    objects: int
    size_bytes: int
    digest: str
    layout: Layout
    made_by: str = ""

    @property
    def scope(self) -> Prefix:
        """`prefix`, parsed."""
        return Prefix.parse(self.prefix)

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prefix": self.prefix,
            "origin": self.origin,
            "objects": self.objects,
            "bytes": self.size_bytes,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "digest": self.digest,
        }

    def pack(self) -> bytes:
        data = {
            "size_bytes": self.layout.size_bytes,
            "root": list(self.layout.root),
            "forms": list(self.layout.templates),
        }
        document = orjson.dumps(asdict(self) | {"layout": data}, option=orjson.OPT_INDENT_2) + b"\n"
        return f"{_MAGIC} {FORMAT_VERSION} {checksums.crc32c(document):08x}\n".encode() + document

    @classmethod
    def unpack(cls, content: bytes, name: str) -> Manifest:
        """Return the manifest of the snapshot `name`; SnapshotUnusable for what this version has not written."""
        head, _, document = content.partition(b"\n")
        words = head.decode("latin-1").rpartition(" ")
        kind = words[0].rpartition(" ")
        if kind[0] == _MAGIC and kind[2] != str(FORMAT_VERSION):
            raise SnapshotUnusable(
                f"snapshot {name!r} has format {kind[2][:20]!r}, this version reads {FORMAT_VERSION}: "
                "run the version that wrote it; it is left as it is"
            )
        if kind[0] != _MAGIC or words[2] != f"{checksums.crc32c(document):08x}":
            raise SnapshotUnusable(f"the manifest of snapshot {name!r} is damaged; it is left as it is")
        try:
            fields = orjson.loads(document)
            data = fields.pop("layout")
            layout = Layout(data["size_bytes"], ObjectFileExtent(*data["root"]), ObjectFileExtent(*data["forms"]))
            manifest = cls(**fields, layout=layout)
        except (ValueError, TypeError, KeyError) as error:
            raise SnapshotUnusable(f"the manifest of snapshot {name!r} cannot be read: {error}") from None
        if manifest.name != name:
            raise SnapshotUnusable(f"the directory of snapshot {manifest.name!r} has been renamed to {name!r}")
        return manifest


MANIFEST = "MANIFEST"
NEW, GONE = ".new-", ".gone-"

_SIZE_BYTES = 8
_FILE_MODE = 0o600


class Snapshot:
    """One that is open: `data` may be read until all who hold it have closed it. Its opener is the first holder."""

    def __init__(self, manifest: Manifest, data: ObjectFile) -> None:
        self.manifest = manifest
        self.data = data
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Be one more who has it open, and closes it; NoSuchSnapshot when it was closed before."""
        with self._lock:
            if not self._holders:
                raise NoSuchSnapshot(f"snapshot {self.manifest.name!r} was closed")
            self._holders += 1

    def close(self) -> None:
        """Let go of it; who does so last closes its file."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self.data.close()


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One as a list of them shows it: `problem` says why it cannot be used."""

    name: str
    manifest: Manifest | None
    problem: str | None = None


class SnapshotStore:
    """One process's view of the directory, which is made where it is missing; StoreUnavailable when that fails."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.changes = ChangeCounter(root / "changes")
        except OSError as error:
            raise self._unavailable(error) from error

    def all(self) -> list[SnapshotInfo]:
        """Every snapshot by name, those that cannot be used too; StoreUnavailable."""
        return [self._info(name) for name in self._names() if self._is_snapshot(name)]

    def manifest(self, name: str) -> Manifest:
        """Return a snapshot's manifest; raise NoSuchSnapshot, SnapshotUnusable or StoreUnavailable."""
        try:
            return Manifest.unpack((self.root / valid_name(name) / MANIFEST).read_bytes(), name)
        except FileNotFoundError:
            if (self.root / name).exists():
                raise SnapshotUnusable(f"snapshot {name!r} has no manifest; it is left as it is") from None
            raise NoSuchSnapshot(f"there is no snapshot {name!r}") from None
        except OSError as error:
            raise StoreUnavailable(f"snapshot {name!r} cannot be read: {error}") from error

    @contextmanager
    def opened(self, name: str) -> Iterator[Snapshot]:
        """Open a snapshot for as long as the context lasts; raises as `open`."""
        snapshot = self.open(name)
        try:
            yield snapshot
        finally:
            snapshot.close()

    def open(self, name: str) -> Snapshot:
        """Return a snapshot to be closed; reads verify nodes. NoSuchSnapshot, SnapshotUnusable, StoreUnavailable."""
        manifest = self.manifest(name)
        try:
            return Snapshot(manifest, ObjectFile(self.root / name / data_name(manifest.id), manifest.layout))
        except FileNotFoundError:
            raise SnapshotUnusable(f"the data of snapshot {name!r} is gone") from None
        except (SnapshotUnusable, ValueError) as error:
            raise SnapshotUnusable(f"snapshot {name!r} cannot be used: {error}") from error
        except OSError as error:
            raise StoreUnavailable(f"snapshot {name!r} cannot be opened: {error}") from error

    def check(self, name: str, *, whole: bool = False) -> Manifest:
        """Return the manifest of a usable snapshot, raising as `open`; `whole`: read all of it. Blocks."""
        with self.opened(name) as snapshot:
            if whole:
                try:
                    snapshot.data.verify(snapshot.manifest.objects)
                except SnapshotUnusable as error:
                    raise SnapshotUnusable(f"snapshot {name!r} cannot be used: {error}") from error
            return snapshot.manifest

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
            shutil.rmtree(gone)
        except FileNotFoundError:
            raise NoSuchSnapshot(f"there is no snapshot {name!r}") from None
        except OSError as error:
            raise StoreUnavailable(f"snapshot {name!r} cannot be deleted: {error}") from error
        return manifest

    def sweep(self, marks: Collection[str]) -> None:
        """Delete leftovers of killed processes, except unfinished snapshots under `marks`.

        Only the background process may call this, before it makes or deletes any. Raises StoreUnavailable.
        """
        kept = {f"{NEW}{mark}" for mark in marks}
        for name in self._names():
            if name.startswith((NEW, GONE)) and name not in kept:
                shutil.rmtree(self.root / name, ignore_errors=True)
        self.changes.tell()  # the one who was killed may not have come to it

    def close(self) -> None:
        """Close the store after its last use. Users of open snapshots close those."""
        self.changes.close()

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"the snapshots in {self.root} cannot be used: {error}")

    def _is_snapshot(self, name: str) -> bool:
        try:
            return (self.root / valid_name(name)).is_dir()
        except ValueError:
            return False

    def _info(self, name: str) -> SnapshotInfo:
        manifest = None
        try:
            manifest = self.manifest(name)
            return SnapshotInfo(name, self.check(name))
        except (SnapshotError, StoreUnavailable) as error:
            return SnapshotInfo(name, manifest, str(error))


class ChangeCounter:
    """One process's view of the number that all share. Nothing is durable: new processes look at the directory."""

    def __init__(self, path: Path) -> None:
        self._map = map_shared(path, _SIZE_BYTES)
        self._number = memoryview(self._map).cast("Q")

    @property
    def number(self) -> int:
        """Another one than before: something has changed."""
        return self._number[0]

    def tell(self) -> None:
        """Something has changed. The background process alone says so."""
        self._number[0] += 1

    def close(self) -> None:
        self._number.release()
        self._map.close()


def data_name(snapshot_id: str) -> str:
    """Name a snapshot's data: another name for each, so that no path ever stands for the data of two."""
    return f"{snapshot_id}.data"
