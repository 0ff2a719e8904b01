"""What was flushed is an object of the origin's from now on: found there, and its bytes stay here as cached blocks.

The staged files become blocks under a second name, without a copy; whatever lies in no file as a whole block is fetched
when it is read. Nothing is lost when there is no room for them. Where the slot remembers, the origin is asked once for
the object's head, so that a restore finds it without a question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from gateway.blocks.cache import BlockCache
from gateway.blocks.filling.hard_link_ingest import OfferedFile
from gateway.core.errors import BlockError, BufferDamaged, OriginError, S3Error
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.metadata.catalog import CHECKSUM_MODE, Catalog, is_remembered
from gateway.operations.visibility import WriteScope, invalidate
from gateway.policy.slots import Slots
from gateway.writeback.files.staged_file import Staging
from gateway.writeback.journal.records import Write

_HEADERS = {CHECKSUM_MODE: "ENABLED"}
"""As most clients ask; what is learned so answers those that ask without it as well."""

LEARN_SECONDS = 1.0
"""What was flushed is pending until this question is over, whoever waits for that: an origin that is slow to answer it
is not waited for."""


class CachePromoter:
    """Tells catalog, listing index and blocks (the method of `writeback.flushing.reconciler.Publication`)."""

    def __init__(self, catalog: Catalog, blocks: BlockCache, slots: Slots, staging: Staging) -> None:
        self._catalog = catalog
        self._blocks = blocks
        self._slots = slots
        self._staging = staging

    async def publish(self, pending: Write, etag: str | None) -> None:
        """The origin has it as this version; None: the key is deleted."""
        await self._blocks.invalidate(pending.key)
        if etag is not None:
            await self._keep(pending, ObjectVersion(pending.key, etag, pending.size_bytes))
        await invalidate(WriteScope(self._catalog, self._slots, pending.key.bucket, [pending.key.key]))
        if etag is not None:
            await self._learn(pending.key)

    async def _learn(self, key: ObjectKey) -> None:
        slot = self._slots.find(key.bucket, key.key)
        if is_remembered(slot, _HEADERS):
            with suppress(OriginError, S3Error, TimeoutError):  # the first reader asks then
                async with asyncio.timeout(LEARN_SECONDS):
                    await self._catalog.current(key, slot, headers=_HEADERS, look=True)

    async def _keep(self, pending: Write, version: ObjectVersion) -> None:
        slot = self._slots.find(pending.key.bucket, pending.key.key).name
        for offered in self._offered(pending, version):
            try:
                await self._blocks.adopt(offered, slot=slot)
            except (BlockError, BufferDamaged):
                return  # no room, a disk in trouble, which was told, or damage since it was sent: the origin has them

    def _offered(self, pending: Write, version: ObjectVersion) -> Iterator[OfferedFile]:
        offset = 0
        for part in pending.parts:
            if part.file.is_here:
                path, checksums = self._staging.path(part.file), partial(self._staging.checksums, part.file)
                yield OfferedFile(path, version, offset, part.file.size_bytes, checksums)
            offset += part.file.size_bytes
