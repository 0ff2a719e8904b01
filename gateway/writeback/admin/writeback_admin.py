"""What operators do about what is pending: look at it, have it flushed now, decide conflicts, abort uploads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import structlog

from gateway.api import documents as to
from gateway.core.clock import Clock, Moment
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
from gateway.writeback.admin.named_prefix import Name, is_at_origin, is_known_here, may_be_name, name_of
from gateway.writeback.admin.queries import FlushStats, PendingQueries, PendingRow
from gateway.writeback.flushing.reconciler import Attempts, Reconciler
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.view import BEHIND_ALL, text

_log = structlog.get_logger("forebay.writeback")

PROBLEMS_SHOWN = 20
"""Of a flush: a list has them all."""

REMEMBERED_SECONDS = 2.0
"""So long figures of all slots are given again: they cost a look at every row."""


class WritebackAdmin:
    """Of one buffer, in the process that flushes it. BufferUnavailable when the journal cannot be read."""

    def __init__(
        self,
        queries: PendingQueries,
        journal: Journal,
        reconciler: Reconciler,
        resolver: ConflictResolver,
        buffers: Mapping[str, int],
        clock: Clock,
    ) -> None:
        """`buffers` are the slots that write back, and how many bytes they may have here; it may change."""
        self._queries = queries
        self._journal = journal
        self._reconciler = reconciler
        self._resolver = resolver
        self._buffers = buffers
        self._clock = clock
        self.checkpoint_queries = CheckpointQueries(queries)
        self.report = CheckpointsReport(self.checkpoint_queries, clock)
        self._summary: tuple[float, to.Writeback] | None = None

    async def summary(self) -> to.Writeback:
        """What only this node has, slot by slot: as it was within the last seconds."""
        now = self._clock.monotonic()
        if self._summary is None or now - self._summary[0] > REMEMBERED_SECONDS:
            slots, buckets = await self._queries.slots(), self._journal.read(lambda tx: tx.all_capabilities())
            self._summary = now, summary_document(slots, self._buffers, buckets, self._journal.problem)
        return self._summary[1]

    async def objects(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        """A page of what is pending under a prefix, in the order of keys; `next` is null behind the last."""
        bucket, key, sequence = from_token(after, str, str, int) if after else ("", "", 0)
        found = await self._queries.page(prefix, (bucket, key, sequence), count)
        following = to_token(*found[-1].key, found[-1].sequence) if len(found) == count else None
        return to.PendingObjects(objects=[object_document(one) for one in found], next=following)

    async def problems(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        """The same of what does not get to the origin, in the order of acknowledgement."""
        [behind] = from_token(after, int) if after else [0]
        found = await self._queries.problems(prefix, behind, count)
        following = to_token(found[-1].sequence) if len(found) == count else None
        return to.PendingObjects(objects=[object_document(one) for one in found], next=following)

    async def uploads(self, prefix: Prefix, after: str, count: int) -> to.OpenUploads:
        """The same of the uploads that are open: nothing of them can be flushed before they are completed."""
        bucket, key, upload_id = from_token(after, str, str, str) if after else ("", "", "")
        found = await self._queries.uploads(prefix, (bucket, key, upload_id), count)
        following = to_token(*found[-1].key, found[-1].upload_id or "") if len(found) == count else None
        return to.OpenUploads(uploads=[upload_document(one) for one in found], next=following)

    async def checkpoints(self, prefix: Prefix, after: str, count: int, states: Collection[str]) -> to.Checkpoints:
        """A page of the checkpoints under a prefix; with `states`, of those that are in one of these."""
        return await self.report.page(prefix, after, count, states)

    async def flush(self, prefix: Prefix) -> to.FlushProgress:
        """Have all that is pending under a prefix by now be tried at once, before what nobody waits for, and say how
        much it is. Where it is the name of an object, or a directory, it is about that and nothing else."""
        through = self._journal.read(lambda tx: tx.newest())
        scope = await self._meant(prefix)
        begun = await self.progress(prefix, through, is_name=isinstance(scope, Name))
        if scope.key_prefix:
            await self._raise_priority(scope)
        await self._try_now(scope)
        return begun

    async def progress(self, prefix: Prefix, through: int, *, is_name: bool = False) -> to.FlushProgress:
        """What of it is pending still that was acknowledged as `through` or before it. `is_name`: it is no prefix, but
        an object, and all that lies under it as under a directory."""
        scope = name_of(prefix) if is_name and may_be_name(prefix) else prefix
        stats = await self._queries.flush(scope, through)
        problems = await self._queries.worst(scope, through, PROBLEMS_SHOWN)
        attempts, awaiting = self._reconciler.attempts(scope), self._awaiting(scope)
        return flush_document(scope, through, stats, problems, attempts, awaiting, self._journal.problem)

    async def _meant(self, prefix: Prefix) -> Prefix:
        if not may_be_name(prefix):
            return prefix
        if self._journal.read(lambda tx: is_known_here(tx, prefix)):
            return name_of(prefix)
        start = text(prefix.key_prefix)
        is_any_pending = self._journal.read(lambda tx: tx.listing(prefix.bucket, start, start + BEHIND_ALL, 1))
        if is_any_pending and await is_at_origin(self._reconciler.requests, prefix):
            return name_of(prefix)
        return prefix

    async def _raise_priority(self, scope: Prefix) -> None:
        now, start = self._clock.now(), text(scope.key_prefix)
        ranges = [(start, start + BEHIND_ALL)]
        if isinstance(scope, Name):
            ranges = [(start, start + b"\0"), (start + b"/", start + b"0")]

        def of_scope(tx: JournalTransaction) -> None:
            for first, stop in ranges:
                tx.send_all_after_all(scope.bucket, first, stop, now, self._reconciler.scratch_slots())
                tx.raise_priority(scope.bucket, first, stop, now)

        await self._journal.change(of_scope)

    def _awaiting(self, scope: Prefix) -> Mapping[int, int]:
        return self._reconciler.awaiting_files(lambda key: scope.covers(*key))

    async def versions(self, key: ObjectKey) -> to.Versions:
        """What is pending first under a key, and what the origin has there now. NothingPending, OriginUnreachable."""
        row = await self._queries.first_of(key)
        if row is None:
            raise NothingPending(f"nothing is pending under {key}")
        return versions_document(row, await self._resolver.at_origin(row))

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> to.Resolved:
        """Decide about what is pending under a key (`Decision`); `sequence`, where it must be this very object.

        NothingPending, ValueError, and what `ConflictResolver.decide` raises.
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

    async def abort(self, upload_ids: Sequence[str]) -> to.Aborted:
        """End uploads that their clients have not completed, as AbortMultipartUpload does; also where the row is
        damaged. What the origin has of them is aborted soon."""
        found = await self._queries.open_uploads(upload_ids)
        aborted = [one.upload_id or "" for one in found if await self._abort(one)]
        self._summary = None
        return to.Aborted(aborted=aborted, not_open=[one for one in upload_ids if one not in aborted])

    async def _abort(self, row: PendingRow) -> bool:
        now = Moment.of(self._clock)
        if row.write is None:
            is_over = await self._journal.change(lambda tx: tx.discard(row.id, now, only_conflict=False))
        else:
            is_over = await self._journal.change(lambda tx: tx.abort(row.upload_id or "", now))
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
        await self._journal.change(lambda tx: tx.try_now(prefix.bucket, prefix.key_prefix, now, awaiting))
        self._reconciler.prioritise(prefix)


class NoWriteback:
    """Where there is no buffer: nothing is pending."""

    async def summary(self) -> to.Writeback:
        return summary_document({}, {}, [])

    async def objects(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        return to.PendingObjects(objects=[], next=None)

    async def problems(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        return to.PendingObjects(objects=[], next=None)

    async def uploads(self, prefix: Prefix, after: str, count: int) -> to.OpenUploads:
        return to.OpenUploads(uploads=[], next=None)

    async def checkpoints(self, prefix: Prefix, after: str, count: int, states: Collection[str]) -> to.Checkpoints:
        return to.Checkpoints(checkpoints=[], next=None, ungrouped=None)

    async def flush(self, prefix: Prefix) -> to.FlushProgress:
        return await self.progress(prefix, 0)

    async def progress(self, prefix: Prefix, through: int, *, is_name: bool = False) -> to.FlushProgress:
        return flush_document(prefix, through, FlushStats(), [], Attempts(), {})

    async def versions(self, key: ObjectKey) -> to.Versions:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> to.Resolved:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")

    async def abort(self, upload_ids: Sequence[str]) -> to.Aborted:
        return to.Aborted(aborted=[], not_open=list(upload_ids))
