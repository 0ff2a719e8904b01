"""The parts of the cache directory that the background process lends to the admin port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol, TypeVar

from gateway.admin.responses import Refused
from gateway.api import documents as to
from gateway.core.errors import BufferUnavailable
from gateway.core.model import ObjectKey
from gateway.s3.events import ObjectEvent

if TYPE_CHECKING:
    from gateway.jobs.runner import Jobs
    from gateway.jobs.snapshot_service import SnapshotService
    from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin

T = TypeVar("T")


class Changes(Protocol):
    """`operations.origin_events.OriginEvents`, which applies events."""

    async def apply(self, events: Sequence[ObjectEvent]) -> list[str | None]:
        """Return why each was left alone, None where it was applied."""


class Explains(Protocol):
    """`jobs.explaining.Explainer`."""

    async def explain(self, key: ObjectKey) -> to.ExplanationDocument: ...


class Indexes(Protocol):
    """`jobs.indexing.indexes.Indexes`."""

    def documents(self) -> list[to.Index]: ...


class Scrubs(Protocol):
    """`blocks.scrubber.Scrubber`; its progress has the fields of a `Scrub`."""

    @property
    def progress(self) -> object | None: ...


@dataclass(slots=True)
class Backends:
    """A part is None while the cache directory is not open."""

    jobs: Jobs | None = None
    changes: Changes | None = None
    snapshots: SnapshotService | None = None
    explainer: Explains | None = None
    indexes: Indexes | None = None
    writeback: WritebackAdmin | NoWriteback | None = None
    scrubber: Scrubs | None = None

    def take_back(self) -> None:
        """Lend nothing any more."""
        for one in fields(self):
            setattr(self, one.name, None)

    async def pending(self) -> to.Writeback | None:
        """Return what the origin does not have yet, slot by slot; None while that is not known."""
        try:
            return await self.writeback.summary() if self.writeback is not None else None
        except BufferUnavailable:
            return None


def opened(part: T | None) -> T:
    """Return the part, or refuse the request while the cache directory is not open."""
    if part is None:
        raise Refused(503, "the cache directory is not open yet")
    return part
