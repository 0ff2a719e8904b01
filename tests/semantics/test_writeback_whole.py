"""`write = "back"`, and manifests that are whole where readers find them: clause 6.7 of docs/semantics.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.policy.slots import Grant, Prefix
from gateway.s3.requests import Operation
from gateway.writeback.flushing import manifest_files
from gateway.writeback.flushing.manifest_files import FIRST_LOOK
from tests.support.memory_origin.faults import Answer, Hold, Unreachable, on
from tests.support.slots import slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import SLOTS, Client, a_client

RECORDED = Path(__file__).parents[1] / "writeback" / "checkpoints" / "recorded"
TWO_RANKS = (RECORDED / "two_ranks.metadata").read_bytes()
STEP = "back/step-1/"
MINE, THEIRS, MANIFEST = f"{STEP}__0_0.distcp", f"{STEP}__1_0.distcp", f"{STEP}.metadata"


def is_there(client: Client, name: str) -> bool:
    return name in client.origin.buckets["bucket"].objects


def reason(client: Client, name: str) -> str | None:
    write = client.pending(name)
    turn = None if write is None else client.buffer.look(lambda tx: tx.turns.of(write.id))
    return turn.last_error if turn is not None else None


def index_of(*names: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{n}": one for n, one in enumerate(names)}}).encode()


def waits(client: Client, name: str) -> Callable[[], bool]:
    return lambda: "that it names" in (reason(client, name) or "")


async def test_6_7_a_manifest_waits_for_what_other_nodes_write(tmp_path: Path) -> None:
    """6.7 It becomes visible when all that it names is there; until then it waits, without having failed."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", MINE, b"mine")
        await client.ask("PUT", MANIFEST, TWO_RANKS)
        async with client.flushing():
            await until(lambda: is_there(client, MINE))
            await until(waits(client, MANIFEST))
            assert reason(client, MANIFEST) == f"waits for 1 file of 2 that it names, such as s3://bucket/{THEIRS}"
            write = client.pending(MANIFEST)
            assert write is not None
            turn = client.buffer.look(lambda tx: tx.turns.of(write.id))
            assert turn is not None
            assert turn.attempts == 0
            assert (await client.ask("GET", MANIFEST)).body == TWO_RANKS
            assert not is_there(client, MANIFEST)
            client.origin.put("bucket", THEIRS, b"theirs")
            await until(lambda: is_there(client, MANIFEST))
        await client.flush()


@pytest.mark.parametrize(
    ("name", "content", "theirs"),
    [
        ("back/m/model.safetensors.index.json", index_of("a.safetensors", "b.safetensors"), "back/m/b.safetensors"),
        ("back/run/latest", b"global_step100\n", "back/run/global_step100/mp_rank_00_model_states.pt"),
        ("back/run/latest_checkpointed_iteration.txt", b"100", "back/run/iter_0000100/mp_rank_00/model.pt"),
    ],
)
async def test_6_7_manifests_of_each_kind(tmp_path: Path, name: str, content: bytes, theirs: str) -> None:
    """6.7 An index names files, a pointer a directory, which has to have an object; one of a longer name is another."""
    async with a_client(tmp_path) as client:
        await client.learn()
        for one in ("back/m/a.safetensors", "back/run/global_step1000/x", "back/run/iter_00001000/x"):
            client.origin.put("bucket", one, b"there")
        await client.ask("PUT", name, content)
        async with client.flushing():
            await until(waits(client, name))
            assert not is_there(client, name)
            client.origin.put("bucket", theirs, b"theirs")
            await until(lambda: is_there(client, name))
        await client.flush()


