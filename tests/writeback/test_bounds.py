"""Room in the buffer: never more is given than there is, whoever asks; who waits is served in turn."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable
from gateway.policy.slots import Prefix
from gateway.writeback.bounds import (
    BACKPRESSURE_FROM,
    DELAY_SECONDS_MAX,
    RETRY_SECONDS_MAX,
    SHARED_SECONDS,
    Bound,
    SlotBounds,
    delay_seconds,
    retry_after_seconds,
)
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import Part
from gateway.writeback.opening import recover
from gateway.writeback.room import MARGIN_BYTES, Reservations
from gateway.writeback.staged_file import CHECKSUM_BYTES
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot
from tests.support.writeback import key, pending, staged, upload

SIZE = 1000


def slot(name: str = "slot", **changed: Any) -> Slot:
    return Slot(name, Prefix.parse(f"s3://{name}/"), write="back", **{"buffer_bytes": SIZE, **changed})


@asynccontextmanager
async def opened(path: Path, clock: ManualClock, *slots: Slot, worker: int = 0) -> AsyncIterator[WritebackBuffer]:
    buffer = await WritebackBuffer.open(path, worker, slots or (slot(),), clock=clock)
    try:
        yield buffer
    finally:
        await buffer.close()


def bounds_of(buffer: WritebackBuffer, name: str = "slot") -> SlotBounds:
    found = buffer.bounds.of(name)
    assert found is not None
    return found


def with_bounds(
    path: Path, scenario: Callable[[WritebackBuffer, SlotBounds, ManualClock], Coroutine[Any, Any, None]], *slots: Slot
) -> None:
    async def run() -> None:
        clock = ManualClock()
        async with opened(path, clock, *slots) as buffer:
            await scenario(buffer, bounds_of(buffer), clock)

    asyncio.run(run())


def written(name: str) -> Part:
    """A part of as many bytes as its name has."""
    return Part(1, staged(name), 0.0)


def test_what_is_acknowledged_and_what_arrives_share_the_room(tmp_path: Path) -> None:
    """A body counts from before its first byte until its write is flushed."""

    async def scenario(buffer: WritebackBuffer, bounds: SlotBounds, _: ManualClock) -> None:
        assert await bounds.take("key", 600, 0) is None
        assert await bounds.take("key", 600, 0) is Bound.FULL
        stored = await buffer.acknowledge(pending(key("k"), parts=[written("x" * 600)]))
        assert bounds.used_bytes() == 1200
        bounds.give_back("key", 600)
        assert bounds.used_bytes() == 600
        assert await bounds.take("key", 400, 0) is None
        assert await bounds.take("key", 1, 0) is Bound.FULL
        await buffer.journal.change(lambda tx: tx.writes.settle(stored.sequence, '"e"', Moment(1.0)))
        assert await bounds.take("key", 600, 0) is None

    with_bounds(tmp_path, scenario)


def test_all_workers_share_the_room(tmp_path: Path) -> None:
    """What one has given out no other gives; what a killed one had given out is free when its successor is there."""

    async def scenario() -> None:
        clock = ManualClock()
        async with opened(tmp_path, clock) as one:
            two = await WritebackBuffer.open(tmp_path, 1, (slot(),), clock=clock)
            assert await bounds_of(two).take("key", 700, 0) is None
            assert await bounds_of(one).take("key", 301, 0) is Bound.FULL
            assert await bounds_of(one).take("key", 300, 0) is None
            await two.close()  # as a kill leaves it: nothing is given back
            assert await bounds_of(one).take("key", 1, 0) is Bound.FULL
            async with opened(tmp_path, clock, worker=1) as successor:
                assert bounds_of(successor).used_bytes() == 300
                assert await bounds_of(one).take("key", 700, 0) is None

    asyncio.run(scenario())


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    wishes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 1200), st.booleans()), max_size=40),
    limit=st.integers(1, 1500),
)
def test_reservations_never_exceed_the_size(
    tmp_path_factory: pytest.TempPathFactory, wishes: list[tuple[int, int, bool]], limit: int
) -> None:
    """Over three workers that take and give back in any order."""

    async def scenario(path: Path) -> None:
        clock = ManualClock()
        small = slot(buffer_bytes=limit)
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(opened(path, clock, small, worker=one)) for one in (0, 1, 255)]
            held: list[tuple[SlotBounds, int]] = []
            for worker, size_bytes, gives_back in wishes:
                bounds = bounds_of(workers[worker])
                if gives_back and held:
                    owner, count = held.pop()
                    owner.give_back("key", count)
                bound = await bounds.take("key", size_bytes, 0)
                fits = sum(count for _, count in held) + size_bytes <= limit
                assert (bound is None) == fits
                assert bound in (None, Bound.FULL) or (bound is Bound.SIZE and size_bytes > limit)
                held += [(bounds, size_bytes)] if bound is None else []
                assert bounds.used_bytes() == sum(count for _, count in held) <= limit

    asyncio.run(scenario(tmp_path_factory.mktemp("bounds")))


def test_a_start_forgets_what_was_arriving(tmp_path: Path) -> None:
    """Also when the slots are others than before."""

    async def scenario() -> None:
        clock = ManualClock()
        buffer = await WritebackBuffer.open(tmp_path, 7, (slot(), slot("b")), clock=clock)
        assert await bounds_of(buffer, "b").take("key", 1000, 0) is None
        await buffer.close()
        recover(tmp_path, Moment(0.0))
        async with opened(tmp_path, clock, slot("b"), slot("c"), slot()) as after:
            assert [bounds_of(after, name).used_bytes() for name in ("b", "c", slot().name)] == [0, 0, 0]

    asyncio.run(scenario())


def test_slots_do_not_take_each_others_room(tmp_path: Path) -> None:
    """Each has its own."""

    async def scenario(buffer: WritebackBuffer, bounds: SlotBounds, _: ManualClock) -> None:
        assert await bounds.take("key", 1000, 0) is None
        assert await bounds_of(buffer, "b").take("key", 1000, 0) is None
        assert buffer.bounds.of("unknown") is None
        assert buffer.bounds.unused_bytes() == 2000 + CHECKSUM_BYTES + 2 * MARGIN_BYTES
        await buffer.acknowledge(pending(key("k"), parts=[written("x" * 600)]))
        assert buffer.bounds.unused_bytes() == 1400 + CHECKSUM_BYTES + 2 * MARGIN_BYTES

    with_bounds(tmp_path, scenario, slot(), slot("b"))


def test_who_waits_is_served_in_turn(tmp_path: Path) -> None:
    """A large body is not overtaken by small ones for ever; whoever gives up or is gone is passed over."""

    async def scenario(_: WritebackBuffer, bounds: SlotBounds, clock: ManualClock) -> None:
        assert await bounds.take("key", 900, 0) is None
        large = asyncio.create_task(bounds.take("key", 800, 20.0))
        gone = asyncio.create_task(bounds.take("key", 100, 20.0))
        small = asyncio.create_task(bounds.take("key", 100, 20.0))
        await clock.advance(1.0)
        assert not large.done()
        assert not small.done()
        gone.cancel()
        bounds.give_back("key", 900)
        await clock.advance(0.1)
        assert (await large, await small) == (None, None)
        assert gone.cancelled()
        assert bounds.used_bytes() == 900

    with_bounds(tmp_path, scenario)


def test_bodies_on_their_way_leave_as_much_free_as_they_take_where_others_write(tmp_path: Path) -> None:
    """What is announced takes room before it comes: nobody's announcements take all of it from others."""

    async def scenario(_: WritebackBuffer, bounds: SlotBounds, clock: ManualClock) -> None:
        assert await bounds.take("other", 10, 0) is None
        bounds.give_back("other", 10)
        assert await bounds.take("large", 600, 0) is Bound.SHARE
        assert [await bounds.take("key", 250, 0) for _ in range(3)] == [None, None, Bound.SHARE]
        kept_waiting = asyncio.create_task(bounds.take("key", 250, 20.0))
        await clock.advance(0.1)
        served = asyncio.create_task(bounds.take("other", 100, 20.0))
        await clock.advance(0.1)
        assert await served is None
        assert not kept_waiting.done()
        bounds.give_back("key", 250)
        bounds.give_back("other", 100)
        await clock.advance(0.1)
        assert await kept_waiting is None
        await clock.advance(SHARED_SECONDS)
        assert await bounds.take("key", 500, 0) is None

    with_bounds(tmp_path, scenario)


