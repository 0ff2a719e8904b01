"""Limits of callers, on a clock that stands still: processes are views of the same cells."""

from __future__ import annotations

import asyncio
import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.callers import (
    LOOK_SECONDS,
    LOST_SECONDS,
    OWN,
    UNSIGNED,
    WAITING_MAX,
    CallerClass,
    CallerLimits,
    CallerRefused,
    Callers,
    CallersPlan,
    Direction,
    LimitName,
    Limits,
    rows_for,
)
from gateway.policy.token_bucket import BURST_SECONDS
from gateway.shared.arena import Numbering, SharedCells, make_shared_memory
from gateway.telemetry import metrics
from tests.support.counting import by_label, counted
from tests.support.manual_clock import ManualClock

WAIT_SECONDS = 5.0


def waiting_now(scope: str, name: str) -> float:
    """The number that waits now."""
    return counted(metrics.CALLER_WAITING, scope=scope, name=name)


class Node:
    """Some processes, and a clock for all."""

    def __init__(self, plan: CallersPlan, clock: ManualClock, descriptor: int, processes: int) -> None:
        self.clock = clock
        self._plan, self._descriptor, self._count = plan, descriptor, processes
        self.processes = [self.begin(number) for number in range(processes)]
        self.beats = [asyncio.create_task(one.beat()) for one in self.processes]

    def begin(self, number: int) -> Callers:
        """Another process with this number."""
        cells = SharedCells.attach(self._descriptor, rows_of(self._plan), self._count, number)
        return Callers(self._plan, self.clock, cells)

    def of(self, credential: str, process: int = 0, agent: str = "") -> CallerLimits:
        found = self.processes[process].find(credential, agent)
        assert found is not None
        return found


def rows_of(plan: CallersPlan) -> int:
    return rows_for(len(plan.credentials), len(plan.classes))


@contextmanager
def memory(plan: CallersPlan, processes: int) -> Iterator[int]:
    descriptor = make_shared_memory(rows_of(plan), processes, 0.0)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def play(plan: CallersPlan, scene: Callable[[Node], Awaitable[None]], processes: int = 1) -> None:
    async def main(descriptor: int) -> None:
        node = Node(plan, ManualClock(), descriptor, processes)
        await node.clock.advance(1.0)
        try:
            await scene(node)
        finally:
            for one in node.beats:
                one.cancel()

    with memory(plan, processes) as descriptor:
        asyncio.run(main(descriptor))


def one_class(limits: Limits, *credentials: str) -> CallersPlan:
    return CallersPlan([(one, Limits()) for one in credentials], [CallerClass("all", limits)], WAIT_SECONDS)


def alone(limits: Limits) -> CallersPlan:
    return CallersPlan([("a", limits)], [], WAIT_SECONDS)


def test_who_is_not_limited_has_no_limits() -> None:
    plan = CallersPlan([("a", Limits()), ("b", Limits(1))], [CallerClass("jobs", Limits(2), app="job")], 5)
    callers = Callers(plan, ManualClock())
    assert callers.find("a", "Boto3/1 app/other") is None
    assert callers.find("a", "x/app app/jobs") is None
    assert callers.find("a", "Boto3/1.4 ua/2.0 os/linux#6.8 app/job") is not None
    of_both = callers.find("b", "app/job")
    assert of_both is not None
    assert [one.scope for one, _ in of_both.accounts] == ["credential", "class"]
    assert callers.find(UNSIGNED, "app/job") is not None
    assert Callers(CallersPlan([("a", Limits())], [CallerClass("x", Limits())], 5), ManualClock()).find("a", "") is None


