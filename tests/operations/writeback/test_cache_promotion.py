"""What was flushed stays here as cached blocks: what the client sent, and nothing that lies behind it in the files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.s3.requests import Operation
from gateway.writeback.staged_file import CHUNK_BYTES, StagedFile, Staging, trailer_bytes
from tests.support.blocks import block_files
from tests.support.write_back_gateway import PART_BYTES, Client, with_a_client, with_client

SIZES = [PART_BYTES, PART_BYTES + CHUNK_BYTES, PART_BYTES + 12_345, 100]


@pytest.mark.slow
@with_a_client()
async def test_flushed_parts_are_read_from_the_cache(client: Client) -> None:
    """Each block that lies wholly in a part; the others are fetched, and not put together with what is no part."""
    bodies = {number: os.urandom(size) for number, size in enumerate(SIZES, 1)}
    upload_id = await client.create("back/m")
    etags = {number: await client.part("back/m", upload_id, number, body) for number, body in bodies.items()}
    await client.complete("back/m", upload_id, etags)
    await client.flush()
    assert client.gateway.blocks.usage().blocks > 0
    for number in range(2):
        assert (await client.ask("GET", "back/m")).body == b"".join(bodies.values()), number


def test_the_room_of_the_trailer_is_counted(tmp_path: Path) -> None:
    """As it is on the disk; nothing is asked of the origin for what was one body."""

    async def scenario(client: Client) -> None:
        await client.learn()
        body = os.urandom(PART_BYTES)
        await client.ask("PUT", "back/k", body)
        await client.flush()
        [file] = block_files(tmp_path)
        assert file.stat().st_size == PART_BYTES + trailer_bytes(PART_BYTES)
        assert client.gateway.blocks.usage().used_bytes == PART_BYTES + 4096
        asked = client.origin.count(Operation.GET_OBJECT)
        assert (await client.ask("GET", "back/k")).body == body
        assert client.origin.count(Operation.GET_OBJECT) == asked

    with_client(tmp_path, scenario)


def _of_checksums(file: StagedFile) -> int:
    return file.size_bytes


def _of_footer(file: StagedFile) -> int:
    return file.disk_bytes - 1


@pytest.mark.parametrize("place", [_of_checksums, _of_footer])
@with_a_client()
async def test_what_is_damaged_since_it_was_sent_is_not_kept(
    client: Client, place: Callable[[StagedFile], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The origin has it: the flush ends well, and the next reader fetches it."""
    checksums = Staging.checksums

    def damaged_before(staging: Staging, file: StagedFile) -> bytes:
        with staging.path(file).open("r+b") as raw:
            raw.seek(place(file))
            [byte] = raw.read(1)
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([byte ^ 1]))
        return checksums(staging, file)

    await client.learn()
    body = os.urandom(PART_BYTES)
    await client.ask("PUT", "back/k", body)
    monkeypatch.setattr(Staging, "checksums", damaged_before)
    await client.flush()
    assert client.gateway.blocks.usage().blocks == 0
    assert (await client.ask("GET", "back/k")).body == body
