"""DeleteObject of what is pending."""

from __future__ import annotations

import asyncio
import base64
import hashlib

import pytest

from gateway.s3.requests import Operation
from gateway.writeback.flushing.state import PARTS_AT_ONCE
from tests.support.memory_origin.faults import Answer, Hold, on
from tests.support.write_back_gateway import PART_BYTES, Client, eventually, with_a_client


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("back/k?versionId=old", {}),
        ("back/k", {"x-amz-expected-bucket-owner": "1234"}),
        ("back/k", {"x-amz-mfa": "serial 123456"}),
    ],
    ids=["version", "owner", "mfa"],
)
@with_a_client()
async def test_a_deletion_that_only_the_origin_can_judge_deletes_nothing_here(
    client: Client, target: str, headers: dict[str, str]
) -> None:
    """It waits for the flush; what was acknowledged stays when the origin refuses."""
    await client.learn()
    await client.ask("PUT", "back/k", b"kept")
    client.origin.inject(on(Operation.DELETE_OBJECT), Answer(403, "AccessDenied"))
    async with client.flushing():
        await client.ask("DELETE", target, headers=headers, status=403)
    assert (await client.ask("GET", "back/k")).body == b"kept"
    assert client.origin.data("bucket", "back/k") == b"kept"


@pytest.mark.parametrize("how", ["DeleteObject", "DeleteObjects"])
@with_a_client()
async def test_a_deletion_cuts_off_the_upload_that_is_on_its_way(client: Client, how: str) -> None:
    """Of a checkpoint that is deleted before it is flushed: the origin's upload is aborted, and no part follows; the
    answer waits for none of it."""
    await client.learn()
    held, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.UPLOAD_PART), Hold(held, reached), times=None)
    name, bucket = "back/run/step-1/a.pt", client.origin.buckets["bucket"]
    async with client.flushing():
        upload_id = await client.create(name)
        etags = {n: await client.part(name, upload_id, n, bytes(PART_BYTES)) for n in range(1, 8)}
        await client.complete(name, upload_id, etags)
        await reached.wait()
        if how == "DeleteObject":
            await client.ask("DELETE", name, status=204)
        else:
            body = f"<Delete><Object><Key>{name}</Key></Object></Delete>".encode()
            digest = base64.b64encode(hashlib.md5(body).digest()).decode()
            answer = await client.ask("POST", "?delete", body, {"content-md5": digest})
            assert b"<Deleted>" in answer.body
        assert not held.is_set()
        await eventually(lambda: not bucket.uploads)
        await eventually(lambda: client.pending(name) is None)
    assert name not in bucket.objects
    assert client.origin.count(Operation.UPLOAD_PART) <= PARTS_AT_ONCE
    assert not list(client.buffer.staging.names())
