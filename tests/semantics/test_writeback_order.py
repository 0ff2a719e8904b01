"""`write = "back"`, what comes last, and when: clause 6.6 of docs/semantics.md."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import ExpectedVersion
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.asgi import call
from tests.support.memory_origin.faults import Answer, Unreachable, on
from tests.support.slots import Slot, slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import SLOTS, Client, a_client
from tests.support.writeback import key

SHARD, MARKER = "back/step-1/shard-1", "back/step-1/.metadata"


def stored(client: Client) -> set[str]:
    return {name for name in client.origin.buckets["bucket"].objects if name.startswith("back/step")}


def puts(client: Client) -> list[str | None]:
    """What has arrived, in order."""
    return [
        call.key
        for call in client.origin.calls
        if call.operation is Operation.PUT_OBJECT and call.status == 200 and "conditions" not in (call.key or "")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [MARKER, "back/step-1/model.safetensors.index.json", "back/step-1/_SUCCESS"])
async def test_6_6_a_marker_is_there_when_the_rest_is(tmp_path: Path, name: str) -> None:
    """6.6 What fails under its directory holds it up; what lies elsewhere, or comes later, does not."""
    async with a_client(tmp_path) as client:
        await client.learn()
        refusals = [
            client.origin.inject(on(Operation.PUT_OBJECT, key=one), Answer(403, "AccessDenied"), times=None)
            for one in (SHARD, "back/step-2/shard", "back/step-1/later")
        ]
        for one in (SHARD, "back/step-2/shard", name, "back/step-1/later", "back/step-1/other"):
            await client.ask("PUT", one, one.encode())
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.PUT_OBJECT, key=SHARD) >= 3)
            assert stored(client) == {"back/step-1/other"}
            assert (await client.ask("GET", name)).body == name.encode()
            refusals[0].times = 0
            await until(lambda: client.pending(name) is None)
        assert stored(client) == {"back/step-1/other", SHARD, name}
        for refusal in refusals:
            refusal.times = 0
        await client.flush()


async def test_6_6_what_is_written_anew_holds_a_marker_up_still(tmp_path: Path) -> None:
    """6.6 The shard that came before is not there when the one that took its place is not."""
    async with a_client(tmp_path) as client:
        await client.learn()
        refusal = client.origin.inject(on(Operation.PUT_OBJECT, key=SHARD), Answer(403, "AccessDenied"), times=None)
        await client.ask("PUT", SHARD, b"one")
        await client.ask("PUT", MARKER, b"m")
        await client.ask("PUT", SHARD, b"two")
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.PUT_OBJECT, key=SHARD) >= 2)
            assert stored(client) == set()
            refusal.times = 0
            await until(lambda: client.pending(MARKER) is None)
        assert client.origin.data("bucket", SHARD) == b"two"


@pytest.mark.slow
async def test_6_6_a_deletion_comes_before_a_marker(tmp_path: Path) -> None:
    """6.6 Readers of the marker do not find what was deleted before."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", SHARD, b"old")
        await client.ask("PUT", SHARD, b"new")
        refusal = client.origin.inject(on(Operation.DELETE_OBJECT, key=SHARD), Unreachable(), times=None)
        deleting = asyncio.create_task(client.ask("DELETE", SHARD, status=204))
        await until(lambda: (last := client.pending(SHARD)) is not None and last.deleted)
        await client.ask("PUT", MARKER, b"m")
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.DELETE_OBJECT, key=SHARD) >= 2)
            assert MARKER not in stored(client)
            refusal.times = 0
            await until(lambda: client.pending(MARKER) is None)
            await deleting
        assert stored(client) == {MARKER}


