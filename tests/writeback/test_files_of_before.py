"""Staged files that an earlier version wrote, without trailers, their checksums in the journal: as good as any."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ByteRange
from gateway.writeback.files.staged_file import StagedFile, read_verified
from gateway.writeback.files.trailer import CHUNK_BYTES
from gateway.writeback.journal import codec
from gateway.writeback.opening import prepare, recover
from gateway.writeback.pending_reader import PendingReader
from tests.support.flushing import Buffer, with_buffer
from tests.support.writeback import key, md5
from tests.writeback.offline_export.test_export import exported, left_by_a_kill, run

SIZE_BYTES = 2 * CHUNK_BYTES + 100
PART_BYTES = 5 * 2**20

ROW = bytes.fromhex("56b4673933000000") + b'{"size":9,"md5":"25f9e794323b453885f5181f1b624d0b"}\x83\x92\x06\xe3'
"""Of a file `w0/a` that holds `123456789`, as version 1 of the journal had it."""


class BufferOfBefore(Buffer):
    """Stages as the version before did."""

    def stage(self, content: bytes) -> StagedFile:
        file = super().stage(content)
        before = replace(file, checksums=self.staging.checksums(file))
        os.truncate(self.staging.path(file), len(content))
        return before


def test_a_row_of_before_is_read_and_written_as_it_was() -> None:
    """To the byte; what is new says of itself that its checksums lie elsewhere."""
    content = b"123456789"
    before = StagedFile("w0/a", len(content), md5(content), bytes.fromhex("839206e3"))
    assert codec.unpack_file("w0/a", ROW) == before
    assert codec.pack_file(before) == ROW
    new = replace(before, checksums=None)
    assert codec.unpack_file("w0/a", codec.pack_file(new)) == new


@pytest.mark.parametrize("size_bytes", [0, 2**16, 5 * 2**30])
def test_a_row_does_not_grow_with_the_bytes(size_bytes: int) -> None:
    """An object of 10,000 parts has a megabyte of them, whatever the length of its parts."""
    assert len(codec.pack_file(StagedFile("w0/a", size_bytes, bytes(16)))) < 100


def test_files_of_before_are_read_and_flushed(tmp_path: Path) -> None:
    """Beside new ones, byte for byte, with the ETags that were answered; and then nothing of them is left."""
    content = {name: os.urandom(size) for name, size in (("empty", 0), ("small", 10), ("large", SIZE_BYTES))}
    parts = [PART_BYTES, 1000]

    async def before(buffer: Buffer) -> None:
        for name, body in content.items():
            await buffer.put(key(name), body)
        model = await buffer.upload(key("model"), parts)
        content["model"] = b"".join(buffer.staging.path(part.file).read_bytes() for part in model.parts)

    left = left_by_a_kill(tmp_path, before, BufferOfBefore)
    prepare(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "FORMAT", left)
    assert recover(left, Moment(0.0)).removed_files == 0

    async def now(buffer: Buffer) -> None:
        content["new"] = os.urandom(SIZE_BYTES)
        await buffer.put(key("new"), content["new"])
        reader = PendingReader(buffer.journal, buffer.staging, buffer.threads)
        for name in ("small", "large", "model", "new"):
            found = buffer.journal.read(lambda tx: tx.latest(key(name)))  # noqa: B023
            assert found is not None
            of_it = buffer.journal.read(lambda tx: list(tx.parts(found.id)))  # noqa: B023
            assert {part.file.checksums is None for part in of_it} == {name == "new"}
            whole = ByteRange(0, len(content[name]) - 1)
            assert b"".join([bytes(piece) async for piece in reader.pieces(found, whole)]) == content[name]
        buffer.start()
        await buffer.flushed()
        assert {name: buffer.origin.data("bucket", name) for name in content} == content
        assert buffer.bucket.object("model").etag.endswith('-2"')

    with_buffer(left, now)


def test_files_of_before_are_exported(tmp_path: Path) -> None:
    """What is whole of them; what is not is named, and no other."""
    content = {name: os.urandom(SIZE_BYTES) for name in ("flipped", "short", "well")}
    files = dict[str, Path]()

    async def before(buffer: Buffer) -> None:
        for name, body in content.items():
            stored = await buffer.put(key(name), body)
            files[name] = tmp_path / "copy" / "staged" / stored.parts[0].file.name

    left = left_by_a_kill(tmp_path, before, BufferOfBefore)
    with files["flipped"].open("r+b") as file:
        file.seek(CHUNK_BYTES)
        file.write(bytes([content["flipped"][CHUNK_BYTES] ^ 1]))
    os.truncate(files["short"], SIZE_BYTES - 1)
    found = run(left, tmp_path / "out")
    assert (found.objects, found.damaged) == (1, 2)
    assert exported(tmp_path / "out") == {"well": content["well"]}


@pytest.mark.parametrize("at", [0, CHUNK_BYTES, SIZE_BYTES - 1])
def test_a_flipped_bit_of_a_file_of_before_is_never_read(tmp_path: Path, at: int) -> None:
    """Its row says what was written."""

    async def scenario(buffer: Buffer) -> None:
        content = os.urandom(SIZE_BYTES)
        file = buffer.stage(content)
        with buffer.staging.path(file).open("r+b") as raw:
            raw.seek(at)
            raw.write(bytes([content[at] ^ 4]))
        with buffer.staging.open(file) as opened, pytest.raises(BufferDamaged, match=f"chunk {at // CHUNK_BYTES}"):
            read_verified(opened, file, at, 1)

    with_buffer(tmp_path, scenario, BufferOfBefore)
