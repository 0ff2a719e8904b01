"""Locks on blocks that processes fetch: a table in memory that all processes of a cache share; and waiting for others.

A process takes a block's lock before it fetches the block. A process that finds it taken waits until it is given back,
and then looks into the index; if the block is large, it reads the file that the holder writes.

    cell   u64: 0, or 1 bit "awaited", 10 bits worker + 1, 27 bits tag of the place, 26 bits tag of the version
           u64: the nonce in the name of the file that the holder writes; 0: none yet
    count  u64 for each worker, behind the cells: how many locks it has, and in the upper 32 bits how many of them are
           unlisted
    until  u64 for each cell, behind the counts: until when a reader in another process counts as waiting for this one
           (ns of the monotonic clock). A waiting process renews it; it expires after AWAITED_SECONDS

The object, the place in it and the vary key choose a set of four cells; a fifth block of a set is fetched without a
lock. Processes wait while the holder lives and turns: a dead one has lost the kernel's lock on its wake file, a hung
one does not beat. A process that gives a holder up takes the lock over; a holder that wakes up later changes nothing.
So locks only save requests: the index prevents that a block is published twice.

Where one process alone serves requests, others fetch seldom. While none of them has a lock, it takes the locks of
places unlisted: they have no cell, and only the count includes them. A process that has taken a lock waits until no
other has unlisted ones, so it never fetches the same bytes: what the other takes from then on is in the table.

A set is changed under a record lock on its bytes, and a mutex against threads. After LOCK_SECONDS_MAX, as its holder
may be stopped, the block is fetched without. All this runs on the event loop. Processes wait without polling:
inotify(7) wakes them, a slow look now and then is the safety net.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import compress, count
from pathlib import Path
from typing import NamedTuple

from gateway.blocks import layout
from gateway.blocks.layout import Block
from gateway.core.errors import StoreUnavailable
from gateway.shared.heartbeats import PROCESSES_MAX, Heartbeats

WAYS = 4
SETS = 8192
CELLS = SETS * WAYS
_WORDS = 2
_WORD_BYTES = 8
_SET_BYTES = WAYS * _WORDS * _WORD_BYTES
_FIRST_WORDS = struct.Struct("@" + "Q8x" * WAYS)
"""The words of a set's cells; each word is read in one step."""
_COUNTS = CELLS * _WORDS
_UNTIL = _COUNTS + PROCESSES_MAX
FILE_BYTES = (_UNTIL + CELLS) * _WORD_BYTES

_VERSION_BITS, _PLACE_BITS = 26, 27
_TAG_BITS = _VERSION_BITS + _PLACE_BITS
_VERSION, _PLACE, _TAGS = (1 << _VERSION_BITS) - 1, (1 << _PLACE_BITS) - 1, (1 << _TAG_BITS) - 1
_AWAITED = 1 << 63

UNKNOWN, FETCHED = 0, 1
"""Versions of no block: it is being found out; it is known, and its bytes are being fetched under this lock."""

LOCK_SECONDS_MAX = 0.1
"""Longer than any process is busy with a set, waiting for a processor included, unless it is stopped there."""

_STUCK_SECONDS = 1.0
"""Seconds for which a set that timed out is tried once without a wait, to keep the event loop free."""

_NO_CELL = -1
_ONE_UNLISTED = 1 << 32
_UNLISTED_LOOK_SECONDS = 0.005

AWAITED_SECONDS = 1.0
"""Seconds for which a reader counts as waiting for another process's fetch: the fetch's bytes then go before those
without a waiting reader (origin/traffic_meter.py)."""

AWAITED_LOOK_SECONDS = 0.25
"""Seconds between two looks of a waiting process whether a reader waits, which it reports."""

HOLDER_SECONDS_MAX = 5.0
"""A lock is not waited for any longer, though its holder turns: the origin, or a disk, keeps it waiting. The same is
true of a growing file to which nothing comes."""


class LockKey(NamedTuple):
    """A set, and what tells one lock in it from another: the tags of the place, and of the version of the object."""

    set: int
    tags: int

    @property
    def version(self) -> int:
        return self.tags & _VERSION

    def of_version(self, version: int) -> LockKey:
        """Return the lock of the same place for another version."""
        return LockKey(self.set, self.tags & ~_VERSION | version)

    def held_by(self, worker: int) -> int:
        """Return the word of a cell while a worker has this lock and no other waits."""
        return (worker + 1) << _TAG_BITS | self.tags


