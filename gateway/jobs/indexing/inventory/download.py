"""Fetching an inventory: its manifest, and its files one by one, verified, into a scratch directory."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Protocol

from gateway.clock import Clock
from gateway.errors import OriginAnswered, StoreUnavailable
from gateway.jobs.indexing.inventory.manifest import BadInventory, InventoryFile, Manifest, parse_manifest
from gateway.jobs.patience import patiently
from gateway.origin.client import Origin, OriginRequest, OriginResponse, Purpose
from gateway.policy.prefixes import Prefix

_MANIFEST_BYTES_MAX = 64 * 1024**2
_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024


class Tools(Protocol):
    """What is needed (`jobs.work.Tools`)."""

    @property
    def origin(self) -> Origin: ...

    @property
    def clock(self) -> Clock: ...


class InventorySource:
    """The bucket that an inventory lies in, read on the account of slot `slot`."""

    def __init__(self, tools: Tools, url: str, slot: str) -> None:
        place = Prefix.parse(url)
        self._tools = tools
        self._bucket = place.bucket
        self._manifest_key = place.key_prefix
        self._slot = slot

    async def manifest(self) -> Manifest:
        """Raises BadInventory, OriginAnswered, OriginUnreachable and OriginBodyError."""

        async def ask() -> bytes:
            async with await self._send(self._manifest_key) as response:
                return await response.read(_MANIFEST_BYTES_MAX)

        return parse_manifest(await patiently(self._tools.clock, ask))

    async def fetch(self, file: InventoryFile, path: Path) -> None:
        """Raises as `manifest`, and StoreUnavailable when the disk does not take it."""

        async def ask() -> None:
            digest, size_bytes = hashlib.md5(usedforsecurity=False), 0
            async with await self._send(file.key) as response:
                with await asyncio.to_thread(path.open, "wb") as target:
                    async for piece in response.stream():
                        digest.update(piece)
                        size_bytes += len(piece)
                        await asyncio.to_thread(target.write, piece)
            if (size_bytes, digest.hexdigest()) != (file.size_bytes, file.md5):
                raise BadInventory(f"{file.key} has not the size and MD5 that the manifest says")

        try:
            await patiently(self._tools.clock, ask)
        except OSError as error:
            raise StoreUnavailable(f"an inventory cannot be kept for sorting: {error}") from error

    async def _send(self, key: str) -> OriginResponse:
        request = OriginRequest("GET", self._bucket, key, purpose=Purpose.REFRESH, slot=self._slot)
        response = await self._tools.origin.send(request)
        if response.status == 200:
            return response
        async with response:
            document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
            raise OriginAnswered(response.status, list(response.headers.items()), document)
