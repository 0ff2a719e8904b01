"""The indexes of this gateway: those of all slots that have one, kept up side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import structlog

from gateway.jobs.indexing.keeping import IndexPlan, SlotIndex
from gateway.jobs.indexing.progress import IndexObserver
from gateway.jobs.tools import Tools
from gateway.metadata.listing.index import ListingIndex

_log = structlog.get_logger("forebay.index")


class Indexes:
    """All of them. Use `open`, and `close` at the end: the next `open` goes on with what is missing then."""

    def __init__(self, tools: Tools, index: ListingIndex, plans: Sequence[IndexPlan], observer: IndexObserver) -> None:
        names = {plan.slot for plan in plans}
        slots = {slot.name: slot for slot in tools.slots}
        self._clock = tools.clock
        self._indexes = [SlotIndex(tools, index, slots[plan.slot], plan, names, observer) for plan in plans]
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def open(cls, tools: Tools, plans: Sequence[IndexPlan], observer: IndexObserver) -> Self:
        """Begin to keep them."""
        index = tools.catalog.listing
        if not isinstance(index, ListingIndex):
            raise TypeError("an index needs the catalog's directory")
        indexes = cls(tools, index, plans, observer)
        indexes._tasks = [asyncio.create_task(indexes._keep(one), name="index") for one in indexes._indexes]
        return indexes

    def documents(self) -> list[dict[str, Any]]:
        """How each stands."""
        return [one.progress.document(self._clock.now()) for one in self._indexes]

    async def close(self) -> None:
        """Break off the crawls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, index: SlotIndex) -> None:
        try:
            await index.run()
        except Exception as error:
            index.progress.state, index.progress.error = "failing", f"{type(error).__name__}: see the log"
            _log.error("an index is not kept up any more", slot=index.progress.slot, exc_info=error)
            raise
