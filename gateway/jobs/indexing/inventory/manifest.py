"""The manifest.json of an inventory (S3 User Guide, "Inventory manifest"): files, their format, and whose they are.

{"sourceBucket": "train", "fileFormat": "CSV", "fileSchema": "Bucket, Key, Size, LastModifiedDate, ETag",
 "creationTimestamp": "1514944800000", "destinationBucket": "arn:aws:s3:::lists",
 "files": [{"key": "lists/train/data/1.csv.gz", "size": 2147483647, "MD5checksum": "f11166069f1990abeb9c97ace9cdfabc"}]}
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gateway.errors import ForebayError

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


class BadInventory(ForebayError):
    """An inventory that cannot be used; the message says why, and what would help."""


@dataclass(frozen=True, slots=True)
class InventoryFile:
    """One of them. `md5` in hexadecimal digits."""

    key: str
    size_bytes: int
    md5: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`columns` are those of COLUMNS that the files have, by their places for CSV. `created_at`: seconds since 1970."""

    source_bucket: str
    file_format: FileFormat
    columns: dict[str, int]
    files: tuple[InventoryFile, ...]
    created_at: float

    @property
    def has_versions(self) -> bool:
        """Whether old versions are among the rows."""
        return "is_latest" in self.columns


def parse_manifest(document: bytes) -> Manifest:
    """BadInventory when it is none, or its files lack a column that is needed."""
    try:
        fields: dict[str, Any] = orjson.loads(document)
        file_format = _FORMATS.get(str(fields["fileFormat"]).lower())
        if file_format is None:
            raise BadInventory(f"its format is {fields['fileFormat']}, and not CSV, ORC or Parquet")
        files = tuple(_file(one) for one in fields["files"])
        columns = _columns(str(fields["fileSchema"]), file_format)
        created_at = int(fields["creationTimestamp"]) / 1000
        return Manifest(str(fields["sourceBucket"]), file_format, columns, files, created_at)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInventory(f"it is no manifest.json of an S3 Inventory: {type(error).__name__}: {error}") from None


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
