"""No fill is begun while the cache directory takes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks.filling.coalescing import Fill
from gateway.blocks.filling.filling import Filler
from gateway.blocks.trouble.isolation import Isolation


@dataclass(frozen=True, slots=True)
class GuardedFiller:
    """Does the work of every `Fill` as long as that makes sense; else StoreUnavailable: readers go past the cache."""

    filler: Filler
    isolation: Isolation

    async def __call__(self, fill: Fill) -> None:
        if not self.isolation.writable:
            raise self.isolation.refuse_writing()
        await self.filler(fill)

    def at_once(self, fill: Fill) -> bool:
        return self.isolation.writable and self.filler.at_once(fill)
