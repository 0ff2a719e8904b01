"""Keeps the newest checkpoints in the cache (`keep_last`): their flushed objects are pinned, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.blocks.cache import BlockCache
from gateway.core.errors import BlockError, PinRefused
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_retention import KeptCheckpoint


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
