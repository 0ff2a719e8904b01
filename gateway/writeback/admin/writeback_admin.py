"""Operators' actions on pending writes: list them, flush them now, decide conflicts, abort uploads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from math import isfinite
from typing import NoReturn

import structlog

from gateway.api import documents as to
from gateway.core.clock import Moment
from gateway.core.errors import NothingPending, NotToBeDecided, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_parts import PartsPage, Reads
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.flush_report import FlushReport, flush_progress
from gateway.writeback.admin.queries import Pending, from_token, to_token
from gateway.writeback.flushing.flush_task import FlushDependencies
from gateway.writeback.flushing.reconciler import Attempts, Reconciler
from gateway.writeback.flushing.state import Headed, Lost, WriteRefused
from gateway.writeback.journal.buckets import BucketCapabilities
from gateway.writeback.journal.records import ExpectedVersion, Write, WriteSpec

_log = structlog.get_logger("forebay.writeback")

REMEMBERED_SECONDS = 2.0
"""Seconds for which the figures of all slots are reused: they cost a look at every row. It costs nothing to find
that nothing is pending, and that is never reused: whoever is told so may stop the machine."""


class Decision(Enum):
    """A decision about a conflict, or about a manifest that waits for its files."""

    KEEP_OURS = "keep-ours"
    """Overwrite the version that the origin has now; if it changes again, the object is a conflict again. A waiting
    manifest is sent without its files."""

    KEEP_THEIRS = "keep-theirs"
    """Give this node's write up; the origin's version stays."""

    DISCARD = "discard"
    """Give up a write that does not reach the origin and is no conflict: damaged, or refused by it for ever."""


class WritebackAdmin(FlushReport):
    """Actions on one buffer, in the process that flushes it. BufferUnavailable if the journal is unreadable."""

    def __init__(
        self, queries: CheckpointQueries, tools: FlushDependencies, reconciler: Reconciler, buffers: Mapping[str, int]
    ) -> None:
        """`buffers` maps the slots that write back to their buffer sizes in bytes; it may change."""
        super().__init__(queries, tools.journal, tools.requests.origin, tools.clock, reconciler)
        self._tools = tools
        self._buffers = buffers
        self._summary: tuple[float, to.Writeback] | None = None

    async def summary(self) -> to.Writeback:
        """Return the data that only this node has, slot by slot, at most REMEMBERED_SECONDS old where there is any."""
        now, found = self._clock.monotonic(), self._summary
        if found is None or now - found[0] > REMEMBERED_SECONDS or not (found[1].objects or found[1].open_uploads):
            slots = await self._queries.slots(self._buffers)
            buckets = self._journal.read(lambda tx: tx.buckets.all_capabilities())
            found = self._summary = now, _summary(slots, buckets, self._journal.problem)
        return found[1]

    async def objects(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        """Return a page of pending objects under a prefix, in the order of keys; `next` is null after the last page."""
        bucket, key, sequence = from_token(after, str, str, int) if after else ("", "", 0)
        found = await self._queries.page(prefix, (bucket, key, sequence), count)
        following = to_token(found[-1].bucket, found[-1].key, found[-1].sequence) if len(found) == count else None
        return to.PendingObjects(objects=found, next=following)

    async def problems(self, prefix: Prefix, after: str, count: int) -> to.PendingObjects:
        """Return a page of objects that need a person, in the order of acknowledgement."""
        [behind] = from_token(after, int) if after else [0]
        found = await self._queries.problems(prefix, behind, count)
        following = to_token(found[-1].sequence) if len(found) == count else None
        return to.PendingObjects(objects=found, next=following)

    async def uploads(self, prefix: Prefix, after: str, count: int) -> to.OpenUploadsDocument:
        """Return a page of open uploads. None can be flushed before its client completes it."""
        bucket, key, upload_id = from_token(after, str, str, str) if after else ("", "", "")
        found = await self._queries.uploads(prefix, (bucket, key, upload_id), count)
        following = to_token(found[-1].bucket, found[-1].key, found[-1].upload_id) if len(found) == count else None
        return to.OpenUploadsDocument(uploads=found, next=following)

    async def versions(self, key: ObjectKey) -> to.Versions:
        """Return a key's first pending write and the origin's version. Raises NothingPending, OriginUnreachable."""
        pending = await self._queries.first_of(key)
        if pending is None:
            raise NothingPending(f"nothing is pending under {key}")
        found = await self._at_origin(pending)
        at, size, theirs = found.moment.at - found.age_seconds, found.size_bytes, None
        if found.etag is not None:
            modified_at = at if isfinite(at) else None
            theirs = to.AtOrigin(bytes=size if size >= 0 else None, etag=found.etag, modified_at=modified_at)
        return to.Versions(object=pending.document, at_origin=theirs)

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> to.Resolved:
        """Decide about the first pending write of a key (`Decision`); with `sequence`, only if it is that write.

        Raises NothingPending, ValueError for an unknown decision, NotToBeDecided when the object has changed its state,
        OriginUnreachable when the origin does not say what it has, BufferUnavailable when the journal cannot be
        written.
        """
        if decision not in [one.value for one in Decision]:
            raise ValueError(f"the decision must be one of {', '.join(one.value for one in Decision)}")
        pending = await self._queries.first_of(key)
        if pending is None or sequence not in (None, pending.document.sequence):
            raise NothingPending(
                f"nothing is pending under {key}" + ("" if sequence is None else ", or a newer write is")
            )
        etag = None
        if decision == Decision.KEEP_OURS.value:
            etag = await self._keep_ours(pending)
        else:
            await self._give_up(pending, Decision(decision))
        self._summary = None
        await self._try_now(Prefix(key.bucket, key.key))
        return to.Resolved(object=str(key), sequence=pending.document.sequence, decision=decision, etag_at_origin=etag)

    async def _keep_ours(self, pending: Pending) -> str | None:
        """Return the ETag at the origin that will be overwritten."""
        now = self._clock.now()
        if pending.write is not None and pending.id in self._tools.manifests.waiting():
            self._tools.manifests.waive(pending.id)
            await self._journal.change(lambda tx: tx.turns.try_now(*pending.key, now, [pending.id]))
            _log.warning("a manifest is sent although the origin lacks files that it names", object=str(pending.key))
            return None
        if pending.write is None or not pending.is_conflict:
            _not_to_be_decided(pending)
        found = await self._at_origin(pending)
        expected, now = ExpectedVersion.exactly(found.etag), self._clock.now()
        if not await self._journal.change(lambda tx: tx.writes.overwrite(pending.id, expected, now)):
            _not_to_be_decided(pending)
        _log.warning(
            "a conflict was resolved: this node's write overwrites what the origin has",
            object=str(pending.key),
            etag=found.etag,
        )
        return found.etag

    async def _give_up(self, pending: Pending, decision: Decision) -> None:
        shown, only = pending.document, pending.is_conflict
        is_hopeless = shown.state == "damaged" or shown.failures > 0 or pending.id in self._tools.manifests.waiting()
        if not only and not (is_hopeless and decision is Decision.DISCARD):
            _not_to_be_decided(pending)
        await self._tools.publication.publish(_gone(pending), None)
        now = Moment.of(self._clock)
        if not await self._journal.change(lambda tx: tx.writes.discard(pending.id, now, only_conflict=only)):
            _not_to_be_decided(pending)
        if only and pending.write is not None:  # others may still arrive
            self._tools.settled(pending.write.claims)
        _log.warning("an acknowledged write was given up", object=str(pending.key), decision=decision.value)

    async def _at_origin(self, pending: Pending) -> Headed:
        """Return the origin's version of the key. OriginUnreachable when the origin does not say."""
        found = await self._tools.requests.head(pending.write or _gone(pending))
        if isinstance(found, Headed):
            return found
        reason = found.code if isinstance(found, WriteRefused) else found.reason if isinstance(found, Lost) else ""
        raise OriginUnreachable(f"the origin does not say what it has under {pending.key}: {reason}")

    async def abort(self, upload_ids: Sequence[str]) -> to.AbortedDocument:
        """End uploads as AbortMultipartUpload does, even damaged rows. The reconciler soon aborts the origin's."""
        aborted = list[str]()
        for write_id, write, upload in await self._queries.open_uploads(upload_ids):
            if await self._abort(write_id, upload.upload_id, is_damaged=write is None):
                aborted.append(upload.upload_id)
                _log.warning(
                    "an open upload was aborted by an operator",
                    object=f"s3://{upload.bucket}/{upload.key}",
                    slot=upload.slot,
                    upload_id=upload.upload_id,
                    parts=upload.parts,
                    bytes=upload.bytes,
                )
        self._summary = None
        return to.AbortedDocument(aborted=aborted, not_open=[one for one in upload_ids if one not in aborted])

    async def _abort(self, write_id: int, upload_id: str, *, is_damaged: bool) -> bool:
        now = Moment.of(self._clock)
        if is_damaged:
            return await self._journal.change(lambda tx: tx.writes.discard(write_id, now, only_conflict=False))
        return await self._journal.change(lambda tx: tx.uploads.abort(upload_id, now))


