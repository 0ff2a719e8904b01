"""Markers come last over all nodes (6.6, 12.10): what they speak for may be pending on other nodes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.model import ObjectKey
from gateway.origin.client import OriginRequest
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from tests.support.memory_origin.faults import Call, Delay
from tests.support.waiting import until
from tests.support.writing_nodes import BUCKET, DirectPeer, WritingNodes, writing_nodes, writing_slot

MARKERS = ("_SUCCESS", "latest")
SHARDS = ("shard-0", "shard-1", "shard-2")


@asynccontextmanager
async def cluster(directory: Path, count: int = 3) -> AsyncIterator[WritingNodes]:
    async with writing_nodes(directory, count) as nodes:
        await nodes.learn()
        yield nodes


def reasons(nodes: WritingNodes, number: int, key: str) -> str:
    """Why a node's write waits; empty: nobody has looked."""
    buffer = nodes.clients[number].buffer

    def look(tx: Any) -> str:
        write = tx.writes.latest(ObjectKey(BUCKET, key))
        turn = tx.turns.of(write.id) if write is not None else None
        return turn.last_error or "" if turn is not None else ""

    return buffer.look(look)


def has(nodes: WritingNodes, key: str) -> bool:
    return key in nodes.origin.buckets[BUCKET].objects


async def absorbed(nodes: WritingNodes, number: int, key: str, content: bytes = b"x") -> None:
    answer = await nodes.put(number, key, content)
    assert (answer.status, answer.headers["x-forebay-cache"]) == (200, "absorbed"), answer.body


async def test_a_marker_waits_for_the_shards_of_other_nodes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as nodes:
        await absorbed(nodes, 1, "run/shard-1")
        await absorbed(nodes, 2, "run/sub/shard-2")
        await absorbed(nodes, 2, "other/shard")
        await absorbed(nodes, 0, "run/_SUCCESS")
        await absorbed(nodes, 1, "run/later")
        async with nodes.clients[0].flushing():
            await until(lambda: "2 writes of other nodes" in reasons(nodes, 0, "run/_SUCCESS"))
            await nodes.clients[1].flush_one(ObjectKey(BUCKET, "run/shard-1"))
            await until(lambda: "a write of other nodes, such as s3://bucket/run/sub/shard-2 on n2" in
                             reasons(nodes, 0, "run/_SUCCESS"))  # fmt: skip
            assert not has(nodes, "run/_SUCCESS")
            await nodes.flush(2)
            await until(lambda: has(nodes, "run/_SUCCESS"))
        await nodes.flush(1)


async def test_an_overwritten_shard_is_waited_for_all_the_same(tmp_path: Path) -> None:
    """Shard on one node (1), marker on another (2), shard overwritten (3): the origin lacks what came first."""
    async with cluster(tmp_path, 2) as nodes:
        await absorbed(nodes, 0, "run/shard", b"first")
        await absorbed(nodes, 1, "run/_SUCCESS")
        await absorbed(nodes, 0, "run/shard", b"second")
        async with nodes.clients[1].flushing():
            await until(lambda: bool(reasons(nodes, 1, "run/_SUCCESS")) or has(nodes, "run/_SUCCESS"))
            assert not has(nodes, "run/_SUCCESS")
            await nodes.flush(0)
            await until(lambda: has(nodes, "run/_SUCCESS"))


async def test_an_overwritten_marker_is_sent_twice(tmp_path: Path) -> None:
    """6.6 Another node's marker waits for the first one, and the second waits for that."""
    async with cluster(tmp_path, 2) as nodes:
        await absorbed(nodes, 0, "run/latest", b"first")
        await absorbed(nodes, 1, "run/_SUCCESS")
        await absorbed(nodes, 0, "run/latest", b"second")
        seen = list[str]()
        nodes.origin.inject(lambda call: _is_put(call, "run/", seen), Delay(0.0), times=None)
        async with nodes.clients[1].flushing():
            await until(lambda: bool(reasons(nodes, 1, "run/_SUCCESS")) or has(nodes, "run/_SUCCESS"))
            async with nodes.clients[0].flushing():
                await until(lambda: len(seen) == 3)
        assert seen == ["run/latest", "run/_SUCCESS", "run/latest"]
        assert nodes.origin.data(BUCKET, "run/latest") == b"second"


