"""Which parts of a bucket's key space are known completely, since when, and how old an answer may be. Pure.

A list of intervals is in order, and none of them overlap. `start` belongs to an interval, `stop` does not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.pages import END, Listed, ListRequest, key_successor, prefix_end
from gateway.policy.slots import Slot, Slots
from gateway.s3.list_result import EntryTemplate


@dataclass(frozen=True, slots=True)
class Interval:
    """Every key of the origin's in [start, stop) was in the index at the moment `observed_at`, and no other."""

    start: bytes
    stop: bytes
    observed_at: ObservedAt


def without(intervals: Iterable[Interval], start: bytes, stop: bytes) -> list[Interval]:
    left = []
    for one in intervals:
        if one.stop <= start or one.start >= stop:
            left.append(one)
            continue
        if one.start < start:
            left.append(replace(one, stop=start))
        if one.stop > stop:
            left.append(replace(one, start=stop))
    return left


def including(intervals: Iterable[Interval], new: Interval, *, merge_seconds: float) -> list[Interval]:
    """With `new` in the place of what it overlaps, made one with neighbours that are `merge_seconds` older or younger.

    What has become one is as old as the older: nothing is ever taken for younger than it is.
    """
    joined: list[Interval] = []
    for one in sorted([*without(intervals, new.start, new.stop), new], key=lambda interval: interval.start):
        if (
            joined
            and joined[-1].stop == one.start
            and _may_merge(joined[-1].observed_at, one.observed_at, merge_seconds)
        ):
            older = min(joined[-1].observed_at, one.observed_at, key=lambda observed: observed.seconds)
            joined[-1] = Interval(joined[-1].start, one.stop, older)
        else:
            joined.append(one)
    return joined


def known_until(intervals: Iterable[Interval], start: bytes, is_usable: Callable[[ObservedAt], bool]) -> bytes:
    """Up to where everything from `start` on is known by intervals that may be used; `start` itself: nothing is."""
    reached = start
    for one in intervals:
        if one.stop <= reached:
            continue
        if one.start > reached or not is_usable(one.observed_at):
            break
        reached = one.stop
    return reached


def is_known_better(intervals: Sequence[Interval], start: bytes, stop: bytes, asked: ObservedAt) -> bool:
    """Return True if all of [start, stop) was learned after the moment `asked`."""

    def is_younger(observed: ObservedAt) -> bool:
        return (observed.epoch, observed.boot) == (asked.epoch, asked.boot) and (observed.seconds > asked.seconds)

    return known_until(intervals, start, is_younger) >= stop


def _may_merge(one: ObservedAt, other: ObservedAt, merge_seconds: float) -> bool:
    same = (one.epoch, one.boot) == (other.epoch, other.boot)
    return same and abs(one.seconds - other.seconds) <= merge_seconds


_MERGED_PART_OF_TTL = 8


@dataclass(frozen=True, slots=True)
class KeyBound:
    """Up to which age, in seconds, an answer is fresh, and up to which one it stands in for an origin that is down."""

    fresh_seconds: float
    stale_seconds: float

    @property
    def merge_seconds(self) -> float:
        """Neighbours whose ages differ by no more become one: little of the TTL is lost by that."""
        return self.fresh_seconds / _MERGED_PART_OF_TTL

    def allows(self, observed: ObservedAt, now: ObservedAt, *, stale: bool = False) -> bool:
        """Return True if knowledge from `observed` may be shown at `now`; both moments are of the same bucket."""
        if observed.epoch != now.epoch:
            return False
        limit_seconds = self.stale_seconds if stale else self.fresh_seconds
        if observed.boot != now.boot:
            return limit_seconds == math.inf  # its age is unknown
        age_seconds = now.seconds - observed.seconds
        return 0 <= age_seconds < limit_seconds or limit_seconds == math.inf


def bound_of(slots: Iterable[Slot]) -> KeyBound | None:
    """Return the bound that all of them allow; None where one is strict, or frozen: the index may not answer."""
    fresh_seconds = stale_seconds = math.inf
    for slot in slots:
        if slot.consistency in ("strict", "snapshot"):
            return None
        if slot.consistency == "ttl":
            fresh_seconds = min(fresh_seconds, slot.metadata_ttl_seconds)
            stale_seconds = min(stale_seconds, slot.metadata_ttl_seconds + slot.stale_if_unreachable_seconds)
    return KeyBound(fresh_seconds, stale_seconds)


def answerable(slots: Slots, bucket: str) -> list[tuple[bytes, bytes]]:
    """Start and stop of the parts of a bucket's key space that the index may answer for: neither strict nor frozen."""
    prefixes = [(slot.prefix.key_prefix.encode(), slot) for slot in slots.of_bucket(bucket)]
    edges = {b"", END, *(prefix for prefix, _ in prefixes), *(prefix_end(prefix) for prefix, _ in prefixes)}
    parts: list[tuple[bytes, bytes]] = []
    for start, stop in pairwise(sorted(edges)):
        slot = next((slot for prefix, slot in prefixes if start.startswith(prefix)), None)
        if slot is None or slot.consistency in ("strict", "snapshot"):
            continue
        if parts and parts[-1][1] == start:
            start = parts.pop()[0]
        parts.append((start, stop))
    return parts


def covered_ranges(
    wanted: ListRequest, keys: Sequence[bytes], prefixes: Sequence[bytes], *, is_last: bool
) -> list[tuple[bytes, bytes]]:
    """Start and stop of each, for an answer to `wanted` with these keys and common prefixes; `is_last` when it ends.

    What lies under a common prefix is not told, nor what lies under one that is left out because it is not greater
    than the place before.
    """
    if wanted.limit == 0:
        return []
    start, stop = wanted.start, wanted.stop
    left_out = wanted.rolled_up(wanted.after) if wanted.after.startswith(wanted.prefix) else None
    if left_out is not None:
        start = max(start, prefix_end(left_out))
    if not is_last:
        stop = max(key_successor(keys[-1]) if keys else b"", prefix_end(prefixes[-1]) if prefixes else b"")
    parts = []
    for prefix in prefixes:
        if start < prefix:
            parts.append((start, prefix))
        start = max(start, prefix_end(prefix))
    if start < stop:
        parts.append((start, stop))
    return parts


@dataclass(frozen=True, slots=True)
class QueryStamp:
    """The moment in which the origin was asked: `observed_at.epoch` is the bucket's, `number` that of own writes."""

    observed_at: ObservedAt
    number: int


@dataclass(frozen=True, slots=True)
class Batch:
    """All that there is in [start, stop) of a bucket, in order. Records number `templates`.

    Neighbours in time up to `merge_seconds` apart may become one.
    """

    bucket: str
    start: bytes
    stop: bytes
    listed: Sequence[Listed]
    templates: Sequence[EntryTemplate]
    asked: QueryStamp
    merge_seconds: float

    def until(self, key: bytes) -> Batch:
        return replace(self, stop=key, listed=self.listed[: bisect_left(self.listed, (key, b""))])

    def beginning_at(self, key: bytes) -> Batch:
        return replace(self, start=key, listed=self.listed[bisect_left(self.listed, (key, b"")) :])
