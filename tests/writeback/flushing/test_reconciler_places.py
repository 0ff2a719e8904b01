"""Whose turn it is: nothing waits for what fails, for what is large, or for another bucket; and an origin that does not
do its work is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gateway.core.model import ObjectKey
from gateway.origin.client import IS_AWAITED, OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.writeback.flushing.flush_task import LONGEST_PAUSE_SECONDS
from gateway.writeback.flushing.lanes import (
    AWAY_AFTER,
    BESIDE_ANSWERS_SECONDS,
    LONGEST_AWAY_SECONDS,
    PARTS_PER_LANE,
    PLACES,
    SLOW_SECONDS,
    UNDER_WAY_MAX,
)
from gateway.writeback.flushing.state import PARTS_AT_ONCE
from gateway.writeback.journal.records import Priority, Turn, Write, WriteSpec
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.writes import SMALL_BYTES_MAX
from gateway.writeback.pending_key_filter import LOOK_SECONDS, QUIET_SECONDS
from tests.support.flushing import HEADERS, PART_BYTES, Buffer, with_buffer
from tests.support.journal_steps import steps_of_reads
from tests.support.memory_origin.faults import Answer, Call, Delay, Hold, Unreachable, on
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.writeback import key, pending


class Line:
    """The way to an origin: what is on it, and how much that was at once."""

    def __init__(self, origin: MemoryOrigin) -> None:
        self._origin = origin
        self.under_way: list[str | None] = []
        self.peak = 0
        self.passed = 0
        self.is_awaited: dict[str | None, Callable[[], bool]] = {}

    async def send(self, request: OriginRequest) -> MemoryResponse:
        self.under_way.append(request.key)
        if (is_awaited := IS_AWAITED.get()) is not None:
            self.is_awaited[request.key] = is_awaited
        self.passed += 1
        self.peak = max(self.peak, len(self.under_way))
        try:
            return await self._origin.send(request)
        finally:
            self.under_way.remove(request.key)

    async def aclose(self) -> None:
        return


def under(prefix: str) -> Callable[[Call], bool]:
    return lambda call: (call.key or "").startswith(prefix)


async def put_many(buffer: Buffer, names: list[str], bucket: str = "bucket") -> None:
    for name in names:
        at = ObjectKey(bucket, name)
        now = buffer.clock.now()
        await buffer.put(at, b"x", spec=WriteSpec(at, HEADERS, "slot"), acknowledged_at=now)


def turns(buffer: Buffer) -> list[Turn]:
    def look(tx: JournalTransaction) -> list[Turn]:
        return [turn for one in tx.writes.waiting(0, 10_000) if (turn := tx.turns.of(one.id)) is not None]

    return buffer.journal.read(look)


@pytest.mark.slow
async def test_a_bucket_that_refuses_all_keeps_no_other_waiting(buffer: Buffer) -> None:
    """80 objects of it, and 20 of another in the same slot, of which all arrive while the clock stands still."""
    await buffer.learn()
    other = buffer.origin.create_bucket("other")
    buffer.origin.inject(on(bucket="bucket"), Answer(403, "AccessDenied"), times=None)
    await put_many(buffer, [f"{number}" for number in range(80)])
    await put_many(buffer, [f"{number}" for number in range(20)], "other")
    buffer.start()
    await buffer.at_once(lambda: len(other.objects) == 20)
    await buffer.until(lambda: all(turn.attempts > 0 for turn in turns(buffer)))
    assert len(buffer.left()) == 80


@pytest.mark.slow
async def test_what_is_refused_keeps_nothing_else_of_its_bucket_waiting(buffer: Buffer) -> None:
    """80 objects under a prefix that is refused, acknowledged before 20 that are not; and what comes once all of them
    sleep goes at once."""
    await buffer.learn()
    buffer.origin.inject(under("no/"), Answer(403, "AccessDenied"), times=None)
    await put_many(buffer, [f"no/{number}" for number in range(80)])
    await put_many(buffer, [f"yes/{number}" for number in range(20)])
    buffer.start()
    await buffer.at_once(lambda: len(buffer.bucket.objects) == 20)
    await buffer.until(lambda: all(turn.attempts > 1 for turn in turns(buffer)))
    await put_many(buffer, ["late"])
    await buffer.clock.advance(QUIET_SECONDS)  # other processes' news are looked for so often
    await buffer.at_once(lambda: "late" in buffer.bucket.objects and len(buffer.left()) == 80)
    assert {turn.priority for turn in turns(buffer)} == {Priority.RETRY}


@pytest.mark.slow
async def test_what_sleeps_takes_no_place(buffer: Buffer) -> None:
    """Every place of those that failed is free again for others that failed; and each sleeps longer than before, at
    most a minute."""
    await buffer.learn()
    buffer.origin.inject(under("no/"), Answer(403, "AccessDenied"), times=None)
    many = 5 * PLACES[Priority.RETRY]
    await put_many(buffer, [f"no/{number}" for number in range(many)])
    buffer.start()
    await buffer.until(lambda: all(turn.attempts >= 10 for turn in turns(buffer)))
    before = buffer.origin.count()
    await buffer.clock.advance(LONGEST_PAUSE_SECONDS / 2)
    await buffer.until(lambda: all((turn.due_at or 0) > buffer.clock.now() for turn in turns(buffer)))
    assert many / 4 < buffer.origin.count() - before < 3 * many
    longest = max((turn.due_at or 0) - buffer.clock.now() for turn in turns(buffer))
    assert longest <= LONGEST_PAUSE_SECONDS


@pytest.mark.slow
async def test_an_origin_that_is_away_is_asked_seldom_and_all_goes_fast_when_it_is_back(buffer: Buffer) -> None:
    """With one write at a time, some seconds apart, however many wait; and hardly longer than that afterwards."""
    many = 100
    await buffer.learn()
    line = Line(buffer.origin)
    await put_many(buffer, [f"{number}" for number in range(many)])
    away = buffer.origin.inject(lambda _: True, Unreachable(), times=None)
    buffer.start(line)
    await buffer.passes(60.0, step=1.0)  # those that were on their way, and the first short pauses
    line.peak, line.passed = 0, 0
    asked_for_seconds = 240.0
    await buffer.passes(asked_for_seconds, step=1.0)
    assert line.peak == 1
    most = asked_for_seconds / (LONGEST_AWAY_SECONDS / 2) + 1
    assert asked_for_seconds / LONGEST_AWAY_SECONDS / 2 < line.passed <= most
    assert len(buffer.left()) == many
    buffer.origin.faults.remove(away)
    assert await buffer.passes(LONGEST_AWAY_SECONDS + 2 * LOOK_SECONDS, lambda: bool(buffer.bucket.objects))
    assert await buffer.passes(5.0, lambda: len(buffer.bucket.objects) > 0.8 * many)
    assert await buffer.passes(LONGEST_PAUSE_SECONDS, lambda: len(buffer.bucket.objects) == many)


async def test_somebody_who_asks_is_not_kept_waiting_by_an_origin_that_was_away(buffer: Buffer) -> None:
    """`writeback flush` has it be asked now."""
    await buffer.learn()
    line = Line(buffer.origin)
    away = buffer.origin.inject(lambda _: True, Unreachable(), times=None)
    await put_many(buffer, ["a", "b", "c"])
    buffer.start(line)
    await buffer.until(lambda: line.passed > 3 * AWAY_AFTER)
    await buffer.still()  # what is on its way has failed, and that is written down
    buffer.origin.faults.remove(away)
    await buffer.journal.change(lambda tx: tx.turns.try_now("bucket", "", buffer.clock.now()))
    buffer.reconciler.prioritise(Prefix("bucket"))
    await buffer.at_once(lambda: len(buffer.bucket.objects) == 3)


@pytest.mark.slow
async def test_what_fails_while_somebody_asks_is_tried_again_soon(buffer: Buffer) -> None:
    """However often it had failed before: what was on its way then would rest for up to a minute."""
    await buffer.learn()
    refused = buffer.origin.inject(on(Operation.PUT_OBJECT), Answer(403, "AccessDenied"), times=None)
    await put_many(buffer, ["a"])
    buffer.start()
    assert await buffer.passes(10 * LONGEST_PAUSE_SECONDS, lambda: len(buffer.observer.failures) >= 8, step=0.5)
    buffer.origin.faults.remove(refused)
    hold = Hold(asyncio.Event(), asyncio.Event())
    buffer.origin.inject(on(Operation.PUT_OBJECT), hold)
    buffer.origin.inject(on(Operation.PUT_OBJECT), Answer(403, "AccessDenied"))
    assert hold.reached is not None
    await buffer.passes(2 * LONGEST_PAUSE_SECONDS, hold.reached.is_set, step=0.5)
    buffer.reconciler.prioritise(Prefix("bucket", "a"))
    hold.until.set()
    assert await buffer.passes(2 * LOOK_SECONDS, lambda: bool(buffer.bucket.objects))


async def test_another_bucket_is_none_the_worse_for_one_that_is_away(buffer: Buffer) -> None:
    """Each bucket is a line of its own, in each slot."""
    await buffer.learn()
    other = buffer.origin.create_bucket("other")
    buffer.origin.inject(on(bucket="bucket"), Unreachable(), times=None)
    await put_many(buffer, [f"{number}" for number in range(30)])
    buffer.start()
    await buffer.until(lambda: len(buffer.observer.failures) > 2 * AWAY_AFTER)
    await put_many(buffer, [f"{number}" for number in range(30)], "other")
    await buffer.clock.advance(QUIET_SECONDS)
    await buffer.at_once(lambda: len(other.objects) == 30)


@pytest.mark.slow
async def test_the_places_of_small_ones_grow_and_shrink_with_what_the_origin_takes(buffer: Buffer) -> None:
    """20 and more are on their way at once when nothing fails; few after it has said SlowDown."""
    await buffer.learn()
    line = Line(buffer.origin)
    quick = buffer.origin.inject(on(Operation.PUT_OBJECT), Delay(1.0), times=None)
    await put_many(buffer, [f"{number:03}" for number in range(600)])
    buffer.start(line)
    assert await buffer.passes(60.0, lambda: line.peak >= 20)
    before = line.peak
    slow = buffer.origin.inject(on(Operation.PUT_OBJECT), Answer(503, "SlowDown"), times=AWAY_AFTER - 1)
    buffer.origin.faults.insert(0, buffer.origin.faults.pop())
    assert await buffer.passes(10.0, lambda: slow.times == 0)
    buffer.origin.faults.remove(quick)
    held = asyncio.Event()
    buffer.origin.inject(on(Operation.PUT_OBJECT), Hold(held), times=None)  # none that begins now succeeds
    await buffer.passes(1.25)  # those that were on their way end
    assert 0 < len(line.under_way) <= PLACES[Priority.SMALL]  # no more than it began with
    line.peak = 0
    held.set()
    buffer.origin.faults.clear()
    buffer.origin.inject(on(Operation.PUT_OBJECT), Delay(1.0), times=None)
    assert await buffer.passes(60.0, lambda: line.peak >= before / 2)


async def test_a_small_object_does_not_wait_behind_large_ones(buffer: Buffer) -> None:
    """Two bytes, acknowledged behind more large ones than have places, which do not get on."""
    await buffer.learn()
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(under("large"), Hold(held, reached), times=None)
    for number in range(PLACES[Priority.LARGE] + 1):
        await buffer.put(key(f"large{number}"), bytes(SMALL_BYTES_MAX + 1))
    await buffer.put(key("small"), b"xy")
    line = Line(buffer.origin)
    buffer.start(line)
    await buffer.at_once(lambda: "small" in buffer.bucket.objects)
    await buffer.at_once(reached.is_set)
    assert len(line.under_way) <= PLACES[Priority.LARGE]
    held.set()
    await buffer.flushed()


async def test_what_somebody_waits_for_goes_first(buffer: Buffer) -> None:
    """A deletion, and what was hurried, with all places taken and much before them; each key in its own order."""
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(under("k"), Hold(held, reached), times=None)
    many = 3 * PLACES[Priority.SMALL]
    for number in range(many):
        await buffer.put(key(f"k{number}"), b"x")
    await buffer.put(key("gone"), b"x")
    await buffer.put(key("hurried"), b"x")
    buffer.start()
    await buffer.until(reached.is_set)
    await buffer.delete(key("gone"))
    await buffer.journal.change(lambda tx: tx.turns.prioritise(key("hurried"), buffer.clock.now()))
    await buffer.until(lambda: len(buffer.left()) == many)
    assert buffer.origin.data("bucket", "hurried") == b"x"
    assert "gone" not in buffer.bucket.objects
    held.set()
    await buffer.flushed()


@pytest.mark.slow
async def test_parts_that_somebody_waits_for_do_not_wait_for_those_of_large_objects(buffer: Buffer) -> None:
    """Though these have all places of the lane, and keep them."""
    await buffer.learn()
    held, line = asyncio.Event(), Line(buffer.origin)
    sizes = [PART_BYTES] * PARTS_AT_ONCE
    buffer.origin.inject(
        lambda call: call.operation is Operation.UPLOAD_PART and call.key != "needed", Hold(held), times=None
    )
    for number in range(PARTS_PER_LANE // PARTS_AT_ONCE):
        await buffer.upload(key(f"large{number}"), sizes, upload_id=str(number))
    buffer.start(line)
    await buffer.until(lambda: len(line.under_way) == PARTS_PER_LANE)
    await buffer.upload(key("needed"), sizes, upload_id="needed")
    await buffer.journal.change(lambda tx: tx.turns.prioritise(key("needed"), buffer.clock.now()))
    await buffer.until(lambda: "needed" in buffer.bucket.objects)
    assert len(buffer.bucket.objects) == 1
    held.set()
    await buffer.flushed()


async def test_the_origin_client_knows_for_which_flush_somebody_waits(buffer: Buffer) -> None:
    """Also where that is so only while it is on its way: a request needs one, an operator a prefix, nobody the rest."""
    await buffer.learn()
    held, line = asyncio.Event(), Line(buffer.origin)
    buffer.origin.inject(under(""), Hold(held), times=None)
    await put_many(buffer, ["needed", "a/asked", "other"])
    buffer.start(line)
    await buffer.until(lambda: len(line.under_way) == 3)
    assert [is_awaited() for is_awaited in line.is_awaited.values()] == [False] * 3
    await buffer.journal.change(lambda tx: tx.turns.prioritise(key("needed"), buffer.clock.now()))
    buffer.reconciler.prioritise(Prefix("bucket", "a/"))
    await buffer.until(lambda: line.is_awaited["needed"]() and line.is_awaited["a/asked"]())
    assert not line.is_awaited["other"]()
    held.set()
    await buffer.flushed()


async def test_a_marker_comes_last(buffer: Buffer) -> None:
    """What was acknowledged before it under its directory is there before, also where that failed at first, and was
    written again since."""
    await buffer.learn()
    shards = [f"step/{number}" for number in range(20)]
    arrived_before: list[set[str]] = []

    def is_marker(call: Call) -> bool:
        if call.key == "step/manifest.json":
            arrived_before.append(set(buffer.bucket.objects))
        return False

    buffer.origin.inject(is_marker, Answer(500), times=None)
    buffer.origin.inject(on(Operation.PUT_OBJECT, key="step/7"), Answer(403, "AccessDenied"), times=3)
    await put_many(buffer, shards)
    await buffer.put(key("step/manifest.json"), b"{}", behind="step/")
    await put_many(buffer, ["elsewhere"])
    buffer.start()
    await buffer.at_once(lambda: "elsewhere" in buffer.bucket.objects)
    await buffer.flushed()
    assert arrived_before == [{*shards, "elsewhere"}]


@pytest.mark.slow
def test_a_look_costs_what_it_starts(tmp_path: Path) -> None:
    """However many objects are pending: the first look, one that finds all places taken, and one with a place."""
    steps: dict[int, list[int]] = {}

    async def scenario(buffer: Buffer, count: int) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(Operation.HEAD_OBJECT), Hold(held, reached))
        buffer.origin.inject(on(Operation.HEAD_OBJECT), Hold(asyncio.Event(), asyncio.Event()), times=None)
        many = [pending(key(f"k{number:05}"), f"{number}") for number in range(count)]
        await buffer.journal.change(partial(_acknowledge, new=many))
        with steps_of_reads(buffer.journal) as counted:
            buffer.start()
            await buffer.until(reached.is_set)
            await buffer.clock.advance(LOOK_SECONDS)
        steps[count] = [max(counted), sum(counted)]

    for count in (50, 3000):
        directory = tmp_path / str(count)
        directory.mkdir()
        with_buffer(directory, lambda buffer: scenario(buffer, count))  # noqa: B023
    for few, many in zip(steps[50], steps[3000], strict=True):
        assert many <= few * 2 + 200  # not sixty times as many; a busy machine looks once more


def _acknowledge(tx: JournalTransaction, new: list[Write]) -> None:
    for one in new:
        tx.writes.acknowledge(one)


async def test_how_it_fares_outlives_the_process(buffer: Buffer) -> None:
    """Attempts, the last error, and since when it fails; the next process goes on counting, and sleeping."""
    await buffer.learn()
    fault = buffer.origin.inject(on(Operation.PUT_OBJECT), Answer(403, "AccessDenied"), times=None)
    await buffer.put(key("k"), b"x")
    buffer.start()
    await buffer.at_once(lambda: len(buffer.observer.failures) == 1)
    await buffer.until(lambda: turns(buffer)[0].attempts >= 4)
    await buffer.kill()
    [before] = turns(buffer)
    assert (before.last_error, before.failing_since) == ("AccessDenied", 1_767_225_600.0)
    tried = buffer.origin.count(Operation.PUT_OBJECT)
    buffer.start()
    await buffer.still()
    assert buffer.origin.count(Operation.PUT_OBJECT) == tried
    await buffer.until(lambda: turns(buffer)[0].attempts > before.attempts)
    assert turns(buffer)[0].failing_since == before.failing_since
    buffer.origin.faults.remove(fault)
    await buffer.flushed()


@pytest.mark.slow
@pytest.mark.parametrize("code", [503, 500])
async def test_keys_that_the_origin_does_not_serve_keep_no_others_waiting(buffer: Buffer, code: int) -> None:
    """S3 throttles by prefix: 100 keys fail as if the bucket was away, and what was acknowledged before, between and
    after them is there within a minute, and from then on within seconds, while they are tried ever more seldom."""
    many = 100
    await buffer.learn()
    tried = 0

    def is_hot(call: Call) -> bool:
        nonlocal tried
        tried += under("hot/")(call)
        return under("hot/")(call)

    buffer.origin.inject(is_hot, Answer(code, "SlowDown"), times=None)
    for name in ("hot/0", "between", "hot/1", "after"):
        for number in range(many // 2):
            await put_many(buffer, [f"{name}{number}"])
            await buffer.clock.advance(0.01)
    buffer.start()
    assert await buffer.passes(60.0, lambda: len(buffer.bucket.objects) == 100)
    for late in ("late/0", "late/1", "late/2"):
        await buffer.passes(60.0, step=1.0)
        await put_many(buffer, [late])
        is_there = partial(buffer.bucket.objects.__contains__, late)
        assert await buffer.passes(LONGEST_AWAY_SECONDS + LOOK_SECONDS, is_there)
    tried = 0
    await buffer.passes(60.0, step=1.0)
    assert tried <= 2 * 60.0 / LONGEST_AWAY_SECONDS * 2
    assert len(buffer.left()) == many


@pytest.mark.slow
async def test_a_key_that_failed_among_many_does_not_wait_long_for_them(buffer: Buffer) -> None:
    """300 keys that the origin does not serve, and others that it does: 5 that it refuses once are there in seconds,
    and 5 of the 300 in minutes, once it serves them again; while what fails is asked a few times a second."""
    many, hot_again = 300, {f"hot/{60 * number}" for number in range(5)}
    await buffer.learn()
    served, tried, others = set[str](), 0, 0

    def is_hot(call: Call) -> bool:
        nonlocal tried
        found = under("hot/")(call) and call.key not in served
        tried += found
        return found

    async def passes(seconds: int, names: set[str], step: float = 0.25) -> bool:
        nonlocal others
        for _ in range(seconds):
            others += 1
            await put_many(buffer, [f"other/{others}"])
            if await buffer.passes(1.0, lambda: names <= set(buffer.bucket.objects), step):
                return True
        return False

    buffer.origin.inject(is_hot, Answer(503, "SlowDown"), times=None)
    await put_many(buffer, [f"hot/{number}" for number in range(many)])
    buffer.start()
    await passes(120, {"never"}, step=1.0)
    once = {f"once/{number}" for number in range(5)}
    for name in once:
        buffer.origin.inject(on(key=name), Answer(503, "SlowDown"))
    await put_many(buffer, sorted(once))
    assert await passes(60, once)
    tried = 0
    await passes(120, {"never"}, step=0.5)
    assert 120 / BESIDE_ANSWERS_SECONDS / 4 < tried <= 120 / BESIDE_ANSWERS_SECONDS
    served |= hot_again
    assert await passes(400, hot_again, step=0.5)


@pytest.mark.slow
async def test_keys_that_hang_keep_no_others_waiting(buffer: Buffer) -> None:
    """Each takes its place for some seconds only: 30 of them, and what was acknowledged behind."""
    await buffer.learn()
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(under("hot/"), Hold(held, reached), times=None)
    await put_many(buffer, [f"hot/{number}" for number in range(30)])
    await put_many(buffer, [f"after/{number}" for number in range(50)])
    line = Line(buffer.origin)
    buffer.start(line)
    assert await buffer.passes(5 * SLOW_SECONDS, lambda: len(buffer.bucket.objects) == 50)
    await put_many(buffer, ["late"])
    assert await buffer.passes(2.0, lambda: "late" in buffer.bucket.objects)
    held.set()
    await buffer.flushed()


@pytest.mark.slow
async def test_no_more_hang_than_may(buffer: Buffer) -> None:
    """However many do, a bound of them is on its way."""
    await buffer.learn()
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(under(""), Hold(held, reached), times=None)
    await put_many(buffer, [f"{number}" for number in range(200)])
    line = Line(buffer.origin)
    buffer.start(line)
    await buffer.passes(120.0, step=1.0)
    assert len(line.under_way) == UNDER_WAY_MAX[Priority.SMALL]
    held.set()
    await buffer.flushed()
