"""The catalog's files: what they give back, what they refuse, who shares them."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import StartupError
from gateway.core.model import Homes, ObjectKey
from gateway.disk import atomic_write
from gateway.metadata import entries as records
from gateway.metadata.entries import (
    CATALOG_KEY_BYTES_MAX,
    CatalogEntry,
    Freshness,
    ObjectHead,
    ObservedAt,
    catalog_key,
    freshness,
    object_head,
    pack,
    unpack,
)
from gateway.metadata.opening import OpenCatalog, open_directory
from gateway.metadata.store import LANDED_PER_TRANSACTION, CatalogUpdate
from gateway.policy.slots import Prefix
from tests.support.prepared_process import PreparedProcess
from tests.support.slots import Slot

ROOT = Path(__file__).parents[2]
KEY = ObjectKey("bucket", "k")
HEADERS = {"content-length": "5", "etag": '"0123456789abcdef0123456789abcdef"', "accept-ranges": "bytes"}
DATED = {**HEADERS, "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


@contextmanager
def opened(directory: Path, origin: str = "origin", **more: Any) -> Iterator[OpenCatalog]:
    catalog = open_directory(directory, Homes(origin), **more)
    try:
        yield catalog
    finally:
        catalog.close()


def fill(catalog: OpenCatalog, key: ObjectKey = KEY, headers: dict[str, str] | None = None) -> CatalogUpdate:
    epochs = catalog.epochs
    learned = ObservedAt(epochs.of_bucket(key.bucket), 1.0, catalog.boot, epochs.of_key(catalog_key(key)))
    return CatalogUpdate(key, CatalogEntry(learned, object_head(key, headers or DATED)))


NAMES = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=8).map("x-amz-meta-{}".format)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20)
ETAGS = st.one_of(
    st.binary(min_size=16, max_size=16).map(lambda raw: f'"{raw.hex()}"'),
    st.from_regex(r'"[0-9a-f]{32}-[0-9]{1,5}"', fullmatch=True),
    VALUES.filter(str.strip),
)
DATES = st.sampled_from(["Thu, 01 Jan 2026 00:00:00 GMT", "Thursday, 01-Jan-26 00:00:00 GMT", "yesterday", ""])


@given(
    st.dictionaries(NAMES, VALUES, max_size=4),
    ETAGS,
    DATES,
    st.integers(0, 2**63),
    st.sampled_from(["binary/octet-stream", "image/jpeg"]),
    st.booleans(),
)
def test_every_header_comes_back(
    extra: dict[str, str], etag: str, date: str, size: int, content_type: str, with_checksums: bool
) -> None:
    """A record gives back what the origin said of the object, whatever it was."""
    headers = {**extra, "etag": etag, "last-modified": date, "content-length": str(size), "content-type": content_type}
    head = object_head(KEY, headers)
    entry = CatalogEntry(ObservedAt(7, 1.5, 9, (10, 11)), head, with_checksums=with_checksums)
    record, extra_record = pack(b"place", entry)
    found = unpack(b"place", KEY, record, extra_record)
    assert found is not None
    assert found.head == ObjectHead(head.version, headers, head.last_modified, remembered=True)
    assert (found.observed_at, found.with_checksums) == (entry.observed_at, with_checksums)
    assert records.has_extra(record) == bool(extra_record)


@given(st.data())
def test_a_damaged_record_is_none(data: st.DataObject) -> None:
    """A flipped bit, a cut, another key's record: a miss, never another answer."""
    record, extra = pack(
        b"place", CatalogEntry(ObservedAt(7, 1.5, 9), object_head(KEY, {**DATED, "x-amz-meta-a": "b"}))
    )
    whole = bytearray(record + extra)
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    assert unpack(b"place", KEY, bytes(whole[: len(record)]), bytes(whole[len(record) :])) is None
    assert unpack(b"elsewhere", KEY, record, extra) is None
    cut = data.draw(st.integers(0, len(record) - 1))
    assert unpack(b"place", KEY, record[:cut], extra) is None


def test_a_plain_object_has_no_extra_record() -> None:
    """What most objects have costs a bit each."""
    plain = {**DATED, "content-type": "binary/octet-stream", "x-amz-server-side-encryption": "AES256"}
    record, extra = pack(b"place", CatalogEntry(ObservedAt(1, 1.0, 1), object_head(KEY, plain)))
    assert (len(record), extra) == (74, b"")


def test_keys_are_ordered_and_long_ones_stay_apart() -> None:
    """Bucket, then key, byte by byte; keys of any length S3 allows have a place of their own."""
    assert catalog_key(ObjectKey("a", "z")) < catalog_key(ObjectKey("ab", "a")) < catalog_key(ObjectKey("b", ""))
    long = [catalog_key(ObjectKey("bucket", "x" * 1000 + end)) for end in ("a", "b", "\udcff")]
    assert len(set(long)) == 3
    assert {len(key) for key in long} == {CATALOG_KEY_BYTES_MAX}


