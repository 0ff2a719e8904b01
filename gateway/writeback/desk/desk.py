"""Who sees to what is pending: shows it, has it flushed now, and has people decide where nobody else can."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from gateway.clock import Clock
from gateway.errors import NothingPending
from gateway.objects import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.desk.deciding import Decider, decision_of
from gateway.writeback.desk.documents import (
    bucket_document,
    from_token,
    object_document,
    progress_document,
    slot_document,
    to_token,
    upload_document,
)
from gateway.writeback.desk.overview import Figures, Overview, Shown, ShownUpload, SlotFigures
from gateway.writeback.flushing.reconciler import Attempts, Reconciler
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Profile

_log = structlog.get_logger("forebay.writeback")

PROBLEMS_SHOWN = 20
"""Of a flush: a list has them all."""

REMEMBERED_SECONDS = 2.0
"""So long figures of all slots are given again: they cost a look at every row."""


class WritebackDesk:
    """Of one buffer, in the process that flushes it. BufferUnavailable when the journal cannot be read."""

    def __init__(
        self,
        overview: Overview,
        journal: Journal,
        reconciler: Reconciler,
        decider: Decider,
        buffers: Mapping[str, int],
        clock: Clock,
    ) -> None:
        """`buffers` are the slots that write back, and how many bytes they may have here."""
        self._overview = overview
        self._journal = journal
        self._reconciler = reconciler
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
        found = await self._overview.problems(prefix, behind, count)
        return self._page(found, count, lambda last: to_token(last.sequence))

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
        await self._try_now(prefix)
        return begun

    async def progress(self, prefix: Prefix, through: int) -> dict[str, Any]:
        """What of it is pending still that was acknowledged as `through` or before it."""
        figures = await self._overview.figures(prefix, through)
        problems = await self._overview.worst(prefix, through, PROBLEMS_SHOWN)
        shown = [object_document(one) for one in problems]
        return progress_document(prefix, through, figures, shown, self._reconciler.attempts(prefix))

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> dict[str, Any]:
        """Decide about what is pending under a key (deciding.py); `sequence`, where it must be this very object."""
        chosen = decision_of(decision)
        shown = await self._overview.first_of(key)
        if shown is None or sequence not in (None, shown.sequence):
            raise NothingPending(
                f"nothing is pending under {key}" + ("" if sequence is None else ", or another by now")
            )
        found = await self._decider.decide(shown, chosen)
        self._summary = None
        await self._try_now(Prefix(key.bucket, key.key))
        return {"object": str(key), "sequence": shown.sequence, "decision": decision, "etag_at_origin": found}

    async def abort(self, upload_ids: Sequence[str]) -> dict[str, Any]:
        """End uploads that their clients have not completed, as AbortMultipartUpload does; also where the row is
        damaged. What the origin has of them is aborted soon."""
        found = await self._overview.open_uploads(upload_ids)
        aborted = [one.upload_id for one in found if await self._abort(one)]
        self._summary = None
        return {"aborted": aborted, "not_open": [one for one in upload_ids if one not in aborted]}

    async def _abort(self, shown: ShownUpload) -> bool:
        now = self._clock.now()
        if shown.upload is None:
            is_over = await self._journal.change(lambda book: book.discard(shown.id, now, only_conflict=False))
        else:
            is_over = await self._journal.change(lambda book: book.abort(shown.upload_id, now))
        if is_over:
            _log.warning(
                "an open upload was aborted by an operator",
                object=str(shown.key),
                slot=shown.slot,
                upload_id=shown.upload_id,
                parts=shown.parts,
                bytes=shown.size_bytes,
            )
        return is_over

    async def _try_now(self, prefix: Prefix) -> None:
        now = self._clock.now()
        await self._journal.change(lambda book: book.try_now(prefix.bucket, prefix.key_prefix, now))
        self._reconciler.hurry(prefix)

    async def _summed(self) -> dict[str, Any]:
        return summary_document(await self._overview.slots(), self._buffers, await self._overview.conditions())

    def _page(self, found: Sequence[Shown], count: int, token: Callable[[Shown], str]) -> dict[str, Any]:
        objects = [object_document(one) for one in found]
        return {"objects": objects, "next": token(found[-1]) if len(found) == count else None}


class NoDesk:
    """Where there is no buffer: nothing is pending."""

    async def summary(self) -> dict[str, Any]:
        return summary_document({}, {}, [])

    async def objects(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        return {"objects": [], "next": None}

    async def problems(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        return {"objects": [], "next": None}

    async def uploads(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]:
        return {"uploads": [], "next": None}

    async def flush(self, prefix: Prefix) -> dict[str, Any]:
        return await self.progress(prefix, 0)

    async def progress(self, prefix: Prefix, through: int) -> dict[str, Any]:
        return progress_document(prefix, through, Figures(), [], Attempts())

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> dict[str, Any]:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")

    async def abort(self, upload_ids: Sequence[str]) -> dict[str, Any]:
        return {"aborted": [], "not_open": list(upload_ids)}


def summary_document(
    slots: Mapping[str, SlotFigures], buffers: Mapping[str, int], buckets: Sequence[tuple[str, Profile]]
) -> dict[str, Any]:
    """Of all slots that write back or have something here, and all of them together; and what is known of buckets."""
    names = sorted({*buffers, *(name for name, one in slots.items() if one != SlotFigures())})
    documents = [slot_document(name, slots.get(name, SlotFigures()), buffers.get(name)) for name in names]
    sums = ("objects", "bytes", "staged_bytes", "open_uploads", "open_upload_bytes", "conflicts", "damaged", "failing")
    oldest = [one["oldest_acknowledged_at"] for one in documents if one["oldest_acknowledged_at"] is not None]
    return {
        **{name: sum(one[name] for one in documents) for name in sums},
        "oldest_acknowledged_at": min(oldest, default=None),
        "slots": documents,
        "buckets": [bucket_document(*one) for one in buckets],
    }
