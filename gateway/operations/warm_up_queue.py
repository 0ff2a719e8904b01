"""Objects that a worker fetches into the cache in the background, because a client's HEAD has asked for it.

    begin ─▶ waiting, WAITING_MAX at most ─▶ OBJECTS_AT_ONCE of them ─▶ pieces, PIECES_AT_ONCE in all ─▶ blocks.fetch

Callers have turns, an object each, however many objects of one wait; and none has more places than are free for the
others: half of them if no other caller warms. Workers that are asked for the same fetch it once: the cache agrees on
each block (blocks/single_flight.py). The queue drops an object if the cache takes no more of it, if it is
written or deleted meanwhile, and if the worker ends. Nothing of the queue outlives the worker: clients ask again.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import structlog

from gateway.blocks.cache import BlockCache
from gateway.blocks.plan import Explanation
from gateway.core.clock import Clock
from gateway.core.errors import ForebayError, OriginAnswered, OriginUnreachable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.metadata.catalog import Catalog
from gateway.origin.client import Purpose
from gateway.origin.retry import asks_for_retry
from gateway.policy.slots import Slot
from gateway.telemetry import metrics
from gateway.telemetry.logs import RateLimitedLog

WAITING_MAX = 4096
"""Objects; some hundred bytes of memory each."""

OBJECTS_AT_ONCE = 4
PIECES_AT_ONCE = 8
PIECES_WHILE_BUSY = 4
"""Pieces at once while this process fetches for readers, and while other processes fetch."""

ATTEMPTS_MAX = 4
"""Beyond what one request is tried (origin/retry.py)."""

LOOK_SHARE = 20.0
LOOK_SECONDS_MAX = 5.0
"""An object is not looked up again for this many times as long as the look took: repeated HEADs of a large object,
whose look takes long, cost only a part of a processor's time."""

LOOKS_MAX = 256
"""The most looks that are remembered."""

_FIRST_PAUSE_SECONDS = 1.0
_BUSY_LOOK_SECONDS = 0.05

_Outcome: TypeAlias = Literal["fetched", "no-room", "changed", "failed"]

_log = RateLimitedLog(structlog.get_logger("forebay.cache"))


@dataclass(slots=True, eq=False)
class _Look:
    task: asyncio.Task[Explanation]
    until: float = math.inf
    """When it becomes too old."""


