"""Verifying ahead of a reader: the same answers as without, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks.block_file import BlockFile, BlockLease, ChunkChecksums, lease_of
from gateway.blocks.directory import DiskThreads
from gateway.blocks.layout import CHUNK_BYTES, Extent
from gateway.blocks.spans import PieceVerifier
from gateway.core.errors import BlockDamaged

PIECE = 2 * CHUNK_BYTES
LENGTH = 4 * PIECE
CONTENT = os.urandom(LENGTH)


class Bench:
    """A block in a file, and a verifier over it."""

    def __init__(self, path: Path, *, damaged_at: int | None = None) -> None:
        checksums = ChunkChecksums(LENGTH)
        checksums.update(CONTENT)
        content = bytearray(CONTENT)
        if damaged_at is not None:
            content[damaged_at] ^= 1
        path.write_bytes(content)
        self.file = lease_of(os.open(path, os.O_RDONLY))
        self.threads = DiskThreads(2)
        self.extent = Extent("f", 0, LENGTH, bytes(checksums.packed))
        self.verifier = PieceVerifier(self.file, self.extent, self.threads)

    def intact(self, position: int, count: int) -> bool:
        return self.file.file.intact(self.extent, position, count)

    def close(self) -> None:
        self.verifier.stop()
        self.threads.shut_down()
        self.file.close()


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions that the disk threads verified, in order."""
    seen: list[int] = []
    verify = BlockFile.verify

    def noting(file: BlockFile, extent: Extent, position: int, count: int) -> None:
        seen.append(position)
        verify(file, extent, position, count)

    monkeypatch.setattr(BlockFile, "verify", noting)
    return seen


def on_bench(bench: Bench, steps: Callable[[Bench], Any]) -> None:
    async def scenario() -> None:
        try:
            await steps(bench)
        finally:
            bench.close()

    asyncio.run(scenario())


def test_what_was_begun_ahead_is_not_done_twice(tmp_path: Path, looked_at: list[int]) -> None:
    """Every piece is looked at once, and only what was asked for counts as verified."""

    async def steps(bench: Bench) -> None:
        for position in range(0, LENGTH, PIECE):
            left = LENGTH - position - PIECE
            await bench.verifier.verify(position, PIECE, reads_on=True)
            assert bench.intact(position, PIECE)
            assert not left or not bench.intact(position + PIECE, 1)
            if left:
                bench.verifier.resume(position + PIECE, PIECE, reads_on=True)

    on_bench(Bench(tmp_path / "f"), steps)
    assert looked_at == list(range(0, LENGTH, PIECE))


def test_a_reader_that_goes_elsewhere_gets_what_it_asks_for(tmp_path: Path, looked_at: list[int]) -> None:
    """What was begun for another place does not stand in for it."""

    async def steps(bench: Bench) -> None:
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        await bench.verifier.verify(2 * PIECE, PIECE, reads_on=False)
        assert bench.intact(2 * PIECE, PIECE)

    on_bench(Bench(tmp_path / "f"), steps)
    assert sorted(looked_at) == [PIECE, 2 * PIECE]


def test_what_is_verified_and_in_memory_is_not_begun(tmp_path: Path, looked_at: list[int]) -> None:
    """A warm block costs nothing ahead."""

    async def steps(bench: Bench) -> None:
        bench.file.file.verify(bench.extent, 0, LENGTH)
        looked_at.clear()
        bench.verifier.resume(PIECE, PIECE, reads_on=False)

    on_bench(Bench(tmp_path / "f"), steps)
    assert looked_at == []


def test_damage_found_ahead_is_raised_where_the_reader_comes_to_it(tmp_path: Path) -> None:
    """Not before: the piece in hand is good."""

    async def steps(bench: Bench) -> None:
        await bench.verifier.verify(0, PIECE, reads_on=True)
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        with pytest.raises(BlockDamaged):
            await bench.verifier.verify(PIECE, PIECE, reads_on=False)
        assert bench.intact(0, PIECE)
        assert not bench.intact(PIECE, 1)

    on_bench(Bench(tmp_path / "f", damaged_at=PIECE + 7), steps)


def test_damage_that_nobody_comes_to_is_no_failure(tmp_path: Path) -> None:
    """The reader has left: whoever reads the piece finds it out again. Nothing is logged as never looked at."""
    complaints: list[object] = []

    async def steps(bench: Bench) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        bench.verifier.stop()
        bench.threads.shut_down()
        for _ in range(3):
            await asyncio.sleep(0)

    on_bench(Bench(tmp_path / "f", damaged_at=PIECE + 7), steps)
    assert complaints == []


@pytest.mark.parametrize("is_verified", [False, True])
def test_it_is_known_whether_anything_had_to_be_verified(tmp_path: Path, is_verified: bool) -> None:
    """So that the blocks behind are verified, too, before the reader comes to them."""

    async def steps(bench: Bench) -> None:
        if is_verified:
            bench.file.file.verify(bench.extent, 0, LENGTH)
        bench.verifier.resume(PIECE, PIECE, reads_on=True)
        assert bench.verifier.has_worked != is_verified

    on_bench(Bench(tmp_path / "f"), steps)


def test_a_piece_that_was_begun_is_not_begun_again(tmp_path: Path, looked_at: list[int]) -> None:
    """A reader that is told of the next piece twice has it verified once."""

    async def steps(bench: Bench) -> None:
        bench.verifier.resume(PIECE, PIECE, reads_on=True)
        bench.verifier.resume(PIECE, PIECE, reads_on=True)
        await bench.verifier.verify(PIECE, PIECE, reads_on=True)

    on_bench(Bench(tmp_path / "f"), steps)
    assert looked_at == [PIECE]


def test_a_reader_that_leaves_at_once_takes_no_file_from_others(tmp_path: Path) -> None:
    """The piece ahead is verified in its own file, or not at all: not in the file that has got the number since."""

    async def steps(bench: Bench) -> None:
        number = bench.file.descriptor
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        bench.verifier.stop()
        bench.file.close()  # the client has left before the work ahead came to run
        others = [leased_file(tmp_path / f"tenant-{name}") for name in "bcdefgh"]
        for _ in range(3):
            await asyncio.sleep(0)
        bench.threads.shut_down()
        more = [leased_file(tmp_path / f"tenant-{name}") for name in "ijk"]
        numbers = [other.descriptor for other in (*others, *more)]
        assert len(set(numbers)) == len(numbers)
        for name, other in zip("bcdefghijk", (*others, *more), strict=True):
            assert os.pread(other.descriptor, 64, 0) == f"tenant-{name}".encode()
            other.close()
        assert number > 0

    on_bench(Bench(tmp_path / "f"), steps)


def leased_file(path: Path) -> BlockLease:
    path.write_text(path.name)
    return lease_of(os.open(path, os.O_RDONLY))
