"""One page of a listing of which a part is frozen: that part from its snapshot, the rest from the origin, in order.

What is listed is what a bucket would hold whose frozen parts are as the snapshots have them, and whose other parts are
as the origin has them now, to the letter; a common prefix is listed when there is a key below it in either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.metadata.listing.pages import Listed, ListRequest, Page, key_successor, prefix_end
from gateway.operations.frozen.places import Part
from gateway.s3.list_result import ListedEntry, ListedPage

AskOrigin = Callable[[bytes, ListRequest], Awaitable[ListedPage]]
"""The origin's page of what lies from a place on, and nothing before it, with its prefix, delimiter and limit.

Keys and prefixes are missing only where there are no more. A common prefix that the place lies within may be missing.
"""

Reader = Callable[[bytes, bytes, int], Sequence[Listed]]
"""A snapshot's keys (`listing.pages.Keys.read`)."""

Numbered = Callable[[ListedEntry], Listed]
"""An entry of the origin as it goes into a page."""

_FROZEN_AT_ONCE = 64


@dataclass(slots=True)
class Mixing:
    """The page that grows, from part to part."""

    wanted: ListRequest
    ask: AskOrigin
    readers: Mapping[str, Reader]
    numbered: Numbered
    page: Page = field(default_factory=Page)

    async def fill(self, parts: Sequence[Part]) -> Page:
        """The page; raises what the origin raises."""
        place = self.wanted.start
        for part in parts:
            place = max(place, part.start)
            while place < part.stop and not self.page.is_truncated and self.wanted.limit:
                place = await (self._of_origin(place, part.stop) if part.slot is None else self._frozen(place, part))
        return self.page

    async def _frozen(self, place: bytes, part: Part) -> bytes:
        """Take what the snapshot has next; where to go on."""
        if part.slot is None:
            raise ValueError("the part is not frozen")
        found = self.readers[part.slot.name](place, part.stop, _FROZEN_AT_ONCE)
        for key, record in found:
            common = self.wanted.rolled_up(key)
            if common is not None:
                return self._take_prefix(common)
            self._take_key((key, record))
        return key_successor(found[-1][0]) if len(found) == _FROZEN_AT_ONCE else part.stop

    async def _of_origin(self, place: bytes, stop: bytes) -> bytes:
        """Take what the origin has next before `stop`; where to go on."""
        inside = self.wanted.rolled_up(place)
        if inside is not None and inside < place:
            return await self._rest_of(inside, place, stop)  # the origin leaves out a common prefix it begins within
        told = await self.ask(place, self._less(self._room() + 1))
        rows: list[ListedEntry | bytes] = sorted(
            [*told.entries, *told.prefixes], key=lambda row: row if isinstance(row, bytes) else row.key
        )
        for row in rows:
            if (row if isinstance(row, bytes) else row.key) >= stop or self.page.is_truncated:
                return stop
            if isinstance(row, bytes):
                if prefix_end(row) > stop:
                    return await self._rest_of(row, max(row, place), stop)
                place = self._take_prefix(row)
            else:
                self._take_key(self.numbered(row))
                place = key_successor(row.key)
        return stop if told.next_token is None else place

    async def _rest_of(self, common: bytes, place: bytes, stop: bytes) -> bytes:
        """List a common prefix if the origin has a key below it between `place` and `stop`; where to go on."""
        end = min(stop, prefix_end(common))
        if not self.wanted.is_behind(common):
            return end
        told = await self.ask(place, ListRequest(common, limit=2))
        return self._take_prefix(common) if told.entries and told.entries[0].key < end else end

    def _less(self, limit: int) -> ListRequest:
        return ListRequest(self.wanted.prefix, self.wanted.delimiter, min(limit, 1000))

    def _room(self) -> int:
        return self.wanted.limit - len(self.page.keys) - len(self.page.prefixes)

    def _take_key(self, listed: Listed) -> None:
        page = self.page
        if not self._room():
            page.is_truncated = True
        if not page.is_truncated:
            page.keys.append(listed)
            page.last, page.last_is_prefix = listed[0], False

    def _take_prefix(self, common: bytes) -> bytes:
        """Behind all that is under it, where the listing goes on."""
        page = self.page
        if self.wanted.is_behind(common):
            if not self._room():
                page.is_truncated = True
            else:
                page.prefixes.append(common)
                page.last, page.last_is_prefix = common, True
        return prefix_end(common)