async def test_6_7_a_manifest_that_is_renamed_or_comes_in_parts(tmp_path: Path) -> None:
    """6.7 A copy of `.metadata.tmp` waits as what it is, and so does what is completed of parts."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", MINE, b"mine")
        await client.ask("PUT", f"{MANIFEST}.tmp", TWO_RANKS)
        await client.ask("PUT", MANIFEST, headers={"x-amz-copy-source": f"/bucket/{MANIFEST}.tmp"})
        deleting = asyncio.create_task(client.ask("DELETE", f"{MANIFEST}.tmp", status=204))
        other = "back/step-2/.metadata"
        upload_id = await client.create(other)
        await client.complete(other, upload_id, {1: await client.part(other, upload_id, 1, TWO_RANKS)})
        async with client.flushing():
            await until(waits(client, MANIFEST))
            await until(waits(client, other))
            assert client.origin.count(Operation.COMPLETE_MULTIPART_UPLOAD, key=other) == 0
            for one in (THEIRS, "back/step-2/__0_0.distcp", "back/step-2/__1_0.distcp"):
                client.origin.put("bucket", one, b"theirs")
            await until(lambda: is_there(client, MANIFEST) and is_there(client, other))
            await deleting
        await client.flush()


async def test_6_7_a_rename_waits_for_no_other_node_while_this_one_flushes(tmp_path: Path) -> None:
    """6.7 `.metadata.tmp` comes last, too: it is here when it is copied, and the copy is acknowledged at once."""
    async with a_client(tmp_path) as client:
        await client.learn()
        large = asyncio.Event()
        client.origin.inject(on(Operation.PUT_OBJECT, key=MINE), held := Hold(large, asyncio.Event()))
        await client.ask("PUT", MINE, b"mine")
        await client.ask("PUT", f"{MANIFEST}.tmp", TWO_RANKS)
        await client.ask("PUT", "back/small", b"small")
        async with client.flushing():
            assert held.reached is not None
            await held.reached.wait()
            await until(lambda: client.pending("back/small") is None)
            copied = {"x-amz-copy-source": f"/bucket/{MANIFEST}.tmp"}
            answer = await client.ask("PUT", MANIFEST, headers=copied)
            assert answer.headers["x-forebay-cache"] == "absorbed"
            await client.ask("DELETE", f"{MANIFEST}.tmp", status=204)
            large.set()
            await until(waits(client, MANIFEST))
            client.origin.put("bucket", THEIRS, b"theirs")
            await until(lambda: is_there(client, MANIFEST))
        await client.flush()
        assert client.origin.count(Operation.PUT_OBJECT, key=f"{MANIFEST}.tmp") == 0


async def test_6_7_what_cannot_be_understood_comes_in_the_order_of_arrival(tmp_path: Path) -> None:
    """6.7 As in 6.6: behind what this node has acknowledged before it."""
    names = [MANIFEST, "back/step-1/x.index.json", "back/step-1/latest", "back/step-1/_SUCCESS"]
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", MINE, b"mine")
        for name in names:
            await client.ask("PUT", name, b"whatever this is")
        await client.flush()
        assert all(is_there(client, name) for name in [*names, MINE])


async def test_6_7_a_slot_may_say_that_order_is_enough(tmp_path: Path) -> None:
    """6.7 With `manifests = "in-order"` nobody looks what a manifest names."""
    slots = [slot_with(SLOTS[0], manifests="in-order")]
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        await client.ask("PUT", MANIFEST, TWO_RANKS)
        await client.flush()
        assert is_there(client, MANIFEST)


async def test_6_7_nobody_waits_for_what_comes_behind(tmp_path: Path) -> None:
    """6.7 Where the order is strict, it counts: what was acknowledged later cannot come before."""
    slots = [slot_with(SLOTS[0], order="strict")]
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        await client.ask("PUT", "back/m/x.index.json", index_of("a", "b"))
        await client.ask("PUT", "back/m/a", b"a")
        await client.ask("PUT", "back/m/b", b"b")
        await client.flush()


async def test_6_7_what_comes_behind_hides_nothing_that_others_write(tmp_path: Path) -> None:
    """6.7 However much of what a manifest names comes behind it: it goes when the others are there."""
    slots = [slot_with(SLOTS[0], order="strict")]
    behind = [f"{n}.safetensors" for n in range(FIRST_LOOK + 1)]
    manifest = "back/m/x.index.json"
    async with a_client(tmp_path, slots) as client:
        await client.learn()
        await client.ask("PUT", manifest, index_of(*behind, "theirs.safetensors"))
        for name in behind:
            await client.ask("PUT", f"back/m/{name}", b"mine")
        async with client.flushing():
            await until(waits(client, manifest))
            waited_for = f"waits for 1 file of {len(behind) + 1} that it names, such as s3://bucket/back/m/theirs"
            assert (reason(client, manifest) or "").startswith(waited_for)
            client.origin.put("bucket", "back/m/theirs.safetensors", b"theirs")
            await until(lambda: is_there(client, manifest))
        await client.flush()


async def test_6_7_what_has_gone_while_others_were_waited_for_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6.7 All that a manifest names is there when it goes, and not only was there once."""
    monkeypatch.setattr(manifest_files, "FOUND_AGAIN_SECONDS", 0.0)
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", MINE, b"of others, too")
        await client.ask("PUT", MANIFEST, TWO_RANKS)
        async with client.flushing():
            await until(waits(client, MANIFEST))
            assert THEIRS in (reason(client, MANIFEST) or "")
            del client.origin.buckets["bucket"].objects[MINE]
            client.origin.put("bucket", THEIRS, b"theirs")
            await until(lambda: MINE in (reason(client, MANIFEST) or ""))
            assert not is_there(client, MANIFEST)
            client.origin.put("bucket", MINE, b"again")
            await until(lambda: is_there(client, MANIFEST))
        await client.flush()


