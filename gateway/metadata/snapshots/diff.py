"""The differences between two sets of objects, each in the order of its keys."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

from gateway.s3.headers import plain_etag
from gateway.s3.list_result import ListedEntry

Entries: TypeAlias = AsyncGenerator[list[ListedEntry], None]


async def differences(before: Entries, after: Entries) -> AsyncGenerator[dict[str, Any], None]:
    """Each object that was `added`, `removed` or `changed` (another ETag or size), by key; at the end how many of each.

    Both are read as they are needed, and closed.
    """
    counts = {"added": 0, "removed": 0, "changed": 0, "same": 0}
    async with aclosing(_each(before)) as left, aclosing(_each(after)) as right:
        old, new = await anext(left, None), await anext(right, None)
        while old is not None or new is not None:
            this_old = old if old is not None and (new is None or old.key <= new.key) else None
            this_new = new if new is not None and (old is None or new.key <= old.key) else None
            change = _change(this_old, this_new)
            counts[change] += 1
            if change != "same":
                yield _document(change, this_old, this_new)
            old = await anext(left, None) if this_old is not None else old
            new = await anext(right, None) if this_new is not None else new
    yield counts


async def _each(pages: Entries) -> AsyncGenerator[ListedEntry, None]:
    async with aclosing(pages):
        async for page in pages:
            for entry in page:
                yield entry


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
