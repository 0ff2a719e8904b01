"""S3 Inventory: what is read of it, what is refused, and what it is good for."""

from __future__ import annotations

import asyncio
import csv
import gzip
import hashlib
import io
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.model import ObjectKey
from gateway.jobs.indexing.indexes import IndexPlan
from gateway.jobs.indexing.inventory import BadInventory, objects_of, parse_manifest
from gateway.jobs.job import JobStore
from gateway.metadata.listing.records import unpack
from gateway.metadata.snapshots.staging import ObjectTable
from gateway.policy.slots import Prefix
from gateway.s3.list_result import EntryTemplate, ListedEntry
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from tests.support.blocks import BUCKET, make_origin
from tests.support.counting import counted
from tests.support.indexing import TTL, IndexBench, SmallPages, fill, index_bench, lists
from tests.support.jobs import job_bench
from tests.support.listing_model import KEY
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Hold, on
from tests.support.slots import Slot

READ_ONLY = Slot("data", Prefix.parse(f"s3://{BUCKET}/"), "read-only", "immutable")
SCHEMA = "Bucket, Key, Size, LastModifiedDate, ETag, StorageClass"
VERSIONED = "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, LastModifiedDate, ETag, StorageClass"
MANIFEST = f"s3://{BUCKET}-lists/daily/manifest.json"
DATE = "2026-11-20T01:02:03.000Z"
ODD_KEYS = ["a b", "a+b", "50%", "é/€/😀", "k000", 'quote"comma,']


