"""UploadPartCopy into an upload that is here: copied by the origin, completed there, known by the journal."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from tests.support.absorbing import PART_BYTES, Client, with_client
from tests.support.asgi import Answer as Got
from tests.support.memory_origin.faults import Answer, Unreachable, on


async def copied(
    client: Client, upload_id: str, number: int, source: str, status: int = 200, **headers: str
) -> tuple[str, Got]:
    """The part's ETag, and the answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    target = f"back/m?partNumber={number}&uploadId={upload_id}"
    answer = await client.ask("PUT", target, headers={"x-amz-copy-source": f"bucket/{source}", **named}, status=status)
    return text_of(answer.body, "ETag") or "", answer


def test_parts_are_copied_by_the_origin_and_uploaded_here(tmp_path: Path) -> None:
    """Of one upload some, by the whole or by a range; byte-equal in the end, with the ETag that was answered."""

    async def scenario(client: Client) -> None:
        await client.learn()
        source = os.urandom(PART_BYTES + 100)
        client.origin.put("bucket", "source", source)
        upload_id = await client.create("back/m")
        own = os.urandom(PART_BYTES)
        etags = {1: await client.part("back/m", upload_id, 1, own)}
        etags[2], _ = await copied(client, upload_id, 2, "source")
        etags[3], _ = await copied(client, upload_id, 3, "source", x_amz_copy_source_range="bytes=10-29")
        listed = await client.ask("GET", f"back/m?uploadId={upload_id}")
        assert [b"<Size>%d</Size>" % size in listed.body for size in (PART_BYTES, PART_BYTES + 100, 20)] == [True] * 3
        done = await client.complete("back/m", upload_id, etags)
        assert client.origin.data("bucket", "back/m") == own + source + source[10:30]
        assert client.origin.buckets["bucket"].object("back/m").etag == text_of(done.body, "ETag")
        assert not client.origin.buckets["bucket"].uploads

    with_client(tmp_path, scenario)


def test_a_pending_source_is_flushed_before(tmp_path: Path) -> None:
    """Read your writes: the part is of what was acknowledged last."""

    async def scenario(client: Client) -> None:
        await client.learn()
        client.origin.put("bucket", "back/source", b"older")
        await client.ask("PUT", "back/source", b"acknowledged")
        upload_id = await client.create("back/m")
        async with client.flushing():
            etag, _ = await copied(client, upload_id, 1, "back/source")
        await client.complete("back/m", upload_id, {1: etag})
        assert client.origin.data("bucket", "back/m") == b"acknowledged"

    with_client(tmp_path, scenario)


def test_errors_of_the_copy_are_the_origins(tmp_path: Path) -> None:
    """No such source, a 5xx, a part on its way: an error, and nothing is noted; then it works."""

    async def scenario(client: Client) -> None:
        await client.learn()
        client.origin.put("bucket", "source", b"content")
        upload_id = await client.create("back/m")
        _, missing = await copied(client, upload_id, 1, "nothing", 404)
        assert b"NoSuchKey" in missing.body
        client.origin.inject(on(Operation.UPLOAD_PART_COPY), Answer(503, "SlowDown"))
        await copied(client, upload_id, 1, "source", 503)
        client.origin.inject(on(Operation.LIST_PARTS), Unreachable())
        await copied(client, upload_id, 1, "source", 503)
        assert client.buffer.look(lambda book: list(book.parts(upload_id))) == []
        await client.part("back/m", upload_id, 2, b"here, and not sent yet")
        _, overtaking = await copied(client, upload_id, 2, "source", 503)
        assert b"SlowDown" in overtaking.body
        etag, _ = await copied(client, upload_id, 1, "source")
        await client.complete("back/m", upload_id, {1: etag})
        assert client.origin.data("bucket", "back/m") == b"content"

    with_client(tmp_path, scenario)


def test_an_upload_that_the_origin_does_not_have_takes_no_copies(tmp_path: Path) -> None:
    """Begun while it was away: told so, with what to do."""

    async def scenario(client: Client) -> None:
        await client.learn()
        client.origin.put("bucket", "source", b"content")
        away = client.origin.inject(lambda _: True, Unreachable(), times=None)
        upload_id = await client.create("back/m")
        away.times = 0
        _, refused = await copied(client, upload_id, 1, "source", 503)
        assert b"begin another" in refused.body

    with_client(tmp_path, scenario)
