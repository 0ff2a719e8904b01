"""Operators' actions on pending writes: list them, flush them now, decide conflicts, abort uploads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import structlog

from gateway.api import documents as to
from gateway.core.clock import Moment
from gateway.core.errors import NothingPending
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.checkpoints import CheckpointsReport
from gateway.writeback.admin.conflict_resolver import ConflictResolver, decision_of
from gateway.writeback.admin.documents import (
    flush_document,
    from_token,
    object_document,
    summary_document,
    to_token,
    upload_document,
    versions_document,
)
from gateway.writeback.admin.named_prefix import Name, is_at_origin, may_be_name, name_of
from gateway.writeback.admin.queries import PendingRow
from gateway.writeback.flushing.reconciler import Attempts, FlushDependencies, Reconciler
from gateway.writeback.journal.rows import keys_under, text
from gateway.writeback.journal.transaction import JournalTransaction

_log = structlog.get_logger("forebay.writeback")

PROBLEMS_SHOWN = 20
"""The most problems that a flush shows; a listing has them all."""

REMEMBERED_SECONDS = 2.0
"""Seconds for which the figures of all slots are reused: they cost a look at every row."""


class WritebackAdmin:
    """Actions on one buffer, in the process that flushes it. BufferUnavailable if the journal is unreadable."""

    def __init__(
        self, queries: CheckpointQueries, tools: FlushDependencies, reconciler: Reconciler, buffers: Mapping[str, int]
    ) -> None:
        """`buffers` maps the slots that write back to their buffer sizes in bytes; it may change."""
        self._queries = queries
        self._journal = tools.journal
        self._reconciler = reconciler
        self._resolver = ConflictResolver(tools)
        self._buffers = buffers
        self._clock = tools.clock
        self.report = CheckpointsReport(queries, tools.clock)
        self._summary: tuple[float, to.Writeback] | None = None

    async def summary(self) -> to.Writeback:
        """Return the data that only this node has, slot by slot, at most REMEMBERED_SECONDS old."""
        now = self._clock.monotonic()
        if self._summary is None or now - self._summary[0] > REMEMBERED_SECONDS:
            slots = await self._queries.slots(self._buffers)
            buckets = self._journal.read(lambda tx: tx.buckets.all_capabilities())
            self._summary = now, summary_document(slots, buckets, self._journal.problem)
        return self._summary[1]

    async def objects(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        """Return a page of pending objects under a prefix, in the order of keys; `next` is null after the last page."""
        bucket, key, sequence = from_token(after, str, str, int) if after else ("", "", 0)
        found = await self._queries.page(prefix, (bucket, key, sequence), count)
        following = to_token(*found[-1].key, found[-1].sequence) if len(found) == count else None
        return to.PendingObjects(objects=[object_document(one) for one in found], next=following)

    async def problems(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        """Return a page of objects that need a person, in the order of acknowledgement."""
        [behind] = from_token(after, int) if after else [0]
        found = await self._queries.problems(prefix, behind, count)
        following = to_token(found[-1].sequence) if len(found) == count else None
        return to.PendingObjects(objects=[object_document(one) for one in found], next=following)

    async def uploads(self, prefix: Prefix, after: str, count: int) -> to.OpenUploadsDocument:
        """Return a page of open uploads. None can be flushed before its client completes it."""
        bucket, key, upload_id = from_token(after, str, str, str) if after else ("", "", "")
        found = await self._queries.uploads(prefix, (bucket, key, upload_id), count)
        following = to_token(*found[-1].key, found[-1].upload_id or "") if len(found) == count else None
        return to.OpenUploadsDocument(uploads=[upload_document(one) for one in found], next=following)

    async def checkpoints(
        self, prefix: Prefix, after: str, count: int, states: Collection[str]
    ) -> to.CheckpointsDocument:
        """Return a page of the checkpoints under a prefix, in any of `states` (empty: all)."""
        return await self.report.page(prefix, after, count, states)

    async def flush(self, prefix: Prefix) -> to.FlushProgress:
        """Try writes under a prefix (a name covers only itself) at once, before others; return how much is pending."""
        through = self._journal.read(lambda tx: tx.writes.newest())
        scope = await self._meant(prefix)
        begun = await self.progress(prefix, through, is_name=isinstance(scope, Name))
        if scope.key_prefix:
            await self._raise_priority(scope)
        await self._try_now(scope)
        return begun

    async def progress(self, prefix: Prefix, through: int, *, is_name: bool = False) -> to.FlushProgress:
        """Return what is pending of writes up to sequence `through`. `is_name`: only this object or directory."""
        scope = name_of(prefix) if is_name and may_be_name(prefix) else prefix
        stats = await self._queries.flush(scope, through)
        problems = await self._queries.worst(scope, through, PROBLEMS_SHOWN)
        attempts, awaiting = self._reconciler.attempts(scope), self._awaiting(scope)
        return flush_document(scope, through, stats, problems, attempts, awaiting, self._journal.problem)

    async def _meant(self, prefix: Prefix) -> Prefix:
        if not may_be_name(prefix):
            return prefix
        if self._journal.read(lambda tx: tx.writes.has_any(prefix.bucket, prefix.key_prefix)):
            return name_of(prefix)
        under = keys_under(prefix.key_prefix)
        is_any_pending = self._journal.read(lambda tx: tx.writes.listing(prefix.bucket, *under, 1))
        if is_any_pending and await is_at_origin(self._reconciler.requests, prefix):
            return name_of(prefix)
        return prefix

    async def _raise_priority(self, scope: Prefix) -> None:
        now, ranges = self._clock.now(), [keys_under(scope.key_prefix)]
        if isinstance(scope, Name):
            start = text(scope.key_prefix)
            ranges = [(start, start + b"\0"), (start + b"/", start + b"0")]

        def of_scope(tx: JournalTransaction) -> None:
            for first, stop in ranges:
                tx.local.send_all_after_all(scope.bucket, first, stop, now, self._reconciler.scratch_slots())
                tx.turns.raise_priority(scope.bucket, first, stop, now)

        await self._journal.change(of_scope)

    def _awaiting(self, scope: Prefix) -> Mapping[int, int]:
        return self._reconciler.awaiting_files(lambda key: scope.covers(*key))

    async def versions(self, key: ObjectKey) -> to.Versions:
        """Return a key's first pending write and the origin's version. Raises NothingPending, OriginUnreachable."""
        row = await self._queries.first_of(key)
        if row is None:
            raise NothingPending(f"nothing is pending under {key}")
        return versions_document(row, await self._resolver.at_origin(row))

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> to.Resolved:
        """Decide about the first pending write of a key (`Decision`); with `sequence`, only if it is that write.

        Raises NothingPending, ValueError, and what `ConflictResolver.decide` raises.
        """
        chosen = decision_of(decision)
        row = await self._queries.first_of(key)
        if row is None or sequence not in (None, row.sequence):
            raise NothingPending(
                f"nothing is pending under {key}" + ("" if sequence is None else ", or a newer write is")
            )
        found = await self._resolver.decide(row, chosen)
        self._summary = None
        await self._try_now(Prefix(key.bucket, key.key))
        return to.Resolved(object=str(key), sequence=row.sequence, decision=decision, etag_at_origin=found)

    async def abort(self, upload_ids: Sequence[str]) -> to.AbortedDocument:
        """End uploads as AbortMultipartUpload does, even damaged rows. The reconciler soon aborts the origin's."""
        found = await self._queries.open_uploads(upload_ids)
        aborted = [one.upload_id or "" for one in found if await self._abort(one)]
        self._summary = None
        return to.AbortedDocument(aborted=aborted, not_open=[one for one in upload_ids if one not in aborted])

    async def _abort(self, row: PendingRow) -> bool:
        now = Moment.of(self._clock)
        if row.write is None:
            is_over = await self._journal.change(lambda tx: tx.writes.discard(row.id, now, only_conflict=False))
        else:
            is_over = await self._journal.change(lambda tx: tx.uploads.abort(row.upload_id or "", now))
        if is_over:
            _log.warning(
                "an open upload was aborted by an operator",
                object=str(row.key),
                slot=row.slot,
                upload_id=row.upload_id,
                parts=row.parts,
                bytes=row.here_bytes,
            )
        return is_over

    async def _try_now(self, prefix: Prefix) -> None:
        now, awaiting = self._clock.now(), self._awaiting(prefix)
        await self._journal.change(lambda tx: tx.turns.try_now(prefix.bucket, prefix.key_prefix, now, awaiting))
        self._reconciler.prioritise(prefix)


