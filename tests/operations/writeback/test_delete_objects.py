"""Deletions of what is pending: DeleteObject and DeleteObjects."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence

import pytest

from gateway.s3.requests import Operation
from gateway.s3.xml import DeleteEntry, DeleteRequest, delete_request_document
from gateway.writeback.flushing.state import PARTS_AT_ONCE
from tests.origin.origins import xml
from tests.support.asgi import Answer as Got
from tests.support.memory_origin.faults import Answer, Hold, on
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, Client, with_a_client


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


@pytest.mark.slow
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
        await until(lambda: not bucket.uploads)
        await until(lambda: client.pending(name) is None)
    assert name not in bucket.objects
    assert client.origin.count(Operation.UPLOAD_PART) <= PARTS_AT_ONCE
    assert not list(client.buffer.staging.names())


async def delete(client: Client, *entries: str | DeleteEntry, quiet: bool = False, **headers: str) -> Got:
    asked = [DeleteEntry(entry) if isinstance(entry, str) else entry for entry in entries]
    body = delete_request_document(DeleteRequest(asked, quiet))
    digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.ask("POST", "?delete=", body, {"Content-MD5": digest, **named})


def deleted(answer: Got) -> Sequence[str]:
    return sorted(node.findtext("Key") or "" for node in xml(answer.body).iter("Deleted"))


def errors(answer: Got) -> dict[str, str]:
    return {node.findtext("Key") or "": node.findtext("Code") or "" for node in xml(answer.body).iter("Error")}


@with_a_client()
async def test_pending_and_other_objects_go_together(client: Client) -> None:
    """Each is answered for, quietly too; none comes back, and the origin is asked for the others alone."""
    await client.learn()
    client.origin.put("bucket", "other", b"x")
    for name in ("back/first", "back/new"):
        await client.ask("PUT", name, b"pending")
    async with client.flushing():
        answer = await delete(client, "back/first", "other", "back/new", "nowhere")
        assert deleted(answer) == ["back/first", "back/new", "nowhere", "other"]
        await client.ask("HEAD", "back/first", status=404)
        await client.ask("PUT", "back/quiet", b"x")
        assert deleted(await delete(client, "back/quiet", quiet=True)) == []
    asked = [call.key for call in client.origin.calls if call.operation is Operation.DELETE_OBJECT]
    assert "back/first" in asked
    assert set(asked) <= {"back/first", "back/new", "back/quiet"}
    assert not client.origin.buckets["bucket"].objects
    await client.flush()


@with_a_client()
async def test_tombstones_come_first(client: Client) -> None:
    """With a flush on its way to the origin the objects are gone here at once, and there before the answer."""
    await client.learn()
    held, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.PUT_OBJECT), Hold(held, reached))
    for name in ("back/a", "back/b"):
        await client.ask("PUT", name, b"x")
    async with client.flushing():
        await reached.wait()
        deleting = asyncio.create_task(delete(client, "back/a", "back/b"))
        await until(lambda: all((one := client.pending(f"back/{n}")) is None or one.deleted for n in "ab"))
        assert names_of(await client.ask("GET", "?list-type=2")) == ["back/first"]
        held.set()
        assert deleted(await deleting) == ["back/a", "back/b"]
    assert set(client.origin.buckets["bucket"].objects) == {"back/first"}


@with_a_client()
async def test_what_names_an_owner_is_left_to_the_origin(client: Client) -> None:
    """Nothing is deleted here before the origin has said whether the bucket is that owner's."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    async with client.flushing():
        assert deleted(await delete(client, "back/a", x_amz_expected_bucket_owner="1234")) == ["back/a"]
    asked = [call for call in client.origin.calls if call.operation is Operation.DELETE_OBJECTS]
    assert [call.headers["x-amz-expected-bucket-owner"] for call in asked] == ["1234"]
    assert client.origin.count(Operation.PUT_OBJECT, key="back/a") == 1


@with_a_client()
async def test_conditions_wait_for_the_flush(client: Client) -> None:
    """The origin judges them by what was acknowledged."""
    await client.learn()
    async with client.flushing():
        etag = (await client.ask("PUT", "back/a", b"one")).headers["etag"]
        await client.ask("PUT", "back/b", b"two")
        answer = await delete(client, DeleteEntry("back/a", etag=etag), DeleteEntry("back/b", etag=etag))
    assert (deleted(answer), errors(answer)) == (["back/a"], {"back/b": "PreconditionFailed"})


@with_a_client()
async def test_a_key_that_cannot_go_keeps_no_other(client: Client) -> None:
    """A conflict is an error of its key alone."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    stored = client.pending("back/a")
    assert stored is not None
    await client.buffer.journal.change(lambda tx: tx.writes.keep(stored.id, "others have changed it"))
    answer = await delete(client, DeleteEntry("back/a", etag=stored.etag), "back/first")
    assert (deleted(answer), errors(answer)) == (["back/first"], {"back/a": "OperationAborted"})


@with_a_client()
async def test_an_upload_knows_what_was_deleted_since(client: Client) -> None:
    """It was begun over an object that DeleteObjects has taken away: no conflict with anybody."""
    await client.learn()
    upload_id = await client.create("back/first")
    assert deleted(await delete(client, "back/first", "other")) == ["back/first", "other"]
    etag = await client.part("back/first", upload_id, 1, b"x")
    await client.complete("back/first", upload_id, {1: etag})
    await client.flush()
    assert client.origin.data("bucket", "back/first") == b"x"


def names_of(answer: Got) -> list[str]:
    return [node.findtext("Key") or "" for node in xml(answer.body).iter("Contents")]
