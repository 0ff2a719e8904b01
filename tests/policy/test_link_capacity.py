"""What the link bears is found out while it is used, by all processes together: simulated, with a clock of the test."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import ParamSpec

import pytest

from gateway.origin.client import Direction
from gateway.origin.traffic_meter import AnswerKind, Traffic
from gateway.policy.bandwidth import Bandwidth, Ceiling, numbering_of
from gateway.policy.capacity_controller import TICK_SECONDS, UNLIMITED_BYTES_PER_SECOND
from tests.support.link_simulation import FarOrigin, FoundLinkSimulation
from tests.support.manual_clock import ManualClock

USED_AT_LEAST = 0.9
DELAY_SECONDS_MAX = 0.2
SETTLING_SECONDS = 5.0
MEASURED_SECONDS = 6.0
FAST, SLOW = 40e6, 10e6
UNQUEUED = 2e9
SLOWER_SECONDS = 45.0


P = ParamSpec("P")


def in_event_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def of_it() -> None:
            await test(*args, **kwargs)

        asyncio.run(of_it())

    return run


@asynccontextmanager
async def simulated(
    capacity: float = FAST, processes: int = 2, origin: FarOrigin | None = None
) -> AsyncIterator[FoundLinkSimulation]:
    link = FoundLinkSimulation(capacity, processes, origin)
    try:
        yield link
    finally:
        await link.end()


def begin(link: FoundLinkSimulation, direction: Direction, count: int = 8) -> list[asyncio.Task[None]]:
    work = link.read if direction == "read" else link.write
    return [work(number % len(link.processes)) for number in range(count)]


async def keeps_its_promise(link: FoundLinkSimulation, settling_seconds: float = SETTLING_SECONDS) -> None:
    """After a while nearly all of the link is used, and nothing waits long in its queue."""
    await link.pass_time(settling_seconds)
    rate, delays = await link.pass_time(MEASURED_SECONDS)
    assert rate >= USED_AT_LEAST * link.link.capacity
    assert max(delays) <= DELAY_SECONDS_MAX


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["read", "write"])
@in_event_loop
async def test_a_link_that_changes_by_four_times_is_used_and_has_no_long_queue(direction: Direction) -> None:
    """Clause 10.9: from five seconds after each change on, 90 % are used, and nothing waits for more than 200 ms."""
    async with simulated() as link:
        begin(link, direction)
        for capacity in (FAST, SLOW, FAST):
            link.link.capacity = capacity
            await keeps_its_promise(link)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "readers"), [(1, 2), (24, 24)])
@in_event_loop
async def test_any_number_of_processes_and_readers(processes: int, readers: int) -> None:
    """Wherever the transfers are, it is one link."""
    async with simulated(processes=processes) as link:
        begin(link, "read", readers)
        for capacity in (FAST, SLOW, FAST):
            link.link.capacity = capacity
            await keeps_its_promise(link)


@pytest.mark.slow
@pytest.mark.parametrize("jitter_seconds", [0.01, 0.02])
@in_event_loop
async def test_an_origin_that_thinks_for_no_fixed_time(jitter_seconds: float) -> None:
    """An answer that takes its time is no queue."""
    async with simulated(origin=FarOrigin(jitter_seconds=jitter_seconds, window_bytes=256 * 1024)) as link:
        begin(link, "read")
        await keeps_its_promise(link)
        link.link.capacity = SLOW
        await keeps_its_promise(link)


@pytest.mark.slow
@in_event_loop
async def test_an_origin_that_becomes_slower_costs_nothing_that_lasts() -> None:
    """All answers are late then, and no queue of ours is the reason."""
    async with simulated() as link:
        begin(link, "read")
        await link.pass_time(SETTLING_SECONDS)
        link.origin = FarOrigin(think_seconds=0.12)
        await link.pass_time(2 * SETTLING_SECONDS)
        rate, _ = await link.pass_time(2 * SETTLING_SECONDS)
        assert rate >= 0.8 * FAST


async def passes_beside_a_slower_origin(
    think_seconds: float, readers: int, block: int, alternating_seconds: float, *, is_found: bool
) -> list[float]:
    """The bytes per second in each five seconds after the origin has begun to think longer, by a link that is never
    full. `alternating_seconds`: then it thinks as before for so long, and so on; 0: it does not."""
    before, slower = FarOrigin(jitter_seconds=0.002), FarOrigin(think_seconds, jitter_seconds=0.002)
    link = FoundLinkSimulation(UNQUEUED, origin=before, is_found=is_found)
    try:
        for number in range(readers):
            link.read(number % len(link.processes), block)
        await link.pass_time(SETTLING_SECONDS)
        rates = []
        for second in range(round(SLOWER_SECONDS)):
            turns = second // alternating_seconds if alternating_seconds else 0
            link.origin = before if turns % 2 else slower
            rates.append((await link.pass_time(1))[0])
        return rates
    finally:
        await link.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("think_seconds", "readers", "block", "alternating_seconds"),
    [(0.075, 8, 300_000, 0), (0.25, 8, 300_000, 0), (0.25, 2, 3_000_000, 0), (0.25, 8, 300_000, 3)],
)
@in_event_loop
async def test_an_origin_that_becomes_slower_is_not_throttled(
    think_seconds: float, readers: int, block: int, alternating_seconds: float
) -> None:
    """Clause 10.9: by three and ten times, for good or by turns, for many readers and few: from five seconds on at
    least 85 % pass of what passes without a limit, in every ten seconds."""
    found, unlimited = [
        await passes_beside_a_slower_origin(think_seconds, readers, block, alternating_seconds, is_found=one)
        for one in (True, False)
    ]
    for begin_second in range(round(SETTLING_SECONDS), len(found) - 9):
        of = slice(begin_second, begin_second + 10)
        assert sum(found[of]) >= 0.85 * sum(unlimited[of])


@pytest.mark.slow
@in_event_loop
async def test_a_queue_is_found_behind_an_origin_that_has_become_slower() -> None:
    """What was accepted hides no queue that is longer: the link falls by four times, and is used and has no long queue
    from ten seconds on."""
    async with simulated() as link:
        begin(link, "read")
        await link.pass_time(SETTLING_SECONDS)
        link.origin = FarOrigin(think_seconds=0.12)
        await link.pass_time(2 * SETTLING_SECONDS)
        link.link.capacity = SLOW
        await keeps_its_promise(link, 2 * SETTLING_SECONDS)


@pytest.mark.slow
@in_event_loop
async def test_nothing_is_held_back_before_a_queue_was_seen() -> None:
    """A link that bears more than anybody wants: each stream has what the origin gives it, from the first second on."""
    stream = 50e6
    async with simulated(10e9, origin=FarOrigin(stream_bytes_per_second=stream, jitter_seconds=0.01)) as link:
        begin(link, "read", 4)
        rate, _ = await link.pass_time(5)
        assert rate > 0.7 * 4 * stream  # they wait for answers, too
        assert link.rate() == UNLIMITED_BYTES_PER_SECOND
        assert link.processes[0].bandwidth.found["read"].found(link.clock.monotonic()).capacity is None


@pytest.mark.slow
@in_event_loop
async def test_who_wants_little_says_nothing_about_the_link() -> None:
    """A link that was found stays found while little is wanted of it, or nothing at all."""
    async with simulated() as link:
        readers = begin(link, "read")
        await link.pass_time(2 * SETTLING_SECONDS)
        found = link.rate()
        for reader in readers:
            reader.cancel()
        seldom = link.read(0, 256 * 1024, pause_seconds=0.2)
        await link.pass_time(30)
        seldom.cancel()
        await link.pass_time(30)
        assert link.rate() >= 0.9 * min(found, FAST)
        begin(link, "read")
        await keeps_its_promise(link)


@pytest.mark.slow
@in_event_loop
async def test_who_decides_is_replaced_when_it_is_stopped_or_killed() -> None:
    """Within a second: the link's changes are followed all the same."""
    async with simulated(processes=3) as link:
        for number in range(8):
            link.read(1 + number % 2)
        await link.pass_time(SETTLING_SECONDS)
        link.processes[0].clock.stop()
        link.link.capacity = SLOW
        await keeps_its_promise(link, SETTLING_SECONDS + 1)
        link.processes[0].clock.resume()
        await link.pass_time(2)
        await link.processes[0].kill()
        link.link.capacity = FAST
        await keeps_its_promise(link, SETTLING_SECONDS + 1)


