"""An object of 10,000 parts, 5 TB, holds nobody up: what is done about all of its parts is done in steps."""

from __future__ import annotations

import asyncio

import pytest

from gateway.s3.requests import Operation
from gateway.writeback.journal.records import Part
from gateway.writeback.staged_file import StagedFile
from tests.support.loop_steps import longest_step
from tests.support.memory_origin.faults import Unreachable, on
from tests.support.write_back_gateway import Client, eventually, with_a_client
from tests.support.writeback import md5

PARTS = 10_000
PART_BYTES = 512 * 1024**2

LINES_MAX = 15_000
"""A millisecond or so: a line for each part is 10,000."""


async def put_parts(client: Client, upload_id: str) -> dict[int, str]:
    """Parts that the origin has, with files that are nowhere; their ETags."""
    etags: dict[int, str] = {}
    for first in range(1, PARTS + 1, 500):
        files = {n: StagedFile(f"w0/{n:032x}", PART_BYTES, md5(b"%d" % n)) for n in range(first, first + 500)}
        parts = [Part(n, file, 1.0, {"crc64nvme": "AAAAAAAAAAA="}, '"there"') for n, file in files.items()]
        await asyncio.gather(*(client.buffer.put_part(upload_id, part) for part in parts))
        etags |= {n: file.etag for n, file in files.items()}
    return etags


@pytest.mark.slow
@with_a_client()
async def test_it_is_listed_completed_and_flushed_in_steps(client: Client) -> None:
    """ListParts, Complete with a checksum of the whole, a HEAD of a part, and the Complete that the origin is sent."""
    create = {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
    upload_id = await client.create("back/m", create)
    etags = await put_parts(client, upload_id)
    with longest_step() as longest:
        page = await client.ask("GET", f"back/m?uploadId={upload_id}&part-number-marker=8998")
    assert page.body.count(b"<Part>") == 1000
    assert b"<NextPartNumberMarker>9998</NextPartNumberMarker>" in page.body
    assert longest.lines < LINES_MAX, str(longest)
    with longest_step() as longest:
        completed = await client.complete("back/m", upload_id, etags)
    assert b"<ChecksumCRC64NVME>" in completed.body
    assert longest.lines < LINES_MAX, str(longest)
    with longest_step() as longest:
        head = await client.ask("HEAD", "back/m?partNumber=9999", status=206)
    assert head.headers["x-amz-mp-parts-count"] == str(PARTS)
    assert longest.lines < LINES_MAX, str(longest)
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(), times=None)
    with longest_step() as longest:
        async with client.flushing():
            await eventually(lambda: client.origin.count(Operation.COMPLETE_MULTIPART_UPLOAD) > 0)
    assert longest.lines < LINES_MAX, str(longest)