SLOTS = {
    "strict": Slot("s", Prefix(""), "read-write", "strict", 60.0, 60.0, 60.0),
    "ttl": Slot("t", Prefix(""), "read-write", "ttl", 60.0, 5.0, 30.0),
    "immutable": Slot("i", Prefix(""), "read-write", "immutable", 60.0, 5.0),
}


@pytest.mark.parametrize(
    ("name", "age", "boot", "expected"),
    [
        ("strict", 0, 1, "useless useless"),
        ("ttl", 0, 1, "fresh fresh"),
        ("ttl", 4.9, 1, "fresh fresh"),
        ("ttl", 5, 1, "fresh useless"),
        ("ttl", 60, 1, "stale useless"),
        ("ttl", 90, 1, "useless useless"),
        ("ttl", 0, 2, "useless useless"),
        ("ttl", -1, 1, "useless useless"),
        ("immutable", 10**9, 1, "fresh useless"),
        ("immutable", 0, 2, "fresh useless"),
    ],
)
def test_what_is_of_another_boot_or_too_old_is_not_believed(name: str, age: float, boot: int, expected: str) -> None:
    """Present and absent; ages are of this boot's clock or unknown, and unknown is too old but for `immutable`."""
    learned = ObservedAt(0, 1000.0, boot)
    entries = (CatalogEntry(learned, object_head(KEY, DATED)), CatalogEntry(learned))
    found = [freshness(entry, SLOTS[name], now_seconds=1000.0 + age, boot=1).value for entry in entries]
    assert " ".join(found) == expected
    assert set(found) <= {state.value for state in Freshness}


def test_what_was_asked_before_a_write_never_lands_after_it(tmp_path: Path) -> None:
    """Of this key, this bucket, or everything: what is there is void, what is on its way is not kept."""
    with opened(tmp_path / "c") as catalog:
        shared = catalog.epochs
        raisers = (
            functools.partial(shared.change_key, KEY),
            functools.partial(shared.change_bucket, "bucket"),
            shared.change_everything,
        )
        for write in raisers:
            before = fill(catalog)
            catalog.store.land([before])
            assert catalog.store.lookup(KEY) is not None
            write()
            assert catalog.store.lookup(KEY) is None
            catalog.store.land([before])
            assert catalog.store.lookup(KEY) is None
            catalog.store.land([fill(catalog)])
            shared.change_key(ObjectKey("bucket", "another"))
            shared.change_bucket("other")
            assert catalog.store.lookup(KEY) is not None


def test_an_object_that_lost_its_extra_headers_has_them_no_more(tmp_path: Path) -> None:
    """A record and its extra record change together."""
    with opened(tmp_path / "c") as catalog:
        catalog.store.land([fill(catalog, headers={**DATED, "x-amz-meta-a": "b"})])
        catalog.store.land([fill(catalog)])
        entry = catalog.store.lookup(KEY)
        assert entry is not None
        assert entry.head is not None
        assert entry.head.headers == DATED
        catalog.store.land([fill(catalog, ObjectKey("b", "big"), {**DATED, "x-amz-meta-a": "b" * 9000})])
        assert catalog.store.lookup(ObjectKey("b", "big")) is None


@pytest.mark.slow
def test_the_catalog_keeps_to_its_size(tmp_path: Path) -> None:
    """Whoever asks for ever new keys makes it forget others, not grow."""
    with opened(tmp_path / "c", size_bytes_max=2**20) as catalog:
        for start in range(0, 40_000, LANDED_PER_TRANSACTION):
            keys = [
                ObjectKey("bucket", f"{n * 7919 % 40_000:050}") for n in range(start, start + LANDED_PER_TRANSACTION)
            ]
            catalog.store.land([fill(catalog, key) for key in keys])
        with catalog.store._environment.begin() as transaction:
            assert 2000 < transaction.stat(catalog.store._entries)["entries"] < 12_000
    assert (tmp_path / "c" / "index" / "data.mdb").stat().st_size < 4 * 2**20


OTHER = """
import os, signal, sys
from pathlib import Path
from gateway.metadata.opening import open_directory
from gateway.core.model import Homes, ObjectKey
from tests.metadata.test_store import KEY, fill
catalog = open_directory(Path(sys.argv[1]), Homes("origin"))
print(catalog.store.lookup(KEY) is not None)
for step in sys.argv[2:]:
    if step == "write":
        catalog.epochs.change_key(KEY)
    elif step == "land":
        catalog.store.land([fill(catalog)])
    elif step == "die":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
catalog.close()
"""


