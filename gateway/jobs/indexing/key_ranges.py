"""Which parts of the key space a slot's index is about, and how its listers share them. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TypeVar

from gateway.metadata.listing.pages import key_successor, prefix_end
from gateway.metadata.listing.ranges import Interval
from gateway.policy.slots import Prefix, Slots

LISTED = ("ttl", "immutable")
"""The kinds of consistency in which the listing index answers."""

_GREATEST = "\U0010ffff"
KEY_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """[start, stop)."""

    start: bytes
    stop: bytes


def ranges_of(slots: Slots, prefix: Prefix, indexed: Collection[str]) -> list[KeyRange]:
    """Return the key ranges under `prefix` that a slot's index keeps, in order.

    Inner slots are left out if they are strict, or if they have an index of their own (`indexed`: the names of those).
    """
    start = prefix.key_prefix.encode()
    within = [(one.prefix.key_prefix.encode(), one) for one in slots.of_bucket(prefix.bucket) if one.prefix != prefix]
    within = [(begin, one) for begin, one in within if begin.startswith(start) and one.prefix.bucket]
    edges = sorted(
        {start, prefix_end(start), *(begin for begin, _ in within), *(prefix_end(begin) for begin, _ in within)}
    )
    kept: list[KeyRange] = []
    for first, end in pairwise(edges):
        inner = next((one for begin, one in within if first.startswith(begin)), None)
        if inner is None or (inner.consistency in LISTED and inner.name not in indexed):
            kept.append(KeyRange(kept.pop().start if kept and kept[-1].stop == first else first, end))
    return kept


def gaps(parts: Iterable[KeyRange], known: Iterable[KeyRange | Interval]) -> list[KeyRange]:
    """Return the parts of `parts` that are in none of `known`. Both are in order."""
    left, known = [], list(known)
    for part in parts:
        start = part.start
        for one in known:
            if one.stop <= start or one.start >= part.stop:
                continue
            if one.start > start:
                left.append(KeyRange(start, one.start))
            start = max(start, one.stop)
        if start < part.stop:
            left.append(KeyRange(start, part.stop))
    return left


def key_before(start: bytes, key_prefix: str) -> str:
    """Return a key behind which a prefix's listing finds all from `start` on; empty: its beginning will do.

    A listing begins behind a key (`start-after`), and places are behind keys, or behind all keys of a prefix: the
    greatest character after that prefix lies behind nearly all of it.
    """
    if start <= key_prefix.encode():
        return ""
    if start.endswith(b"\0"):
        return start[:-1].decode()
    whole = (start[:-1] + bytes([start[-1] - 1])).decode("utf-8", "ignore")
    if len(whole.encode()) == len(start) and len(start) + len(_GREATEST.encode()) <= KEY_BYTES_MAX:
        return whole + _GREATEST
    return start.decode("utf-8", "ignore")[:-1]


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


T = TypeVar("T")

KEPT_MAX = 8192
"""Keys at about equal distances: a megabyte, and more parts than any crawl has listers."""

_CHARACTERS_MAX = 4096
_MISSES_MAX = 3
_BEFORE_SURROGATES, _BEHIND_SURROGATES = "\ud7ff", "\ue000"
_NEAREST_EXPONENT = 6
_DIGITS = "0123456789"


class CharacterStatistics:
    """The characters that have been seen at each position of keys, those beyond ASCII at any; and what guesses came to.

    Where there was a digit, there may be any other.
    """

    def __init__(self) -> None:
        self._tried: dict[int, list[int]] = {}
        self._seen: list[set[str]] = []
        self._beyond: set[str] = set()

    def see(self, keys: Iterable[bytes]) -> None:
        """Keys of the origin's."""
        for position, characters in enumerate(zip_longest(*(key.decode() for key in keys), fillvalue="")):
            if position == len(self._seen):
                self._seen.append(set())
            seen = self._seen[position]
            if len(seen) < _CHARACTERS_MAX:
                seen.update(characters)
            if len(self._beyond) < _CHARACTERS_MAX:
                self._beyond.update(one for one in characters if not one.isascii())

    def tried(self, position: int, *, found: bool) -> None:
        """Note whether a guess at another character in that position found keys before the next guess."""
        self._tried.setdefault(position, [0, 0])[found] += 1

    def is_exhausted(self, position: int) -> bool:
        """Return whether guesses at this position hardly ever find keys."""
        missed, found = self._tried.get(position, (0, 0))
        return missed > _MISSES_MAX * (1 + found)

    def following(self, position: int, character: str) -> list[str]:
        """Return the greater ones of the same kind, in order."""
        kind = _kind(character)
        if kind == "digit":
            return [digit for digit in _DIGITS if digit > character]
        if kind == "beyond":
            return sorted({*_further(character), *(one for one in self._beyond if one > character)})
        seen = self._seen[position] if position < len(self._seen) else ()
        return sorted(one for one in seen if one > character and _kind(one) == kind)