@pytest.mark.slow
async def test_6_7_an_origin_that_does_not_say_is_asked_again(tmp_path: Path) -> None:
    """6.7 As long as nobody knows whether a file is there, it is not."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", MINE, b"x")
        client.origin.put("bucket", THEIRS, b"x")
        away = client.origin.inject(on(Operation.HEAD_OBJECT, key=THEIRS), Unreachable(), times=None)
        await client.ask("PUT", MANIFEST, TWO_RANKS)
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.HEAD_OBJECT, key=THEIRS) >= 2)
            assert not is_there(client, MANIFEST)
            away.times = 0
            denied = client.origin.inject(on(Operation.HEAD_OBJECT, key=THEIRS), Answer(403, "AccessDenied"), times=1)
            await until(lambda: is_there(client, MANIFEST))
            assert denied.times == 0
        await client.flush()


@pytest.mark.slow
async def test_6_7_one_that_goes_through_waits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6.7 Its client is answered when all of it is there, 503 where that takes too long; so is that of a copy."""
    monkeypatch.setattr("gateway.operations.writeback.past_the_buffer.PATIENCE_SECONDS", 1.0)
    condition = {"If-None-Match": "*"}
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", MINE, b"mine")
        client.origin.put("bucket", f"{MANIFEST}.tmp", TWO_RANKS)
        copy = {"x-amz-copy-source": f"/bucket/{MANIFEST}.tmp"}
        await client.ask("PUT", MANIFEST, TWO_RANKS, condition, status=503)
        await client.ask("PUT", MANIFEST, headers=copy, status=503)
        assert not is_there(client, MANIFEST)
        client.origin.put("bucket", THEIRS, b"theirs")
        answer = await client.ask("PUT", MANIFEST, TWO_RANKS, condition)
        assert answer.headers["x-forebay-cache"] == "forwarded"
        assert client.origin.data("bucket", MANIFEST) == TWO_RANKS
        await client.ask("PUT", MANIFEST, headers=copy)


async def test_6_7_a_manifest_that_waits_can_be_deleted(tmp_path: Path) -> None:
    """6.7 With its checkpoint; in a strict slot, too, where its deletion comes behind it, and what else does not."""

    async def scenario(client: Client) -> None:
        await client.learn()
        await client.ask("PUT", MINE, b"mine")
        await client.ask("PUT", MANIFEST, TWO_RANKS)
        async with client.flushing():
            await until(waits(client, MANIFEST))
            if client.gateway.app.services.slots.find("bucket", MINE).order != "strict":
                await client.ask("DELETE", MINE, status=204)
            await client.ask("DELETE", MANIFEST, status=204)
        await client.flush()
        assert not is_there(client, MANIFEST)

    for number, slot in enumerate((SLOTS[0], slot_with(SLOTS[0], order="strict"))):
        async with a_client(tmp_path / str(number), [slot]) as client:
            await scenario(client)


