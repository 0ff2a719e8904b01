"""Request rates: found where the origin refuses, near what it takes, shared by weight, and forgotten; in processes that
are simulated, by a clock that stands still meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.clock import SystemClock
from gateway.core.errors import OriginBusy
from gateway.origin.client import OriginRequest, Purpose
from gateway.policy.fair_shares import rows_of
from gateway.policy.request_rates import (
    GROWTH_SECONDS,
    KEPT,
    KEPT_SECONDS,
    MEMORY_BYTES_MAX,
    PLACES_MAX,
    RATE_MAX,
    RATE_MIN,
    RateCurve,
    RequestRates,
    places_for,
    prefix_of,
    rows_for,
)
from gateway.shared.arena import Numbering
from gateway.telemetry import metrics
from tests.support.counting import by_label, counted
from tests.support.limited_origin import RequestLimits, RequestSimulation, shared_cells
from tests.support.manual_clock import ManualClock

LIMIT = 100.0
WEIGHTS = {"a": 4, "b": 1}
SETTLING_SECONDS = 10.0


def crowd(sim: RequestSimulation, slot: str, key: str, clients: int, **more: float) -> list[asyncio.Task[None]]:
    """Clients in every process."""
    return [sim.send(process, slot, key, **more) for process in range(len(sim.rates)) for _ in range(clients)]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "burst_seconds", "processes"), [(100.0, 0.25, 3), (30.0, 0.1, 2), (600.0, 1.0, 1), (150.0, 0.25, 8)]
)
def test_the_rate_is_near_the_limit_and_next_to_nothing_is_refused(
    limit: float, burst_seconds: float, processes: int
) -> None:
    """Within seconds: at least 85 % of what the origin takes is used, and of a hundred requests less than one is
    refused; without, as many are refused as taken."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(limit, limit, "prefix", burst_seconds), WEIGHTS, processes)
        crowd(sim, "a", "x/k", int(limit / 10 / processes) + 5)
        await sim.pass_time(SETTLING_SECONDS)
        got = await sim.pass_time(40.0)
        assert 0.85 * limit <= got.all_taken <= 1.02 * limit
        assert got.refused <= 0.01 * got.all_taken
        assert got.failed == 0
        assert counted(metrics.ORIGIN_SLOW_DOWN) == sim.refused.total()
        await sim.end()

    asyncio.run(run())