async def test_6_6_a_conflict_holds_a_marker_up_until_it_is_decided(tmp_path: Path) -> None:
    """6.6 Nobody knows what belongs to the marker before."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", SHARD, b"ours")
        client.origin.put("bucket", SHARD, b"theirs")
        await client.ask("PUT", MARKER, b"m")
        await client.ask("PUT", "back/step-1/other", b"x")
        await client.flush_until_conflict(SHARD)
        async with client.flushing(conflicts=True):
            await until(lambda: client.pending("back/step-1/other") is None)
        assert MARKER not in stored(client)
        left = client.buffer.look(lambda tx: tx.writes.earliest(key(SHARD)))
        assert left is not None
        await client.buffer.journal.change(
            lambda tx: tx.writes.discard(write_id=left.id, now=Moment(0.0), only_conflict=True)
        )
        await client.flush()
        assert stored(client) == {SHARD, MARKER, "back/step-1/other"}
        assert client.origin.data("bucket", SHARD) == b"theirs"


async def test_6_6_a_marker_that_goes_through_waits_too(tmp_path: Path) -> None:
    """6.6 A condition is the origin's to judge, when that has what came before."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", SHARD, b"x")
        async with client.flushing():
            answer = await client.ask("PUT", MARKER, b"m", {"If-None-Match": "*"})
        assert answer.headers["x-forebay-cache"] == "forwarded"
        assert puts(client)[-2:] == [SHARD, MARKER]


async def _put(client: Client, name: str, status: int) -> None:
    await client.ask("PUT", name, b"commit", {"If-None-Match": "*"}, status)


async def _copy(client: Client, name: str, status: int) -> None:
    client.origin.put("bucket", "elsewhere", b"commit")
    await client.ask(
        "PUT", name, headers={"x-amz-copy-source": "/bucket/elsewhere", "If-None-Match": "*"}, status=status
    )


async def _complete(client: Client, name: str, status: int) -> None:
    upload_id = await client.create(name)
    etags = {1: await client.part(name, upload_id, 1, b"commit")}
    await client.complete(name, upload_id, etags, status, headers={"If-None-Match": "*"})


@pytest.mark.parametrize(
    ("commit", "log"),
    [
        (_put, "_delta_log/1.json"),
        (_put, "_versions/1.manifest"),
        (_put, "metadata/v1.json"),
        (_put, ".hoodie/1.commit"),
        (_put, "zarr.json"),
        (_put, "part-9"),
        (_copy, "_delta_log/1.json"),
        (_complete, "_versions/1.manifest"),
    ],
)
async def test_6_6_a_condition_makes_a_marker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commit: Callable[[Client, str, int], Awaitable[None]],
    log: str,
) -> None:
    """6.6 A table's commit is not at the origin before the table's data, which another worker has acknowledged: 503
    until then. Data of another table, and what comes later, are not waited for."""
    monkeypatch.setattr("gateway.operations.writeback.past_the_buffer.PATIENCE_SECONDS", 0.2)
    data = "back/table/day-1/part-1"
    async with a_client(tmp_path) as client:
        await client.learn()
        other = await WritebackBuffer.open(tmp_path / "writeback", 1, SLOTS)
        try:
            app = replace(client.gateway.app, services=replace(client.gateway.app.services, writeback=other))
            answer = await call(app, "PUT", f"/bucket/{data}", {}, b"rows")
            assert answer.headers["x-forebay-cache"] == "absorbed"
        finally:
            await other.close()
        refusal = client.origin.inject(
            on(Operation.PUT_OBJECT, key="back/table-2/part-1"), Answer(403, "AccessDenied"), times=None
        )
        await client.ask("PUT", "back/table-2/part-1", b"rows")
        await commit(client, f"back/table/{log}", 503)
        assert f"back/table/{log}" not in client.origin.buckets["bucket"].objects
        await client.flush_one(key(data))
        await commit(client, f"back/table/{log}", 200)
        assert client.origin.data("bucket", f"back/table/{log}") == b"commit"
        assert client.pending("back/table-2/part-1") is not None
        refusal.times = 0