def test_products_and_the_class_of_all_others() -> None:
    classes = [CallerClass("copies", Limits(1), product="rclone"), CallerClass("rest", Limits(2))]
    callers = Callers(CallersPlan([], classes, 5), ManualClock())
    for agent, name in (("rclone/v1.70", "copies"), ("aws-sdk-go/1.4 (go1.2; linux)", "rest"), ("", "rest")):
        found = callers.find(OWN, agent)
        assert found is not None
        assert found.accounts[0][0].name == name


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    rate=st.floats(0.5, 200), processes=st.integers(1, 3), pauses=st.lists(st.floats(0, 0.5), min_size=3, max_size=40)
)
def test_no_more_pass_in_any_span_than_the_rate_and_its_burst(rate: float, processes: int, pauses: list[float]) -> None:
    async def scene(node: Node) -> None:
        passed: list[float] = []

        async def ask(process: int) -> None:
            limits = node.of("a", process)
            try:
                admission = await limits.enter("read")
            except CallerRefused:
                return
            passed.append(node.clock.monotonic())
            admission.leave()

        asked = []
        for number, pause in enumerate(pauses):
            asked.append(asyncio.create_task(ask(number % processes)))
            await node.clock.advance(pause)
        for _ in range(int(WAIT_SECONDS * 20) + 5):
            await node.clock.advance(0.06)
        assert all(one.done() for one in asked)
        for first, start in enumerate(passed):
            for last, end in enumerate(passed[first:], first):
                assert last - first + 1 <= rate * (end - start + BURST_SECONDS) + processes + 1e-6

    play(alone(Limits(requests_per_second=rate)), scene, processes)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    most=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 0.3)), min_size=5, max_size=40),
)
def test_never_more_at_a_time_and_nothing_is_left_behind(most: int, steps: list[tuple[int, int, float]]) -> None:
    """10.5 Three processes and credentials; some leave while they wait."""

    async def scene(node: Node) -> None:
        running, tasks = 0, list[asyncio.Task[None]]()

        async def request(credential: str, process: int, seconds: float) -> None:
            nonlocal running
            limits = node.of(credential, process)
            try:
                admission = await limits.enter("read")
            except CallerRefused:
                return
            running += 1
            assert running <= most
            try:
                await node.clock.sleep(seconds)
            finally:
                running -= 1
                admission.leave()

        for number, (credential, process, seconds) in enumerate(steps):
            tasks.append(asyncio.create_task(request("abc"[credential], process, seconds)))
            await node.clock.advance(seconds / 4)
            if number % 4 == 3:
                tasks[number // 2].cancel()
        for _ in range(300):
            await node.clock.advance(0.05)
        assert all(one.done() for one in tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(isinstance(one.exception(), AssertionError) for one in tasks if not one.cancelled())
        assert counted(metrics.CALLER_RUNNING) == counted(metrics.CALLER_WAITING) == 0
        for process in range(3):
            admission = node.of("a", process).enter_now("read")
            assert admission is not None
            admission.leave()

    play(one_class(Limits(most), "a", "b", "c"), scene, 3)


@pytest.mark.parametrize("limits", [Limits(2), Limits(requests_per_second=20)], ids=["concurrency", "rate"])
@pytest.mark.parametrize("process", [0, 1])
def test_one_with_a_thousand_waiting_does_not_keep_another_with_one(limits: Limits, process: int) -> None:
    """10.5 In the same process, and in another one."""

    async def scene(node: Node) -> None:
        async def request(credential: str, process: int) -> float:
            of, began = node.of(credential, process), node.clock.monotonic()
            admission = await of.enter("read")
            waited = node.clock.monotonic() - began
            await node.clock.sleep(0.1)
            admission.leave()
            return waited

        crowd = [asyncio.create_task(request("a", 0)) for _ in range(1000)]
        await node.clock.advance(0.5)
        waits = []
        for _ in range(5):
            single = asyncio.create_task(request("b", process))
            for _ in range(30):
                await node.clock.advance(0.02)
            waits.append(single.result())
        assert max(waits) < 0.3, waits
        for one in crowd:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    play(one_class(limits, "a", "b"), scene, 2)


def test_waits_and_queues_are_bounded() -> None:
    """10.5 By number and by `caller_wait_max`."""

    async def scene(node: Node) -> None:
        of = node.of("a")
        assert of.enter_now("read")
        tasks = [asyncio.create_task(of.enter("read")) for _ in range(WAITING_MAX)]
        await node.clock.advance(0.1)
        with pytest.raises(CallerRefused):
            await of.enter("read")
        assert waiting_now("credential", "a") == WAITING_MAX
        await node.clock.advance(WAIT_SECONDS)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, CallerRefused) and one.limit == "concurrency" for one in outcomes)
        assert waiting_now("credential", "a") == 0

    play(alone(Limits(1)), scene)


def test_a_process_that_is_to_end_lets_nobody_wait() -> None:
    """10.5 Neither who comes nor who waits already."""

    async def scene(node: Node) -> None:
        of = node.of("a")
        assert of.enter_now("read")
        waiting = asyncio.create_task(of.enter("read"))
        await node.clock.advance(0.1)
        node.processes[0].close()
        with pytest.raises(CallerRefused):
            await waiting
        with pytest.raises(CallerRefused):
            await of.enter("read")

    play(alone(Limits(1)), scene)


