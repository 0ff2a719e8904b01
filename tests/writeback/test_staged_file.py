"""A staged file: durable before it counts, never read where it is damaged, and enough to check it by itself."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import stat
import struct
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums as crt
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.disk.atomic_write import sync_directory
from gateway.writeback import staged_file
from gateway.writeback.staged_file import (
    AT_ONCE_BYTES,
    CHUNK_BYTES,
    FOOTER_BYTES,
    StagedFile,
    Staging,
    TrailerChecksums,
    pack_trailer,
    read_verified,
    trailer_bytes,
)
from tests.support.writeback import md5

CHUNKS = 4
SIZE_BYTES = 3 * CHUNK_BYTES + 17


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    area = Staging(tmp_path, 3)
    area.prepare()
    return area


def stage(staging: Staging, content: bytes, piece_bytes: int = 50_000) -> StagedFile:
    writer = staging.create()
    for start in range(0, len(content), piece_bytes):
        writer.write(memoryview(content)[start : start + piece_bytes])
    return staging.seal(writer, md5(content))


def read(staging: Staging, file: StagedFile, position: int, count: int) -> bytes:
    with staging.open(file) as opened:
        return bytes(read_verified(opened, file, position, count))


def test_what_was_staged_is_read_back(staging: Staging) -> None:
    """Any range of it, verified; private to its owner; with the MD5 that becomes the ETag."""
    content = random.Random(1).randbytes(SIZE_BYTES)
    file = stage(staging, content)
    assert (file.size_bytes, file.etag) == (len(content), f'"{hashlib.md5(content).hexdigest()}"')
    for position, count in ((0, SIZE_BYTES), (1, 1), (CHUNK_BYTES - 1, 2), (SIZE_BYTES - 1, 1), (70_000, 90_000)):
        assert read(staging, file, position, count) == content[position : position + count]
    assert stat.S_IMODE(staging.path(file).stat().st_mode) == 0o600
    assert stat.S_IMODE(staging.path(file).parent.stat().st_mode) == 0o700


def test_an_empty_body_is_a_file_too(staging: Staging) -> None:
    """An object of no bytes has an MD5, and no checksums: a footer is all there is."""
    file = stage(staging, b"")
    assert (file.size_bytes, file.disk_bytes, file.md5) == (0, FOOTER_BYTES, hashlib.md5(b"").digest())
    assert staging.path(file).stat().st_size == FOOTER_BYTES
    assert read(staging, file, 0, 0) == b""


@pytest.mark.parametrize("at", [0, CHUNK_BYTES, SIZE_BYTES - 1])
def test_a_flipped_bit_is_never_read(staging: Staging, at: int) -> None:
    """BufferDamaged for every range whose chunks hold it, and for no other."""
    content = random.Random(2).randbytes(SIZE_BYTES)
    file = stage(staging, content)
    with staging.path(file).open("r+b") as raw:
        raw.seek(at)
        raw.write(bytes([content[at] ^ 4]))
    chunk = at // CHUNK_BYTES * CHUNK_BYTES
    with pytest.raises(BufferDamaged):
        read(staging, file, chunk, 1)
    beside = 2 * CHUNK_BYTES if at != 2 * CHUNK_BYTES else 0
    assert read(staging, file, beside, 10) == content[beside : beside + 10]


def test_a_file_of_another_length_is_not_opened(staging: Staging) -> None:
    """Cut or grown, it is not what was acknowledged: within its bytes, where they end, within what lies behind them."""
    whole = stage(staging, bytes(SIZE_BYTES)).disk_bytes
    for length in (0, SIZE_BYTES - 1, SIZE_BYTES, SIZE_BYTES + 1, whole - FOOTER_BYTES, whole - 1, whole + 1):
        file = stage(staging, bytes(SIZE_BYTES))
        os.truncate(staging.path(file), length)
        with pytest.raises(BufferDamaged, match=f"has {length} bytes, not {whole}"):
            staging.open(file)


@pytest.mark.parametrize("failing", ["fsync of the file", "fsync of the directory"])
def test_what_could_not_be_synced_is_gone(
    staging: Staging, failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failed fsync is never tried again: the kernel may have dropped the bytes, and the next says nothing of it."""
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if is_directory == (failing == "fsync of the directory"):
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BufferUnavailable):
        stage(staging, b"x")
    assert list(staging.names()) == []
    assert calls == (1 if failing == "fsync of the file" else 2)
    monkeypatch.undo()
    assert read(staging, stage(staging, b"later"), 0, 5) == b"later"


