"""Walks a tree in S3's order. All of it blocks.

S3 orders keys by their bytes, so a directory counts as its name with `/` behind it: `a-b` < `a/x` < `a0`. The names of
a directory are kept as sorted chunks of bytes, a third of what they take as objects. They are sorted piece by piece:
nothing ever sorts a million names at once, which would hold the interpreter. They are read anew when the directory has
changed, or had just been changed before. Of a directory with more names than there is room for, the least ones behind
the page's beginning are kept.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from gateway.origin.stores.directory.beneath import opened_beneath
from gateway.origin.stores.directory.key_paths import KEY_BYTES_MAX, OWN
from gateway.origin.stores.directory.versions import SETTLE_SECONDS

_RUN_NAMES = 8192
_CHUNK_NAMES = 2048
NAMES_MAX = 1_500_000
"""Names of one directory that are read at once; each takes about 80 bytes until all are sorted."""

_KEPT_BYTES_MAX = 64 * 1024 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE})
UNREADABLE = frozenset({errno.EACCES, errno.EPERM})

_Identities = frozenset[tuple[int, int]]

OnSkipped = Callable[[str], None]
"""Gets the reason why a name is not listed."""


class Entry(NamedTuple):
    """A file, or an empty directory (`key` ends with `/`), with the open directory that it lies in and its name there.

    Or a common prefix, which has no name.
    """

    key: bytes
    directory: int
    name: bytes


@dataclass(slots=True)
class _Names:
    """A directory's names behind `after` up to `bound` (None: to the end), in order; NULs join those of a chunk."""

    after: bytes
    bound: bytes | None = None
    chunks: list[bytes] = field(default_factory=list)
    firsts: list[bytes] = field(default_factory=list)
    has_links: bool = False
    """Links that are followed are among them: what they lead to may change while the directory does not."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.chunks)) + 200 * len(self.chunks) + 1000

    def holds(self, low: bytes) -> bool:
        return self.after <= low and (self.bound is None or low < self.bound)

    def behind(self, low: bytes, *, inclusive: bool) -> Iterator[bytes]:
        cut = bisect_left if inclusive else bisect_right
        for chunk in islice(self.chunks, max(bisect_right(self.firsts, low) - 1, 0), None):
            names = chunk.split(b"\0")
            yield from islice(names, cut(names, low), None)


class _Runs:
    """Names as they are read: the least `names_max` at most, or half as many."""

    def __init__(self, after: bytes, names_max: int) -> None:
        self.after = after
        self.bound: bytes | None = None
        self._names_max = names_max
        self._runs: list[list[bytes]] = []
        self._count = 0

    def add(self, run: list[bytes]) -> None:
        run.sort()
        self._runs.append(run)
        self._count += len(run)
        if self._count > self._names_max:
            sample = self._sample(max(1, self._names_max // 1024))
            self.bound = sample[len(sample) * (self._names_max // 2) // self._count]
            self._runs = [run[: bisect_right(run, self.bound)] for run in self._runs]
            self._count = sum(map(len, self._runs))

    def _sample(self, step: int) -> list[bytes]:
        return sorted(name for run in self._runs for name in run[::step])

    def sorted(self) -> _Names:
        """Merge the runs, as many names at once as make a chunk. Nothing is left of them."""
        found, runs = _Names(self.after, self.bound), self._runs
        step = max(1, _CHUNK_NAMES // (len(runs) + 1))
        bounds, places = self._sample(step)[_CHUNK_NAMES // step :: _CHUNK_NAMES // step], [0] * len(runs)
        for bound in (*bounds, None):
            chunk = list[bytes]()
            for at, run in enumerate(runs):
                end = len(run) if bound is None else bisect_left(run, bound, places[at])
                chunk += run[places[at] : end]
                places[at] = end
            if chunk:
                chunk.sort()
                found.firsts.append(chunk[0])
                found.chunks.append(b"\0".join(chunk))
        self._runs = []
        return found


class Directories:
    """The names of the directories that were listed last, for all threads."""

    def __init__(self, on_skipped: OnSkipped, *, names_max: int = NAMES_MAX, follows_links: bool = False) -> None:
        self._on_skipped = on_skipped
        self._follows_links = follows_links
        self._names_max = names_max
        self._kept: OrderedDict[tuple[int, ...], _Names] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def names(self, directory: int, low: bytes, *, inclusive: bool, is_root: bool) -> Iterator[bytes]:
        """Yield the names from `low` on, those of directories with a `/`."""
        while True:
            found = self._names(directory, low, is_root=is_root)
            yield from found.behind(low, inclusive=inclusive)
            if found.bound is None:
                return
            low, inclusive = found.bound, False

    def _names(self, directory: int, low: bytes, *, is_root: bool) -> _Names:
        seen = os.fstat(directory)
        identity = (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns)
        with self._lock:
            kept = self._kept.get(identity)
            if kept is not None and kept.holds(low):
                self._kept.move_to_end(identity)
                return kept
        began_at = time.time()
        found = self._read(directory, low if kept is not None else b"", low, is_root=is_root)
        if max(seen.st_mtime, seen.st_ctime) < began_at - SETTLE_SECONDS and not found.has_links:
            with self._lock:
                if (before := self._kept.pop(identity, None)) is not None:
                    self._kept_bytes -= before.size_bytes
                self._kept[identity] = found
                self._kept_bytes += found.size_bytes
                while len(self._kept) > 1 and self._kept_bytes > _KEPT_BYTES_MAX:
                    self._kept_bytes -= self._kept.popitem(last=False)[1].size_bytes
        return found

    def _read(self, directory: int, after: bytes, low: bytes, *, is_root: bool) -> _Names:
        """Read all names; if they are too many from the beginning on, from `low` on."""
        runs, run, has_links = _Runs(after, self._names_max), list[bytes](), False
        with os.scandir(directory) as entries:
            for entry in entries:
                name = self._name(entry, is_root=is_root)
                if name is None or name < after or (runs.bound is not None and name > runs.bound):
                    continue
                has_links = has_links or (self._follows_links and entry.is_symlink())
                run.append(name)
                if len(run) == _RUN_NAMES:
                    runs.add(run)
                    run = []
                    if runs.bound is not None and runs.bound <= low and after != low:
                        return self._read(directory, low, low, is_root=is_root)
        runs.add(run)
        if runs.bound is not None and runs.bound <= low and after != low:
            return self._read(directory, low, low, is_root=is_root)
        found = runs.sorted()
        found.has_links = has_links
        return found

    def _name(self, entry: os.DirEntry[str], *, is_root: bool) -> bytes | None:
        try:
            name = entry.name.encode()
        except UnicodeEncodeError:
            self._on_skipped("not-utf-8")
            return None
        if is_root and entry.name == OWN:
            return None
        if entry.is_dir(follow_symlinks=False):
            return name + b"/"
        if entry.is_file(follow_symlinks=False):
            return name
        if entry.is_symlink():
            return name + b"/" if self._follows_links and _leads_to_directory(entry) else name
        self._on_skipped("special-file")
        return None


def _leads_to_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk over the keys of a bucket with a prefix, behind `after`. Common prefixes are not entered.

    With `follows_links` it enters linked directories, except those that it is in already.
    """

    bucket: int
    directories: Directories
    prefix: bytes
    after: bytes
    delimiter: bytes
    on_skipped: OnSkipped
    follows_links: bool = False

    def entries(self) -> Iterator[Entry]:
        """Yield the entries in order. A descriptor in one is open until the next is asked for."""
        base = self.prefix[: self.prefix.rfind(b"/") + 1]
        names = base.split(b"/")[:-1]
        if any(name in (b"", b".", b"..") or b"\0" in name or len(name) > 255 for name in names):
            return
        if names and names[0] == OWN.encode():
            return
        after = self.after
        rolled_up: bytes | None = b""
        if after > base and not after.startswith(base):
            return
        while rolled_up is not None:
            rolled_up = yield from self._from(base, names, after)
            after = (rolled_up or b"") + b"\xff"

    def _from(self, base: bytes, names: list[bytes], after: bytes) -> Generator[Entry, None, bytes | None]:
        """Yield up to the first common prefix that cuts a name; it is returned, to go on behind it."""
        try:
            above = _Identities()
            for count in range(len(names) if self.follows_links else 0):
                with opened_beneath(self.bucket, names[:count], _DIRECTORY) as directory:
                    above |= {_identity(directory)}
            with opened_beneath(self.bucket, names, _DIRECTORY, follows_links=self.follows_links) as directory:
                return (yield from self._below(directory, base, after, above))
        except OSError as error:
            self._skip(error)
        return None

    def _below(
        self, directory: int, base: bytes, after: bytes, above: _Identities
    ) -> Generator[Entry, None, bytes | None]:
        """`above`: the directories on the way, if links are followed."""
        if self.follows_links:
            if (identity := _identity(directory)) in above:
                return None
            above |= {identity}
        low, inclusive = _begin(base, after, self.prefix)
        is_empty = True
        for name in self.directories.names(directory, low, inclusive=inclusive, is_root=not base):
            is_empty = False
            key = base + name
            if not key.startswith(self.prefix) and not self.prefix.startswith(key):
                if key > self.prefix:
                    return None
                continue
            if len(key) > KEY_BYTES_MAX:
                self.on_skipped("too-long")
                continue
            end = key.find(self.delimiter, len(self.prefix)) if self.delimiter else -1
            if end >= 0:
                rolled_up = key[: end + len(self.delimiter)]
                if rolled_up > after:
                    yield Entry(rolled_up, directory, b"")
                if rolled_up != key or not key.endswith(b"/"):
                    return rolled_up  # which other names may begin with
            elif not name.endswith(b"/"):
                yield Entry(key, directory, name)
            else:
                cut = yield from self._into(directory, name, key, after, above)
                if cut is not None:
                    return cut
        if is_empty and base and base > after and base.startswith(self.prefix) and not low:
            yield Entry(base, directory, b".")
        return None

    def _into(
        self, directory: int, name: bytes, key: bytes, after: bytes, above: _Identities
    ) -> Generator[Entry, None, bytes | None]:
        try:
            # A link may lead to everywhere in the bucket.
            at, path = (self.bucket, key[:-1].split(b"/")) if self.follows_links else (directory, [name[:-1]])
            with opened_beneath(at, path, _DIRECTORY, follows_links=self.follows_links) as below:
                return (yield from self._below(below, key, after, above))
        except OSError as error:
            self._skip(error)
        return None

    def _skip(self, error: OSError) -> None:
        if error.errno in UNREADABLE:
            self.on_skipped("unreadable")
        elif error.errno not in _GONE:
            raise error


def _identity(directory: int) -> tuple[int, int]:
    seen = os.fstat(directory)
    return seen.st_dev, seen.st_ino


def _begin(base: bytes, after: bytes, prefix: bytes) -> tuple[bytes, bool]:
    """Return the name in a directory with which to begin, and whether it is included."""
    low, inclusive = b"", True
    if after.startswith(base):
        head, slash, _ = after[len(base) :].partition(b"/")
        low, inclusive = (head + slash, True) if slash else (head, not head)
    if prefix.startswith(base):
        head, slash, _ = prefix[len(base) :].partition(b"/")
        if head + slash > low:
            low, inclusive = head + slash, True
    return low, inclusive
