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
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote_plus

import lmdb
import orjson

from gateway.core.errors import ForebayError, StoreUnavailable
from gateway.jobs.indexing.key_ranges import KeyRange, SplitPoints, gaps
from gateway.jobs.job import JobDependencies, steadily
from gateway.jobs.listing import with_retries
from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.pages import key_successor
from gateway.metadata.listing.ranges import Batch, QueryStamp
from gateway.metadata.listing.store import UNKNOWN_BOOT
from gateway.metadata.snapshots.staging import ObjectTable
from gateway.origin.client import OriginRequest, OriginResponse, Purpose, error_of
from gateway.policy.slots import Prefix, Slot
from gateway.s3.list_result import EntryTemplate, ListedEntry
from gateway.s3.xml_writer import escape

FileFormat = Literal["CSV", "ORC", "Parquet"]
_FORMATS: dict[str, FileFormat] = {"csv": "CSV", "orc": "ORC", "parquet": "Parquet"}

COLUMNS = {
    "key": "Key",
    "size": "Size",
    "last_modified_date": "LastModifiedDate",
    "e_tag": "ETag",
    "storage_class": "StorageClass",
    "is_latest": "IsLatest",
    "is_delete_marker": "IsDeleteMarker",
    "version_id": "VersionId",
}
"""Columns that are read: as ORC and Parquet name them -> as CSV and the documentation do."""

REQUIRED = ("key", "size", "last_modified_date", "e_tag")

_ROWS_AT_ONCE = 16_384
_CSV_BLOCK_BYTES = 2**20
_AS_LISTED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
_MISSING_EXTRA = "an inventory is read with pyarrow: pip install '.[inventory]' in a clone"


class BadInventory(ForebayError):
    """An inventory that cannot be used; the message says why, and what would help."""


@dataclass(frozen=True, slots=True)
class InventoryFile:
    """One of them. `md5` in hexadecimal digits."""

    key: str
    size_bytes: int
    md5: str


@dataclass(frozen=True, slots=True)
class InventoryManifest:
    """`columns` are those of COLUMNS that the files have, by their positions for CSV."""

    source_bucket: str
    file_format: FileFormat
    columns: dict[str, int]
    files: tuple[InventoryFile, ...]


def parse_manifest(document: bytes) -> InventoryManifest:
    """BadInventory when it is none, or its files lack a column that is needed."""
    try:
        fields: dict[str, Any] = orjson.loads(document)
        file_format = _FORMATS.get(str(fields["fileFormat"]).lower())
        if file_format is None:
            raise BadInventory(f"its format is {fields['fileFormat']}, and not CSV, ORC or Parquet")
        files = tuple(_file(one) for one in fields["files"])
        return InventoryManifest(
            str(fields["sourceBucket"]), file_format, _columns(str(fields["fileSchema"]), file_format), files
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadInventory(f"it is no manifest.json of an S3 Inventory: {type(error).__name__}: {error}") from None


def objects_of(path: Path, manifest: InventoryManifest) -> Iterator[list[ListedEntry]]:
    """Yield the current objects of one file, in its order, some thousands at once; BadInventory. Blocks.

    No more than a part of the file is in memory.
    """
    try:
        import pyarrow
    except ImportError:
        raise BadInventory(_MISSING_EXTRA) from None
    try:
        batches = _csv_batches if manifest.file_format == "CSV" else _columnar_batches
        for columns in batches(path, manifest):
            yield _objects(columns)
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise BadInventory(f"a file cannot be read: {error}") from None


Columns = dict[str, list[Any]]
"""Some rows of a file, column by column."""


def _csv_batches(path: Path, manifest: InventoryManifest) -> Iterator[Columns]:
    """No header, all text; keys are percent-encoded."""
    import pyarrow
    from pyarrow import csv

    with pyarrow.input_stream(path, compression="gzip") as stream:
        if not stream.read(1):
            return  # of no objects; pyarrow takes that for a mistake
    names = {name: f"f{position}" for name, position in manifest.columns.items()}
    reading = csv.ReadOptions(autogenerate_column_names=True, block_size=_CSV_BLOCK_BYTES)
    converting = csv.ConvertOptions(
        include_columns=list(names.values()), column_types=dict.fromkeys(names.values(), pyarrow.string())
    )
    with (
        pyarrow.input_stream(path, compression="gzip") as stream,
        csv.open_csv(stream, read_options=reading, convert_options=converting) as batches,
    ):
        for batch in batches:
            columns = {name: batch.column(there).to_pylist() for name, there in names.items()}
            columns["key"] = [unquote_plus(key, errors="strict") for key in columns["key"]]
            yield columns


def _columnar_batches(path: Path, manifest: InventoryManifest) -> Iterator[Columns]:
    from pyarrow import orc, parquet

    names = list(manifest.columns)
    if manifest.file_format == "Parquet":
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names):
                yield batch.to_pydict()
    else:
        file = orc.ORCFile(path)
        for number in range(file.nstripes):
            stripe = file.read_stripe(number, columns=names)
            for start in range(0, stripe.num_rows, _ROWS_AT_ONCE):
                yield stripe.slice(start, _ROWS_AT_ONCE).to_pydict()


