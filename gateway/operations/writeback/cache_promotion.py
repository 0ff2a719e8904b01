"""Give the block cache what the buffer has: flushed objects, and the checkpoints that stay readable.

The staged files become blocks under a second name, without a copy; blocks that are not whole in one file are fetched
when they are read. Without room for them nothing is lost. If the slot remembers, the origin is asked once for the
object's head, so that a restore needs no question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from gateway.blocks.cache import BlockCache
from gateway.blocks.store import IngestedFile
from gateway.core.errors import BlockError, BufferDamaged, OriginError, PinRefused, S3Error
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.metadata.catalog import CHECKSUM_MODE, Catalog, is_remembered
from gateway.operations.write_scope import WriteScope, invalidate
from gateway.policy.slots import Prefix, Slots
from gateway.writeback.admin.checkpoint_retention import KeptCheckpoint
from gateway.writeback.journal.records import Write
from gateway.writeback.staged_file import Staging

_HEADERS = {CHECKSUM_MODE: "ENABLED"}
"""The headers of most clients' reads; the answer also serves reads without them."""

LEARN_SECONDS = 1.0
"""The object stays pending until this question ends, so a slow origin is not waited for longer."""


class CachePromoter:
    """Updates catalog, listing index and blocks (implements `writeback.flushing.flush_task.Publication`)."""

    def __init__(self, catalog: Catalog, blocks: BlockCache, slots: Slots, staging: Staging) -> None:
        self._catalog = catalog
        self._blocks = blocks
        self._slots = slots
        self._staging = staging

    async def publish(self, pending: Write, etag: str | None) -> None:
        """Publish the origin's version; None: the key is deleted."""
        key, slot = pending.key, self._slots.find(*pending.key)
        await self._blocks.invalidate(key)
        if etag is not None:
            with suppress(BlockError, BufferDamaged):  # no room, a disk fault, or damage: the origin has the bytes
                for ingested in self._ingested(pending, ObjectVersion(key, etag, pending.size_bytes)):
                    await self._blocks.ingest(ingested, slot=slot.name)
        await invalidate(WriteScope(self._catalog, self._slots, key.bucket, [key.key]))
        if etag is not None and is_remembered(slot, _HEADERS):
            with suppress(OriginError, S3Error, TimeoutError):  # then the first reader asks
                async with asyncio.timeout(LEARN_SECONDS):
                    await self._catalog.current(key, slot, headers=_HEADERS, look=True)

    def _ingested(self, pending: Write, version: ObjectVersion) -> Iterator[IngestedFile]:
        offset = 0
        for part in pending.parts:
            if part.file.is_here:
                path, checksums = self._staging.path(part.file), partial(self._staging.checksums, part.file)
                yield IngestedFile(path, version, offset, part.file.size_bytes, checksums)
            offset += part.file.size_bytes


class KeptCheckpoints:
    """The kept checkpoints of one block cache (implements `CheckpointCache`)."""

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._held = dict[ObjectKey, tuple[int, tuple[object, ...]]]()
        self._refused = dict[ObjectKey, str]()

    async def keep(self, checkpoints: Sequence[KeptCheckpoint]) -> Mapping[ObjectKey, str]:
        """Pin these checkpoints, and unpin others. Pins by hand stay. Nothing is fetched."""
        names = {one.name: str(Prefix(*one.name)) for one in checkpoints}
        try:
            numbers, refused = await self._blocks.keep_only(list(names.values()))
            self._refused = {key: self._refused[key] for key in self._refused.keys() & names.keys()}
            self._held = {key: self._held[key] for key in self._held.keys() & names.keys()}
            for one in checkpoints:
                prefix = names[one.name]
                if prefix in refused:
                    self._refused[one.name] = refused[prefix]
                else:
                    await self._hold(one, numbers[prefix])
        except BlockError as error:
            return {name: str(error) for name in names}
        return dict(self._refused)

    async def _hold(self, one: KeptCheckpoint, number: int) -> None:
        """Pin blocks that came into the cache before the pin, or without it; once for each state of the checkpoint."""
        seen = number, one.mark
        if self._held.get(one.name) == seen:
            return
        is_whole = True
        try:
            for key, size_bytes in one.objects:
                is_whole = await self._blocks.hold_object(key, number) >= size_bytes and is_whole
        except PinRefused as error:
            self._refused[one.name] = str(error)
            return
        if not is_whole:
            # There was no room for it, or it was never in the cache. Looked at again each time: blocks that are
            # read from the origin come into the cache, and stay.
            self._refused[one.name] = "not all of it is in the cache"
            self._held.pop(one.name, None)
        else:
            self._refused.pop(one.name, None)
            self._held[one.name] = seen