def csv_file(rows: Iterable[Iterable[object]]) -> bytes:
    """As S3 writes them: every field quoted, no header."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return gzip.compress(text.getvalue().encode())


def row(origin: MemoryOrigin, key: str) -> list[object]:
    stored = origin.buckets[BUCKET].objects[key]
    return [BUCKET, quote_plus(key, safe="/"), stored.size_bytes, DATE, stored.etag.strip('"'), "STANDARD"]


def manifest(files: dict[str, bytes], schema: str = SCHEMA, file_format: str = "CSV", bucket: str = BUCKET) -> bytes:
    return orjson.dumps(
        {
            "sourceBucket": bucket,
            "destinationBucket": f"arn:aws:s3:::{BUCKET}-lists",
            "version": "2016-11-30",
            "creationTimestamp": "1795132800000",
            "fileFormat": file_format,
            "fileSchema": schema,
            "files": [
                {"key": key, "size": len(content), "MD5checksum": hashlib.md5(content).hexdigest()}
                for key, content in files.items()
            ],
        }
    )


def put_inventory(origin: MemoryOrigin, files: dict[str, bytes], document: bytes | None = None) -> None:
    origin.put(f"{BUCKET}-lists", "daily/manifest.json", document or manifest(files))
    for key, content in files.items():
        origin.put(f"{BUCKET}-lists", key, content)


def parsed(tmp_path: Path, content: bytes, document: bytes) -> list[ListedEntry]:
    path = tmp_path / "file"
    path.write_bytes(content)
    return [entry for entries in objects_of(path, parse_manifest(document)) for entry in entries]


def entry(key: str, etag: str, size_bytes: int, storage_class: str, modified: str = DATE) -> ListedEntry:
    template = EntryTemplate("", None, f"<StorageClass>{storage_class}</StorageClass>")
    return ListedEntry(key.encode(), modified, f'"{etag}"', size_bytes, template)


def test_csv_rows_are_read(tmp_path: Path) -> None:
    """Keys percent-encoded, whatever they are made of; fields wherever the schema says."""
    content = csv_file([BUCKET, quote_plus(key), 7, DATE, "ab" * 16, "GLACIER"] for key in ODD_KEYS)
    found = parsed(tmp_path, content, manifest({"file": content}))
    assert found == [entry(key, "ab" * 16, 7, "GLACIER") for key in ODD_KEYS]


def test_only_current_versions_are_read(tmp_path: Path) -> None:
    """Neither old ones nor delete markers, which have no ETag and no size."""
    content = csv_file(
        [
            [BUCKET, "a", "v2", "true", "false", 2, DATE, "cd" * 16, "STANDARD"],
            [BUCKET, "a", "v1", "false", "false", 1, DATE, "ab" * 16, "STANDARD"],
            [BUCKET, "b", "v3", "true", "true", "", DATE, "", ""],
        ]
    )
    found = parsed(tmp_path, content, manifest({"file": content}, VERSIONED))
    assert [(one.key, one.size_bytes) for one in found] == [(b"a", 2)]


PARQUET_SCHEMA = (
    "message s3.inventory { required binary bucket (UTF8); required binary key (UTF8); "
    "optional binary version_id (UTF8); optional boolean is_latest; optional boolean is_delete_marker; "
    "optional int64 size; "
    "optional int64 last_modified_date (TIMESTAMP_MILLIS); optional binary e_tag (UTF8); "
    "optional binary storage_class (UTF8); }"
)
ORC_SCHEMA = (
    "struct<bucket:string,key:string,version_id:string,is_latest:boolean,is_delete_marker:boolean,size:bigint,"
    "last_modified_date:timestamp,e_tag:string,storage_class:string>"
)


def columnar(kind: str) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    keys = ["é b", "old", "gone"]
    table = pyarrow.table(
        {
            "bucket": [BUCKET] * 3,
            "key": keys,
            "version_id": ["v"] * 3,
            "is_latest": [True, False, True],
            "is_delete_marker": [False, False, True],
            "size": [7, 8, None],
            "last_modified_date": pyarrow.array(
                [datetime(2026, 11, 20, 1, 2, 3, 4000, tzinfo=UTC)] * 3, pyarrow.timestamp("ms", "UTC")
            ),
            "e_tag": ["ab" * 16 + "-3", "cd" * 16, None],
            "storage_class": ["STANDARD", "STANDARD", None],
        }
    )
    target = pyarrow.BufferOutputStream()
    if kind == "Parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, target)
    else:
        pytest.importorskip("pyarrow.orc").write_table(table, target)
    content: bytes = target.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize(("kind", "schema"), [("Parquet", PARQUET_SCHEMA), ("ORC", ORC_SCHEMA)])
def test_columnar_rows_are_read(tmp_path: Path, kind: str, schema: str) -> None:
    """ORC and Parquet name the columns otherwise; keys are as they are."""
    content = columnar(kind)
    found = parsed(tmp_path, content, manifest({"file": content}, schema, kind))
    assert found == [entry("é b", "ab" * 16 + "-3", 7, "STANDARD", "2026-11-20T01:02:03.004Z")]


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for document in (manifest({"file": b""}, PARQUET_SCHEMA, "Parquet"), manifest({"file": b""})):
        with pytest.raises(BadInventory, match=r"pip install '\.\[inventory\]'"):
            parsed(tmp_path, b"", document)


@pytest.mark.parametrize(
    ("schema", "missing"),
    [
        ("Bucket, Key, Size", "LastModifiedDate, ETag"),
        ("Bucket, Key", "Size, LastModifiedDate, ETag"),
        ("Bucket, Key, VersionId, Size, LastModifiedDate, ETag", "IsLatest, IsDeleteMarker"),
    ],
)
def test_missing_fields_are_named(schema: str, missing: str) -> None:
    """So that they can be added to the inventory's configuration."""
    with pytest.raises(BadInventory, match=missing):
        parse_manifest(manifest({}, schema))


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"{}", b'{"fileFormat": "CSV"}', manifest({}, file_format="JSON")],
    ids=["nothing", "a list", "an object", "one field", "another format"],
)
def test_what_is_no_manifest_is_refused(document: bytes) -> None:
    """With one kind of error."""
    with pytest.raises(BadInventory):
        parse_manifest(document)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b'"b","k"\n'), gzip.compress(b'"b","k","x","y","e","s"\n')],
    ids=["no gzip", "too few fields", "no number"],
)
def test_what_is_no_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """And said to be one that cannot be read."""
    with pytest.raises(BadInventory, match="cannot be read"):
        parsed(tmp_path, content, manifest({"file": content}))


def test_a_file_without_objects_is_one(tmp_path: Path) -> None:
    """Of an empty bucket."""
    content = csv_file([])
    assert parsed(tmp_path, content, manifest({"file": content})) == []


ENTRY = st.builds(entry, KEY, st.sampled_from(["a", "b"]), st.integers(0, 3), st.just("STANDARD"))


