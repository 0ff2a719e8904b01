"""No fill is begun while the cache directory takes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.blocks.coalescing import Fill
from gateway.blocks.isolation import Isolation


@dataclass(frozen=True, slots=True)
class GuardedFiller:
    """Does the work of every `Fill` as long as that makes sense; else StoreUnavailable: readers go past the cache."""

    filler: Callable[[Fill], Awaitable[None]]
    isolation: Isolation

    async def __call__(self, fill: Fill) -> None:
        if not self.isolation.writable:
            raise self.isolation.refuse_writing()
        await self.filler(fill)
