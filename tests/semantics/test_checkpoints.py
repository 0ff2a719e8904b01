"""Checkpoints of a slot with `write = "back"`: section 11 of docs/semantics.md."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.clock import SystemClock
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.checkpoints import CheckpointsReport
from tests.support.memory_origin.faults import Answer, Unreachable, on
from tests.support.slots import Slot
from tests.support.waiting import until
from tests.support.write_back_gateway import Client, a_client

STEP = "back/run/step-1"


@asynccontextmanager
async def report_of(client: Client) -> AsyncIterator[CheckpointsReport]:
    """What the admin port tells, by the journal of the client's gateway."""
    queries = CheckpointQueries(Path(client.buffer.journal._path).parent)
    try:
        yield CheckpointsReport(queries, SystemClock())
    finally:
        queries.close()


async def shown(client: Client) -> dict[str, dict[str, Any]]:
    """Prefix → a checkpoint."""
    async with report_of(client) as report:
        page = await report.page(Prefix("bucket", "back/"), "", 100, ())
    return {one.prefix: one.document() for one in page.checkpoints}


async def save(client: Client, directory: str = STEP) -> None:
    """As PyTorch's distributed checkpoints are written: the manifest under another name first."""
    for rank in range(2):
        await client.ask("PUT", f"{directory}/__{rank}_0.distcp", f"shard of {rank}".encode())
    await client.ask("PUT", f"{directory}/.metadata.tmp", b"manifest")
    copied = {"x-amz-copy-source": f"/bucket/{directory}/.metadata.tmp"}
    await client.ask("PUT", f"{directory}/.metadata", headers=copied)
    await client.ask("DELETE", f"{directory}/.metadata.tmp", status=204)


async def test_11_1_objects_of_one_save_are_one_checkpoint(tmp_path: Path) -> None:
    """11.1 By their keys alone; the manifest is under its own name at the end; a pointer belongs to the run."""
    async with a_client(tmp_path) as client:
        await client.learn()
        async with client.flushing():
            await save(client)
            await client.ask("PUT", "back/run/latest", b"step-1")
        found = await shown(client)
        assert list(found) == [f"{STEP}/"]
        one = found[f"{STEP}/"]
        assert (one["step"], one["layout"], one["files"], one["ranks_seen"]) == (1, "dcp", 3, [0, 1])
        assert one["bytes"] == 2 * len("shard of 0") + len("manifest")
        assert one["missing"] == {"ranks": [], "objects": [], "open_uploads": 0}


async def test_11_1_patterns_of_the_slot_say_what_belongs_together(tmp_path: Path) -> None:
    """11.1 `checkpoints` of a slot, instead of the known layouts."""

    slots = [Slot("back", Prefix.parse("s3://bucket/back/"), write="back", checkpoints=("back/mine/{step}/",))]
    async with a_client(tmp_path, slots=slots) as client:
        await client.learn()
        await client.ask("PUT", "back/mine/7/model.pt", b"x")
        await client.ask("PUT", f"{STEP}/model.pt", b"x")
        assert list(await shown(client)) == ["back/mine/7/"]


async def test_11_2_durable_is_said_when_the_bucket_has_all_of_it(tmp_path: Path) -> None:
    """11.2 Not before the last object is there, and not while one is missing or fails."""
    async with a_client(tmp_path) as client:
        await client.learn()
        shard = f"{STEP}/__1_0.distcp"
        refusal = client.origin.inject(on(Operation.PUT_OBJECT, key=shard), Answer(403, "AccessDenied"), times=None)
        for rank in range(2):
            await client.ask("PUT", f"{STEP}/__{rank}_0.distcp", b"shard")
        assert (await shown(client))[f"{STEP}/"]["state"] == "writing"
        await client.ask("PUT", f"{STEP}/.metadata", b"manifest")
        assert (await shown(client))[f"{STEP}/"]["state"] == "acknowledged"
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.PUT_OBJECT, key=shard) >= 2)
            failed = (await shown(client))[f"{STEP}/"]
            assert (failed["state"], "AccessDenied" in (failed["reason"] or "")) == ("failed", True)
            refusal.times = 0
            await until(lambda: client.pending(f"{STEP}/.metadata") is None)
        durable = (await shown(client))[f"{STEP}/"]
        assert (durable["state"], durable["bytes_flushed"]) == ("durable", durable["bytes"])
        stored = client.origin.buckets["bucket"].objects
        assert all(f"{STEP}/{name}" in stored for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"))


@pytest.mark.parametrize("effect", [Unreachable(), Answer(503, "SlowDown"), Answer(500, "InternalError")], ids=str)
async def test_11_2_an_outage_needs_nobody(tmp_path: Path, effect: Answer | Unreachable) -> None:
    """11.2 It says so while it lasts; what the bucket refuses afterwards is `failed`, as before."""
    async with a_client(tmp_path) as client:
        await client.learn()
        shard = f"{STEP}/__0_0.distcp"
        fault = client.origin.inject(on(Operation.PUT_OBJECT, key=shard), effect, times=None)
        await client.ask("PUT", shard, b"shard")
        assert (await shown(client))[f"{STEP}/"]["state"] == "writing"
        await client.ask("PUT", f"{STEP}/.metadata", b"manifest")
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.PUT_OBJECT, key=shard) >= 2)
            waiting = (await shown(client))[f"{STEP}/"]
            assert waiting["state"] == "waiting for the bucket"
            assert waiting["reason"]
            client.origin.faults.remove(fault)
            await until(lambda: client.pending(f"{STEP}/.metadata") is None)
        assert (await shown(client))[f"{STEP}/"]["state"] == "durable"