async def test_markers_of_several_nodes_come_in_their_order(tmp_path: Path) -> None:
    """None waits for a later one, so no two wait for each other."""
    async with cluster(tmp_path, 2) as nodes:
        for turn in range(6):
            await absorbed(nodes, turn % 2, f"run/latest{turn}")
        seen = list[str]()
        nodes.origin.inject(lambda call: _is_put(call, "run/latest", seen), Delay(0.0), times=None)
        async with nodes.clients[0].flushing(), nodes.clients[1].flushing():
            await until(lambda: all(has(nodes, f"run/latest{turn}") for turn in range(6)))
        assert seen == [f"run/latest{turn}" for turn in range(6)]


def _is_put(call: Call, beginning: str, seen: list[str]) -> bool:
    if call.operation is Operation.PUT_OBJECT and (call.key or "").startswith(beginning):
        seen.append(call.key or "")
    return False


async def test_a_marker_waits_for_a_node_that_does_not_answer_and_says_so(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2) as nodes:
        await absorbed(nodes, 0, "run/shard")
        await absorbed(nodes, 1, "run/_SUCCESS")
        nodes.direct[1, 0] = DirectPeer(lambda: nodes.nodes[0].app)
        nodes.direct[1, 0].is_down = True
        async with nodes.clients[1].flushing():
            await until(lambda: "n0 at n0:9002 does not answer" in reasons(nodes, 1, "run/_SUCCESS"))
            assert not has(nodes, "run/_SUCCESS")
            nodes.direct[1, 0].is_down = False
            await nodes.flush(0)
            await until(lambda: has(nodes, "run/_SUCCESS"))


async def test_a_marker_is_sent_without_what_it_waits_for_if_a_person_decides_so(tmp_path: Path) -> None:
    """As a manifest without its files (6.7), and as `forebay writeback resolve … keep-ours` does."""
    async with cluster(tmp_path, 2) as nodes:
        await absorbed(nodes, 0, "run/shard")
        await absorbed(nodes, 1, "run/_SUCCESS")
        reconciler = nodes.clients[1].reconciler
        async with nodes.clients[1].flushing():
            await until(lambda: bool(reconciler.awaiting_files(lambda key: key.key == "run/_SUCCESS")))
            [waiting] = reconciler.awaiting_files(lambda _: True)
            reconciler._dependencies.manifests.waive(waiting)
            await until(lambda: has(nodes, "run/_SUCCESS"))
        assert not has(nodes, "run/shard")
        await nodes.flush(0)


async def test_without_the_registry_all_nodes_are_asked(tmp_path: Path) -> None:
    async with cluster(tmp_path) as nodes:
        await absorbed(nodes, 0, "run/shard")
        await absorbed(nodes, 1, "run/_SUCCESS")
        nodes.shared.is_away = True
        async with nodes.clients[1].flushing():
            await until(lambda: "s3://bucket/run/shard on n0" in reasons(nodes, 1, "run/_SUCCESS"))
            assert not has(nodes, "run/_SUCCESS")
            await nodes.clients[0].flush()
            await until(lambda: has(nodes, "run/_SUCCESS"))


async def test_a_marker_that_goes_through_waits_too(tmp_path: Path) -> None:
    """4.7 A conditional write, which the origin judges."""
    async with cluster(tmp_path, 2) as nodes:
        await absorbed(nodes, 0, "run/shard")
        writing = asyncio.create_task(nodes.put(1, "run/commit", b"x", headers={"If-None-Match": "*"}))
        await until(lambda: _is_urgent(nodes, 0, "run/shard"))
        assert not has(nodes, "run/commit")
        await nodes.flush(0)
        assert (await writing).status == 200
        assert has(nodes, "run/commit")


@pytest.mark.parametrize(
    ("marker", "headers"), [("_SUCCESS", {}), ("commit", {"If-None-Match": "*"})], ids=["marker", "condition"]
)
async def test_a_marker_waits_on_a_node_whose_directory_is_closed(
    tmp_path: Path, marker: str, headers: dict[str, str]
) -> None:
    """12.10 That node absorbs nothing, so it goes through. A shard does not wait."""
    async with cluster(tmp_path, 2) as nodes:
        await absorbed(nodes, 0, "run/shard")
        services = nodes.nodes[1].gateway.app.services
        buffer, services.writeback, services.buffer_closed = services.writeback, None, True
        assert (await nodes.put(1, "run/other", b"x")).headers["x-forebay-cache"] == "forwarded"
        writing = asyncio.create_task(nodes.put(1, f"run/{marker}", b"x", headers=headers))
        await until(lambda: _is_urgent(nodes, 0, "run/shard") or has(nodes, f"run/{marker}"))
        assert not has(nodes, f"run/{marker}")
        await nodes.flush(0)
        assert (await writing).status == 200
        assert has(nodes, f"run/{marker}")
        services.writeback, services.buffer_closed = buffer, False


