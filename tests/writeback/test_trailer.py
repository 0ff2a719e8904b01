"""What lies behind a staged file's bytes: enough to check it by itself, and never believed where it is damaged."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums as crt
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import BufferDamaged
from gateway.writeback.staged_file import (
    CHUNK_BYTES,
    FOOTER_BYTES,
    Footer,
    StagedFile,
    Staging,
    TrailerChecksums,
    pack_trailer,
    read_verified,
    trailer_bytes,
    unpack_footer,
)
from tests.support.writeback import md5

CHUNKS = 4
SIZE_BYTES = 3 * CHUNK_BYTES + 17


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    area = Staging(tmp_path, 3)
    area.prepare()
    return area


def stage(staging: Staging, content: bytes) -> StagedFile:
    writer = staging.create()
    writer.write(memoryview(content))
    return staging.seal(writer, md5(content))


def read(staging: Staging, file: StagedFile, position: int, count: int) -> bytes:
    with staging.open(file) as opened:
        return bytes(read_verified(opened, file, position, count))


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
    footer = unpack_footer(whole[-FOOTER_BYTES:])
    assert footer is not None
    assert len(whole) == footer.size_bytes + trailer_bytes(footer.size_bytes)
    found, checksums = whole[: footer.size_bytes], whole[footer.size_bytes : -FOOTER_BYTES]
    again = TrailerChecksums()
    again.update(memoryview(found))
    assert (found, footer.md5) == (content, hashlib.md5(content).digest())
    assert again.digest() == checksums
    assert footer == Footer(size_bytes, md5(content), crt.crc32c(checksums))


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


@pytest.mark.parametrize("written", [0, 4, 4 * CHUNKS, 4 * CHUNKS + 8, 4 * CHUNKS + FOOTER_BYTES - 1])
def test_a_torn_trailer_is_none(staging: Staging, written: int) -> None:
    """Its length on the disk, and of its bytes only the first: zeros are no footer, even where all are."""
    file = stage(staging, bytes(SIZE_BYTES))
    overwrite(staging.path(file), SIZE_BYTES + written, bytes(4 * CHUNKS + FOOTER_BYTES - written))
    with pytest.raises(BufferDamaged, match="footer"):
        staging.open(file)


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
