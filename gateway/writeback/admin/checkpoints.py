"""Checkpoints as JSON documents and as figures for metrics, with the seconds until the origin has each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import orjson

from gateway.core.clock import Clock
from gateway.core.errors import BufferUnavailable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries, CheckpointRow
from gateway.writeback.admin.documents import from_token, to_token
from gateway.writeback.checkpoints.rates import FlushRates
from gateway.writeback.checkpoints.reads import Pass, checkpoint_id, file_id
from gateway.writeback.checkpoints.restores import RestoreFacts, restore_of
from gateway.writeback.checkpoints.state import CheckpointState

LOOK_SECONDS = 10.0

_SHARE = 50.0
"""The pause after a look is at least this many times as long as the look."""

RANKS_SHOWN_MAX = 1000

PAGE_BYTES = 2**20
"""A page ends with the checkpoint that brings it to this size."""

Reads: TypeAlias = Mapping[bytes, Mapping[bytes, Sequence[Pass]]]
"""Id of a checkpoint → id of a file → its passes (`reads_by_checkpoint`)."""

STATES = tuple(state.value for state in CheckpointState)


class CheckpointObserver(Protocol):
    """For metrics."""

    def checkpoints(self, slot: str, state: str, count: int) -> None:
        """Report the number of a slot's checkpoints in a state."""


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

    async def page(self, prefix: Prefix, after: str, count: int, states: Collection[str]) -> dict[str, Any]:
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
        documents, size_bytes = list[dict[str, Any]](), 0
        for row in found:
            documents.append(self._document(row, now) | {"restore": await self._restore(row, read, now)})
            size_bytes += len(orjson.dumps(documents[-1]))
            if size_bytes >= PAGE_BYTES and row is not found[-1]:
                following = (row.name.bucket, row.name.prefix)
                break
        return {
            "checkpoints": documents,
            "next": to_token(*following) if following is not None else None,
            "ungrouped": None if found or after or states else await self._ungrouped(prefix),
        }

    async def _ungrouped(self, prefix: Prefix) -> dict[str, Any] | None:
        found = await self._queries.ungrouped(prefix)
        return None if found is None else {"objects": found.count, "first": str(found.first), "slot": found.slot}

    async def _restore(self, row: CheckpointRow, read: Reads, now: float) -> dict[str, Any] | None:
        """Return the last restore as a document; None if the checkpoint was not read within the last hour."""
        of_checkpoint = checkpoint_id(row.name.bucket, row.name.prefix)
        passes = read.get(of_checkpoint)
        if not passes:
            return None
        files = await self._queries.files(row.id)
        by_key = {file.key: found for file in files if (found := passes.get(file_id(of_checkpoint, file.key)))}
        facts = restore_of(files, by_key, now)
        return None if facts is None else restore_document(facts)

    async def watch(self, slots: Collection[str], observer: CheckpointObserver) -> None:
        """Report the number of checkpoints per state, and sample flush rates, until cancelled. `slots` may change."""
        told = set[str]()
        while True:
            began = self._clock.monotonic()
            with suppress(BufferUnavailable):  # the journal's writers report it
                await self._see()
                counts = await self._queries.states(self._clock.now())
                told |= {*slots, *counts}
                for slot in told:
                    for state in STATES:
                        observer.checkpoints(slot, state, counts.get(slot, {}).get(state, 0))
            await self._clock.sleep(max(LOOK_SECONDS, _SHARE * (self._clock.monotonic() - began)))

    async def _see(self) -> None:
        """Sample the progress of unfinished checkpoints; with many, not at each call: others need the thread too."""
        began = self._clock.monotonic()
        if began < self._see_again_at:
            return
        unfinished = await self._queries.unfinished(self._clock.now())
        now = self._clock.monotonic()
        self._see_again_at = now + _SHARE * (now - began)
        self._rates.see({one.id: one.facts.flushed_bytes for one in unfinished}, now)

    def _document(self, row: CheckpointRow, now: float) -> dict[str, Any]:
        """Times in seconds since 1970; null means unknown, or none."""
        name, facts, kept = row.name, row.facts, self.kept()
        left_seconds = self._rates.left_seconds(row.id, facts.left_bytes)
        return {
            "bucket": name.bucket,
            "prefix": name.prefix,
            "step": name.step,
            "layout": name.layout,
            "slot": row.slot,
            "state": facts.state.value,
            "files": facts.objects,
            "bytes": facts.size_bytes,
            "bytes_flushed": facts.flushed_bytes,
            "bytes_local": facts.local_bytes,
            "ranks": len(facts.ranks),
            "ranks_seen": sorted(facts.ranks)[:RANKS_SHOWN_MAX],
            "began_at": facts.began_at,
            "last_at": facts.last_at,
            "save_seconds": facts.save_seconds,
            "flush_seconds_left": left_seconds if facts.left_bytes > 0 or facts.exposed_since is not None else None,
            "exposed_seconds": None if facts.exposed_since is None else max(0.0, now - facts.exposed_since),
            "kept": row.key in kept and kept[row.key] is None,
            "kept_reason": kept.get(row.key),
            "missing": _missing(row),
            "reason": facts.reason,
        }


def _missing(row: CheckpointRow) -> Mapping[str, Any]:
    missing = row.facts.missing
    return {"ranks": list(missing.ranks), "objects": list(missing.keys), "open_uploads": missing.uploads}


def restore_document(facts: RestoreFacts) -> dict[str, Any]:
    """Times in seconds since 1970."""
    ranks = {one.file.rank for one in facts.behind if one.file.rank is not None}
    return {
        "state": facts.state.value,
        "began_at": facts.began_at,
        "last_at": facts.last_at,
        "files": facts.files,
        "files_begun": facts.files_begun,
        "files_behind": facts.files_behind,
        "bytes": facts.size_bytes,
        "bytes_read": facts.read_bytes,
        "behind": {
            "ranks": sorted(ranks),
            "objects": [
                {
                    "key": one.file.key,
                    "bytes": one.file.size_bytes,
                    "bytes_read": one.read_bytes,
                    "last_at": one.last_at,
                }
                for one in facts.behind
            ],
        },
    }