def test_who_writes_alone_has_all_of_the_room(tmp_path: Path) -> None:
    async def scenario(_: WritebackBuffer, bounds: SlotBounds, __: ManualClock) -> None:
        assert [await bounds.take("key", 500, 0) for _ in range(3)] == [None, None, Bound.FULL]

    with_bounds(tmp_path, scenario)


def test_a_crowd_of_one_credential_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is not asked for each of those who wait, 50 times a second."""

    async def scenario(_: WritebackBuffer, bounds: SlotBounds, clock: ManualClock) -> None:
        assert await bounds.take("other", 10, 0) is None
        assert await bounds.take("key", 400, 0) is None
        crowd = [asyncio.create_task(bounds.take("key", 400, 5.0)) for _ in range(100)]
        await clock.advance(0.0)
        looks, used_bytes = 0, SlotBounds.used_bytes

        def looked(one: SlotBounds) -> int:
            nonlocal looks
            looks += 1
            return used_bytes(one)

        with monkeypatch.context() as patched:
            patched.setattr(SlotBounds, "used_bytes", looked)
            bounds._serve()
        assert looks == 1
        await clock.advance(5.1)
        assert {await one for one in crowd} == {Bound.SHARE}

    with_bounds(tmp_path, scenario)


def test_waiting_has_an_end(tmp_path: Path) -> None:
    """After the patience that was given, and no reservation is left."""

    async def scenario(_: WritebackBuffer, bounds: SlotBounds, clock: ManualClock) -> None:
        assert await bounds.take("key", 1000, 0) is None
        waiting = [asyncio.create_task(bounds.take("key", size, 20.0)) for size in (10, 20)]
        await clock.advance(0.0)
        await clock.advance(19.9)
        assert not any(task.done() for task in waiting)
        await clock.advance(0.2)
        assert [await task for task in waiting] == [Bound.FULL] * 2
        assert bounds.used_bytes() == 1000

    with_bounds(tmp_path, scenario)


def test_who_is_cancelled_when_room_has_just_come_gives_it_back(tmp_path: Path) -> None:
    """A client that leaves takes nothing with it."""

    async def scenario(_: WritebackBuffer, bounds: SlotBounds, clock: ManualClock) -> None:
        assert await bounds.take("key", 1000, 0) is None
        waiting = asyncio.create_task(bounds.take("key", 10, 20.0))
        await clock.advance(0.1)
        bounds.give_back("key", 1000)
        bounds._serve()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert bounds.used_bytes() == 0

    with_bounds(tmp_path, scenario)


def test_a_journal_that_cannot_be_read_is_told_to_all_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hangs, and nothing stays reserved."""

    async def scenario(buffer: WritebackBuffer, bounds: SlotBounds, clock: ManualClock) -> None:
        assert await bounds.take("key", 1000, 0) is None
        waiting = asyncio.create_task(bounds.take("key", 10, 20.0))
        await clock.advance(0.1)

        def fail(_: object) -> None:
            raise BufferUnavailable("no")

        with monkeypatch.context() as patch:
            patch.setattr(buffer.journal, "read", fail)
            await clock.advance(0.1)
        with pytest.raises(BufferUnavailable):
            await waiting
        assert bounds.used_bytes() == 1000

    with_bounds(tmp_path, scenario)


