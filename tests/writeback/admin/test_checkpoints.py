"""Checkpoints are shown as they are: in pages, by state, through flush, failure, conflict and restart; and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from gateway.writeback.admin import checkpoints as report
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries, CheckpointRow
from gateway.writeback.admin.checkpoints import LOOK_SECONDS, STATES, CheckpointsReport
from gateway.writeback.admin.writeback_admin import NoWriteback
from gateway.writeback.checkpoints.reads import ReadPass, checkpoint_id, file_id
from gateway.writeback.checkpoints.state import STALLED_SECONDS
from gateway.writeback.journal.records import ExpectedVersion, Part, Write, WriteSpec
from gateway.writeback.order import with_order
from tests.support.counting import counted
from tests.support.flushing import HEADERS, PART_BYTES
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Answer, on
from tests.support.slots import Slot
from tests.support.writeback import key
from tests.support.writeback_admin import AdminHarness, with_harness

EVERYTHING = Prefix("")
SLOT = Slot("slot", Prefix(""))


async def put(harness: AdminHarness, name: str | ObjectKey, content: bytes = b"x") -> Write:
    """As a worker does it, now."""
    buffer, at = harness.buffer, key(name) if isinstance(name, str) else name
    file, now = buffer.stage(content), buffer.clock.now()
    made = Write(
        WriteSpec(at, HEADERS, "slot"),
        ExpectedVersion(absent=True),
        now,
        etag=file.etag,
        size_bytes=file.size_bytes,
        parts=(Part(1, file, now),),
        acknowledged_at=now,
    )
    return await buffer.journal.change(lambda tx: tx.writes.acknowledge(with_order(made, SLOT)))


async def save(harness: AdminHarness, step: int, ranks: int = 2) -> None:
    for rank in range(ranks):
        await put(harness, f"run/step-{step}/__{rank}_0.distcp")
        await harness.buffer.clock.advance(1.0)
    await put(harness, f"run/step-{step}/.metadata")


async def shown(
    harness: AdminHarness, prefix: Prefix = EVERYTHING, states: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    page = await harness.admin.checkpoints(prefix, "", 100, states)
    return [one.document() for one in page.checkpoints]


async def state(harness: AdminHarness, prefix: str) -> str:
    [one] = await shown(harness, Prefix("bucket", prefix))
    found: str = one["state"]
    return found


async def test_a_save_is_shown_from_its_first_byte_until_the_origin_has_it(harness: AdminHarness) -> None:
    """With files, bytes, ranks, the time of the save, what is flushed, and for how long it is here alone."""
    await harness.buffer.learn()
    await put(harness, "run/step-1/__0_0.distcp", b"12345")
    await harness.buffer.clock.advance(3.0)
    [begun] = await shown(harness)
    assert (begun["state"], begun["save_seconds"], begun["exposed_seconds"]) == ("writing", 0.0, 3.0)
    assert begun["missing"] == {"ranks": [], "objects": ["run/step-1/.metadata"], "open_uploads": 0}
    await put(harness, "run/step-1/__1_0.distcp")
    await put(harness, "run/step-1/.metadata")
    [whole] = await shown(harness)
    assert (whole["bucket"], whole["prefix"], whole["step"]) == ("bucket", "run/step-1/", 1)
    assert (whole["layout"], whole["slot"], whole["state"]) == ("dcp", "slot", "acknowledged")
    assert (whole["files"], whole["bytes"], whole["bytes_flushed"]) == (3, 7, 0)
    assert (whole["ranks"], whole["ranks_seen"], whole["save_seconds"]) == (2, [0, 1], 3.0)
    assert whole["missing"] == {"ranks": [], "objects": [], "open_uploads": 0}
    harness.start()
    await harness.buffer.until(lambda: not harness.buffer.left())
    [there] = await shown(harness)
    assert (there["state"], there["bytes_flushed"], there["exposed_seconds"]) == ("durable", 7, None)
    assert there["flush_seconds_left"] is None
    assert await shown(harness) == [there]


async def test_what_is_on_its_way_says_how_much_is_there_and_how_long_the_rest_takes(harness: AdminHarness) -> None:
    """By what was seen of it within the last minute."""
    await harness.buffer.learn()
    name = "run/step-1/__0_0.distcp"
    sizes = [PART_BYTES] * 3
    opened = await harness.buffer.upload(key(name), sizes)
    await put(harness, "run/step-1/.metadata")
    made = with_order(opened, SLOT)
    await harness.buffer.journal.change(lambda tx: tx.checkpoints.acknowledged(made))

    async def send(part: Part) -> None:
        await harness.buffer.journal.change(lambda tx: tx.uploads.part_sent(opened.id, part))

    await shown(harness)
    for number, part in enumerate(list(await harness.buffer.journal.parts(opened.id))[:2], 1):
        await harness.buffer.clock.advance(3.0)
        await send(replace(part, origin_etag='"1"'))
        [one] = await shown(harness)
        assert (one["state"], one["bytes_flushed"]) == ("flushing", number * PART_BYTES)
        if number == 1:
            assert one["flush_seconds_left"] is None, "one part in three seconds is not known to go on so"
    assert one["flush_seconds_left"] == pytest.approx(3.0, rel=0.01)


async def test_where_there_is_no_checkpoint_it_is_told_what_there_is(harness: AdminHarness) -> None:
    """What is pending, and what was flushed a moment ago; not what was deleted, and nothing where there is one."""

    async def ungrouped(prefix: str, after: str = "", states: tuple[str, ...] = ()) -> dict[str, Any] | None:
        page = await harness.admin.checkpoints(Prefix("bucket", prefix), after, 100, states)
        return None if page.ungrouped is None else page.ungrouped.document()

    await harness.buffer.learn()
    assert await ungrouped("") is None
    for name in ("x/weights", "x/optimizer", "y/other"):
        await put(harness, name)
    there = {"objects": 2, "first": "s3://bucket/x/optimizer", "slot": "slot"}
    assert await ungrouped("x/") == there
    assert await ungrouped("x/", states=("failed",)) is None
    assert await ungrouped("z/") is None
    everything = await harness.admin.checkpoints(EVERYTHING, "", 100, ())
    assert everything.ungrouped is not None
    assert everything.ungrouped.objects == 3
    await save(harness, 1)
    assert await ungrouped("run/") is None
    assert await ungrouped("") is None, "there is a checkpoint"
    harness.start()
    await harness.buffer.until(lambda: not harness.buffer.left())
    assert await ungrouped("x/") == there | {"slot": None}
    await harness.buffer.delete(key("x/weights"))
    left = {"objects": 1, "first": "s3://bucket/x/optimizer", "slot": None}
    assert await ungrouped("x/") == left
    await harness.buffer.until(lambda: not harness.buffer.left())
    assert await ungrouped("x/") == left


async def test_a_failure_and_a_conflict_are_states_of_the_whole(harness: AdminHarness) -> None:
    """With the reason; and are over when they are."""
    await harness.buffer.learn()
    await save(harness, 1)
    refused = harness.buffer.origin.inject(
        on(Operation.PUT_OBJECT, key="run/step-1/__0_0.distcp"), Answer(403, "AccessDenied"), times=None
    )
    harness.start()
    await harness.buffer.until(lambda: len(harness.buffer.left()) == 2 and bool(harness.buffer.observer.failures))
    [failed] = await shown(harness, states=("failed", "conflict"))
    assert (failed["state"], "AccessDenied" in failed["reason"]) == ("failed", True)
    refused.times = 0
    harness.buffer.origin.put("bucket", "run/step-1/__0_0.distcp", b"theirs")
    await harness.buffer.until(lambda: bool(harness.buffer.observer.conflicts))
    assert await state(harness, "run/") == "conflict"
    await harness.admin.resolve(key("run/step-1/__0_0.distcp"), "keep-ours", None)
    await harness.buffer.until(lambda: not harness.buffer.left())
    assert await state(harness, "run/") == "durable"


async def test_a_save_whose_ranks_do_not_come_stalls(harness: AdminHarness) -> None:
    """It says which: those that the checkpoint before it in the same run had."""
    for rank in range(4):
        await put(harness, f"run/step-1/rank_{rank}.pt")
    await harness.buffer.clock.advance(100.0)
    for rank in (0, 2):
        await put(harness, f"run/step-2/rank_{rank}.pt")
    await put(harness, "other/step-2/rank_0.pt")
    await harness.buffer.clock.advance(STALLED_SECONDS - 1)
    assert await state(harness, "run/step-2/") == "writing"
    await harness.buffer.clock.advance(1.0)
    [stalled] = await shown(harness, states=("stalled",))
    assert (stalled["prefix"], stalled["missing"]["ranks"]) == ("run/step-2/", [1, 3])
    for rank in (1, 3):
        await put(harness, f"run/step-2/rank_{rank}.pt")
    await harness.buffer.clock.advance(STALLED_SECONDS)
    assert await state(harness, "run/step-2/") == "acknowledged"


async def test_an_open_upload_is_of_its_checkpoint(harness: AdminHarness) -> None:
    """Before anything of it is acknowledged; aborted, nothing is left of either."""
    now = harness.buffer.clock.now()
    opened = with_order(
        Write(WriteSpec(key("run/step-1/rank_3.pt"), HEADERS, "slot"), ExpectedVersion(), now, upload_id="u"), SLOT
    )
    await harness.buffer.journal.change(lambda tx: tx.uploads.begin(opened))
    [one] = await shown(harness)
    assert (one["state"], one["files"], one["save_seconds"]) == ("writing", 0, None)
    assert one["missing"] == {"ranks": [3], "objects": [], "open_uploads": 1}
    await harness.admin.abort(["u"])
    assert await shown(harness) == []


async def test_checkpoints_come_in_pages(harness: AdminHarness) -> None:
    """Each once, in the order of buckets and prefixes, under a prefix, and by state, whatever the size of the pages."""
    names = [ObjectKey(bucket, f"é/step-{step}/x") for bucket in ("a", "bucket") for step in (1, 2, 30)]
    for one in reversed(names):
        await put(harness, one)
    await put(harness, "z/ckpt-7.pt")
    for count in (1, 2, 100):
        found, after = [], ""
        while True:
            page = await harness.admin.checkpoints(Prefix.parse("s3://"), after, count, ["writing"])
            found += [(one.bucket, one.prefix) for one in page.checkpoints]
            if page.next is None:
                break
            after = page.next
        assert found == sorted([*((one.bucket, one.key.removesuffix("x")) for one in names), ("bucket", "z/ckpt-7.pt")])
    under = await shown(harness, Prefix("bucket", "é/step-3"))
    assert [one["step"] for one in under] == [30]
    assert await shown(harness, states=("durable",)) == []
    for after in ("x", "WzFd"):
        with pytest.raises(ValueError, match="token"):
            await harness.admin.checkpoints(EVERYTHING, after, 1, [])
    with pytest.raises(ValueError, match="'lost' is none"):
        await harness.admin.checkpoints(EVERYTHING, "", 1, ["lost"])


def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    """All of it is in the journal."""
    seen: list[list[dict[str, Any]]] = []

    async def before(harness: AdminHarness) -> None:
        await save(harness, 1)
        await put(harness, "run/step-2/__0_0.distcp")
        seen.append(await shown(harness))

    async def after(harness: AdminHarness) -> None:
        await harness.buffer.clock.advance(2.0)  # a manual clock begins anew
        seen.append(await shown(harness))

    with_harness(tmp_path, before)
    with_harness(tmp_path, after)
    assert seen[0] == seen[1]


async def test_the_same_name_saved_again_is_shown_as_that_save(harness: AdminHarness) -> None:
    """Its time is not that since the first."""
    await save(harness, 1)
    await harness.buffer.clock.advance(1000.0)
    await put(harness, "run/step-1/__0_0.distcp")
    assert await state(harness, "run/") == "writing"
    await harness.buffer.clock.advance(5.0)
    await put(harness, "run/step-1/__1_0.distcp")
    await put(harness, "run/step-1/.metadata")
    [again] = await shown(harness)
    assert (again["state"], again["save_seconds"], again["files"]) == ("acknowledged", 5.0, 3)


@pytest.mark.slow
async def test_checkpoints_are_counted_by_slot_and_state(harness: AdminHarness) -> None:
    """Every state, also where there is none; again and again."""
    told = metrics.CHECKPOINTS.kept
    watching = asyncio.create_task(harness.admin.report.watch(["slot", "idle"]))
    await save(harness, 1)
    await harness.buffer.until(lambda: metrics.CHECKPOINTS.value("slot", "acknowledged") == 1)
    assert set(told()) == {(slot, state) for slot in ("slot", "idle") for state in STATES}
    assert counted(metrics.CHECKPOINTS) == 1
    await harness.buffer.delete(key("run/step-1/.metadata"))
    await harness.buffer.clock.advance(LOOK_SECONDS)
    await harness.buffer.until(lambda: metrics.CHECKPOINTS.value("slot", "acknowledged") == 0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_without_a_buffer_there_are_none() -> None:
    """And nobody is refused."""
    assert asyncio.run(NoWriteback().checkpoints(EVERYTHING, "", 1, [])).checkpoints == []


class SlowQueries(CheckpointQueries):
    """Of very many checkpoints, at which a look takes four seconds."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.looks = 0

    async def unfinished(self, now: float) -> Sequence[CheckpointRow]:
        self.looks += 1
        await self._clock.advance(4.0)
        return []

    async def checkpoints(self, *_: Any) -> tuple[Sequence[CheckpointRow], None]:
        return [], None

    async def ungrouped(self, prefix: Prefix) -> None:
        """None."""


