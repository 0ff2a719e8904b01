"""Checkpoints as JSON documents and as figures for metrics, with the seconds until the origin has each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from gateway.api import documents as to
from gateway.core.clock import Clock
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.telemetry import metrics
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries, CheckpointRow
from gateway.writeback.admin.documents import checkpoint_document, from_token, to_token
from gateway.writeback.admin.queries import LOOK_SHARE, look_repeatedly
from gateway.writeback.checkpoints.rates import FlushRates
from gateway.writeback.checkpoints.reads import ReadPass, checkpoint_id, file_id
from gateway.writeback.checkpoints.restores import RestoreFacts, restore_of
from gateway.writeback.checkpoints.state import CheckpointState

LOOK_SECONDS = 10.0

PAGE_BYTES = 2**20
"""A page ends with the checkpoint that brings it to this size."""

Reads: TypeAlias = Mapping[bytes, Mapping[bytes, Sequence[ReadPass]]]
"""Id of a checkpoint → id of a file → its passes (`reads_by_checkpoint`)."""

STATES = tuple(state.value for state in CheckpointState)


class CheckpointsReport:
    """The checkpoints of one buffer, in the process that flushes it. BufferUnavailable if the journal is unreadable."""

    def __init__(self, queries: CheckpointQueries, clock: Clock) -> None:
        self._queries = queries
        self._clock = clock
        self._rates = FlushRates()
        self._see_again_at = 0.0
        self.kept: Callable[[], Mapping[ObjectKey, str | None]] = dict
        """The checkpoints to keep in the cache, each with the reason if the cache cannot keep it."""
        self.reads: Callable[[], Reads] = dict
        """The passes that workers have counted; it reads files."""

    async def page(self, prefix: Prefix, after: str, count: int, states: Collection[str]) -> to.CheckpointsDocument:
        """Return a page in the order of bucket and prefix. ValueError for an unknown state or a bad token."""
        unknown = sorted(set(states) - set(STATES))
        if unknown:
            known = ", ".join(STATES)
            raise ValueError(f"state must be one of {known}, or several with commas: {unknown[0]!r} is none")
        bucket, last = from_token(after, str, str) if after else ("", "")
        await self._see()
        now = self._clock.now()
        found, following = await self._queries.checkpoints(prefix, (bucket, last), count, now, frozenset(states))
        read = await asyncio.to_thread(self.reads)
        documents, size_bytes = list[to.Checkpoint](), 0
        for row in found:
            restore = await self._restore(row, read, now)
            left_seconds = self._rates.left_seconds(row.id, row.facts.left_bytes)
            documents.append(checkpoint_document(row, now, left_seconds, self.kept(), restore))
            size_bytes += len(documents[-1].model_dump_json().encode())
            if size_bytes >= PAGE_BYTES and row is not found[-1]:
                following = (row.name.bucket, row.name.prefix)
                break
        return to.CheckpointsDocument(
            checkpoints=documents,
            next=to_token(*following) if following is not None else None,
            ungrouped=None if found or after or states else await self._queries.ungrouped(prefix),
        )

    async def _restore(self, row: CheckpointRow, read: Reads, now: float) -> RestoreFacts | None:
        """Return the last restore; None if the checkpoint was not read within the last hour."""
        of_checkpoint = checkpoint_id(row.name.bucket, row.name.prefix)
        passes = read.get(of_checkpoint)
        if not passes:
            return None
        files = await self._queries.files(row.id)
        by_key = {file.key: found for file in files if (found := passes.get(file_id(of_checkpoint, file.key)))}
        return restore_of(files, by_key, now)

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
        self._rates.see({one.id: one.facts.flushed_bytes for one in unfinished}, now)