@pytest.mark.parametrize("set_by_seconds", [3600.0, -7200.0])
def test_what_is_too_old_the_wall_clock_does_not_say(tmp_path: Path, set_by_seconds: float) -> None:
    """5.11 It may be set at any time: nothing becomes older by that, or younger; also what the journal kept."""

    async def scenario() -> None:
        clock = ManualClock()
        bounded = slot(unflushed_age_seconds_max=60.0)
        async with opened(tmp_path, clock, bounded) as buffer:
            await buffer.acknowledge(_acknowledged(pending(key("k"), parts=[written("x")]), clock.now()))
            clock.set_wall(set_by_seconds)
            await clock.advance(60.0)
            assert bounds_of(buffer).now() is None
            assert bounds_of(buffer).age_seconds() == 60.0
        async with opened(tmp_path, clock, bounded) as buffer:
            await clock.advance(0.1)
            assert bounds_of(buffer).now() is Bound.EXPOSURE_AGE

    asyncio.run(scenario())


def _acknowledged(one: Any, at: float) -> Any:
    from dataclasses import replace

    return replace(one, acknowledged_at=at)


def test_checksums_find_room_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer's size is that of bodies; the disk has room for what lies behind them besides, or takes none."""
    size_bytes, checksums_bytes = 2**40, 2**26

    async def scenario(buffer: WritebackBuffer, bounds: SlotBounds, clock: ManualClock) -> None:
        free = {"bytes": MARGIN_BYTES + size_bytes + checksums_bytes - 1}
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free["bytes"], f_frsize=1))
        assert buffer.bounds.unused_bytes() == 2 * MARGIN_BYTES + size_bytes + checksums_bytes
        assert await bounds.take("key", size_bytes, 0) is Bound.DISK
        free["bytes"] += 1
        await clock.advance(1)
        assert await bounds.take("key", size_bytes, 0) is None
        assert bounds.used_bytes() == size_bytes

    with_bounds(tmp_path, scenario, slot(buffer_bytes=size_bytes))


