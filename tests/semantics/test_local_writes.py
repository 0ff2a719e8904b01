"""What is acknowledged and never sent, and what stays in the cache: clauses 11.4 to 11.7 of docs/semantics.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.core.clock import Clock, SystemClock
from gateway.core.model import ObjectKey
from gateway.operations.writeback.cache_promotion import KeptCheckpoints
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.checkpoint_retention import (
    CheckpointCache,
    CheckpointRetention,
    KeptCheckpoint,
)
from gateway.writeback.journal.records import State
from tests.semantics.test_checkpoints import shown
from tests.support.memory_origin.faults import Answer, on
from tests.support.slots import Slot, slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, a_client

SCRATCH = [Slot("back", Prefix.parse("s3://bucket/back/"), write="scratch")]
LATEST = [slot_with(SLOTS[0], flush="latest")]


class Later(SystemClock):
    """Some time later than it is."""

    seconds = 0.0

    def now(self) -> float:
        return super().now() + self.seconds

    def monotonic(self) -> float:
        return super().monotonic() + self.seconds


class NoCache:
    """Nothing is kept."""

    async def keep(self, checkpoints: Sequence[KeptCheckpoint]) -> Mapping[ObjectKey, str]:
        return {}


@asynccontextmanager
async def retention_of(
    client: Client, slot: Slot, clock: Clock | None = None, cache: CheckpointCache | None = None
) -> AsyncIterator[CheckpointRetention]:
    """What carries out what slots say of checkpoints."""
    queries = CheckpointQueries(Path(client.buffer.journal._path).parent)
    clock = clock or client.gateway.app.services.clock
    try:
        cache = cache or NoCache()
        yield CheckpointRetention(queries, client.buffer.journal, [slot], cache, clock)
    finally:
        queries.close()


async def save(client: Client, step: int, ranks: int = 2) -> None:
    for rank in range(ranks):
        await client.ask("PUT", f"back/run/step-{step}/__{rank}_0.distcp", b"shard" * 100)
    await client.ask("PUT", f"back/run/step-{step}/.metadata", b"manifest")


def stored(client: Client) -> set[str]:
    return {name.removeprefix("back/") for name in client.origin.buckets["bucket"].objects if name.startswith("back/")}


async def test_11_4_what_is_only_here_says_so_whatever_its_slot_says_by_now(tmp_path: Path) -> None:
    """11.4 6.8 Written to `scratch`, an object is not durable in a slot that is `through`, or none, since."""
    async with a_client(tmp_path, SCRATCH) as client:
        await client.ask("PUT", "back/a", b"one")
        for slots in ([slot_with(SCRATCH[0], write="through")], [], [slot_with(SCRATCH[0], write="back")]):
            client.gateway.app.services.slots.apply_settings(slots)
            for method in ("HEAD", "GET"):
                got = await client.ask(method, "back/a")
                assert got.headers["x-forebay-durable"] == "false", (slots, method)
        client.gateway.app.services.slots.apply_settings([])
        client.origin.put("bucket", "back/b", b"of the bucket")
        assert "x-forebay-durable" not in (await client.ask("HEAD", "back/b")).headers


async def test_11_4_what_is_written_to_scratch_is_here_and_nowhere_else(tmp_path: Path) -> None:
    """11.4 The origin hears nothing of it, is it there or not; it is read, listed, copied, overwritten, and deleted."""
    async with a_client(tmp_path, slots=SCRATCH) as client:
        fault = client.origin.inject(on(), Answer(503, "SlowDown"), times=None)
        await client.ask("PUT", "back/a.tmp", b"one")
        copied = {"x-amz-copy-source": "/bucket/back/a.tmp"}
        await client.ask("PUT", "back/a", headers=copied)
        upload_id = await client.create("back/big")
        etags = {n: await client.part("back/big", upload_id, n, bytes(PART_BYTES)) for n in (1, 2)}
        await client.complete("back/big", upload_id, etags)
        fault.times = 0
        async with client.flushing():
            assert (await client.ask("GET", "back/a")).body == b"one"
            head = await client.ask("HEAD", "back/big")
            assert (head.headers["content-length"], head.headers["x-forebay-durable"]) == (str(2 * PART_BYTES), "false")
            assert (await client.ask("HEAD", "back/a")).headers["x-forebay-durable"] == "false"
            listed = await client.ask("GET", "?list-type=2&prefix=back%2F")
            assert [name in listed.body for name in (b"back/a<", b"back/a.tmp<", b"back/big<")] == [True] * 3
            await client.ask("DELETE", "back/a.tmp", status=204)
            await client.ask("GET", "back/a.tmp", status=404)
            await client.ask("PUT", "back/a", b"two")
            assert (await client.ask("GET", "back/a")).body == b"two"
            await until(lambda: client.pending("back/a.tmp") is None)
        assert not stored(client)
        writes = (Operation.PUT_OBJECT, Operation.CREATE_MULTIPART_UPLOAD, Operation.UPLOAD_PART)
        assert [client.origin.count(one) for one in writes] == [0, 0, 0]


async def test_11_4_what_only_the_origin_could_judge_is_refused_in_scratch(tmp_path: Path) -> None:
    """11.4 501, and nothing is acknowledged or sent."""
    async with a_client(tmp_path, slots=SCRATCH) as client:
        await client.ask("PUT", "back/a", b"x", {"if-none-match": "*"}, status=501)
        await client.ask("PUT", "back/a", b"x", {"x-amz-acl": "private"}, status=501)
        await client.ask("PUT", "back/a", headers={"x-amz-copy-source": "/bucket/back/none"}, status=501)
        for target in ("back/a?unheard-of=1", "back/a?If-None-Match=%2A", "back/a?partNumber=1&uploadId=x&unheard-of="):
            assert b"scratch" in (await client.ask("PUT", target, b"x", status=501)).body
        assert client.pending("back/a") is None
        assert not any(one.operation in (Operation.PUT_OBJECT, Operation.FORWARD) for one in client.origin.calls)


async def test_11_4_what_the_bucket_has_is_seen_until_it_is_overwritten_here(tmp_path: Path) -> None:
    """11.4 A deletion reaches the bucket, too: nothing comes to light again."""
    async with a_client(tmp_path, slots=SCRATCH) as client:
        client.origin.put("bucket", "back/old", b"of the bucket")
        got = await client.ask("GET", "back/old")
        assert (got.body, got.headers["x-forebay-durable"]) == (b"of the bucket", "true")
        await client.ask("PUT", "back/old", b"scratch")
        assert (await client.ask("GET", "back/old")).body == b"scratch"


async def test_11_5_a_superseded_checkpoint_is_not_sent_once_a_newer_one_is_durable(tmp_path: Path) -> None:
    """11.5 Never before; it stays readable, is told, and does not count as on its way."""
    async with a_client(tmp_path, slots=LATEST) as client:
        await client.learn()
        client.origin.inject(
            on(Operation.PUT_OBJECT, key="back/run/step-1/__1_0.distcp"), Answer(403, "AccessDenied"), times=None
        )
        async with retention_of(client, LATEST[0]) as retention:
            await save(client, 1)
            await retention.look()
            assert client.buffer.look(lambda tx: tx.files.usage("back")).local_objects == 0
            async with client.flushing():
                await until(lambda: client.pending("back/run/step-1/__0_0.distcp") is None)
                for _ in range(2000):  # before a look gives it up
                    if (await shown(client))["back/run/step-1/"]["state"] == "failed":
                        break
                    await asyncio.sleep(0.01)
                else:
                    raise AssertionError("it is not told")
                await save(client, 2)
                await retention.look()
                await until(lambda: client.pending("back/run/step-2/.metadata") is None)
            await retention.look()
        states = {name: one["state"] for name, one in (await shown(client)).items()}
        assert states == {"back/run/step-1/": "local", "back/run/step-2/": "durable"}
        assert client.buffer.look(lambda tx: tx.writes.oldest("back")) is None
        async with client.flushing():
            for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
                await client.ask("GET", f"back/run/step-1/{name}")
        assert (await client.ask("HEAD", "back/run/step-1/.metadata")).headers["x-forebay-durable"] == "false"
        assert "run/step-1/.metadata" not in stored(client)


async def test_11_5_every_nth_is_sent_whatever_comes_after_it(tmp_path: Path) -> None:
    """11.5 As they were begun; objects of no checkpoint always are."""
    slot = slot_with(SLOTS[0], flush="every-2nd")
    async with a_client(tmp_path, slots=[slot]) as client:
        await client.learn()
        for step in (1, 2, 3, 4, 5):
            await save(client, step, ranks=1)
        await client.ask("PUT", "back/log.txt", b"of no checkpoint")
        newest = "back/run/step-5/.metadata"
        await client.buffer.prioritise(ObjectKey("bucket", "back/run/step-5/__0_0.distcp"))
        await client.buffer.prioritise(ObjectKey("bucket", newest))
        held = [
            client.origin.inject(
                on(Operation.PUT_OBJECT, key=f"back/run/step-{one}/__0_0.distcp"), Answer(503), times=None
            )
            for one in (1, 2, 3, 4)
        ]
        async with retention_of(client, slot) as retention:
            async with client.flushing():
                await until(lambda: client.pending(newest) is None)
            await retention.look()
            for fault in held:
                fault.times = 0
            async with client.flushing():
                await until(lambda: client.buffer.look(lambda tx: tx.writes.oldest("back")) is None)
        states = {name: one["state"] for name, one in (await shown(client)).items()}
        assert list(states.values()) == ["local", "durable", "local", "durable", "durable"]
        assert "log.txt" in stored(client)


async def test_11_5_what_is_asked_for_is_sent_after_all(tmp_path: Path) -> None:
    """11.5 By a request that only the origin can answer, as by `forebay flush`."""
    async with a_client(tmp_path, slots=LATEST) as client:
        await client.learn()
        await save(client, 1)
        await client.ask("PUT", "back/run/step-1/extra", b"x")
        async with retention_of(client, LATEST[0]):
            now = client.gateway.app.services.clock.now()
            await client.buffer.journal.change(lambda tx: tx.local.keep_here(1, now))
        assert client.pending("back/run/step-1/extra").state is State.LOCAL  # type: ignore[union-attr]
        async with client.flushing():
            tagging = b"<Tagging><TagSet></TagSet></Tagging>"
            await client.ask("PUT", "back/run/step-1/extra?tagging", tagging)
        assert "run/step-1/extra" in stored(client)
        assert client.pending("back/run/step-1/.metadata") is not None


async def test_11_5_what_no_newer_one_supersedes_any_more_is_sent(tmp_path: Path) -> None:
    """11.5 The newer one was deleted: the one before it is the newest again."""
    async with a_client(tmp_path, slots=LATEST) as client:
        await client.learn()
        held = on(Operation.PUT_OBJECT, key="back/run/step-1/__0_0.distcp")
        fault = client.origin.inject(held, Answer(403, "AccessDenied"), times=None)
        async with retention_of(client, LATEST[0]) as retention:
            await save(client, 1, ranks=1)
            await save(client, 2, ranks=1)
            async with client.flushing():
                await until(lambda: client.pending("back/run/step-2/.metadata") is None)
            await retention.look()
            assert (await shown(client))["back/run/step-1/"]["state"] == "local"
            fault.times = 0
            for name in ("__0_0.distcp", ".metadata"):
                await client.ask("DELETE", f"back/run/step-2/{name}", status=204)
            await retention.look()
            async with client.flushing():
                await until(lambda: client.pending("back/run/step-1/.metadata") is None)
        assert {name: one["state"] for name, one in (await shown(client)).items()} == {"back/run/step-1/": "durable"}


async def test_11_4_what_was_scratch_is_sent_when_its_slot_writes_back(tmp_path: Path) -> None:
    """11.4 Of checkpoints and others; whatever is said of the slot from now on holds for what it has."""
    async with a_client(tmp_path, slots=SCRATCH) as client:
        await client.ask("PUT", "back/run/step-1/a.pt", b"x")
        await client.ask("PUT", "back/other", b"y")
        async with retention_of(client, SLOTS[0]) as retention:
            await retention.look()
        states = [client.pending(name).state for name in ("back/run/step-1/a.pt", "back/other")]  # type: ignore[union-attr]
        assert states == [State.COMMITTED] * 2


async def test_11_6_what_is_not_to_be_sent_goes_by_age_a_checkpoint_as_a_whole(tmp_path: Path) -> None:
    """11.6 After `scratch_expiry`, counted from the last object of a checkpoint."""
    slot = slot_with(SCRATCH[0], scratch_expiry_seconds=600.0)
    async with a_client(tmp_path, slots=[slot], clock=Later()) as client:
        clock = client.gateway.app.services.clock
        assert isinstance(clock, Later)
        await client.ask("PUT", "back/run/step-1/a.pt", b"x")
        clock.seconds += 500.0
        await client.ask("PUT", "back/run/step-1/b.pt", b"x")
        await client.ask("PUT", "back/other", b"x")
        async with retention_of(client, slot, clock) as retention:
            clock.seconds += 150.0
            await retention.look()
            assert client.pending("back/run/step-1/a.pt") is not None
            clock.seconds += 500.0
            await retention.look()
        assert [client.pending(f"back/{name}") for name in ("run/step-1/a.pt", "run/step-1/b.pt", "other")] == [
            None
        ] * 3
        assert not list(client.buffer.staging.names())


async def test_11_6_what_is_not_to_be_sent_gives_way_before_anything_is_refused(tmp_path: Path) -> None:
    """11.6 The oldest first; what came in the last minute stays, and a write for which there is no room is refused."""
    slot = slot_with(SCRATCH[0], buffer_bytes=3000)
    async with a_client(tmp_path, slots=[slot], clock=Later()) as client:
        clock = client.gateway.app.services.clock
        assert isinstance(clock, Later)
        for number in range(3):
            await client.ask("PUT", f"back/{number}", bytes(900))
            clock.seconds += 100.0
        await client.ask("PUT", "back/3", bytes(900))
        assert [client.pending(f"back/{number}") is not None for number in range(4)] == [False, True, True, True]
        await client.ask("PUT", "back/larger", bytes(3001), status=400)


SHARD_BYTES = 512 * 1024


async def flushed(client: Client, step: int) -> None:
    """A checkpoint of one shard, saved and at the origin."""
    await client.ask("PUT", f"back/run/step-{step}/__0_0.distcp", bytes([step]) * SHARD_BYTES)
    await client.ask("PUT", f"back/run/step-{step}/.metadata", b"manifest")
    await until(lambda: client.pending(f"back/run/step-{step}/.metadata") is None)


async def hits(client: Client, step: int) -> bool:
    got = await client.ask("GET", f"back/run/step-{step}/__0_0.distcp")
    assert got.body == bytes([step]) * SHARD_BYTES
    return got.headers["x-forebay-cache"].startswith("hit")


@pytest.mark.slow
async def test_11_7_the_newest_stay_in_the_cache_whatever_else_is_read(tmp_path: Path) -> None:
    """11.7 Older ones are the first to leave; what is deleted is not kept, and the one before it is, as far as it is
    in the cache."""
    slot = slot_with(SLOTS[0], keep_last=2)
    async with a_client(tmp_path, slots=[slot], capacity_bytes=3 * 1024**2) as client:
        await client.learn()
        cache = KeptCheckpoints(client.gateway.blocks)
        async with retention_of(client, slot, cache=cache) as retention, client.flushing():
            for step in (1, 2, 3):
                await flushed(client, step)
                await retention.look()
            assert {key.key: reason for key, reason in retention.kept.items()} == {
                "back/run/step-2/": None,
                "back/run/step-3/": None,
            }
            for number in range(8):
                client.origin.put("bucket", f"back/data/{number}", bytes(SHARD_BYTES))
                await client.ask("GET", f"back/data/{number}")
                await client.gateway.blocks.settle()
            assert [await hits(client, step) for step in (2, 3)] == [True, True]
            assert not client.gateway.blocks.has_blocks_of(ObjectKey("bucket", "back/run/step-1/__0_0.distcp"))
            for name in ("__0_0.distcp", ".metadata"):
                await client.ask("DELETE", f"back/run/step-3/{name}", status=204)
            await retention.look()
            assert {key.key: reason is None for key, reason in retention.kept.items()} == {
                "back/run/step-1/": False,
                "back/run/step-2/": True,
            }


@pytest.mark.slow
async def test_11_7_one_for_which_there_is_no_room_is_told_and_kept_once_it_is_read(tmp_path: Path) -> None:
    """11.7 It is never called kept while its bytes are not in the cache."""
    slot = slot_with(SLOTS[0], keep_last=8)
    async with a_client(tmp_path, slots=[slot], capacity_bytes=3 * 1024**2) as client:
        await client.learn()
        cache = KeptCheckpoints(client.gateway.blocks)
        async with retention_of(client, slot, cache=cache) as retention, client.flushing():
            for step in range(1, 9):
                await flushed(client, step)
                await retention.look()
            kept = {key.key.split("-")[1].rstrip("/"): reason for key, reason in retention.kept.items()}
            assert len(kept) == 8
            there = {str(step): await hits(client, step) for step in range(1, 9)}
            assert {step: reason is None for step, reason in kept.items()} == there
            assert set(there.values()) == {True, False}
            for step in (1, 2, 3):
                for name in ("__0_0.distcp", ".metadata"):
                    await client.ask("DELETE", f"back/run/step-{step}/{name}", status=204)
            await retention.look()
            await hits(client, 8)
            await client.gateway.blocks.settle()
            await retention.look()
            assert await hits(client, 8)
            assert retention.kept[ObjectKey("bucket", "back/run/step-8/")] is None