def _gone(pending: Pending) -> Write:
    """Return a stand-in for the write, enough to ask the origin about its key."""
    return Write(WriteSpec(pending.key, {}, pending.document.slot), ExpectedVersion(), 0.0, deleted=True)


def _not_to_be_decided(pending: Pending) -> NoReturn:
    kind = "a conflict" if pending.is_conflict else "on its way to the origin, and no conflict"
    if pending.document.state == "damaged":
        raise NotToBeDecided(f"what is pending under {pending.key} is damaged: you can discard it, not keep it")
    raise NotToBeDecided(f"what is pending under {pending.key} is {kind}: look at it again")


_SUMS = (
    *("objects", "bytes", "local_objects", "local_bytes", "staged_bytes", "open_uploads", "open_upload_bytes"),
    *("conflicts", "damaged", "failing", "waiting_for_bucket"),
)


def _summary(
    slots: list[to.PendingSlot], buckets: Sequence[tuple[str, BucketCapabilities]], journal_problem: str | None
) -> to.Writeback:
    """`journal_problem`: why the journal cannot record flushes."""
    oldest = [one.oldest_acknowledged_at for one in slots if one.oldest_acknowledged_at is not None]
    profiles = [
        to.BucketProfile(
            bucket=bucket,
            md5_etags=known.md5_etags,
            conditions={kind: getattr(known.conditions, kind).name.lower() for kind in ("put", "complete", "delete")},
        )
        for bucket, known in buckets
    ]
    return to.Writeback(
        **{name: sum(getattr(one, name) for one in slots) for name in _SUMS},
        oldest_acknowledged_at=min(oldest, default=None),
        journal_problem=journal_problem,
        slots=slots,
        buckets=profiles,
    )


class NoWriteback:
    """The actions without a buffer: nothing is pending."""

    async def summary(self) -> to.Writeback:
        return _summary([], [], None)

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
        return flush_progress(prefix, through, to.FlushSums.model_validate(nothing), [], Attempts(), {}, None)

    async def versions(self, key: ObjectKey) -> to.Versions:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> to.Resolved:
        raise NothingPending(f"nothing is pending under {key}: there is no write-back buffer")

    async def abort(self, upload_ids: Sequence[str]) -> to.AbortedDocument:
        return to.AbortedDocument(aborted=[], not_open=list(upload_ids))

    async def parts(self, prefix: Prefix, after: str, count: int) -> PartsPage:
        return PartsPage(now=0.0)

    async def reads_of(self, bucket: str, prefixes: Sequence[str]) -> Reads:
        return {}
