"""S3 Inventory before the first crawl: even shares for listers, and a first listing of `immutable` slots.

An inventory is hours old, may lack recent writes (S3 User Guide, "Amazon S3 Inventory consistency"), and does not say
when it saw a key. So it answers no LIST that has an age bound. In an `immutable` slot without writes it is a listing
of unknown age until the crawl, which always follows, has replaced it.

Its files list keys in any order, and more of them than memory holds: an LMDB environment in a scratch directory brings
them into theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import lmdb

from gateway.core.errors import OriginAnswered, StoreUnavailable
from gateway.jobs.dependencies import JobDependencies
from gateway.jobs.indexing.inventory_files import (
    BadInventory,
    InventoryFile,
    InventoryManifest,
    objects_of,
    parse_manifest,
)
from gateway.jobs.indexing.key_ranges import KeyRange, gaps
from gateway.jobs.indexing.split_points import SplitPoints
from gateway.jobs.retry import with_retries
from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.index import ListingIndex
from gateway.metadata.listing.pages import key_successor
from gateway.metadata.listing.ranges import Batch, QueryStamp
from gateway.metadata.snapshots.staging import ObjectTable
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.policy.slots import Prefix, Slot

P = ParamSpec("P")
T = TypeVar("T")

UNKNOWN_BOOT = 0
"""The boot number of inventory entries, whose age is unknown. A real boot has this number once in 2 to the 32."""

SPLIT_POINT_EVERY = 1000
_LANDED_AT_ONCE = 4096
_BEFORE_EVERY_WRITE = -1
_MANIFEST_BYTES_MAX = 64 * 1024**2
_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024


class InventoryStart:
    """One inventory's part in the beginning of one slot's index: `url` names its manifest.json."""

    def __init__(self, dependencies: JobDependencies, index: ListingIndex, slot: Slot, url: str, scratch: Path) -> None:
        self._dependencies = dependencies
        self._index = index
        self._slot = slot
        self._manifest = Prefix.parse(url)
        self._directory = scratch / slot.name
        self._split_points = SplitPoints()
        self._seen = 0
        self._is_over = False

    async def read(self, parts: Sequence[KeyRange]) -> Sequence[bytes]:
        """SplitPoints for the crawl. Where it may, all of `parts` that is not known is taken from the inventory.

        Raises BadInventory, OriginError, and StoreUnavailable when the disk does not take it.
        """
        manifest = await self._fetch_manifest()
        if manifest.source_bucket != self._slot.prefix.bucket:
            raise BadInventory(f"it is of bucket {manifest.source_bucket}, and not of {self._slot.prefix.bucket}")
        generation = self._index.moment(manifest.source_bucket).epoch
        try:
            await asyncio.to_thread(self._make_directory)
            for file in manifest.files:
                path = self._directory / "file"
                await self._fetch(file, path)
                await self._in_thread(self._sort, path, manifest)
            if self._stands_for_a_listing and self._seen:
                await self._land(parts, generation)
        except (OSError, lmdb.Error) as error:
            raise StoreUnavailable(f"an inventory cannot be sorted: {error}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        return self._split_points.sorted()

    @property
    def _stands_for_a_listing(self) -> bool:
        return self._slot.consistency == "immutable" and self._slot.mode == "read-only"

    def _make_directory(self) -> None:
        """One that is empty, whatever a killed process has left."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700, parents=True)

    async def _in_thread(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Return the result of `work`. A cancelled caller waits for its end before it closes what `work` reads."""
        running = asyncio.create_task(asyncio.to_thread(work, *arguments, **options))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._is_over = True
            await asyncio.wait({running})
            raise

    # Fetching.

    async def _fetch_manifest(self) -> InventoryManifest:
        async def ask() -> bytes:
            async with await self._send(self._manifest.key_prefix) as response:
                return await response.read(_MANIFEST_BYTES_MAX)

        return parse_manifest(await with_retries(self._dependencies.clock, ask))

    async def _fetch(self, file: InventoryFile, path: Path) -> None:
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

        await with_retries(self._dependencies.clock, ask)

    async def _send(self, key: str) -> OriginResponse:
        request = OriginRequest("GET", self._manifest.bucket, key, purpose=Purpose.REFRESH, slot=self._slot.name)
        response = await self._dependencies.origin.send(request)
        if response.status == 200:
            return response
        async with response:
            document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
            raise OriginAnswered(response.status, list(response.headers.items()), document)

    # Sorting.

    def _sort(self, path: Path, manifest: InventoryManifest) -> None:
        prefix = self._slot.prefix.key_prefix.encode()
        with self._sorted() as objects:
            for entries in objects_of(path, manifest):
                if self._is_over:
                    return
                ours = [entry for entry in entries if entry.key.startswith(prefix)]
                first = (-self._seen - 1) % SPLIT_POINT_EVERY
                for entry in ours[first::SPLIT_POINT_EVERY]:
                    self._split_points.add(entry.key)
                self._seen += len(ours)
                if self._stands_for_a_listing:
                    objects.add_missing(ours)
        path.unlink()

    @contextmanager
    def _sorted(self) -> Iterator[ObjectTable]:
        objects = ObjectTable(self._directory / "objects")
        try:
            yield objects
        finally:
            objects.close()

    # Landing.

    async def _land(self, parts: Sequence[KeyRange], generation: int) -> None:
        """All keys of the unknown parts, in order; of each part, all between two batches is told too."""
        bucket = self._slot.prefix.bucket
        known = [one for part in parts for one in self._index.known(bucket, part.start, part.stop)]
        asked = QueryStamp(
            ObservedAt(generation, self._dependencies.clock.monotonic(), UNKNOWN_BOOT), _BEFORE_EVERY_WRITE
        )
        with self._sorted() as objects:
            for part in gaps(parts, [KeyRange(one.start, one.stop) for one in known]):
                start = part.start
                while start < part.stop:
                    listed = await self._in_thread(objects.read, start, part.stop, _LANDED_AT_ONCE)
                    stop = key_successor(listed[-1][0]) if len(listed) == _LANDED_AT_ONCE else part.stop
                    await self._index.land(Batch(bucket, start, stop, listed, objects.templates, asked, math.inf))
                    start = stop