async def test_pages_do_not_look_at_all_checkpoints_each() -> None:
    """Where that takes long it is done a fiftieth of the time at most, however many pages are read."""
    clock = ManualClock()
    queries = SlowQueries(clock)
    report = CheckpointsReport(queries, clock)
    for _ in range(100):
        await report.page(EVERYTHING, "", 100, ())
    assert queries.looks == 1
    await clock.advance(200.0)
    await report.page(EVERYTHING, "", 100, ())
    assert queries.looks == 2


async def test_a_stalled_restore_is_shown(harness: AdminHarness) -> None:
    """From what workers have counted; nothing of it where nothing was read."""
    await harness.buffer.learn()
    await save(harness, 1)
    await save(harness, 2)
    of_checkpoint, now = checkpoint_id("bucket", "run/step-1/"), harness.buffer.clock.now()
    first = file_id(of_checkpoint, "run/step-1/__0_0.distcp")
    harness.admin.report.reads = lambda: {of_checkpoint: {first: [ReadPass(1, now, now)]}}
    reading, other = await shown(harness)
    assert (reading["restore"]["state"], other["restore"]) == ("reading", None)
    await harness.buffer.clock.advance(60.0)
    stalled, _ = await shown(harness)
    assert stalled["restore"] == {
        "state": "stalled",
        "began_at": now,
        "last_at": now,
        "files": 2,
        "files_begun": 1,
        "files_behind": 1,
        "bytes": 2,
        "bytes_read": 1,
        "behind": {
            "ranks": [1],
            "objects": [{"key": "run/step-1/__1_0.distcp", "bytes": 1, "bytes_read": 0, "last_at": None}],
        },
    }


