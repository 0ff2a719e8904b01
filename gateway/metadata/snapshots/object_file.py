"""A snapshot's objects in one file, written once in the order of their keys; docs/on-disk-format.md is the reference.

A tree of nodes: leaves hold keys and records (listing/records.py), branches hold the first key of each child, and where
it lies with its CRC32C. The manifest names the root in the same way. So a reader opens a file of any size by reading
its root, and each node is verified when it is read. It is read and never mapped: a disk that fails, or a file that was
cut, is an error and not the end of the process.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from awscrt import checksums

from gateway.core.errors import SnapshotUnusable, StoreUnavailable
from gateway.metadata.listing.pages import Listed
from gateway.metadata.listing.records import pack_template, unpack, unpack_template
from gateway.s3.list_result import EntryTemplate, ListedEntry

READ_AT_ONCE = 1024
"""Objects read or written together: a few milliseconds."""

NODE_BYTES = 4096
"""A node is written once it has so many: some forty objects."""

BRANCHES_KEPT = 1024
"""Branches of one file in memory, about 10 MiB: below two million objects a look-up reads one leaf."""

_MAGIC = b"forebay objects\n"
_BESIDE_KEYS = b"\xff"
"""Before and behind each key: no UTF-8 has this byte (RFC 3629, 1)."""

_HEAD = struct.Struct("<HHII")
"""The level of a node (0: a leaf), the size of each value (0: they differ), how many, and the bytes of all keys."""


class ObjectFileExtent(NamedTuple):
    """A place in the file, and the CRC32C of its bytes."""

    offset: int
    size_bytes: int
    crc32c: int


_EXTENT = struct.Struct("<QII")


class Layout(NamedTuple):
    """The extents that a reader needs to start."""

    size_bytes: int
    root: ObjectFileExtent
    templates: ObjectFileExtent


class _Leaf:
    """Keys and what belongs to each."""

    def __init__(self, node: bytes) -> None:
        self.level, self._size, self.count, keys_bytes = _HEAD.unpack_from(node)
        self._node = node
        self._values_at = _HEAD.size + keys_bytes

    @cached_property
    def keys(self) -> list[bytes]:
        return self._node[_HEAD.size + 1 : self._values_at - 1].split(_BESIDE_KEYS) if self.count else []

    def record(self, key: bytes) -> bytes | None:
        at = self._node.find(b"\xff%b\xff" % key, _HEAD.size, self._values_at)
        if at < 0:
            return None
        number = self._node.count(_BESIDE_KEYS, _HEAD.size, at)
        return self.values(number, number + 1)[0]

    def rows(self, first: int, end: int) -> list[Listed]:
        return list(zip(self.keys[first:end], self.values(first, end), strict=True))

    def values(self, first: int, end: int) -> Sequence[bytes]:
        if self._size:
            at = self._values_at + first * self._size
            return _alike(self._size, end - first).unpack_from(self._node, at)
        sizes = struct.unpack_from(f"<{self.count}H", self._node, self._values_at)
        at = self._values_at + 2 * self.count + sum(sizes[:first])
        return struct.unpack_from("<" + "".join(f"{size}s" for size in sizes[first:end]), self._node, at)


class _Branch:
    """The first keys of its children, and where they lie."""

    def __init__(self, node: _Leaf) -> None:
        self._keys = node.keys
        self.children = [ObjectFileExtent(*_EXTENT.unpack(extent)) for extent in node.values(0, node.count)]

    def child(self, key: bytes) -> int:
        """Return the number of the child that the key lies in, or would."""
        return max(0, bisect_right(self._keys, key) - 1)


@lru_cache(maxsize=1024)
def _alike(size_bytes: int, count: int) -> struct.Struct:
    return struct.Struct("<" + f"{size_bytes}s" * count)


class ObjectFile:
    """The objects of one snapshot. Threads may read at the same time, until it is closed.

    Reading raises SnapshotUnusable for what is not what was written, and StoreUnavailable when the disk fails.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self._file = path.open("rb", buffering=0)
        self._branches: OrderedDict[int, _Branch] = OrderedDict()
        self._last_leaf: tuple[int, _Leaf] | None = None
        try:
            if os.fstat(self._file.fileno()).st_size != layout.size_bytes:
                raise SnapshotUnusable("its data is not whole")
            packed = self._read(layout.templates)
            self.templates = [unpack_template(line) for line in packed.split(b"\n")] if packed else []
            self._root = layout.root
            self._node(self._root)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def record(self, key: bytes) -> bytes | None:
        """Return an object's record; None: no such object. Takes microseconds, so it may run on the event loop."""
        return self._leaf(key).record(key)

    def entry(self, key: bytes, record: bytes) -> ListedEntry:
        """Unpack a record; SnapshotUnusable when it is none."""
        try:
            return unpack(key, record, self.templates)
        except (IndexError, ValueError, struct.error) as error:
            raise SnapshotUnusable(f"a snapshot's record is damaged: {error}") from error

    def keys(self) -> AbstractContextManager[ObjectFile]:
        """All objects, as they are read for pages of listings (`listing.pages.Keys`)."""
        return nullcontext(self)

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        """As `listing.pages.Keys.read`."""
        if count <= 0 or start >= stop:
            return []
        leaf = self._leaf(start)
        first = bisect_left(leaf.keys, start)
        if first + count <= leaf.count and leaf.keys[first + count - 1] < stop:
            return leaf.rows(first, first + count)
        found: list[Listed] = []
        for leaf in self._leaves(self._root, start):
            first = bisect_left(leaf.keys, start)
            end = min(bisect_left(leaf.keys, stop, lo=first), first + count - len(found))
            found += leaf.rows(first, end)
            if end < leaf.count or len(found) >= count:
                break
        return found

    def part(self, start: bytes, stop: bytes, count: int = READ_AT_ONCE) -> list[ListedEntry]:
        """Return the first `count` objects of [start, stop), in order. Blocks."""
        return [self.entry(key, record) for key, record in self.read(start, stop, count)]

    def verify(self, objects: int) -> None:
        """Read all of it, to see that it is what was written, and so many objects. Blocks for long."""
        found = sum(leaf.count for leaf in self._leaves(self._root, b""))
        if found != objects:
            raise SnapshotUnusable(f"it has {found} objects instead of {objects}")

    def _leaf(self, key: bytes) -> _Leaf:
        node = self._node(self._root)
        while isinstance(node, _Branch):
            node = self._node(node.children[node.child(key)])
        return node

    def _leaves(self, extent: ObjectFileExtent, start: bytes) -> Iterator[_Leaf]:
        """In order, from the one that `start` lies in, or would."""
        node = self._node(extent)
        if isinstance(node, _Leaf):
            yield node
            return
        first = node.child(start)
        yield from self._leaves(node.children[first], start)
        for child in node.children[first + 1 :]:
            yield from self._leaves(child, b"")

    def _node(self, extent: ObjectFileExtent) -> _Leaf | _Branch:
        branch = self._branches.get(extent.offset)
        if branch is not None:
            return branch
        last = self._last_leaf
        if last is not None and last[0] == extent.offset:
            return last[1]
        leaf = _Leaf(self._read(extent))
        if not leaf.level:
            self._last_leaf = extent.offset, leaf
            return leaf
        branch = self._branches[extent.offset] = _Branch(leaf)
        if len(self._branches) > BRANCHES_KEPT:
            self._branches.popitem(last=False)
        return branch

    def _read(self, extent: ObjectFileExtent) -> bytes:
        try:
            content = os.pread(self._file.fileno(), extent.size_bytes, extent.offset)
        except OSError as error:
            raise StoreUnavailable(f"a snapshot cannot be read: {error}") from error
        if len(content) != extent.size_bytes or checksums.crc32c(content) != extent.crc32c:
            raise SnapshotUnusable(f"its data is damaged at byte {extent.offset}; it is left as it is")
        return content


