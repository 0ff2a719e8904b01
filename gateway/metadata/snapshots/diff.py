"""The differences between two sets of objects, each in the order of its keys."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

from gateway.s3.headers import plain_etag
from gateway.s3.list_result import ListedEntry

Entries: TypeAlias = AsyncGenerator[list[ListedEntry], None]


class _Peekable:
    """Entries one at a time, with a look at the next."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._page: list[ListedEntry] = []
        self._next = 0
        self._ended = False

    async def next(self) -> ListedEntry | None:
        """Return the next one, which stays until `take`; None: there is none."""
        while self._next >= len(self._page) and not self._ended:
            self._page, self._next = await anext(self._entries, []), 0
            self._ended = not self._page and not await self._more()
        return self._page[self._next] if self._next < len(self._page) else None

    def take(self) -> None:
        self._next += 1

    async def _more(self) -> bool:
        """Read the next page, as an empty one is not the end. Return False at the end."""
        page = await anext(self._entries, None)
        self._page = page or []
        return page is not None


async def differences(before: Entries, after: Entries) -> AsyncGenerator[dict[str, Any], None]:
    """Each object that was `added`, `removed` or `changed` (another ETag or size), by key; at the end how many of each.

    Both are read as they are needed, and closed.
    """
    counts = {"added": 0, "removed": 0, "changed": 0, "same": 0}
    async with aclosing(before), aclosing(after):
        left, right = _Peekable(before), _Peekable(after)
        while True:
            old, new = await left.next(), await right.next()
            if old is None and new is None:
                break
            if new is None or (old is not None and old.key < new.key):
                new = None
            elif old is None or new.key < old.key:
                old = None
            if old is not None:
                left.take()
            if new is not None:
                right.take()
            change = _change(old, new)
            counts[change] += 1
            if change != "same":
                yield _document(change, old, new)
    yield counts


def _change(old: ListedEntry | None, new: ListedEntry | None) -> str:
    if old is None:
        return "added"
    if new is None:
        return "removed"
    return "same" if _version(old) == _version(new) else "changed"


def _version(entry: ListedEntry) -> tuple[str, int]:
    return plain_etag(entry.etag), entry.size_bytes


def _document(change: str, old: ListedEntry | None, new: ListedEntry | None) -> dict[str, Any]:
    either = old or new
    if either is None:
        raise ValueError("a difference has at least one side")
    said: dict[str, Any] = {"change": change, "key": either.key.decode()}
    for name, entry in (("before", old), ("after", new)):
        if entry is not None:
            said[name] = {"etag": entry.etag, "size": entry.size_bytes}
    return said
