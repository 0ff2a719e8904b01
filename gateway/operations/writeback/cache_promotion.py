"""Makes a flushed object one of the origin's: the catalog finds it there, and its bytes stay here as cached blocks.

The staged files become blocks under a second name, without a copy; blocks that are not whole in one file are fetched
when they are read. Without room for them nothing is lost. If the slot remembers, the origin is asked once for the
object's head, so that a restore needs no question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from gateway.blocks.cache import BlockCache
from gateway.blocks.store import IngestedFile
from gateway.core.errors import BlockError, BufferDamaged, OriginError, S3Error
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.metadata.catalog import CHECKSUM_MODE, Catalog, is_remembered
from gateway.operations.visibility import WriteScope, invalidate
from gateway.policy.slots import Slots
from gateway.writeback.journal.records import Write
from gateway.writeback.staged_file import Staging

_HEADERS = {CHECKSUM_MODE: "ENABLED"}
"""The headers of most clients' reads; the answer also serves reads without them."""

LEARN_SECONDS = 1.0
"""The object stays pending until this question ends, so a slow origin is not waited for longer."""


class CachePromoter:
    """Updates catalog, listing index and blocks (implements `writeback.flushing.reconciler.Publication`)."""

    def __init__(self, catalog: Catalog, blocks: BlockCache, slots: Slots, staging: Staging) -> None:
        self._catalog = catalog
        self._blocks = blocks
        self._slots = slots
        self._staging = staging

    async def publish(self, pending: Write, etag: str | None) -> None:
        """Publish the origin's version; None: the key is deleted."""
        await self._blocks.invalidate(pending.key)
        if etag is not None:
            await self._keep(pending, ObjectVersion(pending.key, etag, pending.size_bytes))
        await invalidate(WriteScope(self._catalog, self._slots, pending.key.bucket, [pending.key.key]))
        if etag is not None:
            await self._learn(pending.key)

    async def _learn(self, key: ObjectKey) -> None:
        slot = self._slots.find(key.bucket, key.key)
        if is_remembered(slot, _HEADERS):
            with suppress(OriginError, S3Error, TimeoutError):  # then the first reader asks
                async with asyncio.timeout(LEARN_SECONDS):
                    await self._catalog.current(key, slot, headers=_HEADERS, look=True)

    async def _keep(self, pending: Write, version: ObjectVersion) -> None:
        slot = self._slots.find(pending.key.bucket, pending.key.key).name
        for ingested in self._ingested(pending, version):
            try:
                await self._blocks.ingest(ingested, slot=slot)
            except (BlockError, BufferDamaged):
                return  # no room, a reported disk fault, or damage since it was sent: the origin has the bytes

    def _ingested(self, pending: Write, version: ObjectVersion) -> Iterator[IngestedFile]:
        offset = 0
        for part in pending.parts:
            if part.file.is_here:
                path, checksums = self._staging.path(part.file), partial(self._staging.checksums, part.file)
                yield IngestedFile(path, version, offset, part.file.size_bytes, checksums)
            offset += part.file.size_bytes
