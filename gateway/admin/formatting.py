"""Figures as people read them, on the status page and in commands."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size_text(size_bytes: float) -> str:
    """`11 B`, `4.9 KiB`, `60.0 MiB`: in the greatest unit of which it is one or more."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    size = float(size_bytes)
    for unit in _UNITS:
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size:,.1f} {_UNITS[-1]}"


def counted(number: int, noun: str) -> str:
    """`1 object`, `1,281,167 objects`; with a noun that has its plural in s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def age_text(at: float | None) -> str:
    """`0:12:05`: how long ago a time (seconds since 1970) was; `-` for none."""
    return "-" if at is None else str(timedelta(seconds=round(max(0.0, time.time() - at))))


def are(number: int) -> str:
    """The verb for so many."""
    return "is" if number == 1 else "are"


def wrong_with(slot: Mapping[str, Any]) -> list[str]:
    """What of a slot's figures (`/api/v1/writeback`) somebody is to look at: `1 conflict`, `2 failing`."""
    told = {"conflicts": counted(slot["conflicts"], "conflict")}
    told |= {name: f"{slot[name]:,} {name}" for name in ("damaged", "failing")}
    return [text for name, text in told.items() if slot[name]]


def waiting_text(slot: Mapping[str, Any]) -> str:
    """`2 waiting for the bucket`: of a slot's figures, or of what `/api/v1/flush` says; empty where nothing does."""
    waiting = slot["waiting_for_bucket"]
    return f"{waiting:,} waiting for the bucket" if waiting else ""


def open_uploads_text(slot: Mapping[str, Any]) -> str:
    """`2 open uploads, 1.0 GiB, one without a part for 0:12:05`: of a slot's figures."""
    text = f"{counted(slot['open_uploads'], 'open upload')}, {size_text(slot['open_upload_bytes'])}"
    touched_at = slot["oldest_upload_touched_at"]
    return text if touched_at is None else f"{text}, one without a part for {age_text(touched_at)}"


def no_objects_yet_text(left: Mapping[str, Any]) -> str:
    """`2 open uploads with 1.0 GiB are no objects yet`: of what `/api/v1/flush` says."""
    uploads, size = counted(left["open_uploads"], "open upload"), size_text(left["open_upload_bytes"])
    return f"{uploads} with {size} {'is no object' if left['open_uploads'] == 1 else 'are no objects'} yet"


def local_text(document: Mapping[str, Any]) -> str:
    """`3 objects, 1.0 GiB`: what is kept here only, and not to be sent."""
    return f"{counted(document['local_objects'], 'object')}, {size_text(document['local_bytes'])}"


def journal_problem_text(document: Mapping[str, Any]) -> str:
    """`write-back journal: takes nothing now, so nothing is flushed: database or disk is full`: where there is one."""
    return f"write-back journal: takes nothing now, so nothing is flushed: {document['journal_problem']}"


def bucket_text(bucket: Mapping[str, Any]) -> str:
    """`bucket b: ETags are MD5s; conditions on put: yes, complete: yes, delete: ignored`."""
    etags = "ETags are MD5s" if bucket["md5_etags"] else "ETags are no MD5s: nothing is written back"
    conditions = ", ".join(f"{kind}: {honoured}" for kind, honoured in bucket["conditions"].items())
    return f"bucket {bucket['bucket']}: {etags}; conditions on {conditions}"


def origin_text(origin: dict[str, Any]) -> str:
    """How the origin is, in words: of the part `origin` of the status document."""
    if origin["problem"] is None:
        return "reachable"
    if origin["state"] == "no credentials":
        return f"not asked, for want of a key: {origin['problem']}"
    return f"{'reachable' if origin['reachable'] else 'not reachable'}: {origin['problem']}"