@pytest.mark.parametrize(
    ("prefix", "found"),
    [
        ("run/step-1", ["run/step-1/", "run/step-1/inner/step-2/", "run/step-10/"]),
        ("run/step-1/", ["run/step-1/", "run/step-1/inner/step-2/"]),
        ("run/step-1/rank", ["run/step-1/"]),
        ("run/step-1/inner/step-2/rank_0.pt", ["run/step-1/", "run/step-1/inner/step-2/"]),
        ("run/step-10/x/" + "y/" * 500, ["run/step-10/"]),
    ],
)
async def test_a_prefix_finds_what_lies_under_it_and_around_it(
    harness: AdminHarness, prefix: str, found: list[str]
) -> None:
    """The checkpoint in whose directory an object lies, too."""
    for directory in ("run/step-1/", "run/step-1/inner/step-2/", "run/step-10/"):
        await put(harness, f"{directory}rank_0.pt")
    assert [one["prefix"] for one in await shown(harness, Prefix("bucket", prefix))] == found


async def test_a_page_has_a_bounded_size(harness: AdminHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before, and goes on behind what it has."""
    monkeypatch.setattr(report, "PAGE_BYTES", 1)
    for step in range(3):
        await put(harness, f"run/step-{step}/rank_0.pt")
    found = list[str]()
    after: Any = ""
    for _ in range(3):
        page = await harness.admin.checkpoints(EVERYTHING, after, 100, ())
        [one], after = page.checkpoints, page.next
        found.append(one.prefix)
    assert (found, after) == ([f"run/step-{step}/" for step in range(3)], None)
