"""Which parts of a bucket's key space are known completely, and since when. Pure.

A list of intervals is in order, and none of them overlap. `start` belongs to an interval, `stop` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gateway.metadata.records import Learned


@dataclass(frozen=True, slots=True)
class Interval:
    """Every key of the origin's in [start, stop) was in the index at the moment `learned`, and no other."""

    start: bytes
    stop: bytes
    learned: Learned


def without(intervals: Iterable[Interval], start: bytes, stop: bytes) -> list[Interval]:
    """What is left of them when [start, stop) is not known any more."""
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
        if joined and joined[-1].stop == one.start and _may_merge(joined[-1].learned, one.learned, merge_seconds):
            older = min(joined[-1].learned, one.learned, key=lambda learned: learned.seconds)
            joined[-1] = Interval(joined[-1].start, one.stop, older)
        else:
            joined.append(one)
    return joined


def known_until(intervals: Iterable[Interval], start: bytes, is_usable: Callable[[Learned], bool]) -> bytes:
    """Up to where everything from `start` on is known by intervals that may be used; `start` itself: nothing is."""
    place = start
    for one in intervals:
        if one.stop <= place:
            continue
        if one.start > place or not is_usable(one.learned):
            break
        place = one.stop
    return place


def is_known_better(intervals: Sequence[Interval], start: bytes, stop: bytes, asked: Learned) -> bool:
    """Whether all of [start, stop) was learned after the moment `asked`."""

    def is_younger(learned: Learned) -> bool:
        return (learned.generation, learned.boot) == (asked.generation, asked.boot) and (
            learned.seconds > asked.seconds
        )

    return known_until(intervals, start, is_younger) >= stop


def _may_merge(one: Learned, other: Learned, merge_seconds: float) -> bool:
    same = (one.generation, one.boot) == (other.generation, other.boot)
    return same and abs(one.seconds - other.seconds) <= merge_seconds
