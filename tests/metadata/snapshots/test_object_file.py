"""A snapshot's objects in a file: found as they were written, verified as they are read, at a cost of its depth."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import SnapshotUnusable
from gateway.metadata.listing.pages import Listed
from gateway.metadata.snapshots import object_file
from gateway.metadata.snapshots.object_file import BRANCHES_KEPT, Layout, ObjectFile, ObjectFileWriter
from gateway.s3.list_result import EntryTemplate
from tests.support.listing_model import KEY

TEMPLATES = [EntryTemplate("", None, f"<StorageClass>{name}</StorageClass>") for name in ("STANDARD", "GLACIER")]


def write(path: Path, rows: Sequence[Listed], templates: Sequence[EntryTemplate] = ()) -> Layout:
    with path.open("wb") as file:
        writer = ObjectFileWriter(file)
        writer.add(rows)
        return writer.finish(templates)


@contextmanager
def opened(rows: Sequence[Listed], node_bytes: int) -> Iterator[ObjectFile]:
    """A file of these rows, in nodes of about so many bytes."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(object_file, "NODE_BYTES", node_bytes)
        path = Path(directory) / "file"
        file = ObjectFile(path, write(path, rows, TEMPLATES))
        try:
            yield file
        finally:
            file.close()


KEYS = st.lists(KEY.map(str.encode), unique=True, max_size=80).map(sorted)


@pytest.mark.slow
@given(KEYS, st.binary(max_size=40), st.integers(1, 400), KEY.map(str.encode), KEY.map(str.encode), st.integers(0, 90))
def test_what_was_written_is_found(
    keys: list[bytes], record: bytes, node_bytes: int, start: bytes, stop: bytes, count: int
) -> None:
    """By key and by range, however deep the tree is; nothing else is."""
    rows = [(key, record + key) for key in keys]
    with opened(rows, node_bytes) as file:
        assert file.templates == TEMPLATES
        for key, value in rows:
            assert file.record(key) == value
            assert file.record(key + b"\0") is None
        assert (file.record(start) is not None) == (start in keys)
        within = [row for row in rows if start <= row[0] < stop]
        assert file.read(start, stop, count) == within[:count]
        assert file.read(b"", b"\xff", len(rows) + 1) == rows
        file.verify(len(rows))
        with pytest.raises(SnapshotUnusable, match="objects"):
            file.verify(len(rows) + 1)


def rows_of(count: int) -> list[Listed]:
    return [(b"train/%08d" % number, b"r" * 40) for number in range(count)]


class Reads:
    """How much was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.size_bytes = 0, 0
        pread = os.pread

        def noted(descriptor: int, size_bytes: int, offset: int) -> bytes:
            self.count += 1
            self.size_bytes += size_bytes
            return pread(descriptor, size_bytes, offset)

        monkeypatch.setattr(os, "pread", noted)

    def taken(self) -> tuple[int, int]:
        taken = self.count, self.size_bytes
        self.count = self.size_bytes = 0
        return taken


@pytest.mark.slow
def test_opening_costs_the_same_whatever_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reads of a few kilobytes, and no memory that grows: it used to be all of the file, for every worker."""
    costs = []
    for count in (1000, 300_000):
        path = tmp_path / f"{count}"
        layout = write(path, rows_of(count), TEMPLATES)
        reads = Reads(monkeypatch)
        tracemalloc.start()
        file = ObjectFile(path, layout)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        costs.append((*reads.taken(), peak))
        monkeypatch.undo()
        file.close()
    assert [reads for reads, _, _ in costs] == [2, 2]
    assert all(size_bytes < 20_000 and peak < 200_000 for _, size_bytes, peak in costs)


@pytest.mark.slow
def test_a_look_up_reads_a_node_of_each_level_and_keeps_the_branches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So with branches known it reads one leaf, and memory has a bound."""
    path, count = tmp_path / "file", 300_000
    file = ObjectFile(path, write(path, rows_of(count)))
    reads = Reads(monkeypatch)
    assert file.record(b"train/00000001") is not None
    assert reads.taken()[0] <= 3
    assert file.record(b"train/00000900") is not None
    assert reads.taken()[0] == 1
    monkeypatch.setattr(object_file, "BRANCHES_KEPT", 4)
    file.verify(count)
    assert len(file._branches) <= 4 < BRANCHES_KEPT
    file.close()


@pytest.mark.slow
def test_every_byte_that_is_read_is_verified(tmp_path: Path) -> None:
    """Whichever byte is flipped: some key is refused or all are as they were; none is missing or another."""
    rows = rows_of(400)
    path = tmp_path / "file"
    layout = write(path, rows, TEMPLATES)
    content = path.read_bytes()
    for place in [*range(0, len(content), 97), *range(len(content) - 30, len(content))]:
        harmed = bytearray(content)
        harmed[place] ^= 0x10
        path.write_bytes(harmed)
        refused = False
        try:
            file = ObjectFile(path, layout)
        except SnapshotUnusable:
            continue
        for key, record in rows:
            try:
                assert file.record(key) == record
            except SnapshotUnusable:
                refused = True
        file.close()
        assert refused or place < len(b"forebay objects\n")


def test_nodes_that_have_changed_places_are_refused(tmp_path: Path) -> None:
    """A branch says which node it means, not only where: the bytes of another sound one are not believed."""
    rows, path = rows_of(2000), tmp_path / "file"
    layout = write(path, rows)
    content = bytearray(path.read_bytes())
    file = ObjectFile(path, layout)
    first, second = file._node(layout.root).children[:2]  # type: ignore[union-attr]
    file.close()
    assert first.size_bytes == second.size_bytes
    ours, theirs = (slice(one.offset, one.offset + one.size_bytes) for one in (first, second))
    content[ours], content[theirs] = content[theirs], content[ours]
    path.write_bytes(content)
    file = ObjectFile(path, layout)
    with pytest.raises(SnapshotUnusable, match="damaged"):
        file.record(rows[0][0])
    file.close()
