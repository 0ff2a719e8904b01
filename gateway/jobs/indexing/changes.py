"""What a crawl has found changed: forgotten by the catalog, and its blocks dropped."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.blocks.cache import BlockCache
from gateway.metadata.catalog import Catalog
from gateway.metadata.listing.ranges import Batch
from gateway.metadata.listing.records import unpack
from gateway.objects import ObjectKey, ObjectVersion


async def drop_changed(catalog: Catalog, blocks: BlockCache, batch: Batch, changed: Sequence[bytes]) -> int:
    """Of the keys that the index knew otherwise than the origin has listed them in `batch`; how many were dropped.

    Those of which the catalog has learned just what is listed are left alone: they were written through this gateway,
    or looked up since, and their blocks are those of the version that is there.
    """
    listed, dropped = dict(batch.listed), 0
    for raw in changed:
        key = ObjectKey(batch.bucket, raw.decode())
        record = listed.get(raw)
        if record is not None:
            entry = unpack(raw, record, batch.forms)
            if catalog.has_learned(ObjectVersion(key, entry.etag, entry.size_bytes)):
                continue
        catalog.forget(key)
        await blocks.invalidate(key)
        dropped += 1
    return dropped