def _objects(columns: Columns) -> list[ListedEntry]:
    """Return current versions' rows, as LIST would show them; an inventory says nothing of owners and checksums."""
    count = len(columns["key"])
    latest, markers = columns.get("is_latest", [True] * count), columns.get("is_delete_marker", [False] * count)
    classes = columns.get("storage_class", [""] * count)
    templates = {one: _template(str(one or "")) for one in set(classes)}
    rows = zip(
        columns["key"],
        columns["last_modified_date"],
        columns["e_tag"],
        columns["size"],
        classes,
        latest,
        markers,
        strict=True,
    )
    return [
        ListedEntry(str(key).encode(), _date(modified), f'"{str(etag).strip(chr(34))}"', int(size), templates[storage])
        for key, modified, etag, size, storage, is_latest, is_marker in rows
        if str(is_latest).lower() == "true" and str(is_marker or False).lower() == "false"
    ]


def _template(storage_class: str) -> EntryTemplate:
    return EntryTemplate("", None, f"<StorageClass>{escape(storage_class)}</StorageClass>" if storage_class else "")


def _file(fields: dict[str, Any]) -> InventoryFile:
    md5 = str(fields["MD5checksum"]).lower()
    if not re.fullmatch("[0-9a-f]{32}", md5):
        raise ValueError("MD5checksum")
    return InventoryFile(str(fields["key"]), int(fields["size"]), md5)


def _columns(schema: str, file_format: FileFormat) -> dict[str, int]:
    if file_format == "CSV":
        there = [name.strip() for name in schema.split(",")]
    else:
        there = [COLUMNS[name] for name in COLUMNS if re.search(rf"\b{name}\b", schema)]
    columns = {name: there.index(title) for name, title in COLUMNS.items() if title in there}
    missing = [COLUMNS[name] for name in REQUIRED if name not in columns]
    if "version_id" in columns:
        missing += [COLUMNS[name] for name in ("is_latest", "is_delete_marker") if name not in columns]
    if missing:
        raise BadInventory(f"its files have no {', '.join(missing)}: add these fields to the inventory's configuration")
    return columns


def _date(value: Any) -> str:
    """`2026-01-01T00:00:00.000Z`, of such a text, or of a time as pyarrow gives it."""
    if isinstance(value, str) and _AS_LISTED.fullmatch(value):
        return value
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"


SPLIT_POINT_EVERY = 1000
_LANDED_AT_ONCE = 4096
_SORTED = "objects"
_BEFORE_EVERY_WRITE = -1
_MANIFEST_BYTES_MAX = 64 * 1024**2


class InventoryStart:
    """One inventory's part in the beginning of one slot's index: `url` names its manifest.json."""

    def __init__(self, dependencies: JobDependencies, slot: Slot, url: str, scratch: Path) -> None:
        self._dependencies = dependencies
        self._index = dependencies.catalog.listing
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
                await steadily(partial(self._sort, path, manifest), stop=self._stop)
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

    def _stop(self) -> None:
        self._is_over = True

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
            raise await error_of(response)

    # Sorting.

    def _sort(self, path: Path, manifest: InventoryManifest) -> None:
        prefix = self._slot.prefix.key_prefix.encode()
        with closing(ObjectTable(self._directory / _SORTED)) as objects:
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

    # Landing.

    async def _land(self, parts: Sequence[KeyRange], generation: int) -> None:
        """All keys of the unknown parts, in order; of each part, all between two batches is told too."""
        bucket = self._slot.prefix.bucket
        known = [one for part in parts for one in self._index.known(bucket, part.start, part.stop)]
        asked = QueryStamp(
            ObservedAt(generation, self._dependencies.clock.monotonic(), UNKNOWN_BOOT), _BEFORE_EVERY_WRITE
        )
        with closing(ObjectTable(self._directory / _SORTED)) as objects:
            for part in gaps(parts, known):
                start = part.start
                while start < part.stop:
                    listed = await steadily(partial(objects.read, start, part.stop, _LANDED_AT_ONCE))
                    stop = key_successor(listed[-1][0]) if len(listed) == _LANDED_AT_ONCE else part.stop
                    await self._index.land(Batch(bucket, start, stop, listed, objects.templates, asked, math.inf))
                    start = stop
