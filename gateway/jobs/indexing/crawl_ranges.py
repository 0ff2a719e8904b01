"""How listers divide a key space: an idle lister takes the second part of the range that seems longest. Pure.

A lister goes through a range from its start to its stop. Nothing need be known about the keys: the part that a lister
has passed estimates the rest, and split_points.py guesses where to cut. Split points of an earlier crawl or an
inventory improve both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.jobs.indexing.split_points import CharacterStatistics, cuts
from gateway.metadata.listing.pages import key_successor

_GUESSES_MIN = 4
"""Guesses that are tried at once while it is unknown whether keys follow."""

_RUN_BETWEEN_SPLIT_POINTS = 4
"""Pages without a split point among them, where there are some: so much has been added there that guessing pays."""

_SAMPLES = 32
"""Keys of a page whose characters are looked at."""


@dataclass(eq=False, slots=True)
class CrawlRange:
    """A range [start, stop) of the key space. The keys after `after` are not listed yet; `start` moves with them.

    `run`: pages since it was last cut. `is_seen`: `after` is a key of the origin's, and not a guess. `is_reached`:
    there are keys at or behind `stop`. `before`: the range that ends where this one begins, until keys are found here.
    """

    start: bytes
    stop: bytes
    after: str
    run: int = 0
    is_seen: bool = False
    is_reached: bool = False
    before: CrawlRange | None = None


class CrawlRanges:
    """The ranges that are not listed yet."""

    def __init__(self, parts: Sequence[CrawlRange], split_points: Sequence[bytes] = ()) -> None:
        self._split_points = split_points
        self._run_min = _RUN_BETWEEN_SPLIT_POINTS if split_points else 1
        self._waiting = list(reversed(parts))
        self._active: list[CrawlRange] = []
        self._statistics = CharacterStatistics()

    @property
    def left(self) -> int:
        """CrawlRanges that are not done."""
        return len(self._waiting) + len(self._active)

    def take(self, idle: int = 1) -> CrawlRange | None:
        """Something to list for one of so many who are idle; None: nothing can be cut now."""
        if not self._waiting:
            self._cut(idle)
        if not self._waiting:
            return None
        crawl_range = self._waiting.pop()
        self._active.append(crawl_range)
        return crawl_range

    def listed(self, crawl_range: CrawlRange, keys: Sequence[bytes], reach: bytes) -> bool:
        """Note that a page has told these keys, all up to `reach`; return whether the range is done."""
        crawl_range.start = reach
        if crawl_range.before is not None:
            self._statistics.tried(len(crawl_range.after) - 1, found=bool(keys))
        if keys:
            self._statistics.see(keys[:: len(keys) // _SAMPLES + 1])
            crawl_range.after, crawl_range.is_seen = keys[-1].decode(), True
            if crawl_range.before is not None:
                crawl_range.before.is_reached = True
        crawl_range.before = None
        crawl_range.run += 1
        if reach < crawl_range.stop:
            return False
        self._active.remove(crawl_range)
        return True

    def _cut(self, idle: int) -> None:
        """Cut a range so that an idle lister gets work, if any can be cut."""
        marked = max(self._active, key=self._marks_in, default=None)
        if marked is not None and self._marks_in(marked) > 1:
            self._cut_at(marked, [self._middle(marked)])
            return
        for crawl_range in sorted(self._active, key=lambda one: one.run, reverse=True):
            if not crawl_range.is_seen or crawl_range.run < self._run_min:
                continue
            count = idle if crawl_range.is_reached else max(idle, _GUESSES_MIN)
            guesses = cuts(
                crawl_range.after, crawl_range.stop, count, self._statistics, is_reached=crawl_range.is_reached
            )
            if guesses:
                self._cut_at(crawl_range, guesses)
                return

    def _cut_at(self, crawl_range: CrawlRange, guesses: Sequence[str]) -> None:
        """Parts begin behind the guesses: a listing can begin behind a key, not at it. The first is the lister's."""
        stop, is_reached, before = crawl_range.stop, crawl_range.is_reached, crawl_range
        for guess in guesses:
            cut = key_successor(guess.encode())
            before.stop, before.is_reached = cut, False
            before = CrawlRange(cut, stop, guess, is_reached=is_reached, before=before)
            self._waiting.append(before)
        crawl_range.run = 0

    def _marks_in(self, crawl_range: CrawlRange) -> int:
        return self._end_of_marks(crawl_range) - bisect_right(self._split_points, crawl_range.start)

    def _middle(self, crawl_range: CrawlRange) -> str:
        first, end = bisect_right(self._split_points, crawl_range.start), self._end_of_marks(crawl_range)
        return self._split_points[(first + end) // 2].decode()

    def _end_of_marks(self, crawl_range: CrawlRange) -> int:
        """One that the range stops just behind is no cut of it."""
        return bisect_left(self._split_points, crawl_range.stop.removesuffix(b"\0"))