async def test_an_uploaded_marker_that_goes_through_waits_whichever_node_is_asked_to_complete_it(
    tmp_path: Path,
) -> None:
    """12.10 The node that has the upload is asked by another one."""
    async with cluster(tmp_path, 2) as nodes:
        begun = await nodes.ask(1, "POST", f"/{BUCKET}/run/commit?uploads")
        upload_id = text_of(begun.body, "UploadId") or ""
        target = f"run/commit?uploadId={upload_id}"
        stored = await nodes.put(1, f"{target}&partNumber=1", b"x")
        await absorbed(nodes, 0, "run/shard")
        part = f"<Part><PartNumber>1</PartNumber><ETag>{stored.headers['etag']}</ETag></Part>"
        document = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
        only_new = {"If-None-Match": "*"}
        completing = asyncio.create_task(nodes.ask(0, "POST", f"/{BUCKET}/{target}", body=document, headers=only_new))
        await until(lambda: _is_urgent(nodes, 0, "run/shard") or has(nodes, "run/commit"))
        assert not has(nodes, "run/commit")
        await nodes.flush(0)
        assert (await completing).status == 200
        assert has(nodes, "run/commit")


async def test_a_marker_that_goes_through_waits_for_nothing_later(tmp_path: Path) -> None:
    """12.10 The shard that it waits for is overwritten again and again, so its key is never without a pending write."""
    async with cluster(tmp_path, 2) as nodes:
        await absorbed(nodes, 0, "run/shard", b"0")
        writing = asyncio.create_task(nodes.put(1, "run/commit", b"x", headers={"If-None-Match": "*"}))
        await until(lambda: _is_urgent(nodes, 0, "run/shard"))
        nodes.origin.inject(lambda call: call.key == "run/shard", Delay(0.05), times=None)
        async with nodes.clients[0].flushing():
            number = 0
            while not writing.done():
                number += 1
                await absorbed(nodes, 0, "run/shard", b"%d" % number)
        assert (await writing).status == 200
        assert has(nodes, "run/shard")
        await nodes.flush(0)


@pytest.mark.slow
async def test_a_marker_is_durable_when_all_nodes_have_flushed_their_part(tmp_path: Path) -> None:
    """6.8 Whichever node is asked; a node that cannot be asked may still have some."""
    marker = "run/step-100/.metadata"

    async def told(nodes: WritingNodes) -> list[str]:
        answers = [await nodes.ask(number, "HEAD", f"/{BUCKET}/{marker}") for number in range(3)]
        return [answer.headers["x-forebay-durable"] for answer in answers]

    async with cluster(tmp_path) as nodes:
        await absorbed(nodes, 0, marker)
        assert await told(nodes) == ["false"] * 3
        await nodes.flush(0)
        assert await told(nodes) == ["true"] * 3
        await absorbed(nodes, 1, "run/step-100/__1_0.distcp")  # after the marker
        await absorbed(nodes, 2, "run/step-1/__1_0.distcp")
        assert await told(nodes) == ["false"] * 3
        await nodes.flush(1)
        assert await told(nodes) == ["true"] * 3
        await absorbed(nodes, 1, "run/step-100/__2_0.distcp")
        nodes.direct[0, 1].is_down = True
        assert (await told(nodes))[0] == "false"
        await nodes.flush(1)
        assert await told(nodes) == ["true"] * 3