class NoWriteback:
    """The actions without a buffer: nothing is pending."""

    async def summary(self) -> to.Writeback:
        return summary_document([], [])

    async def objects(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        return to.PendingObjects(objects=[], next=None)

    async def problems(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        return to.PendingObjects(objects=[], next=None)

    async def uploads(self, prefix: Prefix, after: str, count: int) -> to.OpenUploadsDocument:
        return to.OpenUploadsDocument(uploads=[], next=None)

    async def checkpoints(
        self, prefix: Prefix, after: str, count: int, states: Collection[str]
    ) -> to.CheckpointsDocument:
        return to.CheckpointsDocument(checkpoints=[], next=None, ungrouped=None)

    async def flush(self, prefix: Prefix) -> to.FlushProgress:
        return await self.progress(prefix, 0)

    async def progress(self, prefix: Prefix, through: int, *, is_name: bool = False) -> to.FlushProgress:
        nothing = dict.fromkeys(to.FlushSums.model_fields, 0) | {"oldest_acknowledged_at": None}
        return flush_document(prefix, through, to.FlushSums.model_validate(nothing), [], Attempts(), {})

    async def versions(self, key: ObjectKey) -> to.Versions:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> to.Resolved:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")

    async def abort(self, upload_ids: Sequence[str]) -> to.AbortedDocument:
        return to.AbortedDocument(aborted=[], not_open=list(upload_ids))
