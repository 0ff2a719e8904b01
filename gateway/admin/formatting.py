"""Figures as people read them, on the status page and in commands."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.api import documents as to


_SEE_KERNEL = "see the kernel's log: dmesg"
DISK_STATES = {
    "full": ("full; what is cached is served, what is written goes to the bucket", "make room"),
    "read-only": ("takes nothing; what is cached is served, nothing is added", _SEE_KERNEL),
    "failing": ("failing; the cache is not used for now, the origin serves", _SEE_KERNEL),
    "closed": ("cannot be used; there is no cache, the origin serves", "repair it, and restart the gateway"),
}
"""The meaning of each state, and its cure."""

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size_text(size_bytes: float) -> str:
    """Return `11 B`, `4.9 KiB` or `60.0 MiB`: a size in the greatest unit not above it."""
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
    return "is" if number == 1 else "are"


def wrong_with(pending: to.Sums) -> list[str]:
    """Return the figures that a person has to look at: `1 conflict`, `2 failing`."""
    told = [counted(pending.conflicts, "conflict")] if pending.conflicts else []
    named = {"damaged": pending.damaged, "failing": pending.failing}
    return told + [f"{count:,} {name}" for name, count in named.items() if count]


def waiting_text(pending: to.Sums) -> str:
    """Return `2 waiting for the bucket`; nothing where nothing waits for it."""
    waiting = pending.waiting_for_bucket
    return f"{waiting:,} waiting for the bucket" if waiting else ""


def open_uploads_text(slot: to.PendingSlot) -> str:
    """Return `2 open uploads, 1.0 GiB, one without a part for 0:12:05`."""
    text = f"{counted(slot.open_uploads, 'open upload')}, {size_text(slot.open_upload_bytes)}"
    touched_at = slot.oldest_upload_touched_at
    return text if touched_at is None else f"{text}, one without a part for {age_text(touched_at)}"


def no_objects_yet_text(left: to.Sums) -> str:
    """Return `2 open uploads with 1.0 GiB are no objects yet`."""
    uploads, size = counted(left.open_uploads, "open upload"), size_text(left.open_upload_bytes)
    return f"{uploads} with {size} {'is no object' if left.open_uploads == 1 else 'are no objects'} yet"


def journal_problem_text(problem: str) -> str:
    return f"write-back journal: takes nothing now, so nothing is flushed: {problem}"


def bucket_text(bucket: to.BucketProfile) -> str:
    """Return `bucket b: ETags are MD5s; conditions on put: yes, complete: yes, delete: ignored`."""
    etags = "ETags are MD5s" if bucket.md5_etags else "ETags are no MD5s: nothing is written back"
    conditions = ", ".join(f"{kind}: {honoured}" for kind, honoured in bucket.conditions.items())
    return f"bucket {bucket.bucket}: {etags}; conditions on {conditions}"


def origin_text(origin: to.OriginStatus) -> str:
    """Say how the origin is."""
    if origin.problem is None:
        return "reachable"
    if origin.state == "no credentials":
        return f"not asked, for want of a key: {origin.problem}"
    return f"{'reachable' if origin.reachable else 'not reachable'}: {origin.problem}"


def differing_blocks_texts(one: to.ClusterMember) -> list[str]:
    return [
        f"{one.name} ({one.address}) has blocks of {size_text(differ.there_bytes)} in slot {differ.slot}, this node of "
        f"{size_text(differ.here_bytes)}: the two share few of them"
        for differ in one.differing_blocks
    ]


def cluster_text(cluster: to.ClusterDocument) -> str:
    """`cluster train: 2 of 3 members up`."""
    up = sum(one.state == "up" for one in cluster.members)
    return f"cluster {cluster.name}: {up} of {counted(len(cluster.members), 'member')} up"
