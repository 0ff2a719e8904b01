"""Pending objects, uploads, checkpoints and figures as documents of the admin API, and the tokens of its pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import orjson

from gateway.api import documents as to
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_queries import CheckpointRow
from gateway.writeback.admin.named_prefix import Name
from gateway.writeback.admin.queries import PendingRow
from gateway.writeback.checkpoints.restores import RestoreFacts
from gateway.writeback.checkpoints.state import CheckpointState
from gateway.writeback.flushing.reconciler import Attempts
from gateway.writeback.flushing.state import Headed
from gateway.writeback.journal.records import BucketCapabilities, State

RANKS_SHOWN_MAX = 1000


def object_document(row: PendingRow) -> to.PendingObject:
    """Return a pending object, or a pending deletion (`deleted`); null means unknown."""
    write, turn = row.write, row.turn
    return to.PendingObject(
        bucket=row.key.bucket,
        key=row.key.key,
        sequence=row.sequence,
        slot=row.slot,
        state=_state_of(row),
        bytes=row.size_bytes,
        etag=write.etag if write is not None and not write.deleted else None,
        deleted=write.deleted if write is not None else None,
        acknowledged_at=write.acknowledged_at if write is not None else None,
        parts=row.parts,
        parts_sent=row.sent_parts,
        bytes_sent=row.sent_bytes,
        failures=turn.attempts,
        failing_since=turn.failing_since,
        waits_for=turn.after_sequence,
        reason=row.problem or turn.last_error,
    )


def versions_document(row: PendingRow, found: Headed) -> to.Versions:
    at, size, etag = found.moment.at - found.age_seconds, found.size_bytes, found.etag
    theirs = None
    if etag is not None:
        theirs = to.AtOrigin(bytes=size if size >= 0 else None, etag=etag, modified_at=at if isfinite(at) else None)
    return to.Versions(object=object_document(row), at_origin=theirs)


def _state_of(row: PendingRow) -> str:
    if row.state is State.LOCAL:
        return "local"
    if row.is_damaged:
        return "damaged"
    if row.is_conflict:
        return "conflict"
    if row.turn.attempts:
        return CheckpointState.WAITING if row.turn.failing_since is None else CheckpointState.FAILED
    return "sending" if row.sent_parts or row.state is State.PUBLISHING else "waiting"


def upload_document(row: PendingRow) -> to.OpenUploadDocument:
    upload = row.write
    return to.OpenUploadDocument(
        bucket=row.key.bucket,
        key=row.key.key,
        upload_id=row.upload_id or "",
        slot=row.slot,
        initiated_at=upload.began_at if upload is not None else None,
        touched_at=upload.touched_then.at if upload is not None else None,
        parts=row.parts,
        parts_sent=row.sent_parts,
        bytes=row.here_bytes,
        reason=row.turn.last_error,
    )


_SUMS = (
    *("objects", "bytes", "local_objects", "local_bytes", "staged_bytes", "open_uploads", "open_upload_bytes"),
    *("conflicts", "damaged", "failing", "waiting_for_bucket"),
)


def summary_document(
    slots: list[to.PendingSlot],
    buckets: Sequence[tuple[str, BucketCapabilities]],
    journal_problem: str | None = None,
) -> to.Writeback:
    """Return sums of slots, and buckets' capabilities; `journal_problem`: why the journal cannot record flushes."""
    oldest = [one.oldest_acknowledged_at for one in slots if one.oldest_acknowledged_at is not None]
    return to.Writeback(
        **{name: sum(getattr(one, name) for one in slots) for name in _SUMS},
        oldest_acknowledged_at=min(oldest, default=None),
        journal_problem=journal_problem,
        slots=slots,
        buckets=[_bucket_document(*one) for one in buckets],
    )


def _bucket_document(bucket: str, capabilities: BucketCapabilities) -> to.BucketProfile:
    known = capabilities.conditions
    conditions = {"put": known.put, "complete": known.complete, "delete": known.delete}
    return to.BucketProfile(
        bucket=bucket,
        md5_etags=capabilities.md5_etags,
        conditions={kind: honoured.name.lower() for kind, honoured in conditions.items()},
    )


def flush_document(
    prefix: Prefix,
    through: int,
    sums: to.FlushSums,
    problems: Sequence[PendingRow],
    attempts: Attempts,
    awaiting: Mapping[int, int],
    journal_problem: str | None = None,
) -> to.FlushProgress:
    """Return the rest of a flush. `awaiting` maps ids of waiting manifests to their numbers of missing files."""
    return to.FlushProgress(
        prefix=str(prefix),
        is_name=isinstance(prefix, Name),
        awaiting_files=len(awaiting),
        files_missing=sum(awaiting.values()),
        through=through,
        **dict(sums),
        longest_attempt_seconds=attempts.longest_seconds,
        origin_away=attempts.is_away,
        journal_problem=journal_problem,
        problems=[object_document(one) for one in problems],
    )


def checkpoint_document(
    row: CheckpointRow,
    now: float,
    left_seconds: float | None,
    kept: Mapping[ObjectKey, str | None],
    restore: RestoreFacts | None,
) -> to.Checkpoint:
    """`kept` maps the checkpoints to keep in the cache to why it cannot keep them."""
    name, facts, missing = row.name, row.facts, row.facts.missing
    return to.Checkpoint(
        bucket=name.bucket,
        prefix=name.prefix,
        step=name.step,
        layout=name.layout,
        slot=row.slot,
        state=facts.state.value,
        files=facts.objects,
        bytes=facts.size_bytes,
        bytes_flushed=facts.flushed_bytes,
        bytes_local=facts.local_bytes,
        ranks=len(facts.ranks),
        ranks_seen=sorted(facts.ranks)[:RANKS_SHOWN_MAX],
        began_at=facts.began_at,
        last_at=facts.last_at,
        save_seconds=facts.save_seconds,
        flush_seconds_left=left_seconds if facts.left_bytes > 0 or facts.exposed_since is not None else None,
        exposed_seconds=None if facts.exposed_since is None else max(0.0, now - facts.exposed_since),
        kept=row.key in kept and kept[row.key] is None,
        kept_reason=kept.get(row.key),
        missing=to.MissingDocument(ranks=[*missing.ranks], objects=[*missing.keys], open_uploads=missing.uploads),
        reason=facts.reason,
        restore=None if restore is None else _restore_document(restore),
    )


def _restore_document(facts: RestoreFacts) -> to.Restore:
    ranks = sorted({one.file.rank for one in facts.behind if one.file.rank is not None})
    behind = [
        to.FileBehind(key=one.file.key, bytes=one.file.size_bytes, bytes_read=one.read_bytes, last_at=one.last_at)
        for one in facts.behind
    ]
    return to.Restore(
        state=facts.state.value,
        began_at=facts.began_at,
        last_at=facts.last_at,
        files=facts.files,
        files_begun=facts.files_begun,
        files_behind=facts.files_behind,
        bytes=facts.size_bytes,
        bytes_read=facts.read_bytes,
        behind=to.Behind(ranks=ranks, objects=behind),
    )


def to_token(*place: str | int) -> str:
    """Return the token of a place in a listing, for the request for the next page."""
    return base64.urlsafe_b64encode(orjson.dumps(place)).decode()


def from_token(token: str, *kinds: type) -> Sequence[Any]:
    """Return the place of a token; ValueError if no listing with places of these kinds gave it."""
    try:
        place = orjson.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, orjson.JSONDecodeError):
        place = None
    if not isinstance(place, list) or [type(one) for one in place] != list(kinds):
        raise ValueError("the token is none that this listing has given")
    return place
