"""First looks: reads of objects of which nothing is known, so that the origin is asked for version and bytes at once.

Which block the bytes are of shows in the answer, so that fills cannot be shared before it. Until then who looks first
has the object's place to himself, over all processes (fetch_locks.py): those who learn the version in another way wait
before they begin a fill of the same bytes. Until the fill has ended, when the bytes can be found, nobody else looks
first: others ask for the version, and share the fill.
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
from gateway.objects import ObjectKey

FRUITLESS_MAX = 16_384
"""Looks that brought nothing, remembered by each process."""


@dataclass(slots=True)
class FirstLook:
    """The right to fetch bytes of an unknown version: as long as somebody holds it, nobody else gets it.

    A context manager: the look lasts as long as its body. `turns` bounds how many look at once in a process: one is to
    be held from the question until a fill has taken the answer, because each answer that waits has some of its body in
    memory.

    To be called `fruitless` where there were none: then the version is asked for first the next time.
    """

    locks: FetchLocks
    place: LockKey
    turns: asyncio.Semaphore
    on_end: Callable[[FirstLook], None]
    fruitless: bool = False
    _holders: int = 1
    _known: bool = False

    def __enter__(self) -> FirstLook:
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
            self.locks.release(self.place)

    def becomes(self, fill: LockKey) -> bool:
        """Have a fill's claim take the place of this one, until it is let go of; False when it is not of these bytes.

        The version is known then: who waits for that goes on.
        """
        if self._known or fill.of_version(self.place.version) != self.place:
            return self.place == fill
        looking, self.place, self._known = self.place, fill, True
        self.locks.exchange(looking, fill)
        return True

    def is_over(self) -> None:
        """Who waits for the version goes on; nobody else looks first before the fill has ended, if there is one."""
        if self._holders > 1 and not self._known:
            self.becomes(self.place.of_version(FETCHED))
        self.let_go()


@dataclass(slots=True)
class FirstLooks:
    """Those of one process, and how it sees those of others. Event loop only."""

    locks: FetchLocks
    watcher: FileWatcher
    turns: asyncio.Semaphore
    _looking: dict[LockKey, asyncio.Event] = field(default_factory=dict)
    _fruitless: OrderedDict[LockKey, None] = field(default_factory=OrderedDict)

    def begin(self, object_id: bytes, offset: int, headers: Mapping[str, str]) -> FirstLook | None:
        """The caller, and nobody else, looks at the bytes from `offset` on; None: somebody does. To be entered."""
        place = lock_of_place(object_id, offset, headers)
        taken = place in self._fruitless or place in self._looking
        if taken or self.locks.take(place) != self.locks.worker:
            return None
        self._looking[place] = asyncio.Event()
        return FirstLook(self.locks, place, self.turns, partial(self._end, place))

    def _end(self, place: LockKey, look: FirstLook) -> None:
        over = self._looking.pop(place)
        look.is_over()
        over.set()
        if look.fruitless:
            self._note_fruitless(place)

    def _note_fruitless(self, place: LockKey) -> None:
        """Empty objects have no blocks by which they would be known."""
        self._fruitless[place] = None
        if len(self._fruitless) > FRUITLESS_MAX:
            self._fruitless.popitem(last=False)

    def pending(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> bool:
        """Whether somebody looks at these bytes now."""
        place = lock_of_place(layout.object_id(key), offset, headers)
        return place in self._looking or self._looks_elsewhere(place) is not None

    async def settled(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> bool:
        """Wait until nobody looks at these bytes; whether there was anybody."""
        place = lock_of_place(layout.object_id(key), offset, headers)
        own = self._looking.get(place)
        if own is not None:
            await own.wait()
            return True
        holder = self._looks_elsewhere(place)
        return holder is not None and await self._settled_elsewhere(place, holder)

    def _looks_elsewhere(self, place: LockKey) -> int | None:
        holder = self.locks.holder(place)
        return holder if holder != self.locks.worker else None

    async def _settled_elsewhere(self, place: LockKey, holder: int) -> bool:
        return await self.locks.released(place, holder, self.watcher)