@given(st.lists(ENTRY, max_size=60), st.integers(1, 5))
def test_objects_come_out_in_order(entries: list[ListedEntry], at_once: int) -> None:
    """However few are added at once; a key comes once."""
    with tempfile.TemporaryDirectory() as directory, closing(ObjectTable(Path(directory) / "objects")) as objects:
        for start in range(0, len(entries), at_once):
            objects.add_missing(entries[start : start + at_once])
        found = [unpack(*row, objects.templates) for row in objects.read(b"", b"\xff", len(entries) + 1)]
    assert [one.key for one in found] == sorted({one.key for one in entries})
    assert all(one in entries for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CSV", "Parquet", "ORC"])
def test_a_file_is_read_in_parts(tmp_path: Path, kind: str) -> None:
    """Of a file of a million rows no more than some thousands are in memory at once."""
    pyarrow, count = pytest.importorskip("pyarrow"), 200_000
    if kind == "CSV":
        content, schema = csv_file([BUCKET, f"k{n:07}", n, DATE, "ab" * 16, "STANDARD"] for n in range(count)), SCHEMA
    else:
        table = pyarrow.table(
            {
                "key": [f"k{n:07}" for n in range(count)],
                "size": list(range(count)),
                "last_modified_date": [DATE] * count,
                "e_tag": ["ab" * 16] * count,
            }
        )
        target = pyarrow.BufferOutputStream()
        writer = pytest.importorskip(f"pyarrow.{kind.lower()}")
        writer.write_table(table, target)
        content, schema = target.getvalue().to_pybytes(), "key size last_modified_date e_tag"
    path = tmp_path / "file"
    path.write_bytes(content)
    parts = [len(part) for part in objects_of(path, parse_manifest(manifest({"file": content}, schema, kind)))]
    assert sum(parts) == count
    assert max(parts) <= 65_536


@asynccontextmanager
async def beginning(
    directory: Path, slot: Slot, origin: MemoryOrigin, *, hold: bool = True, refresh: float | None = None
) -> AsyncIterator[IndexBench]:
    """An index that begins with the inventory. `hold`: the crawl that follows gets no page until the test is over."""
    until = asyncio.Event()
    if hold:
        origin.inject(on(Operation.LIST_OBJECTS_V2), Hold(until), times=None)
    plans = [IndexPlan("data", refresh, 4, MANIFEST, directory / "scratch")]
    async with index_bench(directory, origin, [slot], through=SmallPages(origin, 5), plans=plans) as kept:
        yield kept
        until.set()
        await kept.crawled()
        prefix, keys = slot.prefix.key_prefix, [key.decode() for key in origin.buckets[BUCKET].sorted_keys]
        assert kept.listed(prefix=prefix) == [key for key in keys if key.startswith(prefix)]
        assert not list((directory / "scratch").glob("*"))


async def taken(kept: IndexBench) -> None:
    """Until the inventory has told what it can."""
    await kept.until(lambda: kept.indexes.documents()[0].state in ("crawling", "waiting"))


def origin_with_inventory(*keys: str, unlisted: Iterable[str] = (), files: int = 3) -> MemoryOrigin:
    """An origin whose inventory lists these keys, in files whose rows are in no order."""
    origin = make_origin()
    origin.create_bucket(BUCKET)
    fill(origin, [*keys, *unlisted])
    rows = [row(origin, key) for key in sorted(keys, key=lambda key: hashlib.md5(key.encode()).digest())]
    put_inventory(origin, {f"daily/data/{n}.csv.gz": csv_file(rows[n::files]) for n in range(files)})
    return origin


KEYS_LISTED = [*(f"k{number:03}" for number in range(40)), *ODD_KEYS]


async def test_a_read_only_immutable_slot_is_listed_from_it_at_once(tmp_path: Path) -> None:
    """Before the crawl has brought a page; what the inventory lacked is there when it has."""
    origin = origin_with_inventory(*KEYS_LISTED, unlisted=["later"])
    async with beginning(tmp_path, READ_ONLY, origin) as kept:
        await taken(kept)
        assert kept.listed() == sorted(set(KEYS_LISTED), key=str.encode)
        assert kept.indexes.documents()[0].known_since is None


@pytest.mark.parametrize(
    ("slot", "refresh"),
    [(TTL, 50.0), (Slot("data", TTL.prefix, "read-write", "immutable"), None)],
    ids=["ttl", "read-write"],
)
async def test_elsewhere_it_answers_nothing(tmp_path: Path, slot: Slot, refresh: float | None) -> None:
    """Where a listing has a bound, or own writes may be missing in it: it tells the crawl where to begin, no more."""
    async with beginning(tmp_path, slot, origin_with_inventory(*KEYS_LISTED), refresh=refresh) as kept:
        await taken(kept)
        assert kept.listed() is None


async def test_keys_of_a_prefix_only(tmp_path: Path) -> None:
    """The inventory may be of the whole bucket."""
    origin = make_origin()
    origin.create_bucket(BUCKET)
    fill(origin, ["a/1", "b/1", "b/2"])
    put_inventory(origin, {"f": csv_file(row(origin, key) for key in ("b/2", "a/1", "b/1"))})
    slot = Slot("data", Prefix.parse(f"s3://{BUCKET}/b/"), "read-only", "immutable")
    async with beginning(tmp_path, slot, origin) as kept:
        await taken(kept)
        assert kept.listed(prefix="b/") == ["b/1", "b/2"]
        assert kept.listed(prefix="a/") is None


async def test_no_own_write_is_taken_back(tmp_path: Path) -> None:
    """A key that was written while the inventory was read stays marked: the origin is asked about it."""
    origin = origin_with_inventory("k1", "k2")
    body = asyncio.Event()
    origin.inject(on(Operation.GET_OBJECT, key="daily/data/0.csv.gz"), Hold(body))
    async with beginning(tmp_path, READ_ONLY, origin) as kept:
        await kept.until(lambda: kept.indexes.documents()[0].state == "inventory")
        own = await kept.listing.begin_write(BUCKET, ["k1"])
        origin.buckets[BUCKET].remove("k1")
        await kept.listing.end_write(own)
        body.set()
        await taken(kept)
        assert kept.listed() is None


async def test_the_crawl_behind_it_drops_nothing(tmp_path: Path) -> None:
    """It knows less of an object than LIST does: that is no change of the object."""
    origin = origin_with_inventory(*KEYS_LISTED)
    async with beginning(tmp_path, READ_ONLY, origin, hold=False) as kept:
        await kept.bench.catalog.current(ObjectKey(BUCKET, "k001"), READ_ONLY, headers={})
        await kept.bench.catalog.settle()
        await kept.crawled()
        assert counted(metrics.INDEX_CHANGED_KEYS) == 0
        assert kept.bench.catalog.remembered(ObjectKey(BUCKET, "k001"), READ_ONLY, headers={}) is not None


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("gone", "404 NoSuchKey"),
        ("bucket", "it is of bucket other"),
        ("md5", "has not the size and MD5"),
        ("fields", "no LastModifiedDate, ETag"),
    ],
)
async def test_one_that_cannot_be_used_is_said_and_done_without(tmp_path: Path, harm: str, why: str) -> None:
    """The crawl needs none."""
    origin = origin_with_inventory(*KEYS_LISTED, files=1)
    lists_of = f"{BUCKET}-lists"
    if harm == "gone":
        origin.buckets[lists_of].remove("daily/manifest.json")
    elif harm == "bucket":
        origin.put(lists_of, "daily/manifest.json", manifest({}, bucket="other"))
    elif harm == "md5":
        origin.put(lists_of, "daily/data/0.csv.gz", csv_file([]))
    else:
        origin.put(lists_of, "daily/manifest.json", manifest({}, "Bucket, Key, Size"))
    async with beginning(tmp_path, READ_ONLY, origin, hold=False) as kept:
        await taken(kept)
        assert why in (kept.indexes.documents()[0].inventory_error or "")
    assert lists(origin) > 0


