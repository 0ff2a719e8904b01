"""What the catalog and the small answers tell whoever counts: called on the event loop, must not block."""

from __future__ import annotations

from typing import Protocol


class CatalogObserver(Protocol):
    """Events of one process's catalog."""

    def looked_up(self, slot: str, outcome: str) -> None:
        """A question about an object in a slot that lets the catalog answer.

        `outcome`: hit (there is such an object), listed (so too, as a listing has shown since), absent (there is
        none), miss (the origin was asked), stale (it was asked, did not answer, and the slot allows an older answer).
        """

    def not_kept(self, count: int) -> None:
        """Answers of the origin that were not remembered: too many at once, or the disk could not take them."""

    def listed(self, slot: str, outcome: str) -> None:
        """A page of a listing in slots that let the index answer.

        `outcome`: hit, miss or stale, as above; partial: a hit for which the origin was asked about keys just written.
        """

    def keys_not_kept(self, count: int) -> None:
        """Keys that the origin has listed and the index has not kept: too many at once, or the disk is in trouble."""


class SilentCatalogObserver:
    """Counts nothing."""

    def looked_up(self, slot: str, outcome: str) -> None:
        return

    def not_kept(self, count: int) -> None:
        return

    def listed(self, slot: str, outcome: str) -> None:
        return

    def keys_not_kept(self, count: int) -> None:
        return


class AnswersObserver(Protocol):
    """Events of one process's small answers."""

    def answered(self, operation: str, outcome: str) -> None:
        """A question that may be answered from memory. `outcome`: hit, miss or stale, as for the catalog."""

    def trouble(self, kind: str) -> None:
        """The disk did not give or take an answer (unavailable), or gave what was not written (damaged)."""


class SilentAnswersObserver:
    """Counts nothing."""

    def answered(self, operation: str, outcome: str) -> None:
        return

    def trouble(self, kind: str) -> None:
        return