def test_without_rates_the_same_clients_are_refused_all_the_time() -> None:
    """The simulation is one of an origin that is asked for more than it takes."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 2, gated=False)
        crowd(sim, "a", "x/k", 15)
        await sim.pass_time(SETTLING_SECONDS)
        got = await sim.pass_time(SETTLING_SECONDS)
        assert got.refused >= 0.5 * LIMIT
        assert got.failed > 0
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("per", ["prefix", "bucket"])
def test_slots_have_of_a_rate_what_their_weights_say(per: str) -> None:
    """4 : 1, under one prefix and under two of a bucket that is limited as a whole; what one leaves is the other's."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT, per), WEIGHTS, 2)  # type: ignore[arg-type]
        heavy = crowd(sim, "a", "x/k", 15)
        crowd(sim, "b", "x/k" if per == "prefix" else "y/k", 15)
        await sim.pass_time(2 * SETTLING_SECONDS)
        got = await sim.pass_time(2 * SETTLING_SECONDS)
        assert got.taken["a"] == pytest.approx(0.8 * got.all_taken, rel=0.05)
        assert got.all_taken >= 0.85 * LIMIT
        for task in heavy:
            task.cancel()
        got = await sim.pass_time(2 * SETTLING_SECONDS)
        assert got.taken["b"] >= 0.85 * LIMIT
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_prefixes_at_limits_of_their_own_have_all_of_them() -> None:
    """S3 counts each prefix for itself: that one is at its limit costs the others nothing, also where both were refused
    at first, as if it were the bucket's limit."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 2)
        for slot, prefix in (("a", "x/"), ("b", "y/")):
            crowd(sim, slot, prefix + "k", 15)
        await sim.pass_time(60.0)
        got = await sim.pass_time(2 * SETTLING_SECONDS)
        assert min(got.taken.values()) >= 0.85 * LIMIT
        assert got.refused <= 0.01 * got.all_taken
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_an_epoch_of_small_objects_does_not_starve_a_neighbour() -> None:
    """Who wants less than its share gets all of it, and hardly waits, however many requests another slot has."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), {"a": 1, "b": 1}, 2)
        crowd(sim, "b", "x/l", 4, pause_seconds=0.2)
        alone = await sim.pass_time(SETTLING_SECONDS)
        crowd(sim, "a", "x/k", 100)
        await sim.pass_time(SETTLING_SECONDS)
        got = await sim.pass_time(2 * SETTLING_SECONDS)
        assert got.taken["b"] >= 0.95 * alone.taken["b"]
        assert got.all_taken >= 0.85 * LIMIT
        times = sorted(sim.seconds["b"])
        assert times[len(times) // 2] < 0.06
        assert times[int(0.99 * len(times))] < 0.25
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_a_limit_that_rises_is_found_within_a_minute_and_one_that_falls_within_seconds() -> None:
    """Four times as much, and back."""

    async def run() -> None:
        limits = RequestLimits(100.0, 100.0)
        sim = RequestSimulation(limits, WEIGHTS, 2)
        crowd(sim, "a", "x/k", 20)
        await sim.pass_time(2 * SETTLING_SECONDS)
        limits.reads_per_second = 400.0
        await sim.pass_time(45.0)
        assert (await sim.pass_time(15.0)).all_taken >= 0.85 * 400.0
        limits.reads_per_second = 100.0
        await sim.pass_time(SETTLING_SECONDS)
        got = await sim.pass_time(SETTLING_SECONDS)
        assert got.all_taken >= 0.85 * 100.0
        assert got.refused <= 0.01 * got.all_taken
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_reads_and_writes_are_counted_apart() -> None:
    """Writes that are refused hold no read back."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(1e9, 50.0), WEIGHTS, 2)
        for process in range(2):
            for _ in range(10):
                sim.send(process, "a", "x/k", method="PUT")
        sim.send(0, "b", "x/k")
        await sim.pass_time(SETTLING_SECONDS)
        got = await sim.pass_time(SETTLING_SECONDS)
        assert 0.85 * 50 <= got.taken["a"] <= 1.02 * 50
        assert got.taken["b"] >= 0.9 / 0.03
        assert "b" not in by_label(metrics.ORIGIN_THROTTLED, "slot")
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [True, False], ids=["stopped", "killed"])
def test_a_process_that_is_stopped_or_killed_costs_the_others_nothing(goes_on: bool) -> None:
    """They have all of the rate while it is away, its slot's share with it; and it finds what has come of the rate."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 3)
        for _ in range(20):
            sim.send(0, "a", "x/k")
        for process in (1, 2):
            for _ in range(20):
                sim.send(process, "b", "x/k")
        await sim.pass_time(2 * SETTLING_SECONDS)
        sim.clocks[0].stop()
        await sim.pass_time(0.5)
        got = await sim.pass_time(SETTLING_SECONDS)
        assert got.taken["b"] >= 0.85 * LIMIT
        if goes_on:
            sim.limits.reads_per_second = LIMIT / 2
            await sim.pass_time(SETTLING_SECONDS)
            sim.clocks[0].resume()
            await sim.pass_time(2.0)
            got = await sim.pass_time(2 * SETTLING_SECONDS)
            assert got.all_taken >= 0.85 * LIMIT / 2
            assert got.taken["a"] == pytest.approx(0.8 * got.all_taken, rel=0.1)
            assert got.refused <= 0.02 * got.all_taken
        await sim.end()

    asyncio.run(run())


def test_a_process_that_is_killed_while_it_measures_is_not_waited_for() -> None:
    """The others measure, and the rate is in force a second later than it would have been at most."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 2)
        crowd(sim, "a", "x/k", 15)
        while not sim.refused:
            await sim.pass_time(0.01)
        sim.clocks[0].stop()
        await sim.pass_time(2.0)
        got = await sim.pass_time(SETTLING_SECONDS)
        assert got.refused <= 0.01 * got.all_taken
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_a_rate_that_nobody_needs_is_forgotten_and_costs_nothing_then() -> None:
    """A minute after the last request has waited; then nothing is held back, and metrics say so."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 2)
        tasks = crowd(sim, "a", "x/k", 15)
        await sim.pass_time(SETTLING_SECONDS)
        assert metrics.ORIGIN_REQUEST_RATE.value("bucket", "read") == pytest.approx(LIMIT, rel=0.25)
        for task in tasks:
            task.cancel()
        await sim.pass_time(KEPT_SECONDS - 2.0)
        assert sim.rate()
        await sim.pass_time(4.0)
        for rates in sim.rates:
            assert not rates.rates()
            assert not rates._live
            assert rates._watching is None
        told = {labels: rate.get() for labels, rate in metrics.ORIGIN_REQUEST_RATE.kept().items()}
        assert told == {("bucket", "read"): 0.0}
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("is_measured_before", [False, True])
def test_a_request_that_is_refused_now_and_then_holds_nothing_back(is_measured_before: bool) -> None:
    """S3 refuses some at any rate: one in some thousands is no limit, wherever it comes, and no rate falls by it."""
    share = 0.0003

    class NowAndThen(RequestLimits):
        """Besides, takes all but a few."""

        def takes(self, method: str, bucket: str, key: str, now: float) -> bool:
            return super().takes(method, bucket, key, now) and rng.random() >= share

    rng = random.Random(2)

    async def run() -> None:
        sim = RequestSimulation(NowAndThen(LIMIT, LIMIT), WEIGHTS, 2)
        if is_measured_before:
            crowd(sim, "a", "x/k", 15)
            await sim.pass_time(2 * SETTLING_SECONDS)
        else:
            sim.limits.reads_per_second = 1e9
            crowd(sim, "a", "x/k", 3)
        got = await sim.pass_time(60.0)
        if is_measured_before:
            assert got.all_taken >= 0.85 * LIMIT
        else:
            assert sim.refused
            assert counted(metrics.ORIGIN_THROTTLED) == 0
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_a_rate_does_not_grow_without_bound_while_nobody_waits_for_it() -> None:
    """What comes after a lull finds the rate that was known to be good, not what it might have grown to."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 2)
        tasks = crowd(sim, "a", "x/k", 15)
        await sim.pass_time(2 * SETTLING_SECONDS)
        for task in tasks:
            task.cancel()
        await sim.pass_time(40.0)
        before = sim.refused.total()
        crowd(sim, "a", "x/k", 15)
        got = await sim.pass_time(SETTLING_SECONDS)
        assert got.all_taken >= 0.85 * LIMIT
        assert sim.refused.total() - before <= 0.02 * SETTLING_SECONDS * LIMIT
        await sim.end()

    asyncio.run(run())


def test_who_waits_for_too_long_is_told_and_has_taken_nothing() -> None:
    """What a client waits for after the time that clients bear, what nobody waits for after three times that."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(0.001, 0.001), WEIGHTS, wait_seconds_max=0.5)
        rates, clock = sim.rates[0], sim.clock
        live = OriginRequest("GET", "bucket", "x/k", slot="a")
        warm = OriginRequest("GET", "bucket", "x/k", slot="a", purpose=Purpose.WARM)
        for _ in range(5):
            assert rates.passes(live)
            rates.refused(live, clock.monotonic())
        await clock.advance(0)
        await clock.advance(2.0)
        assert rates.passes(live)
        assert sim.rate() == pytest.approx(RATE_MIN, rel=0.1)
        began, outcomes = clock.monotonic(), list[tuple[Purpose, bool, float]]()

        async def wait(request: OriginRequest) -> None:
            is_sent = True
            try:
                if not rates.passes(request):
                    await rates.wait(request)
            except OriginBusy:
                is_sent = False
            outcomes.append((request.purpose, is_sent, clock.monotonic() - began))

        waiting = [asyncio.create_task(wait(request)) for request in (warm, live) for _ in range(20)]
        await clock.advance(0)
        await clock.advance(5.0)
        await asyncio.gather(*waiting)
        sent = [seconds for _, is_sent, seconds in outcomes if is_sent]
        assert 5 <= len(sent) <= 12  # those of a second and a half
        assert by_label(metrics.ORIGIN_THROTTLED_IN_VAIN, "slot") == {"a": 40 - len(sent)}
        for purpose, is_sent, seconds in outcomes:
            longest = 0.5 if purpose is Purpose.LIVE else 1.5
            assert (seconds <= longest + 0.1) if is_sent else (longest <= seconds <= longest + 0.1)
        assert rates.passes(live)
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_a_debt_that_nobody_has_made_is_forgiven() -> None:
    """Two processes change a rate in the same moment, and one has not seen what the other has: seconds later requests
    pass as if that had not been."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 2)
        crowd(sim, "a", "x/k", 15)
        await sim.pass_time(SETTLING_SECONDS)
        [rate] = sim.rates[0]._live.values()
        rate.bucket.take(1_000_000)
        await sim.pass_time(4.0)
        assert (await sim.pass_time(SETTLING_SECONDS)).all_taken >= 0.8 * LIMIT
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_what_a_client_waits_for_goes_before_what_was_begun_earlier_for_nobody() -> None:
    """Within a slot; requests rank as their bytes do."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(100.0, 100.0), WEIGHTS)
        for _ in range(30):
            sim.send(0, "a", "x/k", purpose=Purpose.WARM)
        await sim.pass_time(2 * SETTLING_SECONDS)
        live = sim.send(0, "a", "x/k")
        await sim.pass_time(5.0)
        of_live = [seconds for seconds in sim.seconds["a"] if seconds < 0.08]
        assert len(of_live) >= 5.0 / 0.08
        live.cancel()
        await sim.end()

    asyncio.run(run())


def test_there_are_so_many_rates_and_no_more() -> None:
    """What is refused under further prefixes is sent again, as without; a place that is free again is used again."""

    async def run() -> None:
        clock = ManualClock()
        rates = RequestRates(WEIGHTS, clock, wait_seconds_max=1.0)
        for number in range(3 * PLACES_MAX):
            one = OriginRequest("GET", f"bucket{number}", "x/k", slot="a")
            assert rates.passes(one)
            rates.refused(one, clock.monotonic())
        assert len(rates._live) == PLACES_MAX
        assert by_label(metrics.ORIGIN_SLOW_DOWN, "slot") == {"a": 3 * PLACES_MAX}
        await clock.advance(0)
        await clock.advance(KEPT_SECONDS + 2.0)
        assert not rates._live
        one = OriginRequest("GET", "bucket", "x/k", slot="a")
        rates.refused(one, clock.monotonic())
        assert len(rates._live) == 1
        await rates.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(("slots", "processes"), [(1, 1), (10, 5), (1000, 5), (1000, 65), (5000, 129)])
def test_the_memory_of_all_rates_is_bounded(slots: int, processes: int) -> None:
    """Whatever is configured; where slots and processes are many there are fewer rates."""
    places = places_for(slots + 1, processes)
    assert 2 <= places <= PLACES_MAX
    bytes_all = 8 * processes * rows_for(slots, processes)
    assert bytes_all <= max(MEMORY_BYTES_MAX, 2 * 8 * processes * (rows_of(slots + 1) + 64)) + 8 * processes


@pytest.mark.slow
def test_other_weights_go_on_with_the_rates_that_are_known() -> None:
    """When settings change while the gateway runs, nothing is refused anew, and new weights count at once."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(LIMIT, LIMIT), WEIGHTS, 2)
        tasks = crowd(sim, "a", "x/k", 15) + crowd(sim, "b", "x/k", 30)
        await sim.pass_time(2 * SETTLING_SECONDS)
        weights, numbers = {"b": 4, "a": 1}, Numbering(2).changed(WEIGHTS)
        for one in sim.rates:
            one.apply_settings(weights, numbers.changed(weights), ["bucket"])
        assert len(sim.rates[0]._live) == 1
        refused = sim.refused.total()
        await sim.pass_time(1.0)
        got = await sim.pass_time(2 * SETTLING_SECONDS)
        assert got.taken["b"] == pytest.approx(0.8 * got.all_taken, rel=0.05)
        assert got.all_taken >= 0.85 * LIMIT
        assert sim.refused.total() - refused <= 0.02 * 21 * LIMIT
        for task in tasks:
            task.cancel()
        await sim.end()

    asyncio.run(run())


def test_earlier_tries_lengthen_no_wait() -> None:
    """Who waits has one time for all of it."""

    async def run() -> None:
        sim = RequestSimulation(RequestLimits(0.001, 0.001), WEIGHTS, wait_seconds_max=2.0)
        live = OriginRequest("GET", "bucket", "x/k", slot="a")
        for _ in range(5):
            assert sim.rates[0].passes(live)
            sim.rates[0].refused(live, sim.clock.monotonic())
        await sim.clock.advance(0)
        await sim.clock.advance(2.0)
        began, ended = sim.clock.monotonic(), list[float]()

        async def wait(waited_seconds: float) -> None:
            with suppress(OriginBusy):
                while True:  # a rate lets one pass now and then
                    await sim.rates[0].wait(live, waited_seconds + sim.clock.monotonic() - began)
            ended.append(sim.clock.monotonic() - began + waited_seconds)

        tasks = [asyncio.create_task(wait(seconds)) for seconds in (0.0, 1.5) for _ in range(5)]
        for _ in range(10):
            await sim.clock.advance(0.4)
        await asyncio.gather(*tasks)
        assert len(ended) == len(tasks)
        assert max(ended) <= 2.0 + 0.5
        await sim.end()

    asyncio.run(run())


@pytest.mark.slow
def test_an_origin_that_counts_by_the_second_is_believed_what_it_takes_in_one() -> None:
    """All of a second's requests at its beginning, and none until the next."""

    seconds: Counter[int] = Counter()

    class BySecond(RequestLimits):
        """Counts anew with each second."""

        def takes(self, method: str, bucket: str, key: str, now: float) -> bool:
            seconds[int(now)] += 1
            return seconds[int(now)] <= self.reads_per_second

    async def run() -> None:
        sim = RequestSimulation(BySecond(LIMIT, LIMIT), WEIGHTS, 2)
        crowd(sim, "a", "x/k", 15)
        await sim.pass_time(3 * SETTLING_SECONDS)
        got = await sim.pass_time(3 * SETTLING_SECONDS)
        assert got.all_taken >= 0.7 * LIMIT
        assert got.refused <= 0.03 * got.all_taken
        await sim.end()

    asyncio.run(run())


@given(st.floats(0.0, 1e8), st.floats(RATE_MIN, 1e6))
def test_a_course_is_one_word_that_says_all(began: float, top: float) -> None:
    """To a millisecond, and a few millionths of the rate; it fits a cell, and a later one is greater."""
    course = RateCurve.of(began, top)
    read = RateCurve(course.word)
    assert read.began == pytest.approx(began, abs=1e-3)
    assert read.top == pytest.approx(top, rel=1e-5)
    assert 0 <= course.word < 2**63
    assert RateCurve.of(began + 0.01, RATE_MIN).word > course.word
    assert not read.is_measuring
    assert RateCurve.of(began, float("inf")).is_measuring


def test_a_course_grows_back_within_seconds_and_beyond_within_minutes() -> None:
    """From what is left after a cut to what was refused, to four times that, and from the least to a thousand."""
    course = RateCurve.of(100.0, 1000.0)
    assert course.rate(100.0) == pytest.approx(KEPT * 1000, rel=1e-3)
    assert course.rate(100.0 + GROWTH_SECONDS) == pytest.approx(1000, rel=1e-3)
    assert course.rate(130.0) >= 4000
    assert RateCurve.of(100.0, RATE_MIN).rate(100.0 + 150.0) >= 1000
    assert RateCurve.of(100.0, RATE_MIN).rate(1e6) == RATE_MAX


@pytest.mark.parametrize(
    ("request_", "prefix"),
    [
        (OriginRequest("GET", "b", "train/imagenet/a.tar"), "train/"),
        (OriginRequest("GET", "b", "a.tar"), ""),
        (OriginRequest("GET", "b", None, [("list-type", "2"), ("prefix", "train/im")]), "train/"),
        (OriginRequest("GET", "b", None, [("list-type", "2"), ("prefix", "tr")]), ""),
        (OriginRequest("POST", "b", None, [("delete", None)]), ""),
        (OriginRequest("GET"), ""),
    ],
    ids=str,
)
def test_a_prefix_is_the_first_part_of_the_key(request_: OriginRequest, prefix: str) -> None:
    """Or of what is listed; without one it is the bucket's root."""
    assert prefix_of(request_) == prefix


def test_asking_costs_next_to_nothing_where_nothing_was_refused() -> None:
    """Less than a microsecond in five processes. The bound is ten times that, for machines that do much else."""
    rates = RequestRates(WEIGHTS, SystemClock(), shared_cells(2, 5)[0], wait_seconds_max=1.0)
    request, times = OriginRequest("GET", "bucket", "x/k", slot="a"), []
    for _ in range(5):
        began = time.process_time()
        for _ in range(10_000):
            rates.passes(request)
        times.append((time.process_time() - began) / 10_000)
    print(f"{min(times) * 1e9:.0f} ns")
    assert min(times) < 10e-6
