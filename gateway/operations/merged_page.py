"""One page of a listing, merged from several sources (ListObjects, ListMultipartUploads).

rows of each source from a place on → merged: for a name of several sources the first one counts → cut at the limit
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from heapq import merge
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from gateway.metadata.listing.pages import ListRequest, prefix_end
from gateway.s3.listings import PAGE_KEYS_MAX

T = TypeVar("T")


class Kind(Enum):
    ENTRY = "entry"
    PREFIX = "common prefix"
    TOMBSTONE = "tombstone"
    """The entry is not listed, whatever later sources have."""

    DOUBTFUL_PREFIX = "doubtful common prefix"
    """A prefix that may cover nothing: that must be found out."""


_LISTED = (Kind.ENTRY, Kind.PREFIX)
_PREFIXES = (Kind.PREFIX, Kind.DOUBTFUL_PREFIX)


class PageRow(NamedTuple, Generic[T]):
    """An entry, with its `content`, or a common prefix. Entries of the same name and `rank` are the same."""

    name: bytes
    kind: Kind
    rank: tuple[Any, ...] = ()
    content: T | None = None


class Rows(NamedTuple, Generic[T]):
    """Rows in order. Nothing is known from the place `end` on; None: these are all.

    `has_more`: a later row is certainly listed, unless an earlier source has deleted it.
    """

    rows: Sequence[PageRow[T]]
    end: bytes | None = None
    has_more: bool = False


ListSource: TypeAlias = Callable[[ListRequest], Awaitable[Rows[T]]]
"""Returns rows of a request from its start on: `limit` of them, or all, or those known at once."""


class MergedPage(Generic[T]):
    """A page that grows from the end of one source's rows to the next."""

    def __init__(self, wanted: ListRequest, sources: Sequence[ListSource[T]]) -> None:
        self._wanted = wanted
        self._sources = sources
        self.rows: list[PageRow[T]] = []
        self.is_truncated = False

    async def fill(self) -> None:
        """Take rows until the page is full, or the sources have no more. Raises as they do."""
        wanted = self._wanted
        if wanted.limit == 0:
            await self._sources[-1](wanted)  # raises if there is no such bucket
            return
        while True:
            found = await self._seek(wanted)
            end = min((rows.end for rows in found if rows.end is not None), default=None)
            for row in _first_words(found, end):
                is_listed = row.kind in _LISTED or (
                    row.kind is Kind.DOUBTFUL_PREFIX and await self._is_anything_below(row, wanted)
                )
                if is_listed and not self._room():
                    self.is_truncated = True
                    return
                if is_listed:
                    self.rows.append(row)
                if end is not None and row.kind in _PREFIXES:
                    end = max(end, prefix_end(row.name))  # a source may end within it
            if end is None:
                return
            if not self._room() and _is_more(found, end):
                self.is_truncated = True
                return
            wanted = replace(wanted, begin=end)

    async def _seek(self, wanted: ListRequest) -> list[Rows[T]]:
        """Return the next rows of each source; of later ones, as many more as earlier ones may take away."""
        found: list[Rows[T]] = []
        limit = max(self._room(), 1)
        for source in self._sources:
            found.append(await source(replace(wanted, limit=min(limit, PAGE_KEYS_MAX))))
            limit += sum(row.kind not in _LISTED for row in found[-1].rows)
        return found

    async def _is_anything_below(self, prefix: PageRow[T], wanted: ListRequest) -> bool:
        below = MergedPage(ListRequest(prefix.name, limit=1, begin=wanted.begin), self._sources)
        await below.fill()
        return bool(below.rows)

    def _room(self) -> int:
        return self._wanted.limit - len(self.rows)


def _first_words(found: Sequence[Rows[T]], end: bytes | None) -> Iterator[PageRow[T]]:
    """Yield, in order, each name before `end` once, by the first source that has it."""
    named = [[row for row in rows.rows if end is None or row.name < end] for rows in found]
    in_order: Iterable[PageRow[T]] = merge(*named, key=_identity)  # for equal rows, the first source's come first
    for _, rows in groupby(in_order, key=_identity):
        yield next(rows)


def _identity(row: PageRow[T]) -> tuple[Any, ...]:
    return row.name, row.rank


def _is_more(found: Sequence[Rows[T]], end: bytes) -> bool:
    """Return whether something from `end` on is certainly listed, because no earlier source may take it away."""
    for rows in found:
        left = [row for row in rows.rows if row.name >= end]
        if rows.has_more or any(row.kind in _LISTED for row in left):
            return True
        if left or rows.end is not None:
            return False
    return False
