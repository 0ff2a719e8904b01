"""Requests about uploads that are here, with something that only the origin can judge, or that is not known."""

from __future__ import annotations

from gateway.s3.requests import Operation
from tests.support.memory_origin.faults import Answer, Call
from tests.support.write_back_gateway import Client, with_a_client

OWNER = "x-amz-expected-bucket-owner"
RIGHT, WRONG = {OWNER: "111122223333"}, {OWNER: "444455556666"}


def _names_another(call: Call) -> bool:
    return call.headers.get(OWNER, RIGHT[OWNER]) != RIGHT[OWNER]


@with_a_client()
async def test_another_owner_is_refused_and_the_upload_stays(client: Client) -> None:
    """Of every request about it; the owner for which the origin has begun the upload is not asked for again."""
    client.origin.inject(_names_another, Answer(403, "AccessDenied"), times=None)
    for named in ({}, RIGHT):
        upload_id = await client.create("back/m", named)
        part, upload = f"back/m?partNumber=1&uploadId={upload_id}", f"back/m?uploadId={upload_id}"
        await client.ask("PUT", part, b"x", WRONG, status=403)
        etag = (await client.ask("PUT", part, b"x", RIGHT)).headers["etag"]
        await client.ask("GET", upload, headers=WRONG, status=403)
        await client.ask("DELETE", upload, headers=WRONG, status=403)
        await client.complete("back/m", upload_id, {1: etag}, status=403, headers=WRONG)
        assert client.pending("back/m") is None
        asked = client.origin.count(Operation.HEAD_BUCKET)
        await client.complete("back/m", upload_id, {1: etag}, headers=RIGHT)
        assert client.origin.count(Operation.HEAD_BUCKET) == asked + (not named)
        await client.flush()


@with_a_client()
async def test_an_upload_that_is_open_here_is_never_denied(client: Client) -> None:
    """A parameter that is not known is refused as such: the origin has the upload by another id, and is not asked."""
    await client.learn()
    upload_id = await client.create("back/m")
    target = f"back/m?partNumber=1&uploadId={upload_id}"
    refused = await client.ask("PUT", f"{target}&unheard-of=1", b"x", status=501)
    assert b"NotImplemented" in refused.body
    await client.complete("back/m", upload_id, {1: (await client.ask("PUT", target, b"x")).headers["etag"]})