@pytest.mark.slow
@in_event_loop
async def test_others_that_use_the_link_are_left_their_part() -> None:
    """Half of the link is somebody else's, from some moment on: the queue stays short, and nothing lies idle."""
    async with simulated() as link:
        begin(link, "read")
        await link.pass_time(SETTLING_SECONDS)
        others = link.others(FAST / 2)
        try:
            await keeps_its_promise(link, 2 * SETTLING_SECONDS)
        finally:
            others.cancel()


def bandwidths(clock: ManualClock) -> Bandwidth:
    return Bandwidth([Ceiling("read", None, None), Ceiling("read", "a", 1e9)], clock)


async def tell(bandwidth: Bandwidth, clock: ManualClock, ticks: int, rate: float, waits: Sequence[float]) -> None:
    """Bytes arrive at a rate, and answers take so long, for so many ticks."""
    for _ in range(ticks):
        await clock.advance(TICK_SECONDS)
        for seconds in waits:
            bandwidth.answered(AnswerKind.GET, seconds)
        arrived = round(clock.monotonic() * rate)
        bandwidth.find_capacity({"read": Traffic(arrived), "write": Traffic(0)})


@in_event_loop
async def test_what_was_found_stays_when_settings_change() -> None:
    """10.9 The rate is what it was from the first moment on, and so is what is usual; also when it was a number
    meanwhile."""
    clock = ManualClock()
    bandwidth = bandwidths(clock)
    await tell(bandwidth, clock, 10, 20e6, [0.02, 0.025, 0.03])
    await tell(bandwidth, clock, 10, 20e6, [0.4, 0.45, 0.5])
    found = bandwidth.found["read"].found(clock.monotonic())
    assert found.capacity == pytest.approx(20e6, rel=0.3)
    numbers = numbering_of([Ceiling("read", "a", 1e9)], [])
    for generation, ceiling in enumerate([Ceiling("read", None, 1e6), Ceiling("read", None, None)], 1):
        bandwidth.apply_settings([ceiling], [], numbers, generation)
    link = bandwidth.link("read")
    assert link is not None
    link.level(clock.monotonic())
    assert link.rate < 2 * 20e6
    assert bandwidth.found["read"].found(clock.monotonic()).capacity == found.capacity
    assert bandwidth.window_bytes() is not None


