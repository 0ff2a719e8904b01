"""`forebay warm --cluster`: each block goes to the node that looks after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.errors import OriginUnreachable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.jobs.explaining import Explainer
from gateway.jobs.job import Job, JobKind, JobState
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix
from tests.cluster.nodes import Cluster
from tests.cluster.test_copies import Others
from tests.support.blocks import BLOCK, BUCKET, open_cache, whole
from tests.support.jobs import JobBench, job_bench
from tests.support.memory_origin.response import MemoryResponse
from tests.support.slots import Slot

TTL = Slot("t", Prefix(BUCKET), mode="read-only", consistency="ttl")


def cluster_of(owned: int, of_others: int) -> tuple[Cluster, list[ObjectVersion], list[ObjectVersion]]:
    cluster = Cluster()
    own = [cluster.store(f"own/{number}", BLOCK) for number in range(owned)]
    return cluster, own, [cluster.store(f"others/{number}", 2 * BLOCK) for number in range(of_others)]


async def ended(bench: JobBench, prefix: str = f"s3://{BUCKET}/") -> Job:
    return await bench.ended(await bench.jobs.start(JobKind.WARM, prefix, cluster=True))


async def test_others_keep_what_they_own_and_this_node_the_rest(tmp_path: Path) -> None:
    """No byte of theirs comes here, and none is asked of the bucket."""
    cluster, own, others = cluster_of(2, 3)
    cluster.nodes["one"].replies = [*[MemoryResponse(201)] * 4, *[MemoryResponse(200)] * 2]
    async with job_bench(tmp_path, cluster.bucket, through=cluster.origin, roles=Others()) as bench:
        job = await ended(bench)
        assert (job.state, job.objects_done, job.bytes_done) == (JobState.DONE, 5, 8 * BLOCK)
        assert job.bytes_fetched == 6 * BLOCK
        assert all(bench.cache.holds(one, whole(one), slot="default") for one in own)
        assert not any(bench.cache.holds(one, whole(one), slot="default") for one in others)
    asked = cluster.nodes["one"].asked
    assert {(one.method, one.key, one.headers["range"]) for one in asked} == {
        ("HEAD", one.key.key, f"bytes={first}-{first + BLOCK - 1}") for one in others for first in (0, BLOCK)
    }
    assert {call.key for call in cluster.bucket.calls if call.method == "GET" and call.key} == {
        one.key.key for one in own
    }


async def test_what_has_changed_is_asked_for_anew(tmp_path: Path) -> None:
    cluster, _, _ = cluster_of(0, 1)
    cluster.nodes["one"].replies = [MemoryResponse(412), MemoryResponse(412), *[MemoryResponse(201)] * 2]
    async with job_bench(tmp_path, cluster.bucket, through=cluster.origin, roles=Others()) as bench:
        assert (await ended(bench)).state is JobState.DONE


async def test_blocks_whose_owners_are_away_are_not_warm(tmp_path: Path) -> None:
    """And are not read from the bucket in vain."""
    cluster, _, [version] = cluster_of(0, 1)
    for one in ("one", "two"):
        cluster.nodes[one].unreachable = True
    async with open_cache(tmp_path, cluster.origin, roles=Others()) as cache:
        with pytest.raises(OriginUnreachable, match="no node that looks after the block can be asked"):
            await cache.fetch_at_owner(version, ByteRange(0, BLOCK - 1), slot="default", purpose=Purpose.WARM)
    assert {call.method for call in cluster.bucket.calls} == {"HEAD"}


async def test_an_object_is_explained_with_its_owners(tmp_path: Path) -> None:
    cluster, _, _ = cluster_of(0, 1)
    async with job_bench(tmp_path, cluster.bucket, through=cluster.origin, roles=cluster.roles, slots=[TTL]) as bench:
        explainer = Explainer(bench.jobs._dependencies)
        assert (await explainer.explain(ObjectKey(BUCKET, "others/0"))).owners == []
        cluster.nodes["one"].replies = [MemoryResponse(201)] * 2
        await ended(bench)
        owners = (await explainer.explain(ObjectKey(BUCKET, "others/0"))).owners
    assert [(one.address, one.this_node, one.first, one.second) for one in owners] == [
        ("one", False, 2, 0),
        ("two", False, 0, 2),
    ]
