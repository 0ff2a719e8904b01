"""What the load origin's objects hold: any byte of any object without keeping or storing one."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

_PERIOD_BYTES = 4 * 1024 * 1024 + 4099  # no multiple of a block, so that a block at the wrong offset shows


def _pattern() -> memoryview:
    return memoryview(random.Random(20_261_121).randbytes(_PERIOD_BYTES) * 2)


_PATTERN = _pattern()


@dataclass(frozen=True, slots=True)
class LoadObject:
    """One object: its size, its ETag, and where in the endless pattern its first byte lies."""

    path: str
    size_bytes: int
    etag: str
    phase: int

    def piece(self, offset: int, length: int) -> memoryview:
        """Bytes from `offset` on: `length` of them, or fewer where a longer piece is not at hand."""
        start = (self.phase + offset) % _PERIOD_BYTES
        return _PATTERN[start : start + min(length, _PERIOD_BYTES)]


@dataclass(frozen=True, slots=True)
class FileObject(LoadObject):
    """An object that holds what a file holds."""

    content: memoryview

    def piece(self, offset: int, length: int) -> memoryview:
        return self.content[offset : offset + length]


def file_object(path: str, content: bytes) -> FileObject:
    """The object of that path (`/bucket/key`) with these bytes."""
    made = load_object(path, len(content))
    return FileObject(made.path, made.size_bytes, made.etag, 0, memoryview(content))


def load_object(path: str, size_bytes: int) -> LoadObject:
    """The object of that path (`/bucket/key`) and size; always the same."""
    digest = hashlib.md5(f"{path} {size_bytes}".encode(), usedforsecurity=False).hexdigest()
    return LoadObject(path, size_bytes, f'"{digest}"', int(digest[:8], 16) % _PERIOD_BYTES)


@dataclass(frozen=True, slots=True)
class Family:
    """`count` objects of one size, with keys `prefix` + number + `.bin` in bucket `load`."""

    prefix: str
    count: int
    size_bytes: int

    def key(self, number: int) -> str:
        return f"{self.prefix}{number:06d}.bin"

    def path(self, number: int) -> str:
        return f"/{BUCKET}/{self.key(number)}"

    def paths(self) -> list[str]:
        return [self.path(number) for number in range(self.count)]

    def __str__(self) -> str:
        return f"{self.prefix}:{self.count}:{self.size_bytes}"


BUCKET = "load"


def family(text: str) -> Family:
    """`prefix:count:size_bytes`, as `str(family)` writes it."""
    prefix, count, size_bytes = text.split(":")
    return Family(prefix, int(count), int(size_bytes))
