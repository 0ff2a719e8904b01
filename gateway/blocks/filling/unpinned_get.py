"""Unpinned GETs: reads of objects of which nothing is known, so that the origin is asked for version and bytes at once.

Which block the bytes are of shows in the answer, so that fetches cannot be shared before it. Until then one process has
the lock of the place (fetch_locks.py): those who learn the version in another way wait before they begin to fetch the
same bytes. Until the fetch has ended, when the bytes can be found, nobody else sends an unpinned GET: others ask for
the version, and share the fetch.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from gateway.blocks import layout
from gateway.blocks.files.watching import FileWatcher
from gateway.blocks.filling.fetch_locks import FETCHED, FetchLocks, LockKey, lock_of_place
from gateway.objects import ByteRange, ObjectKey
from gateway.origin.client import OriginResponse

KNOWN_EMPTY_MAX = 16_384
"""Places where there were no bytes, remembered by each process."""


@dataclass(slots=True)
class UnpinnedGet:
    """The right to fetch bytes of an unknown version: as long as somebody holds it, nobody else gets it.

    A context manager: the version is being found out as long as its body lasts. `turns` bounds how many of a process
    are under way: one is to be held from the question until a fetch has taken the answer, because each answer that
    waits has some of its body in memory.

    To be called `known_empty` where there were no bytes: then the version is asked for first the next time.
    """

    locks: FetchLocks
    lock: LockKey
    turns: asyncio.Semaphore
    on_end: Callable[[UnpinnedGet], None]
    known_empty: bool = False
    _holders: int = 1

    def __enter__(self) -> UnpinnedGet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(self)

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self.locks.release(self.lock)

    def becomes(self, lock: LockKey) -> bool:
        """Have a block's lock take the place of this one, until it is let go of; False when it is of another place.

        The version is known then: who waits for that goes on.
        """
        if self.lock.version or lock.of_version(self.lock.version) != self.lock:
            return self.lock == lock
        before, self.lock = self.lock, lock
        self.locks.exchange(before, lock)
        return True

    def is_over(self) -> None:
        """Who waits for the version goes on; until the fetch has ended, if there is one, nobody sends such a GET."""
        if self._holders > 1 and not self.lock.version:
            self.becomes(self.lock.of_version(FETCHED))
        self.let_go()


@dataclass(slots=True)
class UnpinnedResponse:
    """A good answer to an unpinned GET; `range` are the bytes of the object that its body holds.

    Whoever has it made closes it in the end; a fetch takes the response before that, if it needs it. A reader may have
    it for long after: it holds the response, with what has come of its body, no longer than it is of use.
    """

    get: UnpinnedGet
    range: ByteRange
    _response: OriginResponse | None

    @property
    def headers(self) -> Mapping[str, str]:
        """Those of the response; none once it was taken."""
        return self._response.headers if self._response is not None else {}

    def take(self, wanted: ByteRange) -> OriginResponse | None:
        """The response, once, if its body begins with the bytes wanted and holds all of them; the taker closes it."""
        if self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        response, self._response = self._response, None
        return response

    def whole(self, wanted: ByteRange) -> memoryview | None:
        """The bytes wanted, if the body begins with them and all of it is here; to be asked for once, before `take`."""
        if self._response is None or self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        body = self._response.whole()
        if body is None or len(body) != self.range.length:
            return None
        self._response = None  # a body that is here whole leaves nothing to be closed
        return body[: wanted.length]

    async def aclose(self) -> None:
        """Give the connection back, unless the response was taken. Idempotent."""
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()


@dataclass(slots=True)
class UnpinnedGets:
    """Those of one process, and how it sees those of others. Event loop only."""

    locks: FetchLocks
    watcher: FileWatcher
    turns: asyncio.Semaphore
    _own: dict[LockKey, asyncio.Event] = field(default_factory=dict)
    _known_empty: OrderedDict[LockKey, None] = field(default_factory=OrderedDict)

    def begin(self, object_id: bytes, offset: int, headers: Mapping[str, str]) -> UnpinnedGet | None:
        """The caller, and nobody else, finds out the version at `offset`; None: somebody does. To be entered."""
        lock = lock_of_place(object_id, offset, headers)
        taken = lock in self._known_empty or lock in self._own
        if taken or self.locks.take(lock) != self.locks.worker:
            return None
        self._own[lock] = asyncio.Event()
        return UnpinnedGet(self.locks, lock, self.turns, partial(self._end, lock))

    def pending(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> bool:
        """Whether somebody finds out the version at these bytes now."""
        lock = lock_of_place(layout.object_id(key), offset, headers)
        return lock in self._own or self._holder_elsewhere(lock) is not None

    async def settled(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> bool:
        """Wait until nobody finds out the version at these bytes; False: nobody did, or is to be waited for."""
        lock = lock_of_place(layout.object_id(key), offset, headers)
        own = self._own.get(lock)
        if own is not None:
            await own.wait()
            return True
        holder = self._holder_elsewhere(lock)
        return holder is not None and await self.locks.released(lock, holder, self.watcher)

    def _holder_elsewhere(self, lock: LockKey) -> int | None:
        holder = self.locks.holder(lock)
        return holder if holder != self.locks.worker else None

    def _end(self, lock: LockKey, get: UnpinnedGet) -> None:
        over = self._own.pop(lock)
        get.is_over()
        over.set()
        if get.known_empty:
            self._note_known_empty(lock)

    def _note_known_empty(self, lock: LockKey) -> None:
        """Empty objects have no blocks by which they would be known."""
        self._known_empty[lock] = None
        if len(self._known_empty) > KNOWN_EMPTY_MAX:
            self._known_empty.popitem(last=False)
