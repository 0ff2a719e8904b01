"""What the catalog tells whoever counts: called on the event loop, must not block."""

from __future__ import annotations

from typing import Protocol


class CatalogObserver(Protocol):
    """Events of one process's catalog."""

    def looked_up(self, slot: str, outcome: str) -> None:
        """A question about an object in a slot that lets the catalog answer.

        `outcome`: hit (there is such an object), absent (there is none), miss (the origin was asked), stale (it was
        asked, did not answer, and the slot allows an older answer).
        """

    def not_kept(self, count: int) -> None:
        """Answers of the origin that were not remembered: too many at once, or the disk could not take them."""


class SilentCatalogObserver:
    """Counts nothing."""

    def looked_up(self, slot: str, outcome: str) -> None:
        return

    def not_kept(self, count: int) -> None:
        return
