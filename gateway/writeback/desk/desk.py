"""Who sees to what is pending: shows it, has it flushed now, and has people decide where nobody else can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from heapq import nsmallest
from itertools import product
from typing import Any

from gateway.clock import Clock
from gateway.errors import BufferUnavailable, NothingPending
from gateway.objects import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.desk.alarms import Alarm, Alarms
from gateway.writeback.desk.deciding import Decider, decision_of
from gateway.writeback.desk.documents import (
    from_token,
    object_document,
    progress_document,
    slot_document,
    to_token,
    upload_document,
)
from gateway.writeback.desk.overview import Figures, Overview, Shown, SlotFigures
from gateway.writeback.flushing.flusher import Flusher

PROBLEMS_SHOWN = 20
"""Of a flush: a list has them all."""

REMEMBERED_SECONDS = 2.0
"""So long figures of all slots are given again: they cost a look at every row."""

WATCH_SECONDS = 10.0

STATES = ("failing", "conflict", "damaged")

Gauge = Callable[[str, str, int], None]
"""Told how many objects of a slot are in one of these states."""


class WritebackDesk:
    """Of one buffer, in the process that flushes it. BufferUnavailable when the journal cannot be read."""

    def __init__(
        self,
        overview: Overview,
        alarms: Alarms,
        flusher: Flusher,
        decider: Decider,
        buffers: Mapping[str, int],
        clock: Clock,
    ) -> None:
        """`buffers` are the slots that write back, and how many bytes they may have here."""
        self._overview = overview
        self._alarms = alarms
        self._flusher = flusher
        self._decider = decider
        self._buffers = dict(buffers)
        self._clock = clock
        self._summary: tuple[float, dict[str, Any]] | None = None

    async def summary(self) -> dict[str, Any]:
        """What only this node has, slot by slot: as it was within the last seconds."""
        now = self._clock.monotonic()
        if self._summary is None or now - self._summary[0] > REMEMBERED_SECONDS:
            self._summary = now, await self._summed()
        return self._summary[1]

    async def objects(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        """A page of what is pending under a prefix, in the order of keys; `next` is null behind the last."""
        bucket, key, sequence = from_token(after, str, str, int) if after else ("", "", 0)
        found = await self._overview.page(prefix, (bucket, key, sequence), count)
        return self._page(found, count, lambda last: to_token(*last.key, last.sequence))

    async def problems(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        """The same of what does not get to the origin, in the order of acknowledgement."""
        [behind] = from_token(after, int) if after else [0]
        alarms = [one.sequence for one in await self._living(prefix) if one.sequence > behind]
        conflicts = await self._overview.conflicts(prefix, behind, count)
        others = await self._overview.of(nsmallest(count, alarms))
        found = {one.sequence: one for one in (*conflicts, *others)}
        return self._page([found[one] for one in sorted(found)][:count], count, lambda last: to_token(last.sequence))

    async def uploads(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        """A page of the uploads that are open under a prefix: nothing of them can be flushed before they are
        completed."""
        bucket, key, upload_id = from_token(after, str, str, str) if after else ("", "", "")
        found = await self._overview.uploads(prefix, (bucket, key, upload_id), count)
        following = to_token(*found[-1].key, found[-1].upload_id) if len(found) == count else None
        return {"uploads": [upload_document(one) for one in found], "next": following}

    async def flush(self, prefix: Prefix) -> dict[str, Any]:
        """Have all that is pending under a prefix by now be tried at once, and say how much it is."""
        begun = await self.progress(prefix, await self._overview.newest())
        self._flusher.hurry(prefix)
        return begun

    async def progress(self, prefix: Prefix, through: int) -> dict[str, Any]:
        """What of it is pending still that was acknowledged as `through` or before it."""
        figures = await self._overview.figures(prefix, through)
        alarms = [one for one in await self._living(prefix) if one.sequence <= through]
        damaged = [one for one in alarms if one.is_damaged]
        behind = [await self._overview.behind(one.key, one.sequence, through) for one in damaged]
        stuck = figures.conflicts + figures.behind_conflicts + len(damaged) + sum(behind)
        return progress_document(
            prefix,
            through,
            figures,
            damaged=len(damaged),
            failing=len(alarms) - len(damaged),
            stuck=stuck,
            problems=await self._named(prefix, through, alarms),
        )

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> dict[str, Any]:
        """Decide about what is pending under a key (deciding.py); `sequence`, where it must be this very object."""
        chosen = decision_of(decision)
        shown = await self._overview.first_of(key)
        if shown is None or sequence not in (None, shown.sequence):
            raise NothingPending(
                f"nothing is pending under {key}" + ("" if sequence is None else ", or another by now")
            )
        found = await self._decider.decide(shown, chosen)
        self._alarms.forget([shown.sequence])
        self._summary = None
        self._flusher.hurry(Prefix(key.bucket, key.key))
        return {"object": str(key), "sequence": shown.sequence, "decision": decision, "etag_at_origin": found}

    async def watch(self, gauge: Gauge) -> None:
        """For ever: tell how many objects do not get to the origin."""
        told = set(self._buffers)
        while True:
            with suppress(BufferUnavailable):  # whoever writes to the journal learns of it
                counts = await self._counted()
                told |= {slot for slot, _ in counts}
                for slot, state in product(told, STATES):
                    gauge(slot, state, counts[slot, state])
            await self._clock.sleep(WATCH_SECONDS)

    async def _counted(self) -> Counter[tuple[str, str]]:
        conflicts = await self._overview.conflicts_by_slot()
        counts = Counter({(slot, "conflict"): count for slot, count in conflicts.items()})
        for one in await self._living(Prefix("")):
            counts[one.slot, "damaged" if one.is_damaged else "failing"] += 1
        return counts

    async def _summed(self) -> dict[str, Any]:
        figures = await self._overview.slots()
        alarms = await self._living(Prefix(""))
        return summary_document(figures, alarms, self._buffers)

    async def _living(self, prefix: Prefix) -> Sequence[Alarm]:
        """The alarms under a prefix, of what is pending still; others are forgotten."""
        alarms = [one for one in self._alarms if prefix.covers(one.key.bucket, one.key.key)]
        if not alarms:
            return alarms
        pending = await self._overview.pending_of([one.sequence for one in alarms])
        self._alarms.forget([one.sequence for one in alarms if one.sequence not in pending])
        return [one for one in alarms if one.sequence in pending]

    async def _named(self, prefix: Prefix, through: int, alarms: Sequence[Alarm]) -> Sequence[dict[str, Any]]:
        """Conflicts first, then damaged objects, then those that fail."""
        conflicts = [
            one for one in await self._overview.conflicts(prefix, 0, PROBLEMS_SHOWN) if one.sequence <= through
        ]
        others = sorted(alarms, key=lambda one: (not one.is_damaged, one.sequence))[: PROBLEMS_SHOWN - len(conflicts)]
        shown = [*conflicts, *await self._overview.of([one.sequence for one in others])]
        return [object_document(one, self._alarms.of(one.sequence)) for one in shown]

    def _page(self, found: Sequence[Shown], count: int, token: Callable[[Shown], str]) -> dict[str, Any]:
        objects = [object_document(one, self._alarms.of(one.sequence)) for one in found]
        return {"objects": objects, "next": token(found[-1]) if len(found) == count else None}


class NoDesk:
    """Where there is no buffer: nothing is pending."""

    async def summary(self) -> dict[str, Any]:
        return summary_document({}, [], {})

    async def objects(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        return {"objects": [], "next": None}

    async def problems(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        return {"objects": [], "next": None}

    async def uploads(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        return {"uploads": [], "next": None}

    async def flush(self, prefix: Prefix) -> dict[str, Any]:
        return await self.progress(prefix, 0)

    async def progress(self, prefix: Prefix, through: int) -> dict[str, Any]:
        return progress_document(prefix, through, Figures(), damaged=0, failing=0, stuck=0, problems=[])

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> dict[str, Any]:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")


def summary_document(
    slots: Mapping[str, SlotFigures], alarms: Sequence[Alarm], buffers: Mapping[str, int]
) -> dict[str, Any]:
    """Of all slots that write back or have something here, and all of them together."""
    names = sorted({*buffers, *(name for name, one in slots.items() if one != SlotFigures())})
    documents = [
        slot_document(
            name, slots.get(name, SlotFigures()), [one for one in alarms if one.slot == name], buffers.get(name)
        )
        for name in names
    ]
    sums = ("objects", "bytes", "staged_bytes", "open_uploads", "conflicts", "damaged", "failing")
    oldest = [one["oldest_acknowledged_at"] for one in documents if one["oldest_acknowledged_at"] is not None]
    return {
        **{name: sum(one[name] for one in documents) for name in sums},
        "oldest_acknowledged_at": min(oldest, default=None),
        "slots": documents,
    }
