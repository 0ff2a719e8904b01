"""The rows of an inventory's files: current versions only. Blocking, and no more than a part of a file in memory."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from gateway.jobs.indexing.inventory.manifest import BadInventory, Manifest

_ROWS_AT_ONCE = 16_384
_AS_LISTED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
_MISSING_EXTRA = "ORC and Parquet need pyarrow: pip install 'forebay[inventory]', or have the inventory written as CSV"


class Row(NamedTuple):
    """One object. `modified` as LIST writes it, `etag` without quotes, `storage_class` empty where it is not told."""

    key: bytes
    modified: str
    etag: str
    size_bytes: int
    storage_class: str


def rows_of(path: Path, manifest: Manifest) -> Iterator[Row]:
    """The objects that one file lists, in its order; BadInventory when it cannot be read."""
    try:
        if manifest.file_format == "CSV":
            yield from _csv_rows(path, manifest)
        else:
            yield from _columnar_rows(path, manifest)
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, IndexError) as error:
        raise BadInventory(f"a file cannot be read: {error}") from None


def _csv_rows(path: Path, manifest: Manifest) -> Iterator[Row]:
    """No header; keys are percent-encoded."""
    at = manifest.columns
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for fields in csv.reader(file):
            told = {name: fields[place] for name, place in at.items()}
            if _is_current(told):
                told["key"] = unquote_plus(told["key"], errors="strict")
                yield _row(told)


def _columnar_rows(path: Path, manifest: Manifest) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import orc, parquet
    except ImportError:
        raise BadInventory(_MISSING_EXTRA) from None
    names = list(manifest.columns)
    try:
        if manifest.file_format == "Parquet":
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names):
                    yield from _rows_of_batch(batch)
        else:
            file = orc.ORCFile(path)
            for number in range(file.nstripes):
                stripe = file.read_stripe(number, columns=names)
                for start in range(0, stripe.num_rows, _ROWS_AT_ONCE):
                    yield from _rows_of_batch(stripe.slice(start, _ROWS_AT_ONCE))
    except pyarrow.ArrowException as error:
        raise BadInventory(f"a file cannot be read: {error}") from None


def _rows_of_batch(batch: Any) -> Iterator[Row]:
    for told in batch.to_pylist():
        if _is_current(told):
            yield _row(told)


def _is_current(told: dict[str, Any]) -> bool:
    latest, marker = told.get("is_latest", True), told.get("is_delete_marker", False)
    return str(latest).lower() == "true" and str(marker or False).lower() == "false"


def _row(told: dict[str, Any]) -> Row:
    return Row(
        str(told["key"]).encode(),
        _date(told["last_modified_date"]),
        str(told["e_tag"]).strip('"'),
        int(told["size"]),
        str(told.get("storage_class") or ""),
    )


def _date(value: Any) -> str:
    """`2026-01-01T00:00:00.000Z`, of such a text, or of a time as pyarrow gives it."""
    if isinstance(value, str) and _AS_LISTED.fullmatch(value):
        return value
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"
