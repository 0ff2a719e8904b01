"""Files for clients that read blocks themselves (edge/local_port.py); prepared reads say which."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gateway.blocks.cache import BlockCache
from gateway.blocks.handed_out import HandedOut as HandedOut
from gateway.blocks.handed_out import MayRead
from gateway.blocks.handed_out import Place as Place
from gateway.disk.file_lease import FileLease, SharedFile
from gateway.operations.context import AppContext
from gateway.operations.prepared_reads import PreparedRead as PreparedRead
from gateway.operations.prepared_reads import Reads as Reads
from gateway.operations.prepared_reads import SharedRead as SharedRead
from gateway.operations.prepared_reads import StrictRead as StrictRead


class LocalFiles:
    """The files of one worker's blocks."""

    def __init__(self, services: AppContext) -> None:
        self._services = services

    async def open(
        self, wanted: Mapping[bytes, Place], whole: Collection[bytes], may_read: MayRead | None
    ) -> Mapping[bytes, FileLease[SharedFile]]:
        """Open files, by their ids, as far as they are there, and the caller may have them.

        A caller gets a file of several objects only if it may read each of them (`may_read`; None: all there are), and
        if the file is among `whole`: it may read all of the slot.
        """
        blocks = self._services.blocks
        if not wanted or not isinstance(blocks, BlockCache):
            return {}

        def nothing(_: object) -> bool:
            return False

        ids = list(wanted)
        extents = [(wanted[one].extent, may_read if one in whole or may_read is None else nothing) for one in ids]
        opened = await blocks.open_for_client(extents)
        return {one: lease for one, lease in zip(ids, opened, strict=True) if lease is not None}

    async def drop_if_damaged(self, places: Sequence[Place], slot: str) -> None:
        if isinstance(self._services.blocks, BlockCache):
            await self._services.blocks.drop_if_damaged(places, slot)
