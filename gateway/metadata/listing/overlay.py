"""Keys that were written through this gateway, laid over what the index knows of the rest. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from gateway.metadata.listing.pages import Keys, Listed, Page, Record, Wanted
from gateway.metadata.listing.places import behind


class Overlaid:
    """`Keys` of which some are not what the index says. `written` are those, in order.

    Of a written key the truth counts: its record, or None where there is no such object. Of one whose truth is not
    there yet it is noted that it was come across, and it is left out.
    """

    def __init__(self, keys: Keys, written: list[bytes], truths: Mapping[bytes, Record | None]) -> None:
        self._keys = keys
        self._written = written
        self._truths = truths
        self._without_truth: dict[bytes, None] = {}

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        found: list[Listed] = []
        while len(found) < count:
            below = self._keys.read(start, stop, count)
            end = behind(below[-1][0]) if len(below) == count else stop
            found += self._merged(below, self._between(start, end))
            if end == stop:
                break
            start = end
        return found[:count]

    def needed(self, wanted: Wanted, page: Page) -> list[bytes]:
        """Of the keys come across without their truth, those that may make another page of it.

        A common prefix that is listed because of another key is listed whatever becomes of them.
        """
        listed = frozenset(page.prefixes)
        end = behind(page.last) if page.is_truncated else wanted.stop
        return [key for key in self._without_truth if key < end and wanted.rolled_up(key) not in listed]

    def _between(self, start: bytes, stop: bytes) -> Iterable[bytes]:
        return self._written[bisect_left(self._written, start) : bisect_left(self._written, stop)]

    def _merged(self, below: list[Listed], written: Iterable[bytes]) -> list[Listed]:
        merged = dict(below)
        for key in written:
            merged.pop(key, None)
            if key not in self._truths:
                self._without_truth[key] = None
                continue
            record = self._truths[key]
            if record is not None:
                merged[key] = record
        return sorted(merged.items())