@pytest.mark.parametrize("step", ["sorting", "landing"])
async def test_a_gateway_that_ends_leaves_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whether it is in the midst of sorting or of landing: nothing reads what is closed, nothing stays."""
    origin = origin_with_inventory(*KEYS_LISTED)
    method = "add_missing" if step == "sorting" else "read"
    original, reached = getattr(ObjectTable, method), threading.Event()

    def slow(objects: ObjectTable, *arguments: Any) -> Any:
        reached.set()
        time.sleep(0.2)
        return original(objects, *arguments)

    monkeypatch.setattr(ObjectTable, method, slow)
    plans = [IndexPlan("data", None, 4, MANIFEST, tmp_path / "scratch")]
    async with index_bench(tmp_path, origin, [READ_ONLY], plans=plans) as kept:
        await kept.until(reached.is_set)
    assert not list((tmp_path / "scratch").glob("*"))


async def test_what_a_killed_gateway_left_of_an_inventory_goes_at_the_next_start(tmp_path: Path) -> None:
    """Though the slot has no inventory any more, or another name."""
    left = JobStore(tmp_path / "jobs").scratch / "former"
    left.mkdir(parents=True)
    (left / "file").write_bytes(bytes(1000))
    async with job_bench(tmp_path, make_origin()):
        assert not left.exists()
