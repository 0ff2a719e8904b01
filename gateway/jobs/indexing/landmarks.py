"""Keys at about equal distances, so that a later crawl can cut what is to be listed into equal shares. Pure."""

from __future__ import annotations

from collections.abc import Sequence

KEPT_MAX = 8192
"""A megabyte; so many shares are more than any crawl has listers."""


class Landmarks:
    """The last keys of pages, in whatever order they come: one of each `stride`, so that no more than KEPT_MAX stay."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._stride = 1
        self._seen = 0

    def add(self, key: bytes) -> None:
        """A page ends with this key."""
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