def other(directory: Path, *steps: str) -> subprocess.Popen[str]:
    """Another process that has the directory open, and does these things."""
    return PreparedProcess(["-c", OTHER, directory, *steps], stdout=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=60)[0].strip()


def test_processes_share_what_they_learn_and_void_what_they_write(tmp_path: Path) -> None:
    """At once, and though the other process is killed right after."""
    directory = tmp_path / "c"
    with opened(directory) as catalog:
        catalog.store.land([fill(catalog)])
        assert ended(other(directory, "write", "die")) == "True"
        assert catalog.store.lookup(KEY) is None
        assert ended(other(directory, "land", "die")) == "False"
        assert catalog.store.lookup(KEY) is not None


def test_after_an_orderly_end_everything_is_kept(tmp_path: Path) -> None:
    """Over a restart, and over a boot."""
    directory = tmp_path / "c"
    with opened(directory) as catalog:
        catalog.epochs.change_key(KEY)
        catalog.store.land([fill(catalog)])
        assert not (directory / "CLEAN").exists()
    (directory / "BOOT").write_bytes(b"another boot\n")
    with opened(directory) as catalog:
        assert catalog.store.lookup(KEY) is not None


def test_clean_is_gone_for_good_before_anything_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut would bring it back else, beside records that were not synced, and they would be believed."""
    directory, gone = tmp_path / "c", list[bool]()
    with opened(directory):
        pass
    sync_directory, open_environment = atomic_write.sync_directory, lmdb.open

    def synced(path: Path) -> None:
        gone.append(not (path / "CLEAN").exists())
        sync_directory(path)

    def checked(*arguments: Any, **keywords: Any) -> lmdb.Environment:
        assert gone == [True]
        return open_environment(*arguments, **keywords)

    monkeypatch.setattr(atomic_write, "sync_directory", synced)
    monkeypatch.setattr(lmdb, "open", checked)
    with opened(directory):
        pass


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """The same boot goes on with what it left."""
    assert ended(other(tmp_path / "c", "land", "die")) == "False"
    with opened(tmp_path / "c") as catalog:
        assert catalog.store.lookup(KEY) is not None


@pytest.mark.parametrize("harm", ["boot", "origin", "epochs", "short epochs", "index", "short index", "no index"])
def test_what_cannot_be_believed_is_dropped(tmp_path: Path, harm: str) -> None:
    """An unsynced catalog after an unclean boot, one of another origin, and one whose files are not whole."""
    directory = tmp_path / "c"
    assert ended(other(directory, "land", "die")) == "False"
    if harm == "boot":
        (directory / "BOOT").write_bytes(b"another boot\n")
    elif harm == "epochs":
        (directory / "epochs").unlink()
    elif harm == "short epochs":
        os.truncate(directory / "epochs", 4096)
    elif harm == "index":
        (directory / "index" / "data.mdb").write_bytes(b"no index" * 4096)
    elif harm == "short index":
        os.truncate(directory / "index" / "data.mdb", 3 * 4096)
    elif harm == "no index":
        (directory / "index" / "data.mdb").unlink()
        (directory / "index").rename(directory / "elsewhere")
    with opened(directory, "another origin" if harm == "origin" else "origin") as catalog:
        assert catalog.store.lookup(KEY) is None
        catalog.store.land([fill(catalog)])
        assert catalog.store.lookup(KEY) is not None


def test_what_is_known_of_a_bucket_that_moves_is_forgotten(tmp_path: Path) -> None:
    """There, and back again; what is known of the others stays. Who has it open keeps it to its homes."""
    elsewhere = Homes("origin", {KEY.bucket: "elsewhere"})
    for homes, is_known in (
        (Homes("origin"), False),
        (Homes("origin", {"another": "elsewhere"}), True),
        (elsewhere, False),
        (elsewhere, True),
        (Homes("origin", {KEY.bucket: "third"}), False),
        (Homes("origin"), False),
        (Homes("origin"), True),
    ):
        catalog = open_directory(tmp_path / "c", homes)
        assert (catalog.store.lookup(KEY) is not None) == is_known, homes
        catalog.store.land([fill(catalog)])
        catalog.close()
    with opened(tmp_path / "c"), pytest.raises(StartupError, match="other homes of the buckets"):
        open_directory(tmp_path / "c", elsewhere)
    with opened(tmp_path / "c") as catalog:
        assert catalog.store.lookup(KEY) is not None


def test_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A newer version's catalog is never misread."""
    with opened(tmp_path / "c"):
        pass
    (tmp_path / "c" / "FORMAT").write_bytes(b"forebay catalog 4\n")
    with pytest.raises(StartupError, match="run the version that wrote it"):
        open_directory(tmp_path / "c", Homes("origin"))
    assert (tmp_path / "c" / "FORMAT").read_bytes() == b"forebay catalog 4\n"
