"""`write = "back"`: what changes at the origin, and by whose word: clauses 6.1 and 6.5 of docs/semantics.md."""

from __future__ import annotations

from pathlib import Path

from gateway.core.clock import Moment
from gateway.s3.requests import Operation
from gateway.writeback.journal.records import ExpectedVersion, Write
from tests.support.write_back_gateway import Client, a_client
from tests.support.writeback import key

_READS = frozenset({Operation.GET_OBJECT, Operation.HEAD_OBJECT, Operation.LIST_OBJECTS_V2})


def in_conflict(client: Client, name: str) -> Write:
    found = client.buffer.look(lambda tx: tx.writes.earliest(key(name)))
    assert found is not None
    return found


async def overwrite(client: Client, name: str) -> None:
    """As somebody decides who wants this node's write: in place of what the origin has now."""
    expected = ExpectedVersion.exactly(client.origin.buckets["bucket"].objects[name].etag)
    write_id = in_conflict(client, name).id
    assert await client.buffer.journal.change(lambda tx: tx.writes.overwrite(write_id, expected, 0.0))


async def test_6_1_the_origin_gets_what_the_client_sent_once(tmp_path: Path) -> None:
    """6.1 Its bytes and headers, in one PutObject; reads, a LIST and another flush change nothing there."""
    headers = {"content-type": "text/plain", "x-amz-meta-a": "b", "cache-control": "no-store"}
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"as sent", headers)
        await client.flush()
        await client.ask("GET", "back/k")
        await client.ask("HEAD", "back/k")
        await client.ask("GET", "?list-type=2")
        await client.flush()
        changes = [one.operation for one in client.origin.calls if one.key == "back/k" and one.operation not in _READS]
        assert changes == [Operation.PUT_OBJECT]
        assert client.origin.data("bucket", "back/k") == b"as sent"
        stored = client.origin.buckets["bucket"].objects["back/k"].headers
        assert {name: stored[name] for name in headers} == headers


async def test_6_5_who_decides_for_ours_overwrites_what_is_there_then(tmp_path: Path) -> None:
    """6.5 What others write after the decision is a conflict again, and stays until the next one."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        await overwrite(client, "back/k")
        client.origin.put("bucket", "back/k", b"a third")
        await client.flush_until_conflict("back/k")
        assert client.origin.data("bucket", "back/k") == b"a third"
        assert (await client.ask("GET", "back/k")).body == b"ours"
        await overwrite(client, "back/k")
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"ours"


async def test_6_5_a_conflict_ends_by_nothing_but_a_decision(tmp_path: Path) -> None:
    """6.5 Neither by a later write of the key, nor because theirs is gone; who discards it gives up ours."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        await client.ask("PUT", "back/k", b"ours, later")
        del client.origin.buckets["bucket"].objects["back/k"]
        await client.flush_startable()
        assert "back/k" not in client.origin.buckets["bucket"].objects
        assert (await client.ask("GET", "back/k")).body == b"ours, later"
        client.origin.put("bucket", "back/k", b"theirs")
        write_id = in_conflict(client, "back/k").id
        await client.buffer.journal.change(
            lambda tx: tx.writes.discard(write_id=write_id, now=Moment(0.0), only_conflict=True)
        )
        await client.flush()
        assert (await client.ask("GET", "back/k")).body == b"theirs"
