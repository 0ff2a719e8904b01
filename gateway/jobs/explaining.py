"""`forebay explain`: everything that this node knows about one object, without a request to the origin."""

from __future__ import annotations

import asyncio

from gateway.api import documents as to
from gateway.blocks.plan import Explanation
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.jobs.job import JobDependencies
from gateway.metadata.catalog import CatalogHit
from gateway.metadata.snapshots.registry import OpenSnapshot
from gateway.policy.slots import Prefix, Slot


class Explainer:
    """Looks up what this node knows; changes nothing."""

    def __init__(self, dependencies: JobDependencies) -> None:
        self._dependencies = dependencies

    async def explain(self, key: ObjectKey) -> to.ExplanationDocument:
        """Explain a key, except for its pending writes.

        SnapshotError or S3Error if the snapshot cannot be used, StoreUnavailable.
        """
        dependencies = self._dependencies
        slot = dependencies.slots.find(*key)
        known = dependencies.catalog.explain(key, slot)
        version = known.head.version if known is not None and known.head is not None else None
        if slot.consistency == "snapshot":
            version = await asyncio.to_thread(self._frozen, key, slot)
        found = await dependencies.blocks.explain(key, version, slot.name)
        habits = dependencies.catalog.habits(key.bucket)
        pins = [pin for pin in dependencies.blocks.pins() if Prefix.parse(pin).covers(*key)]
        return to.ExplanationDocument(
            bucket=key.bucket,
            key=key.key,
            slot=_slot(slot),
            known=_known(known, slot, version),
            pins=sorted(pins),
            blocks=_blocks(found),
            owners=[
                to.BlockOwner(address=one.address, this_node=one.is_this_node, first=one.first, second=one.second)
                for one in found.owners
            ],
            held=to.HeldBlocks(blocks=found.holding.blocks, bytes=found.holding.size_bytes),
            why_not_kept=found.why_not_kept or "; ".join(sorted(habits.reasons(version))) or None,
            pending=None,
        )

    def _frozen(self, key: ObjectKey, slot: Slot) -> ObjectVersion | None:
        """As the snapshot has it. Blocks."""
        with self._dependencies.snapshots.opened(slot.snapshot or "") as snapshot:
            found = OpenSnapshot(snapshot).find(key.key)
        return found.version if found is not None else None


def _slot(slot: Slot) -> to.ExplainedSlot:
    return to.ExplainedSlot(
        name=slot.name,
        prefix=str(slot.prefix),
        mode=slot.mode,
        consistency=slot.consistency,
        metadata_ttl_seconds=slot.metadata_ttl_seconds if slot.consistency == "ttl" else None,
        snapshot=slot.snapshot,
        write=slot.write,
        authorization=slot.authorization,
        authorization_ttl_seconds=slot.authorization_ttl_seconds if slot.authorization == "origin" else None,
    )


def _known(known: CatalogHit | None, slot: Slot, version: ObjectVersion | None) -> to.KnownVersion:
    by, state, age_seconds = None, "unknown", None
    if slot.consistency == "snapshot":
        by, state = "snapshot", "fresh"
    elif known is not None:
        by, state, age_seconds = "catalog", known.freshness.value, known.age_seconds
    return to.KnownVersion(
        by=by,
        state=state,
        age_seconds=age_seconds,
        exists=version is not None if by is not None else None,
        etag=version.etag if version is not None else None,
        bytes=version.size_bytes if version is not None else None,
    )


def _blocks(found: Explanation) -> to.ExplainedBlocks | None:
    here = found.here
    if here is None:
        return None
    return to.ExplainedBlocks(
        total=here.blocks,
        looked_at=here.looked_at,
        here=here.here,
        partly_here=here.partly,
        evicted=here.evicted,
        bytes_here=here.here_bytes,
        missing=[[one.first, one.last] for one in here.missing],
    )
