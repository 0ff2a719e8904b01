"""Waiting for another process's changes of a file, without polling: inotify(7) on the event loop.

Growth, renaming, removal and the writer's end, a kill included, each wake the watchers. A slow look every now and
then is the safety net: for file systems that report nothing, and for the moment between the kernel's report that a
killed writer's file is closed and the release of the lock on it.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
                self._remove(number, watch)

    def _add(self, descriptor: int) -> int | None:
        if self._descriptor is None:
            return None
        mask = _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVE_SELF
        number: int = self._libc.inotify_add_watch(self._descriptor, b"/proc/self/fd/%d" % descriptor, mask)
        return number if number != -1 else None

    def _remove(self, number: int, watch: Watch) -> None:
        self._watches[number].remove(watch)
        if not self._watches[number]:
            del self._watches[number]
            self._libc.inotify_rm_watch(self._descriptor, number)

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
