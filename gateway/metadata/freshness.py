"""May what was observed still be believed? Pure: the promises of docs/semantics.md, clause 3.

A listing gives ETag, size and date, and not the headers that HEAD gives. Those are written with the object, but for a
few that S3 changes by themselves: what has one of them is not confirmed (docs/decisions/0018).
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

from gateway.metadata.entries import Entry, ObservedAt
from gateway.metadata.head import ObjectHead
from gateway.metadata.listing.records import date_text
from gateway.policy.slots import Slot
from gateway.s3.http_dates import parse_http_date
from gateway.s3.list_result import EntryForm, ListedEntry


class Freshness(Enum):
    """FRESH answers by itself. STALE answers only when the origin does not."""

    FRESH = "fresh"
    STALE = "stale"
    USELESS = "useless"


def freshness(entry: Entry, slot: Slot, *, now_seconds: float, boot: int) -> Freshness:
    """How far `entry` may be trusted in `slot`. `now_seconds` is monotonic, of the boot whose number is `boot`.

    Ages are differences of the machine's own monotonic clock, so that no step of the wall clock makes anything live
    longer. What was learned under another boot, or in the future, is of unknown age: only `immutable` can use it.
    """
    if slot.consistency in ("strict", "snapshot"):
        return Freshness.USELESS  # what is in a snapshot is told by nothing else
    observed = entry.observed_at
    age_seconds = now_seconds - observed.seconds if observed.boot == boot else -1.0
    if entry.head is None:
        return Freshness.FRESH if 0 <= age_seconds < slot.negative_ttl_seconds else Freshness.USELESS
    if slot.consistency == "immutable":
        return Freshness.FRESH
    if age_seconds < 0:
        return Freshness.USELESS
    if age_seconds < slot.metadata_ttl_seconds:
        return Freshness.FRESH
    limit_seconds = slot.metadata_ttl_seconds + slot.stale_if_unreachable_seconds
    return Freshness.STALE if age_seconds < limit_seconds else Freshness.USELESS


def answer_freshness(observed: ObservedAt, now: ObservedAt, slot: Slot, *, ttl_seconds: float) -> Freshness:
    """How far what was said of a bucket may be trusted; `now` is of that bucket, `slot` the one that all of it is in.

    What runs out is stale as long as the slot goes on without its origin: `immutable` and `snapshot` do for good.
    """
    if (observed.boot, observed.epoch) != (now.boot, now.epoch):
        return Freshness.USELESS
    age_seconds = now.seconds - observed.seconds
    if age_seconds < 0:
        return Freshness.USELESS
    if age_seconds < ttl_seconds:
        return Freshness.FRESH
    if slot.consistency in ("immutable", "snapshot"):
        return Freshness.STALE
    more_seconds = slot.stale_if_unreachable_seconds if slot.consistency == "ttl" else 0.0
    return Freshness.STALE if age_seconds < ttl_seconds + more_seconds else Freshness.USELESS


SETTLED_SECONDS = 60.0
"""Dates are told to the second, by clocks of many machines: what was looked at so long after its date keeps it only as
long as it is not written again.
"""

_WRITTEN_WITH_THE_OBJECT = (
    "x-amz-checksum-",
    "x-amz-id-2",
    "x-amz-meta-",
    "x-amz-missing-meta",
    "x-amz-mp-parts-count",
    "x-amz-request-id",
    "x-amz-server-side-encryption",
    "x-amz-storage-class",
    "x-amz-version-id",
    "x-amz-website-redirect-location",
)
"""Beginnings of the names of S3's headers that another write would have to change. Not among them: the count of tags,
retention and legal hold, expiration, restoring, replication, and whatever is unknown.
"""

_MAY_BE_RESTORED = frozenset({"GLACIER", "DEEP_ARCHIVE", "INTELLIGENT_TIERING"})
_STORAGE_CLASS = re.compile("<StorageClass>([^<]*)</StorageClass>")


def is_settled(head: ObjectHead) -> bool:
    """Whether the origin's answer was given so long after the object's date that another version must have another."""
    answered = parse_http_date(head.headers.get("date", ""))
    if answered is None or head.last_modified is None:
        return False
    return answered - head.last_modified >= SETTLED_SECONDS


def is_confirmed(head: ObjectHead, listed: ListedEntry) -> bool:
    """Whether the object that was listed is the one that `head`, which was settled, is about; in doubt it is not."""
    if not is_version(head, listed.modified, listed.etag, listed.size_bytes):
        return False
    storage_class = head.headers.get("x-amz-storage-class", "STANDARD")
    if storage_class != _storage_class(listed.form) or storage_class in _MAY_BE_RESTORED:
        return False
    return all(name.startswith(_WRITTEN_WITH_THE_OBJECT) for name in head.headers if name.startswith("x-amz-"))


def is_version(head: ObjectHead, modified: str, etag: str, size_bytes: int) -> bool:
    """Whether `head` is about an object of this date, as listings write it, ETag and size."""
    if head.version.etag != etag or head.version.size_bytes != size_bytes or head.last_modified is None:
        return False
    return modified.endswith("Z") and modified[:19] == date_text(int(head.last_modified))


@lru_cache(maxsize=1024)
def _storage_class(form: EntryForm) -> str:
    found = _STORAGE_CLASS.search(form.after_size)
    return found[1] if found is not None else "STANDARD"
