"""What the background process lends to the admin port while it has it: each part has a place, empty until then."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.admin.events import ChangesHolder
from gateway.admin.explain import ExplainHolder
from gateway.admin.indexes import IndexHolder
from gateway.admin.jobs import JobsHolder
from gateway.admin.scrub import ScrubHolder
from gateway.admin.snapshots import SnapshotsHolder
from gateway.admin.writeback import WritebackHolder


@dataclass(frozen=True, slots=True)
class Holders:
    """One for each part."""

    jobs: JobsHolder = field(default_factory=JobsHolder)
    scrub: ScrubHolder = field(default_factory=ScrubHolder)
    changes: ChangesHolder = field(default_factory=ChangesHolder)
    explain: ExplainHolder = field(default_factory=ExplainHolder)
    indexes: IndexHolder = field(default_factory=IndexHolder)
    snapshots: SnapshotsHolder = field(default_factory=SnapshotsHolder)
    writeback: WritebackHolder = field(default_factory=WritebackHolder)