async def test_11_2_a_deleted_checkpoint_is_not_shown(tmp_path: Path) -> None:
    """11.2 Whether it was at the bucket or not, and by whichever request."""
    async with a_client(tmp_path) as client:
        await client.learn()
        names = ("__0_0.distcp", ".metadata")
        for name in names:
            await client.ask("PUT", f"{STEP}/{name}", b"x")
        async with client.flushing():
            await until(lambda: client.pending(f"{STEP}/.metadata") is None)
        for name in names:
            await client.ask("DELETE", f"{STEP}/{name}", status=204)
        assert await shown(client) == {}


async def test_11_2_whose_old_versions_are_deleted_is_shown_as_before(tmp_path: Path) -> None:
    """11.2 A request that names a version says nothing of the others: the object may be there."""
    names = [f"{STEP}/{name}" for name in ("__0_0.distcp", ".metadata")]
    async with a_client(tmp_path) as client:
        await client.learn()
        for name in names:
            await client.ask("PUT", name, b"x")
        async with client.flushing():
            await until(lambda: client.pending(names[-1]) is None)
        before = await shown(client)
        client.origin.inject(on(Operation.DELETE_OBJECT), Answer(204), times=None)
        await client.ask("DELETE", f"{names[0]}?versionId=old", status=204)
        client.origin.inject(on(Operation.DELETE_OBJECTS), Answer(200), times=None)
        entries = "".join(f"<Object><Key>{name}</Key><VersionId>old</VersionId></Object>" for name in names)
        body = f"<Delete>{entries}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        await client.ask("POST", "?delete", body, {"content-md5": digest})
        assert await shown(client) == before
        await client.ask("DELETE", names[0], status=204)
        assert (await shown(client))[f"{STEP}/"]["files"] == 1


async def test_11_2_what_the_origin_refuses_to_delete_is_shown_as_before(tmp_path: Path) -> None:
    """11.2 By a DeleteObjects too, in which other keys were deleted; and where its answer says nothing that is
    understood."""
    names = [f"{STEP}/__{rank}_0.distcp" for rank in range(3)]
    errors = f"<Error><Key>{names[1]}</Key><VersionId/><Code>AccessDenied</Code></Error>"
    errors += f"<Error><Key>{names[2]}</Key><VersionId>old</VersionId><Code>AccessDenied</Code></Error>"
    document = f"<DeleteResult>{errors}</DeleteResult>".encode()
    async with a_client(tmp_path) as client:
        await client.learn()
        for name in names:
            await client.ask("PUT", name, b"x")
        async with client.flushing():
            await until(lambda: client.pending(names[-1]) is None)
        entries = "".join(f"<Object><Key>{name}</Key></Object>" for name in names)
        entries += f"<Object><Key>{names[2]}</Key><VersionId>old</VersionId></Object>"
        body = f"<Delete><Quiet>true</Quiet>{entries}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        for answer, left in ((b"no document", 3), (document, 1)):
            client.origin.inject(on(Operation.DELETE_OBJECTS), Answer(200, body=answer))
            told = await client.ask("POST", "?delete", body, {"content-md5": digest})
            assert told.body == answer
            assert (await shown(client))[f"{STEP}/"]["files"] == left


async def test_11_3_what_goes_through_counts_for_its_checkpoint(tmp_path: Path) -> None:
    """11.3 As the first write to a bucket does: the bucket has it, and this node knows."""
    async with a_client(tmp_path) as client:
        await client.ask("PUT", f"{STEP}/__0_0.distcp", b"12345")
        one = (await shown(client))[f"{STEP}/"]
        assert (one["files"], one["bytes"], one["bytes_flushed"], one["ranks_seen"]) == (1, 5, 5, [0])
        assert (one["state"], one["missing"]["objects"]) == ("writing", [f"{STEP}/.metadata"])


async def test_11_3_an_upload_begins_the_save_with_its_first_byte(tmp_path: Path) -> None:
    """11.3 It is seen while nothing of it is acknowledged yet; aborted, it has never been."""
    async with a_client(tmp_path) as client:
        await client.learn()
        answer = await client.ask("POST", f"{STEP}/rank_3.pt?uploads")
        one = (await shown(client))[f"{STEP}/"]
        assert (one["state"], one["files"], one["missing"]["open_uploads"]) == ("writing", 0, 1)
        assert one["missing"]["ranks"] == [3]
        upload_id = answer.body.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
        await client.ask("DELETE", f"{STEP}/rank_3.pt?uploadId={upload_id}", status=204)
        assert await shown(client) == {}