def cuts(last: str, stop: bytes, count: int, statistics: CharacterStatistics, *, is_reached: bool) -> list[str]:
    """Return at most `count` keys between `last`, the last key seen, and `stop`, in order. Empty: no guess is left.

    `is_reached`: keys are known at or after `stop`. Then most remaining keys differ from `last` early, so the cuts are
    early. Otherwise one cut each goes to several lengths, to find out where keys differ.
    """
    if is_reached:
        for kept in range(len(last)):
            if statistics.is_exhausted(kept):
                continue
            guesses = _guesses(last, kept, stop, statistics.following(kept, last[kept]))
            if guesses:
                return _spread(guesses, count)
    levels = [
        guesses
        for kept in range(len(last))
        if not statistics.is_exhausted(kept)
        if (guesses := _guesses(last, kept, stop, _with_one_more(statistics.following(kept, last[kept]), last[kept])))
    ]
    chosen = levels[:1] + _spread(levels[1:], count - 1)
    return [guesses[(len(guesses) - 1) // 2] for guesses in reversed(chosen)]


def _guesses(last: str, kept: int, stop: bytes, characters: Iterable[str]) -> list[str]:
    """Return the first `kept` characters of `last` with each of `characters`, where keys could follow."""
    guesses = [last[:kept] + character for character in characters]
    return [guess for guess in guesses if key_successor(key := guess.encode()) < stop and len(key) <= KEY_BYTES_MAX]


def _spread(values: Sequence[T], count: int) -> list[T]:
    """At most so many of them, at equal distances."""
    parts = min(count, len(values)) + 1
    return [values[len(values) * number // parts] for number in range(1, parts)]


def _with_one_more(characters: Sequence[str], character: str) -> list[str]:
    """And what is behind all of them: it is asked whether there is anything more."""
    last = characters[-1] if characters else character
    if last == _GREATEST:
        return list(characters)
    return [*characters, _BEHIND_SURROGATES if last == _BEFORE_SURROGATES else chr(ord(last) + 1)]


def _further(character: str) -> Iterator[str]:
    """Yield some in wider and wider distances: there are a million of them."""
    for exponent in range(_NEAREST_EXPONENT, 20):
        code = ord(character) + 2**exponent
        if code < ord(_GREATEST) and not ord(_BEFORE_SURROGATES) < code < ord(_BEHIND_SURROGATES):
            yield chr(code)


def _kind(character: str) -> str:
    if not character.isascii():
        return "beyond"
    if character in _DIGITS:
        return "digit"
    return "capital" if character.isupper() else "letter" if character.islower() else "sign"


class SplitPoints:
    """The last keys of pages, in whatever order they come: one of each `stride`, so that no more than KEPT_MAX stay."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._stride = 1
        self._seen = 0

    def add(self, key: bytes) -> None:
        """Note that a page ends with this key."""
        self._seen += 1
        if self._seen % self._stride:
            return
        self._kept.append(key)
        if len(self._kept) > KEPT_MAX:
            self._kept = sorted(self._kept)[::2]
            self._stride *= 2

    def sorted(self) -> Sequence[bytes]:
        """In order."""
        return sorted(self._kept)
