"""UploadPartCopy into uploads that are absorbed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.origin.memory.faults import Answer, on
from gateway.s3.requests import Operation
from tests.support.absorbing import PART_BYTES, Client, with_client

SOURCE = os.urandom(2 * PART_BYTES)


async def copy_part(
    client: Client, upload_id: str, number: int, source: str, byte_range: str | None = None, status: int = 200
) -> str:
    headers = {"x-amz-copy-source": f"/bucket/{source}"}
    if byte_range is not None:
        headers["x-amz-copy-source-range"] = byte_range
    answer = await client.ask("PUT", f"back/m?partNumber={number}&uploadId={upload_id}", b"", headers, status)
    return answer.body.partition(b"<ETag>")[2].partition(b"<")[0].decode().replace("&quot;", '"')


@pytest.mark.parametrize("source", ["there", "back/pending"])
def test_parts_of_copies_and_of_bodies_make_one_object(tmp_path: Path, source: str) -> None:
    """Of an object at the origin, or of one that is pending; with a range and without; the ETag is that of all."""

    async def scenario(client: Client) -> None:
        await client.learn()
        client.origin.put("bucket", "there", SOURCE)
        async with client.flushing():
            await client.ask("PUT", "back/pending", SOURCE)
            upload_id = await client.create("back/m")
            etags = {
                1: await copy_part(client, upload_id, 1, source, f"bytes=0-{PART_BYTES - 1}"),
                2: await client.part("back/m", upload_id, 2, SOURCE[:PART_BYTES]),
                3: await copy_part(client, upload_id, 3, source),
            }
            listed = (await client.ask("GET", f"back/m?uploadId={upload_id}")).body.decode()
            sizes = [part.partition("</Size>")[0] for part in listed.split("<Size>")[1:]]
            assert sizes == [str(PART_BYTES), str(PART_BYTES), str(2 * PART_BYTES)]
            answer = await client.complete("back/m", upload_id, etags)
            assert answer.headers["x-forebay-cache"] == "forwarded"
            assert client.origin.data("bucket", "back/m") == SOURCE[:PART_BYTES] * 2 + SOURCE
            etag = (await client.ask("HEAD", "back/m")).headers["etag"]
            assert etag.replace('"', "&quot;").encode() in answer.body
        assert client.pending("back/m") is None
        assert client.buffer.look(lambda book: book.counts()[1]) == 0

    with_client(tmp_path, scenario)


def test_a_refusal_is_the_origins(tmp_path: Path) -> None:
    """No such source, no right, an error behind a 200: passed on as it is, and no part is noted."""

    async def scenario(client: Client) -> None:
        await client.learn()
        upload_id = await client.create("back/m")
        await copy_part(client, upload_id, 1, "nowhere", status=404)
        error = b"<Error><Code>InternalError</Code></Error>"
        client.origin.inject(on(Operation.UPLOAD_PART_COPY), Answer(200, body=error))
        await copy_part(client, upload_id, 1, "back/first")
        assert client.buffer.look(lambda book: list(book.parts(upload_id))) == []
        await client.ask(
            "PUT", "back/m?partNumber=1&uploadId=none", b"", {"x-amz-copy-source": "/bucket/back/first"}, status=404
        )

    with_client(tmp_path, scenario)
