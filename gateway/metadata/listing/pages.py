"""One page of a listing out of keys in order (S3 API, "ListObjectsV2", "ListObjects"). Pure.

Keys are UTF-8 here: their byte order is S3's. Nothing is scanned that rolls up: behind a common prefix the next key is
looked for at its end.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

END = b"\xff"
"""Behind every key: no byte of UTF-8 is as great."""


def key_successor(key: bytes) -> bytes:
    """Return the first place behind `key`."""
    return key + b"\0"


def prefix_end(prefix: bytes) -> bytes:
    """Return the first place behind every key that begins with `prefix`."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else END


Record: TypeAlias = bytes
Listed: TypeAlias = tuple[bytes, Record]
"""A key and its object's record (records.py)."""


class Keys(Protocol):
    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        """Return the first `count` keys of [start, stop), in order; fewer only when there are no more."""


@dataclass(frozen=True, slots=True)
class ListRequest:
    """The request for a page.

    `after` is the place of the page before: a key, or, with `skip`, a common prefix with all that is under it. `limit`
    counts keys and common prefixes together. [`begin`, `until`) limits each part of a page that is composed of several.
    """

    prefix: bytes = b""
    delimiter: bytes = b""
    limit: int = 1000
    after: bytes = b""
    skip: bool = False
    begin: bytes = b""
    until: bytes = END

    @property
    def start(self) -> bytes:
        if not self.after:
            return max(self.prefix, self.begin)
        return max(self.prefix, self.begin, prefix_end(self.after) if self.skip else key_successor(self.after))

    @property
    def stop(self) -> bytes:
        """Behind the last key that may be listed."""
        return min(self.until, prefix_end(self.prefix))

    def rolled_up(self, key: bytes) -> bytes | None:
        """Return the common prefix that stands for `key`; None: it stands for itself."""
        if not self.delimiter:
            return None
        found = key.find(self.delimiter, len(self.prefix))
        return None if found < 0 else key[: found + len(self.delimiter)]

    def is_behind(self, common_prefix: bytes) -> bool:
        """Return True if `common_prefix` must be listed: S3 leaves out those that are not greater than `after`."""
        return common_prefix > self.after


@dataclass(slots=True)
class Page:
    """Keys and common prefixes, each in order. `last` is the greatest of both, and where the next page begins."""

    keys: list[Listed] = field(default_factory=list)
    prefixes: list[bytes] = field(default_factory=list)
    is_truncated: bool = False
    last: bytes = b""
    last_is_prefix: bool = False


def take(keys: Keys, wanted: ListRequest, known_until: bytes) -> Page | None:
    """Return the page from keys that are complete below `known_until`; None when they do not suffice."""
    if wanted.limit == 0:
        return Page()
    if wanted.delimiter:
        return _Rolling(keys, wanted, min(known_until, wanted.stop)).page()
    stop = min(known_until, wanted.stop)
    found = keys.read(wanted.start, stop, wanted.limit + 1)
    if len(found) <= wanted.limit:
        if stop < wanted.stop:
            return None
        return Page(found, last=found[-1][0] if found else b"")
    found.pop()
    return Page(found, is_truncated=True, last=found[-1][0])


_READ_AT_ONCE_MAX = 256


class _Rolling:
    """A page with a delimiter. Reads single keys where prefixes follow each other, many where keys do."""

    def __init__(self, keys: Keys, wanted: ListRequest, stop: bytes) -> None:
        self._keys = keys
        self._wanted = wanted
        self._stop = stop
        self._page = Page()
        self._place = wanted.start

    def page(self) -> Page | None:
        at_once = 1
        while True:
            found = self._keys.read(self._place, self._stop, at_once)
            plain = self._plain(found)
            self._add_keys(found[:plain])
            if self._page.is_truncated:
                return self._page
            if plain < len(found):
                self._add_prefix(found[plain][0])
                if self._page.is_truncated:
                    return self._page
                at_once = 1
            elif len(found) < at_once:
                return self._page if self._stop == self._wanted.stop else None
            else:
                self._place = key_successor(found[-1][0])
                at_once = min(4 * at_once, _READ_AT_ONCE_MAX)

    def _plain(self, found: list[Listed]) -> int:
        delimiter, skip = self._wanted.delimiter, len(self._wanted.prefix)
        for number, (key, _) in enumerate(found):
            if key.find(delimiter, skip) >= 0:
                return number
        return len(found)

    def _add_keys(self, found: list[Listed]) -> None:
        page = self._page
        room = self._room()
        page.is_truncated = len(found) > room
        page.keys += found[:room]
        if found and room:
            page.last, page.last_is_prefix = page.keys[-1][0], False

    def _add_prefix(self, key: bytes) -> None:
        common = self._wanted.rolled_up(key)
        if common is None:
            raise ValueError("the key does not roll up")
        self._place = prefix_end(common)
        if not self._wanted.is_behind(common):
            return
        if not self._room():
            self._page.is_truncated = True
            return
        self._page.prefixes.append(common)
        self._page.last, self._page.last_is_prefix = common, True

    def _room(self) -> int:
        return self._wanted.limit - len(self._page.keys) - len(self._page.prefixes)


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """Keys in a list: what the origin's page is, and the fake of tests."""

    listed: list[Listed]

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        first = bisect_left(self.listed, (start, b""))
        return self.listed[first : min(first + count, bisect_left(self.listed, (stop, b"")))]