class ObjectFileWriter:
    """Writes a file: `add` all objects in the order of their keys, then `finish`. Memory: a node of each level."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = file.write(_MAGIC)
        self._levels: list[list[Listed]] = [[]]
        self._sizes = [0]

    def add(self, rows: Iterable[Listed]) -> None:
        """Add rows behind all that were added."""
        for key, record in rows:
            self._append(0, key, record)

    def finish(self, templates: Sequence[EntryTemplate]) -> Layout:
        """Write the remaining nodes, and the templates that records name by their numbers."""
        level = 0
        while level < len(self._levels) - 1:
            if self._levels[level]:
                self._write_node(level)
            level += 1
        top = self._levels[level]
        is_root_there = level > 0 and len(top) == 1
        root = ObjectFileExtent(*_EXTENT.unpack(top[0][1])) if is_root_there else self._write(_pack(level, top))
        packed = b"\n".join(pack_template(template) for template in templates)
        return Layout(size_bytes=self._offset + len(packed), root=root, templates=self._write(packed))

    def _append(self, level: int, key: bytes, value: bytes) -> None:
        if level == len(self._levels):
            self._levels.append([])
            self._sizes.append(0)
        self._levels[level].append((key, value))
        self._sizes[level] += len(key) + len(value) + 8
        if self._sizes[level] >= NODE_BYTES and (not level or len(self._levels[level]) > 1):
            self._write_node(level)  # a branch of one child would be no step

    def _write_node(self, level: int) -> None:
        rows, self._levels[level], self._sizes[level] = self._levels[level], [], 0
        self._append(level + 1, rows[0][0], _EXTENT.pack(*self._write(_pack(level, rows))))

    def _write(self, content: bytes) -> ObjectFileExtent:
        extent = ObjectFileExtent(self._offset, len(content), checksums.crc32c(content))
        self._offset += self._file.write(content)
        return extent


def _pack(level: int, rows: Sequence[Listed]) -> bytes:
    """Head, keys, the sizes of the values where they differ, values."""
    keys, values = _BESIDE_KEYS.join([b"", *(key for key, _ in rows), b""]), [value for _, value in rows]
    sizes = {len(value) for value in values}
    size = sizes.pop() if len(sizes) == 1 else 0
    head = _HEAD.pack(level, size, len(rows), len(keys))
    differing = b"" if size else struct.pack(f"<{len(values)}H", *map(len, values))
    return b"".join([head, keys, differing, *values])