class WarmUpQueue:
    """The warm-ups of one worker. Event loop only; `close` at the end, before `blocks`."""

    def __init__(
        self, blocks: BlockCache, catalog: Catalog, clock: Clock, is_pending: Callable[[ObjectKey], bool]
    ) -> None:
        self._blocks = blocks
        self._catalog = catalog
        self._clock = clock
        self._is_pending = is_pending
        self._waiting = OrderedDict[str, deque[tuple[ObjectVersion, Slot]]]()
        """By caller; the next in turn comes first."""
        self._waiting_count = 0
        self._known: set[ObjectVersion] = set()
        """The waiting and running objects."""
        self._running: set[asyncio.Task[None]] = set()
        self._pieces = asyncio.Semaphore(PIECES_AT_ONCE)
        self._fetching = 0
        self._looks = OrderedDict[ObjectVersion, _Look]()
        self._is_closed = False

    async def look(self, version: ObjectVersion, slot: Slot) -> Explanation:
        """Return which blocks of a version are cached and whether it is kept. StoreUnavailable.

        Concurrent callers share one look; it counts for a while, but not past the end of the version's warm-up.
        """
        found = self._looks.get(version)
        if found is None or found.until <= self._clock.monotonic():
            task = asyncio.create_task(
                self._blocks.explain(version.key, version, slot.name), name="look at a warm-up", context=Context()
            )
            found = self._looks[version] = _Look(task)
            task.add_done_callback(partial(self._looked, version, found, self._clock.monotonic()))
            self._looks.move_to_end(version)
            while len(self._looks) > LOOKS_MAX:
                self._looks.popitem(last=False)
        return await asyncio.shield(found.task)

    def _looked(self, version: ObjectVersion, look: _Look, began: float, task: asyncio.Task[Explanation]) -> None:
        took_seconds = self._clock.monotonic() - began
        look.until = began + took_seconds + min(LOOK_SECONDS_MAX, LOOK_SHARE * took_seconds)
        is_good = not task.cancelled() and task.exception() is None
        if self._looks.get(version) is look and (not is_good or look.until <= self._clock.monotonic()):
            del self._looks[version]

    def begin(self, version: ObjectVersion, slot: Slot, caller: str) -> bool:
        """Fetch a version in the background, once. Return False if too many objects wait, in all or of this caller."""
        if version in self._known:
            return True
        mine = self._waiting.get(caller, ())
        if self._is_closed or len(mine) >= WAITING_MAX - self._waiting_count:
            return False
        self._known.add(version)
        self._waiting.setdefault(caller, deque()).append((version, slot))
        self._waiting_count += 1
        metrics.WARM_UP_WAITING.add(1)
        if len(self._running) < OBJECTS_AT_ONCE:
            # In a context of its own: what belongs to the request ends with it.
            task = asyncio.create_task(self._work(), name="warm-up", context=Context())
            self._running.add(task)
            task.add_done_callback(self._running.discard)  # if it never began
        return True

    async def settle(self) -> None:
        """Wait until nothing waits or runs."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Drop waiting objects, and cancel running fetches."""
        self._is_closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        looking = [look.task for look in self._looks.values()]  # on threads, which must end
        await asyncio.gather(*running, *looking, return_exceptions=True)
        metrics.WARM_UP_WAITING.add(-self._waiting_count)
        self._waiting.clear()
        self._waiting_count = 0
        self._known.clear()

    async def _work(self) -> None:
        try:
            while self._waiting:
                version, slot = self._next()
                try:
                    metrics.WARM_UP_OBJECTS.add(1, slot.name, await self._fetched(version, slot))
                finally:
                    self._known.discard(version)
                    self._looks.pop(version, None)
        finally:
            # In one step with the last look at the queue: what is queued later finds that this task has ended.
            if (task := asyncio.current_task()) is not None:
                self._running.discard(task)

    def _next(self) -> tuple[ObjectVersion, Slot]:
        """Take the first object of the caller whose turn it is."""
        caller, waiting = self._waiting.popitem(last=False)
        found = waiting.popleft()
        if waiting:
            self._waiting[caller] = waiting
        self._waiting_count -= 1
        metrics.WARM_UP_WAITING.add(-1)
        return found

    async def _fetched(self, version: ObjectVersion, slot: Slot) -> _Outcome:
        try:
            return await self._fetch(version, slot)
        except OriginAnswered as answer:
            if answer.status in (404, 412):
                self._catalog.forget(version.key)  # there is another version, or none
                return "changed"
            reason = f"the origin answered {answer.status}"
        except ForebayError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with one object, the next one has its turn
            reason = f"{type(error).__name__}: {error}"
        _log.warning("an object was not warmed", "failed", object=str(version.key), reason=reason)
        return "failed"

    async def _fetch(self, version: ObjectVersion, slot: Slot) -> _Outcome:
        """Fetch its pieces. Raise the origin's error for the first piece that it did not give."""
        pieces: set[asyncio.Task[bool]] = set()
        try:
            for piece in self._blocks.pieces(version, slot.name):
                await self._wait_for_turn()
                pieces.add(asyncio.create_task(self._fetch_piece(version, piece, slot), name="warm-up piece"))
                over = {task for task in pieces if task.done()}
                pieces -= over
                if not all(task.result() for task in over):
                    return "no-room"
                if self._is_pending(version.key):
                    return "changed"
            return "fetched" if all(await asyncio.gather(*pieces)) else "no-room"
        finally:
            for task in pieces:
                task.cancel()
            await asyncio.gather(*pieces, return_exceptions=True)

    async def _wait_for_turn(self) -> None:
        """Wait until one more piece may be fetched; `_fetch_piece` ends its turn."""
        await self._pieces.acquire()
        try:
            while self._fetching >= PIECES_WHILE_BUSY and self._blocks.readers_wait():
                await self._clock.sleep(_BUSY_LOOK_SECONDS)
        except BaseException:
            self._pieces.release()
            raise
        self._fetching += 1

    async def _fetch_piece(self, version: ObjectVersion, piece: ByteRange, slot: Slot) -> bool:
        attempts = 0
        try:
            while True:
                attempts += 1
                try:
                    _, is_kept = await self._blocks.fetch(version, piece, slot=slot.name, purpose=Purpose.WARM)
                    return is_kept
                except (OriginUnreachable, OriginAnswered) as error:
                    is_final = isinstance(error, OriginAnswered) and not asks_for_retry(error.status)
                    if is_final or attempts == ATTEMPTS_MAX:
                        raise
                await self._clock.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempts - 1))
        finally:
            self._fetching -= 1
            self._pieces.release()
