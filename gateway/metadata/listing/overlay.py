"""Keys that were written through this gateway, laid over what the index knows of the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from gateway.metadata.listing.pages import Keys, Listed, Page, Record, Wanted
from gateway.metadata.listing.places import behind

WRITTEN_MAX = 256
"""Written keys between two others: with more, it is not known what lies there."""


class Written(Protocol):
    """Where written keys come from."""

    def __call__(self, start: bytes, stop: bytes, count: int) -> list[bytes]:
        """The first `count` written keys of [start, stop), in order."""


class Overlaid:
    """`Keys` of which some are not what the index says: those that were written.

    Of a written key the truth counts: its record, or None where there is no such object. Of one whose truth is not
    there yet it is noted that it was come across, and it is left out. `is_unknown`: there were too many of them.
    """

    def __init__(self, keys: Keys, written: Written, truths: Mapping[bytes, Record | None]) -> None:
        self._keys = keys
        self._written = written
        self._truths = truths
        self._without_truth: dict[bytes, None] = {}
        self.is_unknown = False

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

    def _between(self, start: bytes, stop: bytes) -> list[bytes]:
        found = self._written(start, stop, WRITTEN_MAX)
        self.is_unknown |= len(found) == WRITTEN_MAX
        return found

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