def lock_of_place(object_id: bytes, offset: int, headers: Mapping[str, str]) -> LockKey:
    """Return the lock under which the version of the object at these bytes is found out.

    The locks of all blocks that begin there are in the same set, and of the same place.
    """
    vary = _digest(headers) if headers else _NO_HEADERS
    place = _number(object_id) + offset // layout.CHUNK_BYTES * 0x9E3779B97F4A7C15 + _number(vary)
    mixed = (place * 0xD6E8FEB86659FD93 >> 20) ^ _number(object_id[8:])
    return LockKey(mixed % SETS, (mixed // SETS & _PLACE) << _VERSION_BITS | UNKNOWN)


def lock_of_block(block: Block, place: LockKey) -> LockKey:
    """Return the lock of a block that begins at a place."""
    return place.of_version(FETCHED + 1 + _number(block.id) % (_VERSION - FETCHED))


class FetchLocks:
    """The table and the wake files in `directory`, as the process of a worker uses them.

    Opening, `forget` and closing block.
    """

    def __init__(self, directory: Path, worker: int, heartbeats: Heartbeats, *, has_one_worker: bool = False) -> None:
        """`has_one_worker`: all processes but one fetch seldom; the same in all of them."""
        self.worker = worker
        self._has_one_worker = has_one_worker
        self._unlisted = 0
        own = (_COUNTS + worker) * _WORD_BYTES
        others = slice(_COUNTS * _WORD_BYTES, own), slice(own + _WORD_BYTES, _UNTIL * _WORD_BYTES)
        self._counts_of_others = [(where, bytes(where.stop - where.start)) for where in others]
        """Their places, and their bytes while no other process has a lock."""
        self._directory = directory
        self._heartbeats = heartbeats
        self._mutex = threading.Lock()
        self._held: dict[LockKey, int] = {}
        """With the cell of each; _NO_CELL: it is unlisted."""

        self._unreleased: set[LockKey] = set()
        self._stuck: dict[int, float] = {}
        self._table = _open_table(directory / "fetch-locks")
        self._map = mmap.mmap(self._table, FILE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._wake_files: dict[int, int] = {}
        fcntl.flock(self.wake_file(worker), fcntl.LOCK_EX)

    def close(self) -> None:
        """Close the table; may be repeated."""
        self._words.release()
        self._map.close()
        table, self._table = self._table, -1
        if table >= 0:
            os.close(table)
        while self._wake_files:
            os.close(self._wake_files.popitem()[1])

    # Taking and giving back

    def take(self, key: LockKey, given_up: int | None = None) -> int | None:
        """Return the worker that has the lock now: this one, or one to wait for; None if the lock cannot be had.

        `given_up` is a holder that is not waited for. A worker's lock of a place for any version keeps all others from
        the lock of the place.
        """
        self.release_late()
        if not self._lock(key.set):
            return None
        try:
            free = None
            for cell, content in self._cells(key.set):
                if content & ~_AWAITED == 0:
                    free = cell if free is None else free
                elif content & _TAGS == key.tags:
                    return self._take_held(key, cell, given_up)
                elif key.version == UNKNOWN and (content ^ key.tags) & _TAGS <= _VERSION:
                    return None
            if free is None:
                free = next((cell for cell, content in self._cells(key.set) if not self.turns(_holder(content))), None)
            return self._take_free(key, free) if free is not None else None
        finally:
            self._unlock(key.set)

    def take_unlisted(self, key: LockKey) -> bool:
        """Take the lock of a place past the table, if no other process may be fetching; False: call `take`."""
        self.release_late()
        if not self._has_one_worker:
            return False
        self._held[key] = _NO_CELL
        self._unlisted += 1
        self._count()  # and then the look: the other process counts, and then looks, too
        if not self.others_fetch():
            return True
        self.release(key)
        return False

    async def all_listed(self) -> None:
        """Wait until no other process that turns has unlisted locks. Call it with a lock, so that none takes more."""
        deadline = time.monotonic() + HOLDER_SECONDS_MAX
        while self._has_one_worker and self.others_fetch() and time.monotonic() < deadline:
            counts = enumerate(self._words[_COUNTS:_UNTIL])
            unlisted = [worker for worker, count in counts if count >= _ONE_UNLISTED and worker != self.worker]
            if not any(map(self.turns, unlisted)):
                return
            await asyncio.sleep(_UNLISTED_LOOK_SECONDS)

    def has(self, key: LockKey) -> bool:
        """Return True if this process has taken a lock and not given it back; it may have lost it meanwhile."""
        return key in self._held

    def release(self, key: LockKey) -> None:
        """Give a lock back, and wake waiting processes. One that this process has lost stays as it is."""
        cell = self._held.pop(key, None)
        if cell is None:
            return
        if cell == _NO_CELL:
            self._unlisted -= 1
        elif not self._change(key, 0):
            self._unreleased.add(key)
        self._count()

    def exchange(self, key: LockKey, other: LockKey) -> None:
        """Give a lock back, wake waiting processes, and take another one of the same place instead."""
        if key not in self._held:
            return
        if self._held[key] == _NO_CELL:
            self.take(other)
            self.release(key)
        elif self._change(key, other.held_by(self.worker)):
            self._held[other] = self._held.pop(key)
        else:
            self.release(key)

    def release_late(self) -> None:
        """Give back what could not be given back when it was due."""
        if not self._unreleased:
            return
        owed, self._unreleased = self._unreleased, set()
        self._unreleased.update(key for key in owed if not self._change(key, 0))

    def forget(self, worker: int) -> None:
        """Give back every lock of a worker whose process is gone, or has just begun. Blocks."""
        self._words[_COUNTS + worker] = 0
        held = self._words[:_COUNTS:_WORDS].tolist()
        for number in {cell // WAYS for cell in compress(count(), held) if _holder(held[cell]) == worker}:
            while not self._lock(number):
                time.sleep(LOCK_SECONDS_MAX)
            try:
                for cell, content in self._cells(number):
                    if _holder(content) == worker:
                        self._words[cell] = 0
            finally:
                self._unlock(number)
        if worker == self.worker:
            self._held.clear()
            self._unlisted = 0
            self._unreleased.clear()
        self._notify(worker)

    # Waiting

    def holder(self, key: LockKey) -> int | None:
        """Return the worker that has a lock now, dead or alive, or None."""
        cell = self._cell_of(key)
        return _holder(self._words[cell]) if cell is not None else None

    def turns(self, worker: int) -> bool:
        """Return True if a worker's process lives and does not hang."""
        if worker == self.worker:
            return True
        if self._heartbeats.is_hung(worker):
            return False
        try:
            fcntl.flock(self.wake_file(worker), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.wake_file(worker), fcntl.LOCK_UN)
        return False

    def is_awaited(self, key: LockKey) -> bool:
        """Return True if a reader in another process waits for this one's work under its lock."""
        cell = self._held.get(key)
        if cell is None or cell == _NO_CELL:
            return False
        until = self._words[_UNTIL + cell // _WORDS]
        if not until or until <= self._heartbeats.now_ns():
            return False
        return self._words[cell] & ~_AWAITED == key.held_by(self.worker)

    def await_change(self, key: LockKey, holder: int, *, is_reader: bool = False) -> bool:
        """Make the holder report its lock's next change; False if it has lost it. For `is_reader` see `is_awaited`."""
        if not self._lock(key.set):
            return self.holder(key) == holder
        try:
            cell = self._cell_of(key)
            if cell is None or _holder(self._words[cell]) != holder:
                return False
            self._words[cell] |= _AWAITED
            if is_reader:
                self._words[_UNTIL + cell // _WORDS] = self._heartbeats.now_ns() + int(AWAITED_SECONDS * 1e9)
            return True
        finally:
            self._unlock(key.set)

    async def released(
        self,
        key: LockKey,
        holder: int,
        watcher: FileWatcher,
        is_abandoned: Callable[[], bool] = lambda: False,
        is_reader: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Wait until a lock is given back or `is_abandoned` returns True. Return False if its holder must be given up.

        Each look calls `is_reader` to learn whether a reader waits.
        """
        deadline = time.monotonic() + HOLDER_SECONDS_MAX
        with watcher.watch(self.wake_file(holder)) as watch:
            while not is_abandoned():
                watch.clear()
                if not self.await_change(key, holder, is_reader=is_reader()):
                    return True
                if not self.turns(holder) or time.monotonic() > deadline:
                    return False
                await watch.changed(AWAITED_LOOK_SECONDS)
        return True

    def others_fetch(self) -> bool:
        (before, none_before), (behind, none_behind) = self._counts_of_others
        return self._map[before] != none_before or self._map[behind] != none_behind

    def wake_file(self, worker: int) -> int:
        """Return the descriptor of a worker's wake file, to watch; open until `close`. Raises StoreUnavailable."""
        descriptor = self._wake_files.get(worker)
        if descriptor is None:
            # For writing only one's own: that it is closed shall mean that its process is gone.
            flags = (os.O_RDWR if worker == self.worker else os.O_RDONLY) | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                descriptor = self._wake_files[worker] = os.open(self._directory / f"w{worker}.wake", flags, 0o600)
            except OSError as error:
                raise StoreUnavailable(f"a worker's wake file cannot be opened: {error}") from error
        return descriptor

    # The file that a holder writes

    def show_file(self, key: LockKey, nonce: int) -> None:
        self._change(key, key.held_by(self.worker), nonce)

    def shown_file(self, key: LockKey, holder: int) -> int:
        """Return the nonce of the file that a holder writes; 0 if there is none yet, or the lock is lost."""
        cell = self._cell_of(key)
        if cell is None:
            return 0
        nonce = self._words[cell + 1]
        return nonce if self._words[cell] & ~_AWAITED == key.held_by(holder) else 0

    # The table

    def _take_held(self, key: LockKey, cell: int, given_up: int | None) -> int:
        holder = _holder(self._words[cell])
        if holder == given_up and holder != self.worker:
            return self._take_free(key, cell)
        if holder == self.worker and key not in self._held:  # a pending release, which is not due any more
            self._unreleased.discard(key)
            self._held[key] = cell
            self._count()
        return holder

    def _take_free(self, key: LockKey, cell: int) -> int:
        self._words[cell + 1] = self._words[_UNTIL + cell // _WORDS] = 0
        self._words[cell] = key.held_by(self.worker) | (self._words[cell] & _AWAITED)
        self._held[key] = cell
        self._count()
        return self.worker

    def _change(self, key: LockKey, content: int, nonce: int = 0) -> bool:
        """Change the cell of a lock, if this process still has it, and wake waiting processes.

        Return False when the set cannot be locked now.
        """
        if not self._lock(key.set):
            return False
        try:
            cell = self._cell_of(key)
            if cell is None or _holder(self._words[cell]) != self.worker:
                return True
            awaited = self._words[cell] & _AWAITED
            self._words[cell + 1] = nonce
            self._words[cell] = content
        finally:
            self._unlock(key.set)
        if awaited:
            self._notify(self.worker)
        return True

    def _cell_of(self, key: LockKey) -> int | None:
        tags = key.tags
        for cell, content in self._cells(key.set):
            if content & _TAGS == tags and content & ~_AWAITED > _TAGS:
                return cell
        return None

    def _cells(self, number: int) -> zip[tuple[int, int]]:
        first = number * WAYS * _WORDS
        words = _FIRST_WORDS.unpack_from(self._map, number * _SET_BYTES)
        return zip(range(first, first + WAYS * _WORDS, _WORDS), words, strict=True)

    def _count(self) -> None:
        self._words[_COUNTS + self.worker] = self._unlisted * _ONE_UNLISTED + len(self._held)

    def _notify(self, worker: int) -> None:
        with suppress(OSError, StoreUnavailable):  # waiting processes look for themselves a little later
            os.utime(self.wake_file(worker))

    def _lock(self, number: int) -> bool:
        self._mutex.acquire()
        if self._try_lock(number) or self._lock_in_time(number):
            return True
        self._mutex.release()
        return False

    def _lock_in_time(self, number: int) -> bool:
        began = time.monotonic()
        if self._stuck.get(number, 0.0) > began:
            return False
        while not self._try_lock(number):
            if time.monotonic() > began + LOCK_SECONDS_MAX:
                self._stuck[number] = time.monotonic() + _STUCK_SECONDS
                return False
            time.sleep(LOCK_SECONDS_MAX / 1000)
        self._stuck.pop(number, None)
        return True

    def _try_lock(self, number: int) -> bool:
        try:
            fcntl.lockf(self._table, fcntl.LOCK_EX | fcntl.LOCK_NB, _SET_BYTES, number * _SET_BYTES)
            return True
        except OSError:
            return False

    def _unlock(self, number: int) -> None:
        fcntl.lockf(self._table, fcntl.LOCK_UN, _SET_BYTES, number * _SET_BYTES)
        self._mutex.release()


def _holder(content: int) -> int:
    return ((content & ~_AWAITED) >> _TAG_BITS) - 1


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _digest(headers: Mapping[str, str]) -> bytes:
    """Return the vary key of the headers that go to the origin along with a request."""
    state = hashlib.blake2b(digest_size=16, person=b"forebay fill 1")
    for name, value in sorted(headers.items()):
        for text in (name.encode(), value.encode("utf-8", "surrogatepass")):
            state.update(len(text).to_bytes(8, "little"))
            state.update(text)
    return state.digest()


_NO_HEADERS = _digest({})


def _open_table(path: Path) -> int:
    """Open the file, whole on the disk: a page that could not be backed would kill a process that touches it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


LOOK_SECONDS = 1.0
"""Without any news, a watcher looks for itself this often."""

LOOK_UNTOLD_SECONDS = 0.05
"""Seconds between looks without inotify, when the user has no instance left."""

_LOOK_AFTER_CLOSE_SECONDS = 0.001

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVE_SELF = 0x2, 0x4, 0x8, 0x800
_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 64 * 1024


class Watch:
    """One file as one watcher sees it. `clear`, look at the file, then wait for `changed`: no change is missed."""

    def __init__(self, look_seconds: float) -> None:
        self._look_seconds = look_seconds
        self._patience_seconds = look_seconds
        self._changed = asyncio.Event()

    def clear(self) -> None:
        self._changed.clear()

    async def changed(self, seconds_max: float = math.inf) -> None:
        """Wait until something happened since `clear`, or it is time to look anyway: for `seconds_max` at most."""
        patience, self._patience_seconds = self._patience_seconds, min(2 * self._patience_seconds, self._look_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(patience, seconds_max)):
                await self._changed.wait()

    def notify(self, *, writer_closed: bool) -> None:
        if writer_closed:
            self._patience_seconds = _LOOK_AFTER_CLOSE_SECONDS
        self._changed.set()


class FileWatcher:
    """All watches of one event loop, on one inotify instance."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = asyncio.get_running_loop()
        self._watches: dict[int, list[Watch]] = {}
        self._descriptor: int | None = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor == -1:
            self._descriptor = None
        else:
            self._loop.add_reader(self._descriptor, self._read)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    @contextmanager
    def watch(self, *descriptors: int) -> Iterator[Watch]:
        """Watch open files, whatever their names become."""
        numbers = [number for number in map(self._add, descriptors) if number is not None]
        watch = Watch(LOOK_SECONDS if len(numbers) == len(descriptors) else LOOK_UNTOLD_SECONDS)
        for number in numbers:
            self._watches.setdefault(number, []).append(watch)
        try:
            yield watch
        finally:
            for number in numbers:
                self._watches[number].remove(watch)
                if not self._watches[number]:
                    del self._watches[number]
                    self._libc.inotify_rm_watch(self._descriptor, number)

    def _add(self, descriptor: int) -> int | None:
        if self._descriptor is None:
            return None
        mask = _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVE_SELF
        number: int = self._libc.inotify_add_watch(self._descriptor, b"/proc/self/fd/%d" % descriptor, mask)
        return number if number != -1 else None

    def _read(self) -> None:
        assert self._descriptor is not None  # noqa: S101 - the loop calls this only while it is open
        try:
            events = os.read(self._descriptor, _BUFFER_BYTES)
        except BlockingIOError:
            return
        position = 0
        while position < len(events):
            number, mask, _, name_bytes = _EVENT.unpack_from(events, position)
            position += _EVENT.size + name_bytes
            self._notify(number, mask)

    def _notify(self, number: int, mask: int) -> None:
        overflown = number == -1
        watches = [watch for one in self._watches.values() for watch in one] if overflown else None
        for watch in watches or self._watches.get(number, []):
            watch.notify(writer_closed=overflown or bool(mask & _CLOSE_WRITE))
