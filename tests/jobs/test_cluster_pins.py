"""`forebay pin --cluster`: each node pins the blocks that it looks after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.jobs.job import JobKind, JobState, Unpinned
from gateway.origin import peer_protocol as peer
from gateway.policy.slots import Prefix
from tests.cluster.nodes import Cluster
from tests.cluster.test_copies import Others
from tests.support.blocks import BLOCK, BUCKET, whole
from tests.support.jobs import JobBench, job_bench
from tests.support.memory_origin.response import MemoryResponse

DATA = f"s3://{BUCKET}/data/"
FILE = BLOCK + 4096


@asynccontextmanager
async def bench_of(directory: Path, cluster: Cluster) -> AsyncIterator[JobBench]:
    async def unpin(prefix: str) -> Unpinned:
        told = await cluster.origin.unpin(Prefix.parse(prefix))
        return Unpinned(any(told.values()), [one for one, was_pinned in told.items() if was_pinned is None])

    roles = Others("data/others")
    async with job_bench(
        directory, cluster.bucket, through=cluster.origin, roles=roles, unpin_at_others=unpin
    ) as bench:
        yield bench


def unpinned_at(cluster: Cluster) -> list[str]:
    """The nodes that were told to let go of the prefix."""
    return [
        name
        for name, node in cluster.nodes.items()
        if any((one.key, one.headers.get(peer.UNPIN)) == ("data/-", "5") for one in node.asked)
    ]


async def test_others_pin_what_they_own_and_this_node_the_rest(tmp_path: Path) -> None:
    cluster = Cluster()
    own, others = cluster.store("data/own", BLOCK), cluster.store("data/others", 2 * BLOCK)
    cluster.nodes["one"].replies = [MemoryResponse(201)] * 2
    async with bench_of(tmp_path, cluster) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, DATA, cluster=True))
        assert (job.state, job.objects_done, job.bytes_fetched) == (JobState.DONE, 2, 3 * BLOCK)
        assert bench.cache.usage().slots["default"].pinned_bytes == FILE
        assert bench.cache.holds(own, whole(own), slot="default")
        assert not bench.cache.holds(others, whole(others), slot="default")
        assert {(one.key, one.headers[peer.PIN]) for one in cluster.nodes["one"].asked} == {("data/others", "5")}
        assert not any(peer.PIN in call.headers for call in cluster.bucket.calls)
        cluster.nodes["one"].replies = [MemoryResponse(200)]
        cluster.nodes["two"].replies = [MemoryResponse(404)]
        cluster.nodes["three"].unreachable = True
        assert await bench.jobs.unpin(DATA, cluster=True) == Unpinned(True, ["three"])
        assert bench.cache.usage().slots["default"].pinned_bytes == 0
        cluster.nodes["three"].unreachable = False
        for node in cluster.nodes.values():
            node.replies = [MemoryResponse(404)]
        assert await bench.jobs.unpin(DATA, cluster=True) == Unpinned(False, [])


async def test_a_pin_that_one_node_refuses_is_taken_back_on_all(tmp_path: Path) -> None:
    cluster = Cluster()
    for key in ("data/others", "data/own"):
        cluster.store(key, BLOCK)
    cluster.nodes["one"].replies = [MemoryResponse(409), MemoryResponse(200)]
    async with bench_of(tmp_path, cluster) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, DATA, cluster=True))
        assert job.state is JobState.FAILED
        assert job.errors == (f"a node that looks after blocks of {DATA} cannot pin them: no room, or other pins",)
        assert bench.jobs.pins() == []
    assert cluster.asked()["two"] == 1  # and not for the block
    assert unpinned_at(cluster) == ["one", "two", "three"]


async def test_a_pin_of_this_node_is_not_one_over_the_cluster(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.store("data/own", BLOCK)
    async with bench_of(tmp_path, cluster) as bench:
        await bench.ended(await bench.jobs.start(JobKind.PIN, DATA))
        for node in cluster.nodes.values():
            node.replies = [MemoryResponse(404)]
        assert not (await bench.jobs.unpin(DATA, cluster=True)).was_pinned
        assert bench.jobs.pins() == [DATA]
        assert await bench.jobs.unpin(DATA) == Unpinned(True)


@pytest.mark.parametrize("status", [409, 503])
async def test_no_other_request_takes_a_refused_pin_for_an_answer(status: int) -> None:
    cluster = Cluster()
    version = cluster.store("data/others", BLOCK)
    cluster.nodes["one"].replies = [MemoryResponse(status, {"retry-after": "0"})]
    assert len(await cluster.read(version)) == BLOCK
