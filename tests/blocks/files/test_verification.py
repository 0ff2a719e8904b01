"""Whether bytes are in memory, and whether they are the right ones."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from awscrt import checksums
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks.block_file import ChunkChecksums, chunk_aligned, read_verified
from gateway.blocks.layout import CHUNK_BYTES, Extent, chunk_count
from gateway.blocks.page_cache import Residency
from gateway.core.errors import BlockDamaged
from tests.support.blocks import MIB, drop_page_cache

LENGTH = 5 * CHUNK_BYTES + 777
START = 4096


def packed_checksums(content: bytes) -> bytes:
    chunks = (content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES))
    return b"".join(checksums.crc32c(chunk).to_bytes(4, "little") for chunk in chunks)


@settings(max_examples=30)
@given(st.integers(1, 300_000), st.lists(st.integers(1, 100_000), max_size=20), st.randoms(use_true_random=False))
def test_checksums_do_not_depend_on_how_bytes_arrive(length: int, sizes: list[int], rng: random.Random) -> None:
    """Pieces of any size give the checksums of the 64 KiB chunks, and only whole chunks count as complete."""
    content = rng.randbytes(length)
    sums, position = ChunkChecksums(length), 0
    for size in [*sizes, length]:
        piece = content[position : position + size]
        position += len(piece)
        sums.update(piece)
        whole_chunks = position if position == length else position // CHUNK_BYTES * CHUNK_BYTES
        assert sums.complete_bytes == whole_chunks
    assert bytes(sums.packed) == packed_checksums(content)
    assert len(sums.packed) == 4 * chunk_count(length)


def test_a_single_wrong_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    """Every read that touches a chunk with a flipped bit fails; reads of other chunks succeed."""
    rng = random.Random(7)
    content = bytearray(rng.randbytes(LENGTH))
    path = tmp_path / "f"
    extent = Extent("f", START, LENGTH, packed_checksums(bytes(content)))
    for _ in range(100):
        bit = rng.randrange(LENGTH * 8)
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(b"\0" * START + damaged)
        position = rng.randrange(LENGTH)
        count = rng.randint(1, LENGTH - position)
        first, stop = chunk_aligned(extent, position, count)
        touches = first <= bit // 8 < stop
        with path.open("rb") as file:
            if touches:
                with pytest.raises(BlockDamaged):
                    read_verified(file.fileno(), extent, position, count)
            else:
                assert read_verified(file.fileno(), extent, position, count) == content[position : position + count]


def test_a_short_file_is_damaged(tmp_path: Path) -> None:
    """A file that ends early is an error, never short bytes."""
    path = tmp_path / "f"
    content = os.urandom(LENGTH)
    path.write_bytes(b"\0" * START + content[:-1])
    with path.open("rb") as file, pytest.raises(BlockDamaged, match="shorter"):
        read_verified(file.fileno(), Extent("f", START, LENGTH, packed_checksums(content)), LENGTH - 10, 10)


@pytest.mark.parametrize("cachestat", [True, False])
def test_residency_tells_memory_from_disk(tmp_path: Path, cachestat: bool) -> None:
    """Bytes just written are in memory; after the kernel dropped them they are not; one page missing is seen."""
    path = tmp_path / "f"
    path.write_bytes(os.urandom(2 * MIB))
    residency = Residency(cachestat=cachestat)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        assert residency.resident(descriptor, 0, 2 * MIB)
        drop_page_cache(path)
        if _in_memory_after_drop(descriptor):
            pytest.skip("this file system keeps everything in memory")
        assert not residency.resident(descriptor, 0, 2 * MIB)
        os.pread(descriptor, MIB, 0)
        assert residency.resident(descriptor, 0, MIB)
        assert not residency.resident(descriptor, 0, MIB + 1)
    finally:
        os.close(descriptor)


def _in_memory_after_drop(descriptor: int) -> bool:
    return Residency().resident(descriptor, 0, 2 * MIB)


def test_what_waits_to_be_written_has_not_come_from_the_device(tmp_path: Path) -> None:
    """Once it is written, nobody can tell any more."""
    residency, path = Residency(), tmp_path / "f"
    with path.open("wb") as file:
        file.write(os.urandom(MIB))
        file.flush()
        if not residency.unwritten(file.fileno(), 0, MIB):
            pytest.skip("this system does not tell what waits to be written")
        os.fdatasync(file.fileno())
        assert not residency.unwritten(file.fileno(), 0, MIB)
        os.pwrite(file.fileno(), bytes(MIB), 0)
        assert residency.unwritten(file.fileno(), 0, MIB)
        assert not residency.unwritten(file.fileno(), 0, MIB + 1)