@pytest.mark.parametrize(("size_bytes", "order"), [(1, "file, directory"), (8 * AT_ONCE_BYTES, "directory, file")])
def test_file_and_directory_are_synced_before_it_counts(
    staging: Staging, size_bytes: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once: the name is worth nothing without the bytes, nor are they without it. The name of what is not small is
    synced when the file is there, and more of it still comes."""
    synced: list[str] = []
    real, named = os.fsync, threading.Event()

    def fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        assert not is_directory or list(staging.names())
        real(descriptor)
        synced.append("directory" if is_directory else "file")
        named.set()

    monkeypatch.setattr(os, "fsync", fsync)
    writer, content = staging.create(), memoryview(bytes(size_bytes))
    for start in range(0, size_bytes, AT_ONCE_BYTES):
        writer.write(content[start : start + AT_ONCE_BYTES])
    if size_bytes > AT_ONCE_BYTES:
        assert named.wait(10)
    staging.seal(writer, b"")
    assert ", ".join(synced) == order


def test_many_seal_with_few_syncs_of_the_directory(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes while one is under way shares the next; none returns before one that began after it came."""
    syncing, going_on, real = threading.Event(), threading.Event(), sync_directory
    count = 0

    def slow(path: Path) -> None:
        nonlocal count
        count += 1
        if count == 1:
            syncing.set()
            assert going_on.wait(10)
        real(path)

    monkeypatch.setattr("gateway.writeback.staged_file.sync_directory", slow)
    first = staging._names.begin()
    assert syncing.wait(10)
    others = [staging._names.begin() for _ in range(8)]
    assert not any(one.done() for one in (first, *others))
    going_on.set()
    for one in (first, *others):
        one.result(10)
    assert count == 2


def test_a_failed_sync_of_the_directory_fails_all_who_waited_for_it(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them may believe that its name is on the disk; nothing is left of the files."""
    syncing, going_on = threading.Event(), threading.Event()

    def fail(_: Path) -> None:
        syncing.set()
        assert going_on.wait(10)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gateway.writeback.staged_file.sync_directory", fail)
    staging._names.begin()
    assert syncing.wait(10)
    writers = [staging.create() for _ in range(3)]
    for writer in writers:
        writer.write(memoryview(bytes(AT_ONCE_BYTES)))
    going_on.set()
    for writer in writers:
        with pytest.raises(BufferUnavailable, match="Input/output"):
            staging.seal(writer, b"")
    assert not list(staging.names())


@pytest.mark.parametrize(("error", "is_raised"), [(5, True), (28, True), (38, False), (1, False), (29, False)])
def test_writing_out_early_hides_no_error_and_needs_no_support(
    staging: Staging, error: int, is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk says then is believed; where the call is missing, forbidden or means nothing, fsync does it all."""
    begun: list[tuple[int, int]] = []

    def refuse(_: int, position: int, count: int, __: int) -> int:
        begun.append((position, count))
        ctypes.set_errno(error)
        return -1

    monkeypatch.setattr(staged_file, "_sync_file_range", refuse)
    writer, piece = staging.create(), memoryview(bytes(AT_ONCE_BYTES // 2 + 1))
    writer.write(piece)
    with pytest.raises(OSError) if is_raised else nullcontext():
        writer.write(piece)
        assert begun == [(0, AT_ONCE_BYTES + 2)]
    staging.discard(writer)


def test_a_full_disk_is_said_so(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file can be made, nothing is left of the attempt."""

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    writer = staging.create()
    with pytest.raises(OSError, match="No space left"):
        writer.write(memoryview(b"x"))
    with pytest.raises(BufferUnavailable, match="No space left"):
        staging.seal(staging.create(), b"")
    monkeypatch.undo()
    staging.discard(writer)
    assert list(staging.names()) == []


def test_a_sweep_removes_what_the_journal_does_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dead worker's files, or of all; what it names stays."""
    areas = {worker: Staging(tmp_path, worker) for worker in (1, 2)}
    files = {}
    for worker, area in areas.items():
        area.prepare()
        files[worker] = [stage(area, bytes([worker])), stage(area, bytes([worker, 2]))]
    known = {files[1][0].name, files[2][0].name}

    def unknown(names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in known]

    monkeypatch.setattr(staged_file, "SWEPT_AT_ONCE", 1)
    assert areas[2].sweep(unknown, worker=1) == 1
    assert set(areas[1].names()) == known | {files[2][1].name}
    assert areas[1].sweep(unknown) == 1
    assert set(areas[1].names()) == known


# What lies behind its bytes


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(content)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 100_000), max_size=5), st.integers(0, 2**32))
def test_checksums_do_not_depend_on_the_pieces(sizes: list[int], seed: int) -> None:
    """However the bytes come, they are those of each 64 KiB."""
    content = random.Random(seed).randbytes(sum(sizes))
    whole, pieces, position = TrailerChecksums(), TrailerChecksums(), 0
    whole.update(memoryview(content))
    for size in sizes:
        pieces.update(memoryview(content)[position : position + size])
        position += size
    packed = pieces.digest()
    assert packed == whole.digest()
    assert len(packed) == 4 * -(-len(content) // CHUNK_BYTES)


def test_the_format_is_the_documented_one() -> None:
    """To the byte (docs/on-disk-format.md): files outlive the program that wrote them."""
    content, checksums = b"123456789", TrailerChecksums()
    checksums.update(memoryview(content))
    trailer = pack_trailer(len(content), md5(content), checksums.digest())
    assert trailer[:4].hex() == "839206e3"  # the CRC32C of "123456789", known to everybody
    assert trailer[4:-4].hex() == (
        "46425953544147450100000001000000090000000000000025f9e794323b453885f5181f1b624d0bd959a055"
    )
    assert trailer[-4:] == crt.crc32c(trailer[4:-4]).to_bytes(4, "little")
    assert len(trailer) == trailer_bytes(len(content)) == 4 + FOOTER_BYTES


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES, SIZE_BYTES])
def test_a_file_is_checked_without_the_journal(staging: Staging, size_bytes: int) -> None:
    """Its footer says what is in it, and where; checksums and MD5 say that it is that."""
    content = random.Random(size_bytes).randbytes(size_bytes)
    whole = staging.path(stage(staging, content)).read_bytes()
    _, _, chunks, length, digest, checksums_crc = struct.unpack("<8sIIQ16sI", whole[-FOOTER_BYTES:-4])
    assert len(whole) == length + trailer_bytes(length)
    found, checksums = whole[:length], whole[length:-FOOTER_BYTES]
    again = TrailerChecksums()
    again.update(memoryview(found))
    assert (found, digest) == (content, hashlib.md5(content).digest())
    assert again.digest() == checksums
    assert (4 * chunks, checksums_crc) == (len(checksums), crt.crc32c(checksums))


def test_no_byte_of_a_footer_is_without_its_check(staging: Staging) -> None:
    """Flipped anywhere, a bit makes the file one that is not opened."""
    file = stage(staging, random.Random(3).randbytes(SIZE_BYTES))
    path, start = staging.path(file), file.disk_bytes - FOOTER_BYTES
    whole = path.read_bytes()
    for number in range(FOOTER_BYTES):
        overwrite(path, start + number, bytes([whole[start + number] ^ 1 << number % 8]))
        with pytest.raises(BufferDamaged, match="footer"):
            staging.open(file)
        with pytest.raises(BufferDamaged, match="footer"):
            staging.checksums(file)
        overwrite(path, start, whole[start:])
    assert read(staging, file, 0, SIZE_BYTES) == whole[:SIZE_BYTES]


def test_a_flipped_bit_of_a_checksum_costs_its_chunk(staging: Staging) -> None:
    """No byte of it is read, every other is; and nobody takes the checksums over as they are."""
    content = random.Random(4).randbytes(SIZE_BYTES)
    file = stage(staging, content)
    path = staging.path(file)
    whole = path.read_bytes()
    for number in range(4 * CHUNKS):
        overwrite(path, SIZE_BYTES + number, bytes([whole[SIZE_BYTES + number] ^ 1 << number % 8]))
        for chunk in range(CHUNKS):
            if chunk == number // 4:
                with pytest.raises(BufferDamaged, match=f"chunk {chunk}"):
                    read(staging, file, chunk * CHUNK_BYTES, 1)
            else:
                assert read(staging, file, chunk * CHUNK_BYTES, 1) == content[chunk * CHUNK_BYTES :][:1]
        with pytest.raises(BufferDamaged, match="checksums"):
            staging.checksums(file)
        overwrite(path, SIZE_BYTES, whole[SIZE_BYTES:])
    assert staging.checksums(file) == whole[SIZE_BYTES:-FOOTER_BYTES]


@pytest.mark.parametrize("as_long", [True, False])
def test_another_file_is_not_taken_for_it(staging: Staging, *, as_long: bool) -> None:
    """Whole as it may be: length and MD5 are the acknowledged ones, or it is not opened."""
    file, other = stage(staging, bytes(SIZE_BYTES)), stage(staging, b"x" * (SIZE_BYTES - (not as_long)))
    os.replace(staging.path(other), staging.path(file))
    with pytest.raises(BufferDamaged, match="another one" if as_long else "bytes, not"):
        staging.open(file)


def test_a_piece_costs_its_own_checksums(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the file: opening it takes a footer, a byte of it its chunk and four bytes more."""
    file, asked = stage(staging, bytes(64 * CHUNK_BYTES)), list[int]()
    real = os.pread

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        asked.append(count)
        return real(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    read(staging, file, 40 * CHUNK_BYTES + 5, 1)
    assert asked == [FOOTER_BYTES, CHUNK_BYTES, 4]


def test_the_trailer_is_there_before_the_file_is_synced(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sync for both: what comes later might not survive it."""
    lengths: list[int] = []
    real: Any = os.fsync

    def fsync(descriptor: int) -> None:
        lengths.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr("gateway.writeback.staged_file.sync_directory", lambda _: None)
    monkeypatch.setattr(os, "fsync", fsync)
    file = stage(staging, bytes(SIZE_BYTES))
    assert lengths == [file.disk_bytes] == [staging.path(file).stat().st_size]
