"""One process's ceilings: pieces wait, in order, for every ceiling over them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.bandwidth import Bandwidth, Ceiling, Gate
from gateway.policy.token_bucket import BURST_SECONDS
from tests.support.manual_clock import ManualClock

STEP_SECONDS = 0.05


def limited(clock: ManualClock, *ceilings: Ceiling) -> Bandwidth:
    return Bandwidth(ceilings, [one.bytes_per_second for one in ceilings], clock)


def gate_of(bandwidth: Bandwidth, slot: str) -> Gate:
    gate = bandwidth.gate("read", slot)
    assert gate is not None
    return gate


async def take_in_row(gate: Gate, counts: list[int], passed: Callable[[int], None]) -> None:
    for count in counts:
        await gate.take(count)
        passed(count)


async def run_all(clock: ManualClock, *work: Awaitable[None]) -> None:
    """Let time pass until all of it is done."""
    tasks = [asyncio.ensure_future(one) for one in work]
    while not all(task.done() for task in tasks):
        await clock.advance(STEP_SECONDS)
    for task in tasks:
        task.result()


def test_what_no_ceiling_covers_has_no_gate() -> None:
    """So that it costs nothing; a slot's ceiling covers that slot and direction alone, the link's all slots."""
    clock = ManualClock()
    bandwidth = limited(clock, Ceiling("read", "a", 1000), Ceiling("write", None, 1000))
    assert bandwidth.gate("read", "a") is not None
    assert bandwidth.gate("read", "b") is None
    assert bandwidth.gate("write", "b") is not None
    assert bandwidth.gate("read", "a") is bandwidth.gate("read", "a")


COUNTS = st.lists(st.integers(1, 5000), max_size=12)


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

                work.append(take_in_row(gate_of(bandwidth, slot), row, passed))
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
        gate = gate_of(limited(clock, Ceiling("read", "a", 1000)), "a")
        await gate.take(1100)
        await run_all(clock, *(take_in_row(gate, [count], order.append) for count in (900, 1, 500, 2)))
        assert order == [900, 1, 500, 2]

    asyncio.run(run())


def test_a_slot_at_its_ceiling_keeps_no_other_from_the_link() -> None:
    """Its pieces wait beside those of the others, not before them."""

    async def run() -> None:
        clock = ManualClock()
        bandwidth = limited(clock, Ceiling("read", "slow", 10), Ceiling("read", None, 10_000))
        slow, fast = gate_of(bandwidth, "slow"), gate_of(bandwidth, "fast")
        await slow.take(1000)
        waiting = asyncio.ensure_future(slow.take(1000))
        await run_all(clock, take_in_row(fast, [1000] * 20, lambda _: None))
        assert clock.monotonic() < 2.1
        assert not waiting.done()
        await clock.advance(100)
        assert 90 < await waiting < 101

    asyncio.run(run())


def test_who_leaves_while_waiting_has_taken_nothing() -> None:
    """Those behind move up, whoever left, the first or one in the midst; no timer is left behind either."""

    async def run() -> None:
        clock, order = ManualClock(), list[int]()
        gate = gate_of(limited(clock, Ceiling("read", "a", 1000)), "a")
        await gate.take(1100)
        tasks = [asyncio.ensure_future(take_in_row(gate, [n], order.append)) for n in (5000, 1000, 7000, 1)]
        await clock.advance(0)
        tasks[0].cancel()
        tasks[2].cancel()
        await clock.advance(1.0)
        assert order == [1000]
        await clock.advance(1.0)
        assert order == [1000, 1]
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(run())


def test_who_leaves_when_its_turn_has_just_come_gives_back_what_it_took() -> None:
    """The moment between passing and knowing of it costs nobody anything."""

    async def run() -> None:
        clock = ManualClock()
        bandwidth = limited(clock, Ceiling("read", "a", 1000))
        gate = gate_of(bandwidth, "a")
        await gate.take(1100)
        late = asyncio.ensure_future(gate.take(50_000))
        await clock.advance(0)
        gate.give_back(1100)
        bandwidth.set_rates([2000])
        assert gate.delay_seconds(clock.monotonic()) > 20
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert late.cancelled()
        assert gate.delay_seconds(clock.monotonic()) == 0

    asyncio.run(run())


def test_who_is_cancelled_just_before_its_turn_is_passed_over() -> None:
    """It takes nothing, and those behind it do not wait for it to notice."""

    async def run() -> None:
        clock = ManualClock()
        bandwidth = limited(clock, Ceiling("read", "a", 1000))
        gate = gate_of(bandwidth, "a")
        await gate.take(1100)
        leaving, next_one = asyncio.ensure_future(gate.take(50_000)), asyncio.ensure_future(gate.take(1000))
        await clock.advance(0)
        leaving.cancel()
        gate.give_back(1100)
        bandwidth.set_rates([2000])
        assert gate.delay_seconds(clock.monotonic()) == 0.45
        await asyncio.gather(leaving, next_one, return_exceptions=True)
        assert leaving.cancelled()
        assert next_one.done()
        assert gate.delay_seconds(clock.monotonic()) == 0.45

    asyncio.run(run())


def test_a_new_rate_is_heard_by_those_who_wait() -> None:
    """They do not sleep through it: what would have taken hours takes seconds."""

    async def run() -> None:
        clock = ManualClock()
        bandwidth = limited(clock, Ceiling("read", "a", 1))
        gate = gate_of(bandwidth, "a")
        await gate.take(10_000)
        waiting = asyncio.ensure_future(gate.take(1))
        await clock.advance(10)
        bandwidth.set_rates([10_000])
        await clock.advance(0)
        await clock.advance(1)
        assert waiting.done()

    asyncio.run(run())


def test_demands_tell_what_was_used_and_who_was_short() -> None:
    """Used bytes with headroom; the whole ceiling when anybody waited; nothing when nothing went on."""

    async def run() -> None:
        clock = ManualClock()
        bandwidth = limited(clock, Ceiling("read", "a", 1000), Ceiling("read", None, 10**6))
        gate = gate_of(bandwidth, "a")
        await clock.advance(1)
        await gate.take(50)
        assert bandwidth.demands() == [62.5, 62.5]
        assert bandwidth.demands() == [0, 0]
        await clock.advance(1)
        await gate.take(200)
        waiting = asyncio.ensure_future(gate.take(10))
        await clock.advance(0)
        await clock.advance(1)
        await waiting
        assert bandwidth.demands() == [1000, 131.25]

    asyncio.run(run())
