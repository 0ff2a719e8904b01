"""What the origin has said of parts of a bucket, on its way into the index. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.metadata.listing.pages import Listed
from gateway.metadata.records import Learned
from gateway.s3.list_result import EntryForm


@dataclass(frozen=True, slots=True)
class Asked:
    """The moment in which the origin was asked: `learned.generation` is the bucket's, `number` that of own writes."""

    learned: Learned
    number: int


@dataclass(frozen=True, slots=True)
class Batch:
    """All that there is in [start, stop) of a bucket, in order. Records give their forms by places in `forms`.

    Neighbours in time up to `merge_seconds` apart may become one.
    """

    bucket: str
    start: bytes
    stop: bytes
    listed: Sequence[Listed]
    forms: Sequence[EntryForm]
    asked: Asked
    merge_seconds: float

    def until(self, place: bytes) -> Batch:
        """Its part before a place."""
        return replace(self, stop=place, listed=self.listed[: bisect_left(self.listed, (place, b""))])

    def behind(self, place: bytes) -> Batch:
        """Its part from a place on."""
        return replace(self, start=place, listed=self.listed[bisect_left(self.listed, (place, b"")) :])
