"""Ceilings: pieces wait, in order, for every ceiling over them, in one process and between several."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.origin.client import OriginRequest, Purpose
from gateway.origin.traffic_meter import OriginMeter
from gateway.policy.bandwidth import NOT_WAITED, Bandwidth, BandwidthShare, Ceiling, RateLimiter, numbering_of, rows_for
from gateway.policy.fair_shares import HOLD_SECONDS
from gateway.policy.token_bucket import BURST_SECONDS
from gateway.shared.arena import Numbering, SharedCells, make_shared_memory
from gateway.telemetry import metrics
from tests.support.counting import by_label, counted
from tests.support.manual_clock import ManualClock

STEP_SECONDS = 0.05


def first() -> int:
    """A rank: before or beside all others."""
    return 0


def limited(clock: ManualClock, *ceilings: Ceiling) -> Bandwidth:
    return Bandwidth(ceilings, clock)


def limiter_of(bandwidth: Bandwidth, slot: str) -> RateLimiter:
    limiter = bandwidth.limiter("read", slot)
    assert limiter is not None
    return limiter


async def take_in_row(limiter: RateLimiter, counts: list[int], passed: Callable[[int], None]) -> None:
    for count in counts:
        await limiter.take(count, first)
        passed(count)


async def run_all(clock: ManualClock, *work: Awaitable[None]) -> None:
    """Let time pass until all of it is done."""
    tasks = [asyncio.ensure_future(one) for one in work]
    while not all(task.done() for task in tasks):
        await clock.advance(STEP_SECONDS)
    for task in tasks:
        task.result()


def test_what_no_ceiling_covers_has_no_limiter() -> None:
    """So that it costs nothing; a slot's ceiling covers that slot and direction alone, the link's all slots."""
    clock = ManualClock()
    bandwidth = limited(clock, Ceiling("read", "a", 1000), Ceiling("write", None, 1000))
    assert bandwidth.limiter("read", "a") is not None
    assert bandwidth.limiter("read", "b") is None
    assert bandwidth.limiter("write", "b") is not None
    assert bandwidth.limiter("read", "a") is bandwidth.limiter("read", "a")


COUNTS = st.lists(st.integers(1, 5000), max_size=12)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.lists(COUNTS, max_size=3)), st.integers(500, 20_000))
def test_no_ceiling_lets_more_pass_than_it_says(takers: dict[str, list[list[int]]], link: int) -> None:
    """In no span of time, but for a piece: slots `a` and `b` have ceilings, `c` has none, and all share the link."""
    rates = {"a": 1000.0, "b": 3000.0, None: float(link)}

    async def run() -> list[tuple[float, str, int]]:
        clock, seen = ManualClock(), []
        bandwidth = limited(clock, *(Ceiling("read", slot, rate) for slot, rate in rates.items()))
        work = []
        for slot, rows in takers.items():
            for row in rows:

                def passed(count: int, slot: str = slot) -> None:
                    seen.append((clock.monotonic(), slot, count))

                work.append(take_in_row(limiter_of(bandwidth, slot), row, passed))
        await run_all(clock, *work)
        return seen

    seen = asyncio.run(run())
    assert len(seen) == sum(len(row) for rows in takers.values() for row in rows)
    for covered, rate in rates.items():
        passed = [(at, count) for at, slot, count in seen if covered in (None, slot)]
        for i, (start, _) in enumerate(passed):
            for j in range(i, len(passed)):
                counts = [count for _, count in passed[i : j + 1]]
                assert sum(counts) - max(counts) <= rate * (passed[j][0] - start + BURST_SECONDS) + 1e-3


def test_pieces_of_a_slot_pass_in_the_order_they_came() -> None:
    """A small one does not overtake a large one for which there is no room yet."""

    async def run() -> None:
        clock, order = ManualClock(), list[int]()
        limiter = limiter_of(limited(clock, Ceiling("read", "a", 1000)), "a")
        await limiter.take(1100, first)
        await run_all(clock, *(take_in_row(limiter, [count], order.append) for count in (900, 1, 500, 2)))
        assert order == [900, 1, 500, 2]

    asyncio.run(run())


def test_a_slot_at_its_ceiling_keeps_no_other_from_the_link() -> None:
    """Its pieces wait beside those of the others, not before them."""

    async def run() -> None:
        clock = ManualClock()
        bandwidth = limited(clock, Ceiling("read", "slow", 10), Ceiling("read", None, 10_000))
        slow, fast = limiter_of(bandwidth, "slow"), limiter_of(bandwidth, "fast")
        await slow.take(1000, first)
        waiting = asyncio.ensure_future(slow.take(1000, first))
        await run_all(clock, take_in_row(fast, [1000] * 20, lambda _: None))
        assert clock.monotonic() < 2.1
        assert not waiting.done()
        await clock.advance(100)
        assert 90 < (await waiting).ceiling_seconds < 101

    asyncio.run(run())


def test_who_leaves_while_waiting_has_taken_nothing() -> None:
    """Those behind move up, whoever left, the first or one in the midst; no timer is left behind either."""

    async def run() -> None:
        clock, order = ManualClock(), list[int]()
        limiter = limiter_of(limited(clock, Ceiling("read", "a", 1000)), "a")
        await limiter.take(1100, first)
        tasks = [asyncio.ensure_future(take_in_row(limiter, [n], order.append)) for n in (5000, 1000, 7000, 1)]
        await clock.advance(0)
        tasks[0].cancel()
        tasks[2].cancel()
        await clock.advance(1.0)
        assert order == [1000]
        await clock.advance(1.0)
        assert order == [1000, 1]
        await clock.advance(HOLD_SECONDS)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(run())


def test_who_leaves_when_its_turn_has_just_come_gives_back_what_it_took() -> None:
    """The moment between passing and knowing of it costs nobody anything."""

    async def run() -> None:
        clock = ManualClock()
        limiter = limiter_of(limited(clock, Ceiling("read", "a", 1000)), "a")
        await limiter.take(1100, first)
        late = asyncio.ensure_future(limiter.take(50_000, first))
        await clock.advance(0)
        await clock.advance(0.9)
        assert not late.done()
        [sleep] = [task for task in asyncio.all_tasks() if task is late]
        clock._elapsed = 1.0
        for _, _, wake in clock._sleepers:
            wake.set_result(None)
        sleep.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert late.cancelled()
        assert await limiter.take(100, first) == NOT_WAITED

    asyncio.run(run())


def test_who_waits_for_the_link_leaves_its_slot_as_it_was() -> None:
    """It had passed the ceiling of its slot: that is given back, too."""

    async def run() -> None:
        clock = ManualClock()
        bandwidth = limited(clock, Ceiling("read", "a", 1000), Ceiling("read", None, 1000))
        await limiter_of(bandwidth, "b").take(10_100, first)
        leaving = asyncio.ensure_future(limiter_of(bandwidth, "a").take(5000, first))
        await clock.advance(0)
        await clock.advance(1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        waiting = asyncio.ensure_future(limiter_of(bandwidth, "a").take(100, first))
        await clock.advance(0)
        await clock.advance(8.9)
        assert not waiting.done()
        await clock.advance(0.2)
        assert sum(await waiting) == pytest.approx(9.0, abs=0.01)

    asyncio.run(run())


PROCESSES = 4


def shared_by_processes(clock: ManualClock, *ceilings: Ceiling) -> list[Bandwidth]:
    """The ceilings as each of some processes keeps them."""
    rows = rows_for(numbering_of(ceilings, ()).most)
    descriptor = make_shared_memory(rows, PROCESSES, clock.monotonic())
    try:
        cells = [SharedCells.attach(descriptor, rows, PROCESSES, own) for own in range(PROCESSES)]
        return [Bandwidth(ceilings, clock, one) for one in cells]
    finally:
        os.close(descriptor)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, PROCESSES - 1), COUNTS), max_size=6))
def test_all_processes_together_keep_to_the_ceiling_and_use_it_up(rows: list[tuple[int, list[int]]]) -> None:
    """In no span of time more, but for a piece of each; and none of it is lost while anybody waits."""

    async def run() -> list[tuple[float, int]]:
        clock, seen = ManualClock(), []
        processes = shared_by_processes(clock, Ceiling("read", None, 1000))
        work = []
        for process, row in rows:

            def passed(count: int) -> None:
                seen.append((clock.monotonic(), count))

            work.append(take_in_row(limiter_of(processes[process], "a"), row, passed))
        await run_all(clock, *work)
        return seen

    seen = asyncio.run(run())
    largest = max([count for _, count in seen], default=0)
    for i, (start, _) in enumerate(seen):
        for j in range(i, len(seen)):
            within = sum(count for _, count in seen[i : j + 1])
            assert within <= 1000 * (seen[j][0] - start + BURST_SECONDS) + PROCESSES * largest
    total = sum(count for _, count in seen)
    assert not seen or seen[-1][0] <= total / 1000 + STEP_SECONDS + 0.001 * len(seen)


def test_processes_that_wait_pass_in_turn() -> None:
    """However many pieces one has waiting: each has one in the row, so the other waits for one of them, not for all."""

    async def run() -> None:
        clock, order = ManualClock(), list[str]()
        many, few, *_ = (limiter_of(one, "a") for one in shared_by_processes(clock, Ceiling("read", "a", 1000)))
        await many.take(1100, first)
        work = [take_in_row(many, [100], lambda _: order.append("many")) for _ in range(50)]
        work += [take_in_row(few, [100] * 5, lambda _: order.append("few"))]
        await run_all(clock, *work)
        assert [i for i, name in enumerate(order) if name == "few"][-1] <= 10

    asyncio.run(run())


@pytest.mark.parametrize("of_link", [False, True])
def test_a_piece_for_which_somebody_begins_to_wait_passes_next(of_link: bool) -> None:
    """Of thirty that are warmed in one process, while another warms too; and it is one of many when he has left."""

    async def run() -> None:
        clock, order, awaited = ManualClock(), list[str](), set[str]()
        ceiling = Ceiling("read", None if of_link else "a", 1000)
        one, other, *_ = (limiter_of(of_process, "a") for of_process in shared_by_processes(clock, ceiling))

        async def take(limiter: RateLimiter, name: str) -> None:
            while True:
                await limiter.take(200, lambda: 0 if name in awaited else 2)
                order.append(name)

        await one.take(1100, first)
        work = [asyncio.create_task(take(one, f"one-{number}")) for number in range(30)]
        work += [asyncio.create_task(take(other, f"other-{number}")) for number in range(30)]
        for _ in range(60):
            await clock.advance(STEP_SECONDS)
        assert order.count("one-20") <= 1
        order.clear()
        awaited.add("one-20")
        for _ in range(40):
            await clock.advance(STEP_SECONDS)
        # Ten pieces pass in two seconds: in each one that has waited for too long, in each process.
        assert order.index("one-20") <= 2
        assert order.count("one-20") >= 5
        awaited.clear()
        order.clear()
        for _ in range(40):
            await clock.advance(STEP_SECONDS)
        assert order.count("one-20") <= 1
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    asyncio.run(run())


def test_a_process_that_is_gone_while_its_piece_waits_costs_the_others_that_piece_once() -> None:
    """Nothing of it need be cleared away: the debt is paid by time."""

    async def run() -> None:
        clock = ManualClock()
        gone, other, *_ = (limiter_of(one, "a") for one in shared_by_processes(clock, Ceiling("read", "a", 1000)))
        await other.take(1100, first)
        lost = asyncio.ensure_future(gone.take(500, first))
        await clock.advance(0)
        clock._sleepers.clear()  # it never wakes again
        waiting = asyncio.ensure_future(other.take(1000, first))
        await clock.advance(0)
        await clock.advance(1.49)
        assert not waiting.done()
        await clock.advance(0.02)
        assert sum(await waiting) == pytest.approx(1.5, abs=0.01)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("ceiling", [Ceiling("read", "a", 1000), Ceiling("read", None, 1000)], ids=["own", "link"])
def test_who_has_waited_for_too_long_has_taken_nothing_and_the_others_pass(ceiling: Ceiling) -> None:
    """A bound on the wait, for each piece; one that is told of it when it is cancelled has taken nothing either."""
    clock = ManualClock()

    async def run() -> None:
        limiter = limiter_of(limited(clock, ceiling), "a")
        await limiter.take(1100, first)  # the burst, and a second's worth
        impatient = [asyncio.create_task(limiter.take(500, first, 0.3)) for _ in range(3)]
        patient = asyncio.create_task(limiter.take(500, first))
        await clock.advance(0)
        await clock.advance(0.3 + HOLD_SECONDS)
        assert [type(task.exception()) for task in impatient] == [TimeoutError] * 3
        assert not patient.done()
        await clock.advance(0.7)
        assert patient.done()
        assert not limiter.passes(1, first)
        await clock.advance(0.6)
        assert limiter.passes(1, first)  # nobody else has taken anything

    asyncio.run(run())


@pytest.mark.parametrize("link", [None, 1000])
@pytest.mark.parametrize("after", [None, 100_000])
def test_who_waits_under_a_ceiling_that_is_lifted_passes_at_once(link: int | None, after: int | None) -> None:
    """Or by the one that is in force then. What was waited for is given back, and one that leaves meanwhile takes
    nothing."""

    async def scenario() -> None:
        clock = ManualClock()
        ceilings = [Ceiling("read", "a", 1000)] + ([Ceiling("read", None, link)] if link is not None else [])
        before = limited(clock, *ceilings)
        meter = OriginMeter(before)
        request = OriginRequest("GET", "b", "k", slot="a", purpose=Purpose.LIVE)
        limiter_of(before, "a").charge(10_000)
        readers = [asyncio.ensure_future(meter.of_body("read", request).wait(5000)) for _ in range(16)]
        await clock.advance(STEP_SECONDS)
        await clock.advance(STEP_SECONDS)
        assert not any(one.done() for one in readers)
        readers[3].cancel()
        changed = [Ceiling("read", "a", after)] if after is not None else []
        before.apply_settings(changed, [], numbering_of(ceilings, []), 1)
        readers[4].cancel()
        for _ in range(20):
            await clock.advance(STEP_SECONDS)
        assert all(one.done() for one in readers)
        assert [one.cancelled() for one in readers].count(True) == 2
        assert counted(metrics.BANDWIDTH_WAIT_SECONDS) > 0
        levels = [bucket.level(clock.monotonic()) for bucket in before._buckets.values()]
        assert all(level > -10_000 for level in levels), "nothing of the pieces that waited is on the account"
        assert all(one.exception() is None for one in readers if not one.cancelled())

    asyncio.run(scenario())


@pytest.mark.parametrize("link", [None, 1_000_000])
def test_the_wait_for_a_ceiling_that_is_lifted_is_told_as_one_for_the_ceiling(link: int | None) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        ceilings = [Ceiling("read", "a", 1000)]
        of_link = [Ceiling("read", None, link)] if link is not None else []
        bandwidth = limited(clock, *ceilings, *of_link)
        meter = OriginMeter(bandwidth)
        request = OriginRequest("GET", "b", "k", slot="a", purpose=Purpose.LIVE)
        limiter_of(bandwidth, "a").charge(10_000)
        readers = [asyncio.ensure_future(meter.of_body("read", request).wait(5000)) for _ in range(4)]
        for _ in range(20):
            await clock.advance(STEP_SECONDS)
        bandwidth.apply_settings(of_link, [], numbering_of(ceilings, []), 1)
        for _ in range(20):
            await clock.advance(STEP_SECONDS)
        await asyncio.gather(*readers)
        by = by_label(metrics.BANDWIDTH_WAIT_SECONDS, "by")
        assert by["ceiling"] == pytest.approx(4 * 20 * STEP_SECONDS, rel=0.2)
        assert by.get("link", 0.0) < by["ceiling"] / 4

    asyncio.run(scenario())


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from(["link", "slot", "found", "both"]), st.integers(1, 20))
def test_no_change_of_settings_lets_more_pass(seed: int, processes: int, ceiling: str, changes: int) -> None:
    """10.2 However often weights and ceilings change and slots come, and however late a process learns of it, or of
    which of them."""
    rate, piece, seconds, dice = 4_000_000.0, 200_000, 3.0, random.Random(seed)
    kinds: dict[str, list[str | None]] = {"link": [None], "slot": ["a"], "found": [None], "both": [None, "a"]}
    numbers = Numbering(8).changed(["a", "b"])

    def settings_of(weight: int, most: float) -> tuple[list[Ceiling], list[BandwidthShare]]:
        ceilings = [Ceiling("read", slot, None if ceiling == "found" else most) for slot in kinds[ceiling]]
        names = {"b": 1, "a": weight, f"new-{weight}": 1}
        return ceilings, [
            BandwidthShare("read", name, of_slot) for name, of_slot in names.items() if name in numbers.of
        ]

    async def run() -> int:
        nonlocal numbers
        clock, passed, generation = ManualClock(), 0, 0
        rows = rows_for(numbers.most)
        memory = make_shared_memory(rows, processes, clock.monotonic())
        latest = settings_of(1, rate)
        cells = [SharedCells.attach(memory, rows, processes, own) for own in range(processes)]
        os.close(memory)
        of_process = [Bandwidth(latest[0], clock, one, latest[1], numbers) for one in cells]
        if ceiling == "found":
            link = of_process[0].link("read")
            assert link is not None
            link.change_rate(rate, clock.monotonic() + 1e-6)
            await clock.advance(2e-6)

        async def take(own: int) -> None:
            nonlocal passed
            while True:
                await limiter_of(of_process[own], "a").take(piece, first)
                passed += piece
                await asyncio.sleep(0)

        takers = [asyncio.create_task(take(own)) for own in range(processes)]
        began, late = clock.monotonic(), dict[int, float]()
        change_at = began
        while clock.monotonic() < began + seconds:
            now = clock.monotonic()
            if now >= change_at:
                change_at, weight = now + 1 / changes, dice.randint(1, 9)
                generation, numbers = generation + 1, numbers.changed(["b", "a", f"new-{weight}"])
                latest = settings_of(weight, rate * dice.choice([0.5, 1.0]))
                late.update({own: now + dice.uniform(0, 0.2) for own in range(processes) if own not in late})
            for own in [one for one, due in late.items() if due <= now]:
                del late[own]
                of_process[own].apply_settings(*latest, numbers, generation)
                cells[own].follow(generation)
            await clock.advance(0.01)
        for one in takers:
            one.cancel()
        await asyncio.gather(*takers, return_exceptions=True)
        return passed

    passed = asyncio.run(run())
    assert passed <= rate * (seconds + BURST_SECONDS + 0.2) + (processes + 1) * piece


def test_a_process_with_settings_of_before_decides_nothing() -> None:
    """It starts, or goes on, when others keep to newer ones already."""
    clock, numbers = ManualClock(), Numbering(4).changed(["a"])
    rows = rows_for(numbers.most)
    memory = make_shared_memory(rows, 2, clock.monotonic())
    one, other = (SharedCells.attach(memory, rows, 2, own) for own in range(2))
    os.close(memory)
    newer = Bandwidth([Ceiling("read", "a", 1000)], clock, one, (), numbers)
    clock._elapsed = 5.0
    newer.apply_settings([Ceiling("read", "a", 500)], [], numbers, 2)
    one.follow(2)
    older = Bandwidth([Ceiling("read", "a", 1000)], clock, other, (), numbers, 0)
    older.apply_settings([Ceiling("read", "a", 2000)], [], numbers, 1)
    for bandwidth in (newer, older):
        limiter = limiter_of(bandwidth, "a")
        assert limiter._ceiling is not None
        limiter._ceiling.level(6.0)
        assert limiter._ceiling.rate == 500
