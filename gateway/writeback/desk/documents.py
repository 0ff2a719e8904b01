"""Pending objects, uploads and figures as JSON documents, and the tokens of pages. Times in seconds since 1970."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.policy.slots import Prefix
from gateway.writeback.desk.overview import Figures, Shown, ShownUpload, SlotFigures
from gateway.writeback.flushing.reconciler import Attempts
from gateway.writeback.journal.records import Profile, State


def object_document(shown: Shown) -> dict[str, Any]:
    """One pending object, or, with `deleted`, one that is to be deleted; null is what is not known."""
    write, turn = shown.write, shown.turn
    return {
        "bucket": shown.key.bucket,
        "key": shown.key.key,
        "sequence": shown.sequence,
        "slot": shown.slot,
        "state": state_of(shown),
        "bytes": shown.size_bytes,
        "etag": write.etag if write is not None and not write.deleted else None,
        "deleted": write.deleted if write is not None else None,
        "acknowledged_at": write.acknowledged_at if write is not None else None,
        "parts": shown.parts,
        "parts_sent": shown.sent_parts,
        "bytes_sent": shown.sent_bytes,
        "failures": turn.attempts,
        "failing_since": turn.failing_since,
        "waits_for": turn.after_sequence,
        "reason": shown.problem or turn.last_error,
    }


def state_of(shown: Shown) -> str:
    """waiting, sending, conflict or damaged."""
    if shown.is_damaged:
        return "damaged"
    if shown.is_conflict:
        return "conflict"
    return "sending" if shown.sent_parts or shown.state is State.PUBLISHING else "waiting"


def upload_document(shown: ShownUpload) -> dict[str, Any]:
    """An upload that the client has not completed."""
    upload = shown.upload
    return {
        "bucket": shown.key.bucket,
        "key": shown.key.key,
        "upload_id": shown.upload_id,
        "slot": shown.slot,
        "initiated_at": upload.began_at if upload is not None else None,
        "touched_at": upload.touched_then.at if upload is not None else None,
        "parts": shown.parts,
        "parts_sent": shown.sent_parts,
        "bytes": shown.size_bytes,
        "reason": shown.turn.last_error,
    }


def slot_document(name: str, figures: SlotFigures, buffer_bytes: int | None) -> dict[str, Any]:
    """What of a slot only this node has; `reason` is why the last of its flushes failed that do.

    `staged_bytes` of its buffer are taken; `buffer_bytes` null: it is not written back any more.
    """
    return {
        "slot": name,
        "buffer_bytes": buffer_bytes,
        "staged_bytes": figures.staged_bytes,
        "objects": figures.objects,
        "bytes": figures.size_bytes,
        "oldest_acknowledged_at": figures.oldest_at,
        "open_uploads": figures.uploads.uploads,
        "open_upload_bytes": figures.uploads.size_bytes,
        "oldest_upload_touched_at": figures.uploads.touched.at if figures.uploads.touched is not None else None,
        "conflicts": figures.conflicts,
        "damaged": figures.damaged,
        "failing": figures.failing,
        "reason": figures.reason,
    }


def bucket_document(bucket: str, profile: Profile) -> dict[str, Any]:
    """What is known of a bucket: whether its ETags are MD5s, and what it makes of conditions on each kind of request
    (yes, ignored, refused, unknown)."""
    known = profile.conditions
    return {
        "bucket": bucket,
        "md5_etags": profile.md5_etags,
        "conditions": {
            "put": known.put.name.lower(),
            "complete": known.complete.name.lower(),
            "delete": known.delete.name.lower(),
        },
    }


def progress_document(
    prefix: Prefix, through: int, figures: Figures, problems: Sequence[Any], attempts: Attempts
) -> dict[str, Any]:
    """What is left of a flush. `stuck` are conflicts, damaged objects, and what waits behind these; `held_up` these,
    what fails, and what waits behind that."""
    return {
        "prefix": str(prefix),
        "through": through,
        "objects": figures.objects,
        "bytes": figures.size_bytes,
        "bytes_sent": figures.sent_bytes,
        "oldest_acknowledged_at": figures.oldest_at,
        "open_uploads": figures.uploads,
        "open_upload_bytes": figures.upload_bytes,
        "conflicts": figures.conflicts,
        "damaged": figures.damaged,
        "failing": figures.failing,
        "stuck": figures.stuck,
        "held_up": figures.held_up,
        "longest_attempt_seconds": attempts.longest_seconds,
        "origin_away": attempts.is_away,
        "problems": list(problems),
    }


def to_token(*place: str | int) -> str:
    """A place in a listing, for the request for the next page."""
    return base64.urlsafe_b64encode(orjson.dumps(place)).decode()


def from_token(token: str, *kinds: type) -> Sequence[Any]:
    """The place again; ValueError for what is no token of a listing with places of these kinds."""
    try:
        place = orjson.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, orjson.JSONDecodeError):
        place = None
    if not isinstance(place, list) or [type(one) for one in place] != list(kinds):
        raise ValueError("the token is none that this listing has given")
    return place
