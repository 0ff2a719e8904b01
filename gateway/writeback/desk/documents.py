"""Pending objects, uploads and figures as JSON documents, and the tokens of pages. Times in seconds since 1970."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.policy.slots import Prefix
from gateway.writeback.desk.alarms import Alarm
from gateway.writeback.desk.overview import Figures, Shown, ShownUpload, SlotFigures
from gateway.writeback.journal.records import State


def object_document(shown: Shown, alarm: Alarm | None) -> dict[str, Any]:
    """One pending object, or, with `deleted`, one that is to be deleted; null is what is not known."""
    pending = shown.pending
    return {
        "bucket": shown.key.bucket,
        "key": shown.key.key,
        "sequence": shown.sequence,
        "slot": shown.slot,
        "state": state_of(shown, alarm),
        "bytes": shown.size_bytes,
        "etag": pending.etag if pending is not None and not pending.deleted else None,
        "deleted": pending.deleted if pending is not None else None,
        "acknowledged_at": pending.acknowledged_at if pending is not None else None,
        "parts": shown.parts,
        "parts_sent": shown.sent_parts,
        "bytes_sent": shown.sent_bytes,
        "failures": alarm.failures if alarm is not None else 0,
        "failing_since": alarm.since if alarm is not None else None,
        "reason": shown.problem or (alarm.reason if alarm is not None else None),
    }


def state_of(shown: Shown, alarm: Alarm | None) -> str:
    """waiting, sending, conflict or damaged."""
    if shown.pending is None or (alarm is not None and alarm.is_damaged):
        return "damaged"
    if shown.is_conflict:
        return "conflict"
    return "sending" if shown.sent_parts or shown.pending.state is State.SENDING else "waiting"


def upload_document(shown: ShownUpload) -> dict[str, Any]:
    """An upload that the client has not completed."""
    return {
        "bucket": shown.key.bucket,
        "key": shown.key.key,
        "upload_id": shown.upload_id,
        "slot": shown.slot,
        "initiated_at": shown.upload.initiated_at if shown.upload is not None else None,
        "parts": shown.parts,
        "bytes": shown.size_bytes,
    }


def slot_document(name: str, figures: SlotFigures, alarms: Sequence[Alarm], buffer_bytes: int | None) -> dict[str, Any]:
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
        "open_uploads": figures.uploads,
        "conflicts": figures.conflicts,
        "damaged": sum(one.is_damaged for one in alarms),
        "failing": sum(not one.is_damaged for one in alarms),
        "reason": max(alarms, key=lambda one: one.last_at).reason if alarms else None,
    }


def progress_document(
    prefix: Prefix, through: int, figures: Figures, *, damaged: int, failing: int, stuck: int, problems: Sequence[Any]
) -> dict[str, Any]:
    """What is left of a flush. `stuck` are conflicts, damaged objects, and what waits behind these."""
    return {
        "prefix": str(prefix),
        "through": through,
        "objects": figures.objects,
        "bytes": figures.size_bytes,
        "bytes_sent": figures.sent_bytes,
        "oldest_acknowledged_at": figures.oldest_at,
        "open_uploads": figures.uploads,
        "conflicts": figures.conflicts,
        "damaged": damaged,
        "failing": failing,
        "stuck": stuck,
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