@in_event_loop
async def test_a_busy_process_does_not_take_its_own_delays_for_the_link_s() -> None:
    """Answers look later than they were by as much as the process was late to look."""
    clock = ManualClock()
    bandwidth = bandwidths(clock)
    await tell(bandwidth, clock, 10, 20e6, [0.02] * 3)
    for _ in range(20):
        await clock.advance(TICK_SECONDS)
        for _ in range(3):
            bandwidth.answered(AnswerKind.GET, 0.32)
        bandwidth.find_capacity({"read": Traffic(round(clock.monotonic() * 20e6)), "write": Traffic(0)}, 0.3)
    assert bandwidth.found["read"].found(clock.monotonic()).capacity is None


@in_event_loop
async def test_the_window_of_a_connection_is_its_part_of_what_the_link_carries() -> None:
    """All together may have under way what passes in the time of an answer and a short queue; a few bytes at least."""
    clock = ManualClock()
    bandwidth = bandwidths(clock)
    assert bandwidth.window_bytes() is None
    await tell(bandwidth, clock, 10, 20e6, [0.02] * 3)
    await tell(bandwidth, clock, 10, 20e6, [0.5] * 3)
    capacity = bandwidth.found["read"].found(clock.monotonic()).capacity
    alone = bandwidth.window_bytes()
    assert capacity is not None
    assert alone is not None
    assert alone <= capacity * 0.11
    for bodies, least in ((10, alone // 10), (100_000, 1)):
        bandwidth.find_capacity({"read": Traffic(0, bodies=bodies), "write": Traffic(0)})
        window = bandwidth.window_bytes()
        assert window is not None
        assert window >= least
        assert math.isclose(window, max(16 * 1024, alone / bodies), rel_tol=0.01)