async def test_a_manifest_does_not_wait_for_files_that_wait_for_it(tmp_path: Path) -> None:
    """6.7 Such as another node has acknowledged later: the two would wait for each other for ever."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = orjson.dumps({"weight_map": {f"layer{number}": name for number, name in enumerate(names)}})
    slot = writing_slot(markers=("*.index.json", "*.safetensors"))
    async with writing_nodes(tmp_path, 2, slots=[slot]) as nodes:
        await nodes.learn()
        await absorbed(nodes, 0, "run/model.safetensors.index.json", index)
        for name in names:
            await absorbed(nodes, 1, f"run/{name}")
        async with nodes.clients[0].flushing(), nodes.clients[1].flushing():
            await until(lambda: all(has(nodes, f"run/{name}") for name in names))
        assert has(nodes, "run/model.safetensors.index.json")


def _is_urgent(nodes: WritingNodes, number: int, key: str) -> bool:
    buffer = nodes.clients[number].buffer

    def look(tx: Any) -> bool:
        write = tx.writes.latest(ObjectKey(BUCKET, key))
        return write is not None and tx.turns.urgent([write.id]) == {write.id}

    return buffer.look(look)


# Histories


@dataclass
class History:
    """Clients' writes under one prefix, in an order that a seed gives. A content is its key's number of the version."""

    nodes: WritingNodes
    seed: int
    acknowledged: dict[str, int] = field(default_factory=dict)
    needed: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    """A marker and its version → what was acknowledged before it."""

    @property
    def prefix(self) -> str:
        return f"history-{self.seed}/"

    async def play(self) -> None:
        dice, versions, last = random.Random(self.seed), dict[str, int](), dict[str, asyncio.Task[None]]()
        for _ in range(dice.randint(4, 12)):
            key = self.prefix + dice.choice(MARKERS if dice.random() < 0.3 else SHARDS)
            if key in last:
                await last[key]
            versions[key] = versions.get(key, 0) + 1
            if key.endswith(MARKERS):
                self.needed[key, versions[key]] = dict(self.acknowledged)
            number = dice.randrange(len(self.nodes.nodes))
            last[key] = asyncio.create_task(self._write(number, key, versions[key]))
            if dice.random() < 0.7:
                await last[key]  # else it is under way together with the next one, of another key
        await asyncio.gather(*last.values())
        await until(lambda: all(_version(self.nodes, key) == last for key, last in self.acknowledged.items()))

    async def _write(self, number: int, key: str, version: int) -> None:
        answer = await self.nodes.put(number, key, str(version).encode())
        while answer.status == 503 and b"is pending on another node: try again" in answer.body:
            # Nothing was written; on a busy machine a flush takes longer than a write waits (12.4).
            answer = await self.nodes.put(number, key, str(version).encode())
        assert answer.status == 200, f"seed {self.seed}: {answer.body!r}"
        self.acknowledged[key] = max(version, self.acknowledged.get(key, 0))

    def check(self, key: str, version: int) -> None:
        """A marker's version has just become visible."""
        for other, at_least in self.needed[key, version].items():
            found = _version(self.nodes, other)
            assert found >= at_least, f"seed {self.seed}: {key} of {version} before {other} of {at_least}: {found}"


def _version(nodes: WritingNodes, key: str) -> int:
    return int(nodes.origin.data(BUCKET, key)) if has(nodes, key) else 0


def _is_of(shard: str, call: Call) -> bool:
    return (call.key or "").endswith(shard)


async def play(directory: Path, seeds: Sequence[int]) -> None:
    """All of them at the same time, while the bucket is slow to take some of the shards."""
    async with cluster(directory) as nodes, AsyncExitStack() as stack:
        histories = {f"history-{seed}/": History(nodes, seed) for seed in seeds}
        failures, write = list[AssertionError](), nodes.origin._face.answer

        async def watched(request: OriginRequest) -> Any:
            answer = await write(request)
            key = request.key or ""
            if request.method == "PUT" and not request.query and answer.status == 200 and key.endswith(MARKERS):
                try:
                    histories[key.rpartition("/")[0] + "/"].check(key, _version(nodes, key))
                except AssertionError as error:
                    failures.append(error)
            return answer

        nodes.origin._face.answer = watched  # type: ignore[method-assign]
        for number, shard in enumerate(SHARDS):
            nodes.origin.inject(partial(_is_of, shard), Delay(0.02 * (number + 1)), times=None)
        for client in nodes.clients:
            await stack.enter_async_context(client.flushing())
        try:
            await asyncio.gather(*(history.play() for history in histories.values()))
        except BaseException as error:
            error.add_note(f"seeds {list(seeds)}")
            raise
        assert not failures, failures[0]


def first_seed() -> int:
    return int(os.environ.get("FOREBAY_MARKERS_SEED") or random.randrange(2**32))


@pytest.mark.slow
async def test_markers_come_last_in_any_history(tmp_path: Path) -> None:
    first = first_seed()
    await play(tmp_path, range(first, first + 20))


@pytest.mark.slow
@pytest.mark.parametrize("group", range(int(os.environ.get("FOREBAY_MARKERS_GROUPS", "2"))))
async def test_markers_come_last_in_many_histories(tmp_path: Path, group: int) -> None:
    first = first_seed() + 50 * group
    await play(tmp_path, range(first, first + 50))
