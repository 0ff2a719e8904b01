"""Habits of buckets that the origin's answers have shown: object sizes, and operations that the origin cannot do there.

If the origin lacks what the cache relies on (ranges, strong ETags that differ where objects do), the gateway reads
objects in one stream, past the cache. All processes know that through the catalog.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

from gateway.core.model import ObjectKey, ObjectVersion
from gateway.metadata.entries import CatalogEntry
from gateway.s3.origin_habits import OriginHabits


class SizesSeen:
    """How large the objects were that this process looked at last, by bucket and the ending of their names."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()

    def note(self, version: ObjectVersion) -> None:
        """To be called when the origin has said how long an object is."""
        kind = _kind(version.key)
        sizes = self._kinds.get(kind)
        if sizes is None:
            sizes = self._kinds[kind] = deque(maxlen=SIZES_SEEN)
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        sizes.append(version.size_bytes)

    def are_within(self, key: ObjectKey, size_bytes: int) -> bool:
        """Return True if enough objects of this kind were seen, the last ones all within `size_bytes`."""
        sizes = self._kinds.get(_kind(key), ())
        return len(sizes) == SIZES_SEEN and max(sizes) <= size_bytes


SIZES_SEEN = 8
KINDS_MAX = 4096

BUCKETS_LISTED_MAX, ETAGS_LISTED_MAX = 16, 10_000
"""With more, a process forgets which sizes it has seen listed with which ETags."""


def _kind(key: ObjectKey) -> tuple[str, str]:
    _, dot, ending = key.key.rpartition("/")[2].rpartition(".")
    return key.bucket, ending if dot else ""


HABITS_SECONDS = 600.0
"""Seconds for which Forebay believes that an origin knows no ranges, makes weak ETags or withholds ranges."""

HABITS_REREAD_SECONDS = 1.0
_WEAK, _RANGES, _SHARED, _WITHHELD = "weak-etags", "no-ranges", "shared-etags", "withheld-etags"


def habits_version(bucket: str) -> ObjectVersion:
    """Return the place of a bucket's habits in the catalog: no object has such a key."""
    return ObjectVersion(ObjectKey(bucket, ""), "habits", 0)


def pack_habits(habits: OriginHabits) -> dict[str, str]:
    """As headers of an entry."""
    packed = {_WEAK: "1" if habits.weak_etags else "", _RANGES: "1" if habits.no_ranges else ""}
    packed[_WITHHELD] = "\t".join(sorted(habits.withheld_etags))
    return {**packed, _SHARED: "\t".join(sorted(habits.shared_etags))}


def unpack_habits(entry: CatalogEntry, boot: int, now_seconds: float) -> OriginHabits:
    """Return the habits that are still valid at `now_seconds` of the boot of that number."""
    told: Mapping[str, str] = entry.head.headers if entry.head is not None else {}
    observed = entry.observed_at
    is_young = observed.boot == boot and 0 <= now_seconds - observed.seconds < HABITS_SECONDS
    shared, withheld = (frozenset(filter(None, told.get(name, "").split("\t"))) for name in (_SHARED, _WITHHELD))
    if not is_young:
        return OriginHabits(shared_etags=shared)
    return OriginHabits(told.get(_WEAK) == "1", told.get(_RANGES) == "1", shared, withheld)