def test_what_a_stopped_process_holds_is_free_after_a_second_and_what_a_dead_one_held_too() -> None:
    async def scene(node: Node) -> None:
        assert node.of("a", 1).enter_now("read")
        node.beats[1].cancel()
        assert not node.of("a", 0).enter_now("read")
        await node.clock.advance(LOST_SECONDS + 0.3)
        admission = node.of("a", 0).enter_now("read")
        assert admission is not None
        admission.leave()
        node.processes[1] = node.begin(1)  # in the place of the dead one
        node.beats[1] = asyncio.create_task(node.processes[1].beat())
        await node.clock.advance(0.5)
        assert node.of("a", 1).enter_now("read")
        assert not node.of("a", 0).enter_now("read")

    play(alone(Limits(1)), scene, 2)


def test_who_waits_in_a_stopped_process_holds_nobody_up() -> None:
    async def scene(node: Node) -> None:
        holder = node.of("a", 0).enter_now("read")
        assert holder is not None
        waiting = asyncio.create_task(node.of("b", 1).enter("read"))
        await node.clock.advance(0.05)
        for gate in node.processes[1]._gates.values():  # it is stopped: it looks no more
            if gate._looking is not None:
                gate._looking.cancel()
        holder.leave()
        behind = asyncio.create_task(node.of("a", 0).enter("read"))
        await node.clock.advance(0.2)
        assert behind.done()
        waiting.cancel()

    play(one_class(Limits(1), "a", "b"), scene, 2)


def test_bytes_pass_at_the_rate_and_by_turns() -> None:
    """Ten bodies of one credential, and one of another: each credential has half."""

    async def scene(node: Node) -> None:
        passed: Counter[str] = Counter()

        async def body(credential: str) -> None:
            admission = await node.of(credential).enter("read", wait_seconds=60)
            while True:
                await admission.pass_bytes("read", 65536)
                passed[credential] += 65536

        tasks = [asyncio.create_task(body(one)) for one in "aaaaaaaaaab"]
        for _ in range(500):
            await node.clock.advance(0.02)
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert passed.total() == pytest.approx(10e6, rel=0.05)
        assert passed["b"] == pytest.approx(passed["a"], rel=0.05)

    play(one_class(Limits(read_bytes_per_second=1e6), "a", "b"), scene)


def test_the_debt_of_small_answers_holds_back_what_comes_next() -> None:
    async def scene(node: Node) -> None:
        of = node.of("a")
        reading = of.enter_now("read")
        assert reading is not None
        assert reading.passes("read", 2_000_000)
        assert not reading.passes("read", 1)
        reading.leave()
        assert not of.enter_now("read")
        writing = of.enter_now("write")
        assert writing is not None
        writing.leave()
        waiting = asyncio.create_task(of.enter("read"))
        await node.clock.advance(1.8)
        assert not waiting.done()
        await node.clock.advance(0.3)
        assert waiting.done()

    play(alone(Limits(read_bytes_per_second=1e6)), scene)


def test_what_was_expected_of_an_answer_that_never_came_is_given_back() -> None:
    """Heads of objects, refused requests, clients that leave: a hundred cost no bytes."""

    async def scene(node: Node) -> None:
        of = node.of("a")
        for _ in range(100):
            admission = of.enter_now("read")
            assert admission is not None
            admission.leave()

    play(alone(Limits(read_bytes_per_second=1e6)), scene)