def test_cells_are_as_wide_as_any_body(tmp_path: Path) -> None:
    """Thousands of bodies of 5 GiB fit in a number."""
    reservations = Reservations(tmp_path / "r", 256, ["a", "b"])
    a, b = reservations.row("a"), reservations.row("b")
    reservations.add(b, 10_000 * 5 * 2**30)
    assert (reservations.total(a), reservations.total(b)) == (0, 10_000 * 5 * 2**30)
    assert reservations.total_of_all() == reservations.total(b)
    reservations.close()


def test_closing_lets_go_of_the_file(tmp_path: Path) -> None:
    """Also where slots have changed, and somebody holds a row: a file system could not be unmounted otherwise. A body
    that is given up afterwards finds nothing to give back to."""
    path = tmp_path / "r"
    reservations = Reservations(path, 256, ["a"])
    row = reservations.row("a")
    reservations.apply_settings(["a", "b"])
    reservations.add(row, 5)
    reservations.close()
    reservations.add(row, -5)
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


SIZES = st.integers(1, 5 * 2**30)


@given(size=SIZES, used=st.integers(0, 2**40), allowed=st.integers(1, 2**40), age=st.none() | st.floats(0, 1e6))
def test_a_delay_is_bounded(size: int, used: int, allowed: int, age: float | None) -> None:
    """Never longer than clients bear, none below three quarters, and none where nothing would be gained."""
    delay = delay_seconds(size, used, allowed, age)
    assert 0 <= delay <= DELAY_SECONDS_MAX
    if used < BACKPRESSURE_FROM * allowed or age is None:
        assert delay == 0
    assert 1 <= retry_after_seconds(size, used, age) <= RETRY_SECONDS_MAX


@given(size=SIZES, used=st.integers(1, 2**40), more=st.integers(0, 2**40), age=st.floats(0, 1e6))
def test_a_fuller_buffer_never_makes_it_shorter(size: int, used: int, more: int, age: float) -> None:
    """At the same rate of the flush."""
    allowed = 2**40
    fuller = min(used + more, allowed)
    assert delay_seconds(size, used, allowed, age) <= delay_seconds(size, fuller, allowed, age * fuller / used) + 1e-9


@pytest.mark.parametrize(
    ("writers", "flush_bytes_per_second"), [(1, 20e6), (4, 20e6), (4, 125e6), (16, 125e6), (16, 5e8)]
)
def test_what_comes_in_becomes_what_goes_out(writers: int, flush_bytes_per_second: float) -> None:
    """Writers of 8 MiB parts, a flush that is slower than they are: the buffer stops filling before it is full."""
    part, allowed, used = 8 * 2**20, 4 * 2**30, 0.0
    ready = [0.0] * writers
    now, flushed_at = 0.0, 0.0
    acknowledged: list[float] = []
    went_in = 0
    while now < 600:
        writer = min(range(writers), key=lambda one: ready[one])
        now = max(now, ready[writer])
        used = max(0.0, used - (now - flushed_at) * flush_bytes_per_second)
        flushed_at = now
        assert used + part <= allowed
        used += part
        went_in += part
        acknowledged.append(now)
        oldest = acknowledged[max(0, len(acknowledged) - max(1, round(used / part)))]
        delay = delay_seconds(part, round(used), allowed, now - oldest)
        ready[writer] = now + part / 1e9 * writers + delay
    assert used > BACKPRESSURE_FROM * allowed
    late = [at for at in acknowledged if at > 300]
    assert len(late) * part / 300 == pytest.approx(flush_bytes_per_second, rel=0.15)


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.acknowledge(pending(key("k"), "x")),
        lambda buffer: buffer.acknowledge_sharing(pending(key("k"), "x")),
        lambda buffer: buffer.write_tombstone(pending(key("k"), deleted=True)),
        lambda buffer: buffer.complete(upload("u", key("k"))),
        lambda buffer: buffer.complete_at_origin(upload("u", key("k"))),
        lambda buffer: buffer.abort("u"),
    ],
    ids=["acknowledge", "share", "write_tombstone", "complete", "complete-at-origin", "abort"],
)
def test_whatever_the_journal_does_not_take_leaves_the_disk_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[WritebackBuffer], Awaitable[object]]
) -> None:
    """The bodies that come next are not received in vain: they go through, for some seconds."""

    async def scenario(buffer: WritebackBuffer, bounds: SlotBounds, _: ManualClock) -> None:
        async def fail(_: object) -> None:
            raise BufferUnavailable("no")

        with monkeypatch.context() as patch:
            patch.setattr(buffer.journal, "change", fail)
            with pytest.raises(BufferUnavailable):
                await change(buffer)
        assert await bounds.take("key", 1, 0) is Bound.DISK

    with_bounds(tmp_path, scenario)
