"""The bytes of objects in `MemoryOrigin`: kept, computed from the offset, or only counted."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

_PERIOD_BYTES = 1_048_573
"""A prime: no two aligned blocks of a generated object are alike."""


class Content(Protocol):
    """Immutable bytes that may be larger than memory."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on, fewer at the end."""


class BytesContent:
    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read(self, offset: int, count: int) -> bytes:
        return self._data[offset : offset + count]


class GeneratedContent:
    """`size_bytes` bytes that depend on seed and offset only: any size, a megabyte of memory at most."""

    def __init__(self, size_bytes: int, seed: int = 0) -> None:
        self._size = size_bytes
        self._pad = _pad(seed, min(size_bytes, _PERIOD_BYTES))

    @property
    def size_bytes(self) -> int:
        return self._size

    def read(self, offset: int, count: int) -> bytes:
        end = min(self._size, offset + count)
        pieces = []
        while offset < end:
            start = offset % _PERIOD_BYTES
            piece = self._pad[start : start + end - offset]
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)


@lru_cache(maxsize=16)
def _pad(seed: int, count: int) -> bytes:
    """The first `count` bytes of the period. A whole one takes 2 ms to make; objects of one seed share it."""
    return random.Random(seed).randbytes(-(-count // 4) * 4)[
        :count
    ]  # whole words: the rest of one is drawn differently


class DiscardedContent:
    """Bytes that were hashed and thrown away: only their number is left, and they read as zeros."""

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes

    @property
    def size_bytes(self) -> int:
        return self._size

    def read(self, offset: int, count: int) -> bytes:
        return bytes(max(0, min(count, self._size - offset)))


class JoinedContent:
    """Several contents one behind the other: a completed multipart upload."""

    def __init__(self, parts: Sequence[Content]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.size_bytes for part in parts))

    @property
    def size_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, offset: int, count: int) -> bytes:
        pieces = []
        index = bisect_right(self._ends, offset)
        while count > 0 and index < len(self._parts):
            start = self._ends[index] - self._parts[index].size_bytes
            piece = self._parts[index].read(offset - start, count)
            pieces.append(piece)
            offset += len(piece)
            count -= len(piece)
            index += 1
        return b"".join(pieces)


class SlicedContent:
    """A range of another content: what UploadPartCopy takes."""

    def __init__(self, content: Content, offset: int, count: int) -> None:
        self._content = content
        self._offset = offset
        self._size = count

    @property
    def size_bytes(self) -> int:
        return self._size

    def read(self, offset: int, count: int) -> bytes:
        return self._content.read(self._offset + offset, max(0, min(count, self._size - offset)))