async def test_6_8_reads_of_a_marker_say_whether_the_origin_has_it(tmp_path: Path) -> None:
    """6.8 HEAD and GET of a marker say `x-forebay-durable`, of nothing else; without any right besides reading."""
    async with a_client(tmp_path) as client:
        await client.learn()
        await client.ask("PUT", MINE, b"mine")
        await client.ask("PUT", MANIFEST, TWO_RANKS)
        for method in ("HEAD", "GET"):
            assert (await client.ask(method, MANIFEST)).headers["x-forebay-durable"] == "false"
            assert "x-forebay-durable" not in (await client.ask(method, MINE)).headers
        async with client.flushing():
            await until(waits(client, MANIFEST))
            assert (await client.ask("HEAD", MANIFEST)).headers["x-forebay-durable"] == "false"
            client.origin.put("bucket", THEIRS, b"theirs")
            await until(lambda: client.pending(MANIFEST) is None)
        for method in ("HEAD", "GET", "HEAD", "GET", "GET"):
            assert (await client.ask(method, MANIFEST)).headers["x-forebay-durable"] == "true"
        assert "x-forebay-durable" not in (await client.ask("HEAD", "back/none/.metadata", status=404)).headers
        await client.ask("PUT", MANIFEST, TWO_RANKS)
        assert (await client.ask("HEAD", MANIFEST)).headers["x-forebay-durable"] == "false"
        await client.flush()


async def test_6_8_what_durable_hangs_on_is_asked_for_with_the_gateways_own_key(tmp_path: Path) -> None:
    """6.8 Whose rights end within a directory learns whether a file is there that its manifest names, and no more."""
    manifest, named = "back/run/step-1/model.safetensors.index.json", "back/run/step-1/other.safetensors"
    grant = Grant((Prefix.parse("s3://bucket/back/run/step-1/model"), Prefix.parse("s3://bucket/back/first")))
    async with a_client(tmp_path, grant=grant) as client:
        await client.learn()
        await client.ask("PUT", manifest, b'{"weight_map": {"a": "other.safetensors"}}')
        async with client.flushing():
            await until(lambda: client.origin.count(Operation.HEAD_OBJECT, key=named) > 0)
            assert (await client.ask("HEAD", manifest)).headers["x-forebay-durable"] == "false"
            client.origin.put("bucket", named, b"of another node")
            await client.ask("HEAD", named, status=403)
            await client.ask("GET", named, status=403)
        async with client.flushing(ahead_seconds=600.0):
            await until(lambda: client.pending(manifest) is None)
        assert (await client.ask("HEAD", manifest)).headers["x-forebay-durable"] == "true"


async def test_6_8_a_marker_is_not_durable_while_the_rest_of_its_checkpoint_is_pending(tmp_path: Path) -> None:
    """6.8 What comes behind the index of a checkpoint counts, and what comes for another checkpoint does not."""
    async with a_client(tmp_path) as client:
        await client.learn()
        run = "back/run/checkpoint-5/"
        shard, index = f"{run}model-00001-of-00001.safetensors", f"{run}model.safetensors.index.json"
        await client.ask("PUT", shard, b"s")
        await client.ask("PUT", index, index_of("model-00001-of-00001.safetensors"))
        await client.flush()
        assert (await client.ask("HEAD", index)).headers["x-forebay-durable"] == "true"
        await client.ask("PUT", "back/run/checkpoint-55/optimizer.pt", b"o")
        assert (await client.ask("HEAD", index)).headers["x-forebay-durable"] == "true"
        await client.ask("PUT", f"{run}optimizer.pt", b"o")
        for method in ("HEAD", "GET"):
            assert (await client.ask(method, index)).headers["x-forebay-durable"] == "false"
        await client.flush()
        assert (await client.ask("HEAD", index)).headers["x-forebay-durable"] == "true"
