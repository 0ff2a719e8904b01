"""Guesses of where to cut a key range when only its beginning is known. Pure.

Keys are assumed to go on as they began: a digit may be followed by other digits, a letter by letters already seen. Each
guess is a key after the last key seen: a prefix of that key, and a greater character of the same kind. Both outcomes
are useful: if keys follow, two listers can go on from there; if none do, everything after the guess is done.

Text is compared by code points here, which is the order of UTF-8 (RFC 3629, 1), so every guess is a valid key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

from gateway.metadata.listing.pages import key_successor

T = TypeVar("T")

KEY_BYTES_MAX = 1024

KEPT_MAX = 8192
"""Keys at about equal distances: a megabyte, and more parts than any crawl has listers."""

_CHARACTERS_MAX = 4096
_MISSES_MAX = 3
_BEFORE_SURROGATES, _BEHIND_SURROGATES = "\ud7ff", "\ue000"
_NEAREST_EXPONENT = 6
_GREATEST = "\U0010ffff"
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
