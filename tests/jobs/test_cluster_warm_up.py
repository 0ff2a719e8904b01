"""`forebay warm --cluster`: each block goes to the node that looks after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import OriginUnreachable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.jobs.explaining import Explainer
from gateway.jobs.job import Job, JobKind, JobState
from gateway.origin import peer_protocol as peer
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix
from gateway.s3.origin_habits import NO_HABITS
from tests.cluster.nodes import Cluster
from tests.cluster.test_copies import Others
from tests.support.blocks import BLOCK, BUCKET, TestClock, open_cache, whole
from tests.support.jobs import JobBench, job_bench
from tests.support.memory_origin.response import MemoryResponse
from tests.support.slots import Slot, slot_with

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


async def test_what_peers_refuse_and_name_again_is_no_habit_of_the_bucket(tmp_path: Path) -> None:
    cluster, _, _ = cluster_of(0, 1)
    cluster.nodes["one"].replies = [None, MemoryResponse(412), MemoryResponse(412), None, *[MemoryResponse(201)] * 2]
    async with job_bench(tmp_path, cluster.bucket, through=cluster.origin, roles=Others(), slots=[TTL]) as bench:
        bench.catalog._roles = Others()
        assert (await ended(bench)).state is JobState.DONE
        assert bench.catalog.habits(BUCKET) == NO_HABITS


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_job_names_the_owners_that_are_away_at_once(tmp_path: Path, has_room: bool) -> None:
    """It keeps copies of their blocks as far as that takes no room from others, and goes on with what it owns."""
    cluster, [own], [large, _] = cluster_of(1, 2)
    for one in ("one", "two"):
        cluster.nodes[one].unreachable = True
    slots = [slot_with(TTL, copies="idle" if has_room else "none")]
    options: dict[str, Any] = {"through": cluster.origin, "roles": Others(), "slots": slots}
    async with job_bench(tmp_path, cluster.bucket, clock=TestClock(), **options) as bench:  # it would wait for ever
        job = await ended(bench)
        assert (job.state, job.full, job.objects_done, job.objects_failed) == (JobState.FAILED, False, 1, 2)
        assert job.errors[0].endswith(": one and two cannot be asked to keep the blocks that they own: unreachable")
        assert bench.cache.holds(own, whole(own), slot="t")
        assert bench.cache.holds(large, whole(large), slot="t") == has_room


async def test_a_pin_over_the_cluster_keeps_no_copies(tmp_path: Path) -> None:
    cluster, _, _ = cluster_of(0, 1)
    for one in ("one", "two"):
        cluster.nodes[one].unreachable = True
    async with job_bench(tmp_path, cluster.bucket, through=cluster.origin, roles=Others()) as bench:
        started = await bench.jobs.start(JobKind.PIN, f"s3://{BUCKET}/", cluster=True)
        assert (await bench.ended(started)).state is JobState.FAILED
    assert {call.method for call in cluster.bucket.calls if call.key} <= {"HEAD"}


async def test_the_second_owner_keeps_what_the_first_cannot(tmp_path: Path) -> None:
    """As its own, whatever room copies may take."""
    cluster, _, [version] = cluster_of(0, 1)
    cluster.nodes["one"].unreachable = True
    cluster.view.order = (cluster.member("one"), cluster.member("me"))
    slots = [slot_with(TTL, copies="none")]
    async with job_bench(tmp_path, cluster.bucket, through=cluster.origin, roles=Others(), slots=slots) as bench:
        assert (await ended(bench)).state is JobState.DONE
        assert bench.cache.holds(version, whole(version), slot="t")


async def test_what_is_to_pass_soon_is_told_as_such(tmp_path: Path) -> None:
    """The job asks again for it, as of the bucket."""
    cluster, _, [version] = cluster_of(0, 1)
    for one in ("one", "two"):
        cluster.nodes[one].replies = [MemoryResponse(peer.BUCKET_AWAY)]
    async with open_cache(tmp_path, cluster.origin, roles=Others()) as cache:
        with pytest.raises(OriginUnreachable, match=r"one and two cannot be asked to keep the blocks .*: bucket-away"):
            await cache.fetch_at_owner(version, ByteRange(0, BLOCK - 1), slot="default", purpose=Purpose.WARM)


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