class Downloads:
    """Connections that ask for one body after the other, and when which bytes of them passed."""

    def __init__(self, node: Node, direction: Direction) -> None:
        self._node = node
        self._direction = direction
        self.passed: list[tuple[float, int]] = []
        self.refused = 0

    async def connection(self, process: int, sizes: Iterator[int], latencies: Iterator[float]) -> None:
        """For ever. Between its turn and its first byte a request takes as long as the origin does."""
        while True:
            size = next(sizes)
            try:
                known = size if self._direction == "write" else None
                admission = await self._node.of("a", process).enter(self._direction, known)
            except CallerRefused:
                self.refused += 1
                continue
            try:
                await self._node.clock.sleep(next(latencies))
                piece_bytes = admission.piece_bytes(self._direction)
                assert piece_bytes is not None
                while size:
                    piece = min(size, piece_bytes)
                    if size > piece_bytes or not admission.passes(self._direction, piece):
                        await admission.pass_bytes(self._direction, piece)
                    self.passed.append((self._node.clock.monotonic(), piece))
                    size -= piece
            finally:
                admission.leave()

    def worst(self, rate: float, most: float) -> float:
        """By how much the bytes of some span exceed `rate` over it and a burst more, and `most`."""
        excess = behind = 0.0
        last = self.passed[0][0]
        for at, count in self.passed:  # a bucket that is never empty but for the spans that are the worst
            behind = max(0.0, behind - rate * (at - last)) + count
            excess, last = max(excess, behind - rate * BURST_SECONDS - most), at
        return excess


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize(
    ("sizes", "rate"),
    [
        ([90_000], 1e6),
        ([1_000], 1e5),
        ([60_000], 2e5),
        ([1_000_000], 1e7),
        ([1_000, 20_000, 300_000, 2_097_152, 1_000], 3e6),
        ([1_000] * 300 + [2_097_152] * 100, 1e7),
    ],
    ids=["90KB", "1KB", "60KB", "1MB", "mixed", "suddenly-large"],
)
@pytest.mark.parametrize("latency_seconds", [0.0, 1.0])
def test_bodies_of_any_size_keep_to_the_rate_in_any_span(
    sizes: list[int], rate: float, direction: Direction, latency_seconds: float
) -> None:
    """10.7: a hundred connections at three workers: at most rate * (t + 0.1), and a piece for each worker."""
    limits = Limits(read_bytes_per_second=rate, write_bytes_per_second=rate)

    async def scene(node: Node) -> None:
        downloads, dice = Downloads(node, direction), random.Random(17)
        latencies = iter(lambda: latency_seconds * dice.random() * (node.clock.monotonic() < 3 or 0.1), None)
        tasks = [
            asyncio.create_task(
                downloads.connection(number % 3, cycle(sizes[number % len(sizes) :] + sizes), latencies)
            )
            for number in range(100)
        ]
        seconds = 8
        for _ in range(seconds * 50):
            await node.clock.advance(0.02)
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        piece_bytes = min(1024 * 1024, max(64 * 1024, rate / 10), max(sizes))
        assert downloads.worst(rate, 3 * piece_bytes) <= 0
        late = sum(count for at, count in downloads.passed if at > 4)
        if not latency_seconds or len(sizes) < 10:  # else a hundred connections do not ask for so much
            assert late >= 0.8 * rate * (seconds + 1 - 4)

    play(alone(limits), scene, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(1e6, 1e6), (1e6, 5e6), (5e6, 1e6)])
def test_bytes_keep_to_the_rates_of_credential_and_class_both(rates: tuple[float, float]) -> None:
    """What waits for one of them does not add up at the other."""
    plan = CallersPlan(
        [("a", Limits(read_bytes_per_second=rates[0])), ("b", Limits())],
        [CallerClass("all", Limits(read_bytes_per_second=rates[1]))],
        WAIT_SECONDS,
    )

    async def scene(node: Node) -> None:
        downloads = Downloads(node, "read")
        tasks = [
            asyncio.create_task(downloads.connection(number % 3, repeat(90_000), repeat(0.0))) for number in range(50)
        ]

        async def other() -> None:
            admission = await node.of("b").enter("read", wait_seconds=60)
            while True:  # holds the class up, with a debt of two seconds, and lets go of it
                await admission.pass_bytes("read", int(2 * rates[1]))
                await node.clock.sleep(2)

        tasks.append(asyncio.create_task(other()))
        for _ in range(400):
            await node.clock.advance(0.02)
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        rate = min(rates)
        assert downloads.worst(rate, 3 * 90_000) <= 0
        assert sum(count for _, count in downloads.passed) >= 2 * rate

    play(plan, scene, 3)


def test_who_leaves_at_the_very_moment_of_the_turn_gives_the_place_back() -> None:
    async def scene(node: Node) -> None:
        of = node.of("a")
        holder = of.enter_now("read")
        assert holder is not None
        waiting = asyncio.create_task(of.enter("read"))
        await node.clock.advance(0.05)
        holder.leave()  # it has the place, and has not heard of it
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert of.enter_now("read")

    play(alone(Limits(1)), scene)


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (Limits(1), "concurrency"),
        (Limits(requests_per_second=0.5), "rate"),
        (Limits(1, 100.0), "concurrency"),
        (Limits(100, 0.5), "rate"),
        (Limits(read_bytes_per_second=1000), "read"),
    ],
)
def test_who_waits_is_told_while_he_waits_and_under_the_limit_that_keeps_him(limits: Limits, limit: LimitName) -> None:
    """Also where all find others waiting, and in a process in which nobody has passed."""

    async def scene(node: Node) -> None:
        holder = node.of("a").enter_now("read")
        assert holder is not None
        while limit == "rate" and node.of("a").enter_now("read"):
            pass
        if limit == "read":
            assert holder.passes("read", 20_000)
        waiting = [asyncio.create_task(node.of("a", number % 2).enter("read")) for number in range(20)]
        await node.clock.advance(0.0)
        for seconds in (1.0, 2.0):
            await node.clock.advance(1.0)
            still = sum(not one.done() for one in waiting)
            assert still >= 19
            assert by_label(metrics.CALLER_WAITING, "limit", scope="credential", name="a") == {limit: still}
            waited = by_label(metrics.CALLER_WAIT_SECONDS, "limit", scope="credential", name="a")
            assert waited == {limit: pytest.approx(20 * seconds, rel=0.1)}
        await node.clock.advance(WAIT_SECONDS)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert list(metrics.CALLER_REFUSED.kept()) == [("credential", "a", limit)]
        assert counted(metrics.CALLER_WAITING) == 0

    play(alone(limits), scene, 2)


