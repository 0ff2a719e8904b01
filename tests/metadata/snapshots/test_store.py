"""Snapshots on disk: there as a whole or not at all, never misread, never dropped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import NoSuchSnapshot, SnapshotConflict, SnapshotError, SnapshotUnusable
from gateway.metadata.listing.pages import END
from gateway.metadata.listing.records import etag_and_size, modified_of, pack, unpack
from gateway.metadata.snapshots import staging as staging_module
from gateway.metadata.snapshots.staging import TEMPLATES_MAX, ObjectTable, Origins, SnapshotStaging
from gateway.metadata.snapshots.store import SnapshotStore
from gateway.s3.list_result import EntryTemplate, ListedEntry
from tests.support.snapshots import entry, files_of, keys_of, make

MADE = [["old"], ["new", "old"]]
STEPS = 60
"""More than there are."""

OBJECTS = {"a": b"1", "b/c": b"22", "é": b"333", "\U0010ffff": b""}
ORIGINS = Origins("v1", "s3://bucket/", "memory", 1.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SnapshotStore]:
    opened = SnapshotStore(tmp_path / "snapshots")
    yield opened
    opened.close()


def test_what_was_kept_is_there(store: SnapshotStore) -> None:
    """Every object with its ETag and size, the totals, and what it is of."""
    manifest = make(store, "v1", OBJECTS)
    assert (manifest.objects, manifest.size_bytes, manifest.prefix) == (4, 6, "s3://bucket/")
    assert store.manifest("v1") == manifest
    with store.opened("v1") as snapshot:
        found = snapshot.data.part(b"", b"\xff")
        assert found == [entry(key, OBJECTS[key]) for key in ("a", "b/c", "é", "\U0010ffff")]
        assert snapshot.data.record(b"b/c") is not None
        assert snapshot.data.record(b"b/") is None
        assert snapshot.data.record(b"") is None
    assert [one.name for one in store.all()] == ["v1"]


def test_an_empty_snapshot_is_one(store: SnapshotStore) -> None:
    """A prefix with nothing under it is frozen as that."""
    assert make(store, "v1", {}).objects == 0
    assert keys_of(store, "v1") == []


def test_the_digest_tells_contents_apart(store: SnapshotStore) -> None:
    """The same for the same objects, another for another key, ETag or size."""
    digest = make(store, "v1", OBJECTS).digest
    assert make(store, "v2", OBJECTS).digest == digest
    assert make(store, "v3", OBJECTS | {"a": b"2"}).digest != digest
    assert make(store, "v4", {**OBJECTS, "x": b""}).digest != digest


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".new-1", "-a", "a" * 65, "a\n", "a\0", "é"])
def test_a_name_never_becomes_a_path_unchecked(store: SnapshotStore, name: str) -> None:
    """Nothing is looked at on disk, made or deleted."""
    for use in (store.manifest, store.open, store.delete):
        with pytest.raises(ValueError, match="no name of a snapshot"):
            use(name)
    with pytest.raises(ValueError, match="no name of a snapshot"):
        SnapshotStaging.begin(store, "m", Origins(name, "s3://bucket/", "memory", 1.0))


def test_a_name_is_taken_once(store: SnapshotStore) -> None:
    """Whether it is there before the making begins, or comes first."""
    late = SnapshotStaging.begin(store, "late", ORIGINS)
    make(store, "v1", OBJECTS)
    with pytest.raises(SnapshotConflict, match="already"):
        SnapshotStaging.begin(store, "m", ORIGINS)
    with pytest.raises(SnapshotConflict, match="already"):
        late.publish(2.0)
    late.discard()
    assert files_of(store.root) == ["v1"]
    assert len(keys_of(store, "v1")) == 4


def test_objects_out_of_order_are_refused(store: SnapshotStore) -> None:
    """An origin that does not list in order gives no snapshot, rather than a wrong one."""
    staging = SnapshotStaging.begin(store, "m", ORIGINS)
    staging.append([entry("b")])
    for keys in (["a"], ["b"], ["d", "c"]):
        with pytest.raises(SnapshotError, match="order"):
            staging.append([entry(key) for key in keys])
    staging.discard()
    assert files_of(store.root) == []


def test_deleting_leaves_nothing(store: SnapshotStore) -> None:
    """Who has it open reads on; nobody opens it again."""
    make(store, "v1", OBJECTS)
    with store.opened("v1") as snapshot:
        store.delete("v1")
        assert len(snapshot.data.part(b"", b"\xff")) == 4
        with pytest.raises(NoSuchSnapshot):
            store.open("v1")
        make(store, "v1", {"new": b""})
        assert keys_of(store, "v1") == ["new"]
    assert files_of(store.root) == ["v1"]
    with pytest.raises(NoSuchSnapshot):
        store.delete("v2")


def test_whoever_looks_at_the_number_sees_that_something_has_changed(store: SnapshotStore) -> None:
    """Another process's view of the same directory, after a snapshot has come and gone."""
    other = SnapshotStore(store.root)
    seen = [other.changes.number]
    make(store, "v1", OBJECTS)
    seen.append(other.changes.number)
    store.delete("v1")
    seen.append(other.changes.number)
    assert len(set(seen)) == 3
    other.close()


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def _flip_data(path: Path) -> None:
    data = next(path.glob("*.data"))
    _flip(data, data.stat().st_size // 2)


def _cut_data(path: Path) -> None:
    data = next(path.glob("*.data"))
    os.truncate(data, data.stat().st_size - 1)


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "data": (_flip_data, "damaged"),
    "cut": (_cut_data, "not whole"),
    "no data": (lambda path: next(path.glob("*.data")).unlink(), "gone"),
    "manifest": (lambda path: _flip(path / "MANIFEST", 60), "damaged"),
    "no manifest": (lambda path: (path / "MANIFEST").unlink(), "no manifest"),
    "empty manifest": (lambda path: (path / "MANIFEST").write_bytes(b""), "damaged"),
    "newer": (lambda path: (path / "MANIFEST").write_bytes(b"forebay snapshot 3 00000000\nwhatever"), "format '3'"),
    "older": (lambda path: (path / "MANIFEST").write_bytes(b"forebay snapshot 0 00000000\nwhatever"), "format '0'"),
    "renamed": (lambda path: path.rename(path.with_name("v2")), "renamed"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_or_newer_is_refused_and_left_as_it_is(tmp_path: Path, harm: str) -> None:
    """The message says what is the matter; not a byte changes; it can be deleted, and others can be used."""
    root = tmp_path / "snapshots"
    store = SnapshotStore(root)
    make(store, "v1", OBJECTS)
    make(store, "well", OBJECTS)
    store.close()
    damage, message = HARMS[harm]
    damage(root / "v1")
    name = "v2" if harm == "renamed" else "v1"
    before = {path: path.read_bytes() for path in (root / name).iterdir()}
    store = SnapshotStore(root)
    store.sweep([])
    with pytest.raises(SnapshotUnusable, match=message):
        store.check(name, whole=True)
    assert {path: path.read_bytes() for path in (root / name).iterdir()} == before
    problems = {one.name: one.problem for one in store.all()}
    assert problems["well"] is None
    if harm != "data":  # that is only seen when all of it is read
        assert problems[name] is not None
    assert len(keys_of(store, "well")) == 4
    store.delete(name)
    assert files_of(root) == ["well"]
    store.close()


def test_what_a_killed_process_has_begun_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last key, with the moment of its beginning; under another boot it begins anew."""
    store = SnapshotStore(tmp_path / "snapshots")
    begun = SnapshotStaging.begin(store, "m", ORIGINS)
    begun.append([entry("a", b"1")])
    begun.leave()
    store.sweep(["m"])
    again = SnapshotStaging.begin(store, "m", Origins("v1", "s3://bucket/", "memory", 5.0))
    assert (again.last_key(), again.totals(), again.origins.started_at) == (b"a", (1, 1), 1.0)
    again.leave()
    boot = tmp_path / "boot"
    boot.write_text("another")
    monkeypatch.setattr(staging_module, "BOOT_ID", boot)
    anew = SnapshotStaging.begin(store, "m", Origins("v1", "s3://bucket/", "memory", 5.0))
    assert (anew.last_key(), anew.origins.started_at) == (None, 5.0)
    anew.leave()
    store.sweep([])
    assert files_of(store.root) == []
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize(("work", "states"), [("make", MADE), ("bring in", MADE), ("delete", [["old"], []])])
def test_a_kill_at_any_step_leaves_all_or_nothing(tmp_path: Path, work: str, states: list[list[str]]) -> None:
    """A snapshot is wholly there or not at all, what is there can be read, and nothing else is left."""
    for step in range(STEPS):
        store = SnapshotStore(tmp_path / f"{step}")
        make(store, "old", OBJECTS)
        store.close()
    subprocess.run([sys.executable, "-m", "tests.support.snapshot_kills", work, str(tmp_path)], check=True)
    steps, code = map(int, (tmp_path / "steps").read_text().split())
    assert code == 0
    assert 8 < steps < STEPS
    seen = [_survivors(tmp_path / f"{step}") for step in range(steps + 1)]
    assert all(one in states for one in seen)
    assert (seen[0], seen[-1]) == (states[0], states[1])


def _survivors(root: Path) -> list[str]:
    """The snapshots that the next process finds, all of them in order."""
    store = SnapshotStore(root)
    store.sweep([])
    found = files_of(root)
    for name in found:
        assert keys_of(store, name) == (["a"] if name == "new" else sorted(OBJECTS))
    store.close()
    return found


DATES = st.sampled_from(["2026-01-02T03:04:05.000Z", "2026-01-02T03:04:05.678Z", "2026-01-02T03:04:05Z", "yesterday"])
HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)
ETAGS = st.one_of(
    HEX.map(lambda text: f'"{text}"'),
    st.tuples(HEX, st.integers(1, 10_000)).map(lambda parts: f'"{parts[0]}-{parts[1]}"'),
    st.sampled_from(['"opaque"', 'W/"weak"', "bare", '""']),
)


@given(DATES, ETAGS, st.integers(0, 2**48 - 1), st.integers(0, TEMPLATES_MAX - 1))
def test_version_and_date_come_out_of_a_record_without_the_rest(
    modified: str, etag: str, size_bytes: int, template: int
) -> None:
    """As they were listed, however they were written."""
    record = pack(ListedEntry(b"key", modified, etag, size_bytes, EntryTemplate("", "", "")), template)
    assert etag_and_size(record) == (etag, size_bytes)
    assert modified_of(record) == modified


def test_objects_keep_their_forms(tmp_path: Path) -> None:
    """Those that came with the first page, and those that came later, or were there before a restart."""
    templates = [EntryTemplate("", f"<Owner><ID>{number}</ID></Owner>", "") for number in range(3)]
    entries = [entry(f"{number}", template=template) for number, template in enumerate(templates)]
    for one in entries:
        table = ObjectTable(tmp_path / "table")
        table.append([one])
        table.close()
    table = ObjectTable(tmp_path / "table")
    assert [unpack(*row, table.templates) for row in table.read(b"", END, 10)] == entries
    assert [key for key, _ in table.read(b"1", b"2", 10)] == [b"1"]
    assert [key for key, _ in table.read(b"", END, 1)] == [b"0"]
    assert table.read(b"3", END, 10) == []
    table.close()
