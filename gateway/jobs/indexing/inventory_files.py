"""The files of an S3 Inventory: its manifest.json, and the objects that CSV, ORC and Parquet files list.

The manifest (S3 User Guide, "Inventory manifest") names the files, their format, and whose they are:

{"sourceBucket": "train", "fileFormat": "CSV", "fileSchema": "Bucket, Key, Size, LastModifiedDate, ETag",
 "creationTimestamp": "1514944800000", "destinationBucket": "arn:aws:s3:::lists",
 "files": [{"key": "lists/train/data/1.csv.gz", "size": 2147483647, "MD5checksum": "f11166069f1990abeb9c97ace9cdfabc"}]}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote_plus

import orjson

from gateway.core.errors import ForebayError
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