async def test_6_6_a_commit_waits_for_its_tables_data_in_other_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6.6 Also where the log's own slot has a strict order; a conflict in the way is told at once."""
    monkeypatch.setattr("gateway.operations.writeback.past_the_buffer.PATIENCE_SECONDS", 0.2)
    log = Slot("log", Prefix.parse("s3://bucket/back/table/_delta_log/"), write="back", order="strict")
    commit = "back/table/_delta_log/1.json"
    async with a_client(tmp_path, [*SLOTS, log]) as client:
        await client.learn()
        await client.ask("PUT", "back/table/part-1", b"ours")
        await client.ask("PUT", commit, b"commit", {"If-None-Match": "*"}, 503)
        client.origin.put("bucket", "back/table/part-1", b"theirs")
        await client.flush_until_conflict("back/table/part-1")
        answer = await client.ask("PUT", commit, b"commit", {"If-None-Match": "*"}, 409)
        assert b"OperationAborted" in answer.body
        assert commit not in client.origin.buckets["bucket"].objects


@pytest.mark.slow
@pytest.mark.parametrize(
    "log", ["_delta_log/1.json", "_versions/1.manifest", "metadata/v1.metadata.json", "metadata/version-hint.text"]
)
async def test_6_6_a_marker_beside_its_data_holds_for_the_directory_above(tmp_path: Path, log: str) -> None:
    """6.6 Written without a condition, a table's log is acknowledged at once, and sent behind the data."""
    async with a_client(tmp_path) as client:
        await client.learn()
        data = "back/step/day-1/part-1"
        refusal = client.origin.inject(on(Operation.PUT_OBJECT, key=data), Answer(403, "AccessDenied"), times=None)
        await client.ask("PUT", data, b"rows")
        answer = await client.ask("PUT", f"back/step/{log}", b"commit")
        assert answer.headers["x-forebay-cache"] == "absorbed"
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.PUT_OBJECT, key=data) >= 2)
            assert stored(client) == set()
        refusal.times = 0
        await client.flush()
        assert stored(client) == {data, f"back/step/{log}"}


async def test_6_6_names_are_the_slots_own(tmp_path: Path) -> None:
    """6.6 `markers` of the slot says which."""
    slots = [slot_with(SLOTS[0], markers=("done-*",))]
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        refusal = client.origin.inject(on(Operation.PUT_OBJECT, key=SHARD), Answer(403, "AccessDenied"), times=None)
        for name in (SHARD, "back/step-1/done-1", MARKER):
            await client.ask("PUT", name, b"x")
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.PUT_OBJECT, key=SHARD) >= 2)
            assert stored(client) == {MARKER}
        refusal.times = 0
        await client.flush()


async def test_6_6_a_marker_of_many_parts_waits_too(tmp_path: Path) -> None:
    """6.6 Its parts may go ahead: they are not visible."""
    async with a_client(tmp_path) as client:
        await client.learn()
        refusal = client.origin.inject(on(Operation.PUT_OBJECT, key=SHARD), Answer(403, "AccessDenied"), times=None)
        await client.ask("PUT", SHARD, b"x")
        upload_id = await client.create(MARKER)
        await client.complete(MARKER, upload_id, {1: await client.part(MARKER, upload_id, 1, b"m")})
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.PUT_OBJECT, key=SHARD) >= 2)
            assert client.origin.count(Operation.COMPLETE_MULTIPART_UPLOAD, key=MARKER) == 0
        refusal.times = 0
        await client.flush()
        assert stored(client) == {SHARD, MARKER}


