"""The parts that jobs use."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.blocks.cache import BlockCache
from gateway.core.clock import Clock
from gateway.core.model import Homes
from gateway.metadata.catalog import Catalog
from gateway.metadata.snapshots.store import SnapshotStore
from gateway.origin.client import Origin
from gateway.policy.slots import Slots


@dataclass(frozen=True, slots=True)
class JobDependencies:
    """The parts that jobs use. `homes` says where buckets are, as snapshots record it."""

    origin: Origin
    catalog: Catalog
    blocks: BlockCache
    slots: Slots
    clock: Clock
    snapshots: SnapshotStore | None = None
    homes: Homes = field(default_factory=lambda: Homes(""))
