"""DeleteObjects of what is pending."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence

from gateway.s3.requests import Operation
from gateway.s3.xml import DeleteEntry, DeleteRequest, delete_request_document
from tests.origin.origins import xml
from tests.support.asgi import Answer
from tests.support.memory_origin.faults import Hold, on
from tests.support.write_back_gateway import Client, eventually, with_a_client


async def delete(client: Client, *entries: str | DeleteEntry, quiet: bool = False, **headers: str) -> Answer:
    asked = [DeleteEntry(entry) if isinstance(entry, str) else entry for entry in entries]
    body = delete_request_document(DeleteRequest(asked, quiet))
    digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.ask("POST", "?delete=", body, {"Content-MD5": digest, **named})


def deleted(answer: Answer) -> Sequence[str]:
    return sorted(node.findtext("Key") or "" for node in xml(answer.body).iter("Deleted"))


def errors(answer: Answer) -> dict[str, str]:
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
        await eventually(lambda: all((one := client.pending(f"back/{n}")) is None or one.deleted for n in "ab"))
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


def names_of(answer: Answer) -> list[str]:
    return [node.findtext("Key") or "" for node in xml(answer.body).iter("Contents")]