def test_long_user_agents_are_not_remembered() -> None:
    """A thousand of 50 KB, which anybody may send."""
    classes = [CallerClass("job", Limits(1), app="job")]
    callers = Callers(CallersPlan([], classes, 5), ManualClock())
    assert callers.find(OWN, "app/job " + "x" * 50_000) is not None
    tracemalloc.start()
    try:
        for number in range(1000):
            assert callers.find(OWN, f"{number}" + "x" * 50_000) is None
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("after", [Limits(), Limits(10, 1000.0, read_bytes_per_second=1e6)], ids=["lifted", "raised"])
def test_who_waits_under_limits_that_are_lifted_passes(after: Limits) -> None:
    """Requests that have not begun, and pieces of those that have begun; what was held counts on."""

    async def scenario() -> None:
        before = CallersPlan([("k", Limits(1, 1.0, read_bytes_per_second=1000))], [], WAIT_SECONDS)
        clock, numbers = ManualClock(), Numbering(1).changed(["k"])
        callers = Callers(before, clock, None, numbers)
        limits = callers.find("k", "")
        assert limits is not None
        admission = limits.enter_now("read", 0)
        assert admission is not None
        await admission.pass_bytes("read", 5000)
        waiting = [asyncio.ensure_future(limits.enter("read")) for _ in range(5)]
        piece = asyncio.ensure_future(admission.pass_bytes("read", 70_000))
        await clock.advance(0.1)
        waiting[1].cancel()
        callers.apply_settings(CallersPlan([("k", after)], [], WAIT_SECONDS), numbers, Numbering(0), 1)
        waiting[2].cancel()
        for _ in range(10):
            await clock.advance(0.1)
        assert [one.cancelled() for one in waiting] == [False, True, True, False, False]
        assert piece.done()
        assert waiting_now("credential", "k") == 0
        held = 4 if after.any else 0
        requests = limits.accounts[0][0].requests
        assert requests is not None
        assert requests.held(clock.monotonic()) == 4
        again = callers.find("k", "")
        assert (again is not None and again.accounts[0][0].requests is requests) == (held > 0)
        for one in (admission, *(one.result() for one in waiting if not one.cancelled())):
            one.leave()
        assert requests.held(clock.monotonic()) == 0
        assert metrics.CALLER_RUNNING.value("credential", "k") == 0

    asyncio.run(scenario())


def test_the_wait_until_a_limit_is_lifted_is_told_under_that_limit() -> None:
    async def scene(node: Node) -> None:
        held = node.of("a").enter_now("read")
        waiting = asyncio.ensure_future(node.of("a").enter("read"))
        await node.clock.advance(0.0)
        await node.clock.advance(LOOK_SECONDS / 2)
        node.processes[0].apply_settings(alone(Limits()), Numbering(1).changed(["a"]), Numbering(0), 1)
        for admission in (held, await waiting):
            assert admission is not None
            admission.leave()
        waited = {labels: cell.get() for labels, cell in metrics.CALLER_WAIT_SECONDS.kept().items() if cell.get()}
        assert waited == {("credential", "a", "concurrency"): pytest.approx(LOOK_SECONDS / 2)}

    play(alone(Limits(1)), scene)


def test_places_that_are_held_count_under_changed_limits() -> None:
    """Also of a credential that was removed meanwhile and comes back, in a process that has not seen that."""
    plans = [alone(Limits(3)), CallersPlan([], [], WAIT_SECONDS), alone(Limits(2))]

    async def scene(node: Node) -> None:
        numbers = Numbering(1).changed(["a"])
        held = [node.of("a", process).enter_now("read") for process in (0, 1)]
        node.processes[0].apply_settings(plans[1], numbers.changed([]), Numbering(0), 1)
        for process in node.processes:
            process.apply_settings(plans[2], numbers, Numbering(0), 2)
        assert node.of("a", 0).enter_now("read") is None
        assert held[1] is not None
        held[1].leave()
        assert node.of("a", 0).enter_now("read") is not None

    play(plans[0], scene, 2)
