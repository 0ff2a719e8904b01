"""The objects of a job, on disk: written by a listing or from a manifest, and read in order while it grows.

One JSON array a line: `[bucket, key]`, or `[bucket, key, etag, size]` from a listing. An offset is a number of bytes:
a restart skips the objects before it. All of it blocks, except `Worklist.entries`.

A manifest names the objects to warm, one `s3://bucket/key` a line, in the order in which they will be asked for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from gateway.core.errors import ForebayError, store_errors
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix

LINE_BYTES_MAX = 4096
"""The longest line of a manifest: scheme, bucket and a key of 1,024 bytes fit easily."""

_READ_BYTES = 256 * 1024
_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One object, and where the next one begins in the list. ETag and size in bytes where a listing has told them."""

    key: ObjectKey
    next_offset: int
    etag: str | None = None
    size_bytes: int = 0


@dataclass(slots=True)
class RecoveredWork:
    """The size of a list, in total and up to the offset that the job has reached."""

    last: WorkItem | None = None
    objects: int = 0
    size_bytes: int = 0
    objects_before: int = 0
    bytes_before: int = 0

    def add(self, entry: WorkItem, *, before: bool) -> None:
        """One line more."""
        self.last = entry
        self.objects += 1
        self.size_bytes += entry.size_bytes
        self.objects_before += before
        self.bytes_before += entry.size_bytes * before


class Worklist:
    """One job's list. `complete` is set once nothing will be added any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complete = False
        self._grown = asyncio.Event()

    def add(self, entries: Iterable[tuple[object, ...]]) -> None:
        """Append; StoreUnavailable when the disk does not take it."""
        lines = b"".join(orjson.dumps(entry) + b"\n" for entry in entries)
        with store_errors("a list of objects cannot be written"):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _FILE_MODE)
            with os.fdopen(descriptor, "ab") as file:
                file.write(lines)

    def sync(self) -> None:
        """Make the added lines survive a power cut. Raise StoreUnavailable when the disk fails."""
        with store_errors("a list of objects cannot be written"):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def recover(self, offset: int) -> RecoveredWork:
        """Return the list that an earlier process left. Cut it off before the first line that a crash has torn."""
        found = RecoveredWork()
        with (
            store_errors("a list of objects cannot be read"),
            suppress(FileNotFoundError),
            self.path.open("r+b") as file,
        ):
            for entry in _lines(file, 0):
                found.add(entry, before=entry.next_offset <= offset)
            file.truncate(found.last.next_offset if found.last is not None else 0)
        return found

    def grown(self) -> None:
        """Wake the readers that wait for more lines. Call it on the event loop."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def finish(self) -> None:
        """Mark the list as complete. Call it on the event loop."""
        self.complete = True
        self.grown()

    async def entries(self, offset: int) -> AsyncGenerator[WorkItem, None]:
        """Yield the entries from `offset` on, waiting for those that are not written yet."""
        while True:
            complete, grown = self.complete, self._grown
            batch = await asyncio.to_thread(self._read, offset)
            for entry in batch:
                offset = entry.next_offset
                yield entry
            if not batch:
                if complete:
                    return
                await grown.wait()

    def _read(self, offset: int) -> list[WorkItem]:
        with (
            store_errors("a list of objects cannot be read"),
            suppress(FileNotFoundError),
            self.path.open("rb") as file,
        ):
            return list(_lines(file, offset, _READ_BYTES))
        return []


def _lines(file: BinaryIO, offset: int, bytes_max: int | None = None) -> Iterator[WorkItem]:
    """Yield the whole lines from `offset` on, until more than `bytes_max` are read."""
    begun = offset
    file.seek(offset)
    for line in file:
        if not line.endswith(b"\n"):
            return
        offset += len(line)
        try:
            bucket, key, *known = orjson.loads(line)
        except (ValueError, TypeError):  # a power cut leaves zeros where lines had not reached the disk
            return
        etag, size_bytes = known or (None, 0)
        yield WorkItem(ObjectKey(bucket, key), offset, etag, size_bytes)
        if bytes_max is not None and offset - begun >= bytes_max:
            return


class BadManifest(ForebayError):
    """A line of a manifest names no object."""


class ManifestLines:
    """Turns a manifest's pieces into (bucket, key), whatever way the pieces cut it. Empty lines are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._number = 0

    def feed(self, piece: bytes) -> Iterator[tuple[str, str]]:
        """Yield the objects of the lines that end in this piece; BadManifest names the line that is none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise BadManifest(f"line {self._number + len(lines) + 1} is longer than {LINE_BYTES_MAX} bytes")
        for line in lines:
            yield from self._object(line)

    def end(self) -> Iterator[tuple[str, str]]:
        """Yield the last line, where it has no line feed."""
        rest, self._rest = self._rest, b""
        yield from self._object(rest)

    def _object(self, line: bytes) -> Iterator[tuple[str, str]]:
        self._number += 1
        line = line.removesuffix(b"\r")
        if not line:
            return
        try:
            named = Prefix.parse(line.decode())
        except ValueError as error:  # UnicodeDecodeError is one
            raise BadManifest(f"line {self._number}: {error}") from None
        if not named.key_prefix:
            raise BadManifest(f"line {self._number} names no key: it should read s3://bucket/key")
        yield named.bucket, named.key_prefix