async def test_6_6_in_a_strict_slot_a_deletion_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6.6 Of what is not pending, of one key and of several: 503 where what comes before it does not go."""
    monkeypatch.setattr("gateway.operations.writeback.past_the_buffer.PATIENCE_SECONDS", 0.1)
    slots = [slot_with(SLOTS[0], order="strict")]
    document = b"<Delete><Object><Key>back/old</Key></Object><Object><Key>back/older</Key></Object></Delete>"
    md5 = {"content-md5": base64.b64encode(hashlib.md5(document, usedforsecurity=False).digest()).decode()}
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        for name in ("back/old", "back/older"):
            client.origin.put("bucket", name, b"old")
        await client.ask("PUT", "back/manifest", b"new")
        await client.ask("DELETE", "back/old", status=503)
        answer = await client.ask("POST", "?delete", document, md5)
        assert answer.body.count(b"<Code>ServiceUnavailable</Code>") == 2
        assert {"back/old", "back/older"} <= set(client.origin.buckets["bucket"].objects)
        await client.flush()
        await client.ask("DELETE", "back/old", status=204)
        assert (await client.ask("POST", "?delete", document, md5)).body.count(b"<Deleted>") == 2
        assert not {"back/old", "back/older"} & set(client.origin.buckets["bucket"].objects)


async def test_6_4_in_a_strict_slot_who_is_refused_has_deleted_nothing(tmp_path: Path) -> None:
    """6.4 What is in conflict stays, and is what the person who decides chooses."""
    slots = [slot_with(SLOTS[0], order="strict")]
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        await client.ask("DELETE", "back/k", status=409)
        assert (await client.ask("GET", "back/k")).body == b"ours"
        etag = client.origin.buckets["bucket"].objects["back/k"].etag
        [write] = client.buffer.look(lambda tx: tx.writes.waiting(0, 10))
        await client.buffer.journal.change(lambda tx: tx.writes.overwrite(write.id, ExpectedVersion.exactly(etag), 0.0))
        await client.flush()
        assert client.origin.data("bucket", "back/k") == b"ours"


async def test_6_6_strict_is_one_by_one(tmp_path: Path) -> None:
    """6.6 In the order of acknowledgement, and what was overwritten is sent as well."""
    slots = [slot_with(SLOTS[0], order="strict")]
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        names = ["back/b", "back/a", "back/b", "back/c/d", "back/a"]
        for number, name in enumerate(names):
            await client.ask("PUT", name, b"%d" % number)
        await client.flush()
        assert puts(client)[1:] == names
        assert client.origin.data("bucket", "back/b") == b"2"


@pytest.mark.parametrize(
    ("method", "target", "headers", "status"),
    [
        ("PUT", "back/step-1/commit", {"If-None-Match": "*"}, 200),
        ("PUT", "back/copy", {"x-amz-copy-source": f"bucket/{SHARD}", "x-amz-tagging-directive": "COPY"}, 200),
        ("GET", f"{SHARD}?tagging", {}, 200),
        ("GET", "?versions", {}, 501),  # by this origin
    ],
)
async def test_7_8_who_waits_for_the_origin_waits_for_what_overwrites_it_here(
    tmp_path: Path, method: str, target: str, headers: dict[str, str], status: int
) -> None:
    """7.8 6.6 The origin has neither the write that was pending, nor the one in its place: a commit has no data yet."""
    async with a_client(tmp_path) as client:
        await client.learn()
        refusal = client.origin.inject(on(Operation.PUT_OBJECT, key=SHARD), Answer(403, "AccessDenied"), times=None)
        await client.ask("PUT", SHARD, b"one")
        asked = client.origin.count(), len(client.origin.buckets["bucket"].objects)
        waiting = asyncio.create_task(client.ask(method, target, b"", headers, status))
        await _until_looked(client)
        await client.ask("PUT", SHARD, b"two")
        await _until_looked(client)
        sent = [call for call in client.origin.calls[asked[0] :] if call.operation is not Operation.HEAD_OBJECT]
        assert (sent, waiting.done(), len(client.origin.buckets["bucket"].objects)) == ([], False, asked[1])
        refusal.times = 0
        async with client.flushing():
            await waiting
        assert client.origin.data("bucket", SHARD) == b"two"


async def test_6_4_a_deletion_is_over_when_the_key_is_written_again(tmp_path: Path) -> None:
    """6.4 Its client is not told to repeat it: that would delete what was written since."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", "back/first", b"one")
        deleting = asyncio.create_task(client.ask("DELETE", "back/first", status=204))
        await _until_looked(client)
        assert not deleting.done()
        await client.ask("PUT", "back/first", b"two")
        await deleting
        await client.flush()
        assert client.origin.data("bucket", "back/first") == b"two"


async def _until_looked(client: Client, times: int = 3) -> None:
    """Until a request that waits has looked at the journal so often."""
    looks, look = 0, client.buffer.journal.read

    def counted(step: Callable[[JournalTransaction], object]) -> object:
        nonlocal looks
        looks += 1
        return look(step)

    client.buffer.look = counted  # type: ignore[assignment]
    await until(lambda: looks >= times)
    client.buffer.look = look
