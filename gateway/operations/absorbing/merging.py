"""One page of a listing with what is pending in it: the page of the bucket as if all of it had been flushed.

What is pending is read before the page without it is asked for: what the flush takes from the one to the other in
between is in both, and nothing is missed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from gateway.metadata.listing.index import Found
from gateway.metadata.listing.pages import Listed, ListRequest, Page
from gateway.metadata.listing.records import form_of, pack, with_form
from gateway.operations.absorbing.pending_rows import Fate, PendingRow, PendingRows
from gateway.s3.list_query import PAGE_KEYS_MAX
from gateway.s3.list_result import EntryForm, ListedEntry
from gateway.s3.list_token import ListPlace
from gateway.writeback.journal.records import PendingObject

Look = Callable[[ListRequest, int], Awaitable[PendingRows]]
"""What is pending (pending_rows.py): so many rows, or all."""

Ask = Callable[[ListRequest], Awaitable[Found]]
"""The page without what is pending. One that is truncated is not empty."""

ROWS_AT_LEAST = 128
"""Rows of what is pending that are read for a page, however small: they may be tombstones."""


class Merging:
    """The page that grows, from the places where one of its two sources ends to the next.

    Entries of pending objects have an owner of None until somebody gives them another (`forms`).
    """

    def __init__(
        self, wanted: ListRequest, look: Look, ask: Ask, entry: Callable[[PendingObject], ListedEntry]
    ) -> None:
        self._wanted = wanted
        self._look = look
        self._ask = ask
        self._entry = entry
        self._numbers: dict[EntryForm, int] = {}
        self._page = Page()

    @property
    def forms(self) -> list[EntryForm]:
        """By the numbers that the page's records have."""
        return list(self._numbers)

    async def page(self) -> Page:
        """Raises what the sources raise."""
        wanted = self._wanted
        if wanted.limit == 0:
            await self._ask(wanted)  # that there is such a bucket
            return self._page
        while True:
            rows = await self._look(wanted, max(self._room() + 1, ROWS_AT_LEAST))
            left_out = sum(row.fate is not Fate.LISTED for row in rows.rows)
            limit = min(max(self._room(), 1) + left_out, PAGE_KEYS_MAX)
            found = await self._ask(replace(wanted, limit=limit))
            end = _end_of_both(rows, found.page)
            await self._take(rows, found, end)
            if self._page.is_truncated or end is None:
                return self._page
            wanted = replace(wanted, after=end.last, skip=end.is_prefix)

    async def _take(self, rows: PendingRows, found: Found, end: ListPlace | None) -> None:
        """All that is known by both sources."""
        pending = {row.name: row for row in rows.rows}
        keys = dict(found.page.keys)
        for name in sorted({*pending, *keys, *found.page.prefixes}):
            if end is not None and name > end.last:
                break
            await self._take_one(name, pending.get(name), found, keys.get(name))
            if self._page.is_truncated:
                return
        self._page.is_truncated = not self._room() and end is not None and _is_more(rows, found.page, end)

    async def _take_one(self, name: bytes, row: PendingRow | None, found: Found, record: bytes | None) -> None:
        if row is not None and row.pending is not None:
            if row.fate is Fate.LISTED:
                self._add_key(self._pending(row.pending))
        elif record is not None:
            number = self._number(found.forms[form_of(record)])
            self._add_key((name, with_form(record, number)))
        elif row is None or row.fate is Fate.LISTED or await self._is_anything(name):
            self._add_prefix(name)

    async def _is_anything(self, common: bytes) -> bool:
        """Whether a common prefix stands for anything that is not deleted."""
        below = await Merging(ListRequest(common, limit=1), self._look, self._ask, self._entry).page()
        return bool(below.keys)

    def _pending(self, pending: PendingObject) -> Listed:
        entry = self._entry(pending)
        return entry.key, pack(entry, self._number(entry.form))

    def _number(self, form: EntryForm) -> int:
        return self._numbers.setdefault(form, len(self._numbers))

    def _add_key(self, listed: Listed) -> None:
        page = self._page
        page.is_truncated = not self._room()
        if not page.is_truncated:
            page.keys.append(listed)
            page.last, page.last_is_prefix = listed[0], False

    def _add_prefix(self, common: bytes) -> None:
        page = self._page
        page.is_truncated = not self._room()
        if not page.is_truncated:
            page.prefixes.append(common)
            page.last, page.last_is_prefix = common, True

    def _room(self) -> int:
        return self._wanted.limit - len(self._page.keys) - len(self._page.prefixes)


def _end_of_both(rows: PendingRows, page: Page) -> ListPlace | None:
    """Up to where both are known; None: to the end."""
    ends = [] if rows.end is None else [rows.end]
    if page.is_truncated:
        ends.append(ListPlace(page.last, page.last_is_prefix))
    return min(ends, default=None)


def _is_more(rows: PendingRows, page: Page, end: ListPlace) -> bool:
    """Whether it is certain that something is listed behind `end`."""
    left = [row for row in rows.rows if row.name > end.last]
    if any(row.fate is Fate.LISTED for row in left):
        return True
    return page.is_truncated and rows.end is None and not left
