"""A flush is about the checkpoint that is named, and about no other; manifests wait, and people can end that."""

from __future__ import annotations

import sqlite3

import pytest

from gateway.core.errors import NotToBeDecided
from gateway.policy.slots import Prefix
from gateway.writeback.journal.records import Priority
from tests.support.memory_origin.faults import Unreachable, on
from tests.support.slots import Slot
from tests.support.writeback import key
from tests.support.writeback_admin import AdminHarness

INDEX = b'{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
MANIFEST = "step-1/model.safetensors.index.json"


async def put(harness: AdminHarness, *names: str) -> None:
    harness.buffer.slots["slot"] = Slot("slot", Prefix(""), markers=("*.index.json",))
    await harness.buffer.learn()
    for name in names:
        await harness.buffer.put(key(name), b"x")


def asked(name: str) -> Prefix:
    return Prefix("bucket", name)


async def test_a_name_is_a_checkpoint_and_no_beginning_of_others(harness: AdminHarness) -> None:
    """`step-1` is what lies under `step-1/`, and an object of that name; `step-1/` and `step-` are prefixes."""
    await put(harness, "step-1/a", "step-1/b/c", "step-1", "step-10/a", "step-1.pt", "step-1-optim/a")
    begun = await harness.admin.flush(asked("step-1"))
    assert (begun.objects, begun.is_name) == (3, True)
    assert (await harness.admin.progress(asked("step-1"), begun.through, is_name=True)).objects == 3
    assert (await harness.admin.flush(asked("step-1/"))).objects == 2
    assert (await harness.admin.flush(asked("step-"))).objects == 6
    assert (await harness.admin.flush(asked("step-1.pt"))).objects == 1


async def test_what_is_at_the_origin_already_is_a_name_too(harness: AdminHarness) -> None:
    """Flushed by this node a moment ago, or known to the origin alone: others that begin so are not waited for."""
    await put(harness, "step-1/a")
    harness.start()
    await harness.buffer.flushed()
    await harness.stop()
    harness.buffer.origin.put("bucket", "step-2/a", b"x")
    harness.buffer.origin.put("bucket", "latest", b"x")
    await put(harness, "step-10/a", "step-20/a", "latest-one", "step-30/a")
    for name in ("step-1", "step-2", "latest"):
        begun = await harness.admin.flush(asked(name))
        assert (begun.objects, begun.is_name) == (0, True), name
    assert (await harness.admin.flush(asked("step-3"))).objects == 1
    harness.buffer.origin.inject(on(), Unreachable(), times=None)
    assert (await harness.admin.flush(asked("step-2"))).objects == 1  # nobody knows: more is waited for


def priorities(harness: AdminHarness) -> dict[str, Priority]:
    with sqlite3.connect(harness.buffer.journal._path) as journal:
        return {key.decode(): Priority(one) for key, one in journal.execute("SELECT key, priority FROM writes")}


async def test_what_is_waited_for_comes_before_the_rest(harness: AdminHarness) -> None:
    """Its priority is raised; that of others is not, and what fails stays among what fails."""
    await put(harness, "step-1/a", "step-10/a")
    await harness.admin.flush(asked("step-1"))
    assert priorities(harness) == {"step-1/a": Priority.URGENT, "step-10/a": Priority.SMALL}
    await harness.admin.flush(asked(""))
    assert priorities(harness)["step-10/a"] is Priority.SMALL


async def until_it_waits(harness: AdminHarness) -> None:
    await put(harness, "step-1/a.safetensors")
    await harness.buffer.put(key(MANIFEST), INDEX, behind="step-1/")
    harness.start()
    await harness.buffer.until(lambda: bool(harness.buffer.observer.waits))


async def test_a_flush_says_what_manifests_wait_for(harness: AdminHarness) -> None:
    """It is no failure, and goes on at once when somebody asks; what others write ends it."""
    await until_it_waits(harness)
    left = await harness.admin.flush(asked("step-1"))
    assert (left.objects, left.awaiting_files, left.files_missing, left.failing) == (1, 1, 1, 0)
    page = await harness.admin.objects(Prefix("bucket"), "", 10)
    reason = "waits for 1 file of 2 that it names, such as s3://bucket/step-1/b.safetensors"
    assert [one.reason for one in page.objects] == [reason]
    harness.buffer.origin.put("bucket", "step-1/b.safetensors", b"theirs")
    await harness.admin.flush(asked("step-1"))
    await harness.buffer.flushed()
    assert (await harness.progress()).awaiting_files == 0
    assert harness.buffer.observer.failures == []


@pytest.mark.slow
async def test_a_manifest_that_waits_asks_little(harness: AdminHarness) -> None:
    """What was found is not asked for again, and the pauses grow to some seconds."""
    await until_it_waits(harness)
    calls = harness.buffer.origin.calls
    await harness.buffer.passes(30.0)
    before = len(calls)
    await harness.buffer.passes(60.0)
    since = [call.key for call in calls[before:]]
    assert 5 <= len(since) <= 40
    assert "step-1/a.safetensors" not in since


@pytest.mark.parametrize("decision", ["keep-ours", "discard"])
async def test_people_can_end_it(harness: AdminHarness, decision: str) -> None:
    """Sent without its files, or given up."""
    await until_it_waits(harness)
    await harness.admin.resolve(key(MANIFEST), decision, None)
    await harness.buffer.flushed()
    assert (MANIFEST in harness.buffer.bucket.objects) == (decision == "keep-ours")


async def test_people_cannot_give_up_what_only_waits_its_turn(harness: AdminHarness) -> None:
    """What was not looked at yet is on its way."""
    await put(harness, "step-1/a.safetensors")
    await harness.buffer.put(key(MANIFEST), INDEX, behind="step-1/")
    for decision in ("keep-ours", "discard"):
        with pytest.raises(NotToBeDecided):
            await harness.admin.resolve(key(MANIFEST), decision, None)
