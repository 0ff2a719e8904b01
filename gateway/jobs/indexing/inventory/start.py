"""What an inventory is good for before the first crawl: even shares, and a first listing of `immutable` slots.

An inventory tells what there was hours ago, may lack what was written shortly before (S3 User Guide, "Amazon S3
Inventory consistency"), and says nothing of when it saw which key. So it answers no LIST where that has a bound; in an
`immutable` slot that nothing is written to, it stands for a listing of unknown age until the crawl, which follows in
any case, has been there.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import lmdb

from gateway.errors import StoreUnavailable
from gateway.jobs.indexing.inventory.download import InventorySource
from gateway.jobs.indexing.inventory.manifest import BadInventory, Manifest
from gateway.jobs.indexing.inventory.rows import Row, rows_of
from gateway.jobs.indexing.inventory.sorting import SortedRuns
from gateway.jobs.indexing.landmarks import Landmarks
from gateway.jobs.indexing.parts import Part, gaps
from gateway.jobs.tools import Tools
from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.index import ListingIndex
from gateway.metadata.listing.pages import Listed, key_successor
from gateway.metadata.listing.ranges import Batch, QueryStamp
from gateway.metadata.listing.records import pack
from gateway.policy.slots import Slot
from gateway.s3.list_result import EntryForm, ListedEntry
from gateway.s3.xml_writer import escape

UNKNOWN_BOOT = 0
"""Of what an inventory has told: its age is unknown. A boot of the machine has this number once in 2 to the 32."""

LANDMARK_EVERY = 1000
_LANDED_AT_ONCE = 4096
_BEFORE_EVERY_WRITE = -1


class InventoryStart:
    """One inventory's part in the beginning of one slot's index."""

    def __init__(self, tools: Tools, index: ListingIndex, slot: Slot, url: str, scratch: Path) -> None:
        self._tools = tools
        self._index = index
        self._slot = slot
        self._source = InventorySource(tools, url, slot.name)
        self._scratch = scratch
        self._forms: dict[EntryForm, int] = {}
        self._seen = 0
        self._landmarks = Landmarks()

    async def read(self, parts: Sequence[Part]) -> Sequence[bytes]:
        """Landmarks for the crawl. Where it may, all of `parts` that is not known is taken from the inventory.

        Raises BadInventory, OriginError, and StoreUnavailable when the disk does not take it.
        """
        manifest = await self._source.manifest()
        if manifest.source_bucket != self._slot.prefix.bucket:
            raise BadInventory(f"it is of bucket {manifest.source_bucket}, and not of {self._slot.prefix.bucket}")
        epoch = self._index.moment(manifest.source_bucket).epoch
        directory = await asyncio.to_thread(self._directory)
        try:
            runs = SortedRuns(directory) if self._stands_for_a_listing else None
            await self._take_files(manifest, directory, runs)
            if runs is not None and self._seen:
                await self._land(runs, parts, epoch)
        except (OSError, lmdb.Error) as error:
            raise StoreUnavailable(f"an inventory cannot be sorted: {error}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        return self._landmarks.sorted()

    @property
    def _stands_for_a_listing(self) -> bool:
        return self._slot.consistency == "immutable" and self._slot.mode == "read-only"

    def _directory(self) -> Path:
        """One that is empty, whatever a killed process has left."""
        directory = self._scratch / self._slot.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        return directory

    async def _take_files(self, manifest: Manifest, directory: Path, runs: SortedRuns | None) -> None:
        for file in manifest.files:
            path = directory / "file"
            await self._source.fetch(file, path)
            await asyncio.to_thread(self._take, rows_of(path, manifest), runs)
            await asyncio.to_thread(path.unlink)

    def _take(self, rows: Iterable[Row], runs: SortedRuns | None) -> None:
        ours = self._marked(rows)
        if runs is not None:
            runs.add((row.key, self._packed(row)) for row in ours)
        else:
            for _ in ours:
                pass

    def _marked(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Those of the slot."""
        prefix = self._slot.prefix.key_prefix.encode()
        for row in rows:
            if row.key.startswith(prefix):
                self._seen += 1
                if self._seen % LANDMARK_EVERY == 0:
                    self._landmarks.add(row.key)
                yield row

    def _packed(self, row: Row) -> bytes:
        storage = f"<StorageClass>{escape(row.storage_class)}</StorageClass>" if row.storage_class else ""
        form = EntryForm("", None, storage)
        entry = ListedEntry(row.key, row.modified, f'"{row.etag}"', row.size_bytes, form)
        return pack(entry, self._forms.setdefault(form, len(self._forms)))

    async def _land(self, runs: SortedRuns, parts: Sequence[Part], epoch: int) -> None:
        """All keys of the unknown parts, in order; of each part, all between two batches is told too."""
        bucket = self._slot.prefix.bucket
        known = [one for part in parts for one in self._index.known(bucket, part.start, part.stop)]
        left = gaps(parts, [Part(one.start, one.stop) for one in known])
        rows = await asyncio.to_thread(runs.rows)
        while left:
            listed = await asyncio.to_thread(lambda: list(islice(rows, _LANDED_AT_ONCE)))
            reach = key_successor(listed[-1][0]) if len(listed) == _LANDED_AT_ONCE else None
            while left and (reach is None or left[0].start < reach):
                part = left.pop(0)
                stop = part.stop if reach is None else min(part.stop, reach)
                await self._land_part(part.start, stop, listed, epoch)
                if stop < part.stop:
                    left.insert(0, Part(stop, part.stop))
                    break

    async def _land_part(self, start: bytes, stop: bytes, listed: Sequence[Listed], epoch: int) -> None:
        within = [row for row in listed if start <= row[0] < stop]
        told = ObservedAt(epoch, self._tools.clock.monotonic(), UNKNOWN_BOOT)
        asked = QueryStamp(told, _BEFORE_EVERY_WRITE)
        await self._index.land(Batch(self._slot.prefix.bucket, start, stop, within, list(self._forms), asked, math.inf))
