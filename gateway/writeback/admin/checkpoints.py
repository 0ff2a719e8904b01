"""Checkpoints as JSON documents and as figures for metrics, with the seconds until the origin has each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from gateway.api import documents as to
from gateway.core.clock import Clock
from gateway.core.model import ObjectKey
from gateway.core.progress_rate import ProgressRate
from gateway.policy.slots import Prefix
from gateway.telemetry import metrics
from gateway.writeback.admin.checkpoint_parts import Part, PartsPage
from gateway.writeback.admin.checkpoint_parts import Reads as TextReads
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries, CheckpointRow
from gateway.writeback.admin.queries import LOOK_SHARE, from_token, look_repeatedly, to_token
from gateway.writeback.checkpoints.reads import ReadPass, checkpoint_id, file_id
from gateway.writeback.checkpoints.state import CheckpointState, ObjectFacts, restore_of

LOOK_SECONDS = 10.0

RATE_SECONDS = 60.0
"""Flush progress older than this does not count for the rate."""

FILES_TOLD_MAX = 10_000
"""Files whose passes one answer to another node has."""

PAGE_BYTES = 2**20
"""A page ends with the checkpoint that brings it to this size."""

Reads: TypeAlias = Mapping[bytes, Mapping[bytes, Sequence[ReadPass]]]
"""Id of a checkpoint → id of a file → its passes (`reads_by_checkpoint`)."""

STATES = tuple(state.value for state in CheckpointState)


def check_states(states: Iterable[str]) -> frozenset[str]:
    """Return the states; ValueError if there is no such state."""
    asked = frozenset(states)
    unknown = sorted(asked - set(STATES))
    if unknown:
        known = ", ".join(STATES)
        raise ValueError(f"state must be one of {known}, or several with commas: {unknown[0]!r} is none")
    return asked


class CheckpointsReport:
    """The checkpoints of one buffer, in the process that flushes it. BufferUnavailable if the journal is unreadable."""

    def __init__(self, queries: CheckpointQueries, clock: Clock) -> None:
        self._queries = queries
        self._clock = clock
        self._rates = dict[int, ProgressRate]()
        """The flush progress of unfinished checkpoints, by id."""
        self._see_again_at = 0.0
        self.kept: Callable[[], Mapping[ObjectKey, str | None]] = dict
        """The checkpoints to keep in the cache, each with the reason if the cache cannot keep it."""
        self.reads: Callable[[], Reads] = dict
        """The passes that workers have counted; it reads files."""

    async def page(self, prefix: Prefix, after: str, count: int, states: Collection[str]) -> to.CheckpointsDocument:
        """Return a page in the order of bucket and prefix. ValueError for an unknown state or a bad token."""
        states = check_states(states)
        bucket, last = from_token(after, str, str) if after else ("", "")
        await self._see()
        now = self._clock.now()
        found, following = await self._queries.checkpoints(prefix, (bucket, last), count, now, frozenset(states))
        read = await asyncio.to_thread(self.reads)
        documents, size_bytes = list[to.Checkpoint](), 0
        for row in found:
            documents.append(await self._completed(row, read, now))
            size_bytes += len(documents[-1].model_dump_json().encode())
            if size_bytes >= PAGE_BYTES and row is not found[-1]:
                following = row.key
                break
        return to.CheckpointsDocument(
            checkpoints=documents,
            next=to_token(*following) if following is not None else None,
            ungrouped=None if found or after or states else await self._queries.ungrouped(prefix),
        )

    async def parts(self, prefix: Prefix, after: str, count: int) -> PartsPage:
        """Return a page of this node's parts of checkpoints; `after` as in `page`."""
        bucket, last = from_token(after, str, str) if after else ("", "")
        await self._see()
        found, following = await self._queries.parts(prefix, (bucket, last), count)
        parts = [one.model_copy(update={"seconds_left": self._seconds_left(number, one)}) for number, one in found]
        return PartsPage(now=self._clock.now(), parts=tuple(parts), following=following)

    def _seconds_left(self, checkpoint_id: int, part: Part) -> float | None:
        left = [ObjectFacts(*columns) for columns in part.objects]
        left_bytes = sum(one.size_bytes - one.sent_bytes for one in left if not one.is_durable and not one.is_local)
        rate = self._rates.get(checkpoint_id)
        return rate.seconds_left(left_bytes) if rate is not None and left_bytes > 0 else None

    async def reads_of(self, bucket: str, prefixes: Sequence[str]) -> TextReads:
        """Return the passes of the files of checkpoints, as other nodes are told of them."""
        read = await asyncio.to_thread(self.reads)
        ids = [checkpoint_id(bucket, prefix) for prefix in prefixes]
        found = {file.hex(): tuple(map(tuple, passes)) for one in ids for file, passes in read.get(one, {}).items()}
        return dict(islice(found.items(), FILES_TOLD_MAX))

    async def _completed(self, row: CheckpointRow, read: Reads, now: float) -> to.Checkpoint:
        """Return a checkpoint with what the journal does not tell."""
        found, kept, restore = row.document, self.kept(), None
        of_checkpoint, left_seconds = checkpoint_id(*row.key), None
        left_bytes = found.bytes - found.bytes_flushed - found.bytes_local
        if row.id in self._rates and (left_bytes > 0 or found.exposed_seconds is not None):
            left_seconds = self._rates[row.id].seconds_left(left_bytes)
        if passes := read.get(of_checkpoint):
            files = await self._queries.objects(row.id)
            by_key = {one.key: parts for one in files if (parts := passes.get(file_id(of_checkpoint, one.key)))}
            restore = restore_of(files, by_key, now)
        is_kept = row.key in kept and kept[row.key] is None
        told = {"kept": is_kept, "kept_reason": kept.get(row.key), "restore": restore}
        return found.model_copy(update={"flush_seconds_left": left_seconds, **told})

    async def watch(self, slots: Collection[str]) -> None:
        """Count the checkpoints by state, and see how fast they move, for ever. `slots` may change."""
        told = set[str]()

        async def look() -> None:
            await self._see()
            counts = await self._queries.states(self._clock.now())
            told.update(slots, counts)
            for slot in told:
                for state in STATES:
                    metrics.CHECKPOINTS.set(counts.get(slot, {}).get(state, 0), slot, state)

        await look_repeatedly(look, self._clock, LOOK_SECONDS)

    async def _see(self) -> None:
        """Sample the progress of unfinished checkpoints; with many, not at each call: others need the thread too."""
        began = self._clock.monotonic()
        if began < self._see_again_at:
            return
        unfinished = await self._queries.unfinished(self._clock.now())
        now = self._clock.monotonic()
        self._see_again_at = now + LOOK_SHARE * (now - began)
        self._rates = {one.id: self._rates.get(one.id) or ProgressRate(RATE_SECONDS) for one in unfinished}
        for one in unfinished:
            self._rates[one.id].note(now, one.document.bytes_flushed)
