"""Bandwidth ceilings of a whole gateway: kept by all its processes together, whatever happens to one of them.

The origin serves as fast as it can. Bounds are on bytes over time, from outside: a slow machine makes them easier to
keep, and only the lower bounds ask for anything, which is far less than what is there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.policy.token_bucket import BURST_SECONDS
from gateway.serve.shared_directory import in_memory_directory
from gateway.telemetry import metric_reading, metrics
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

WORKERS = 4
MIB = 2**20
CEILING = 16 * MIB
OBJECT_BYTES = 64 * MIB
PIECE_BYTES_MAX = MIB
"""The most that one connection hands over at once."""

TOLERANCE = 1.1
PATIENCE_SECONDS = 120.0


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin(keep_bodies=False) as one:
        for name in ("slow", "free"):
            for i in range(4):
                one.model.put_generated(name, f"object{i}", OBJECT_BYTES, seed=i)
        yield one


def gateway_with(origin: StrictOrigin, *, workers: int = WORKERS, link: dict[str, str] | None = None) -> GatewayProcess:
    """The slot `slow` has ceilings; what is in the bucket `free` has none but those of the link."""
    slow = {"name": "slow", "prefix": "s3://slow/", "read_bandwidth": "16MiB/s", "write_bandwidth": "16MiB/s"}
    config: dict[str, Any] = {
        "server": {"workers": workers, "allow_unsigned": True},
        "origin": {
            **origin.settings,
            **(link or {}),
        },
        "cache": {"capacity": "1GiB", "block_size": "8MiB", "readahead": 0},
        "slots": [slow],
    }
    return GatewayProcess(config)


def read(url: str) -> float:
    """Read it all over a connection of its own; returns the bytes per second."""
    began, size = time.monotonic(), 0
    with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client, client.stream("GET", url) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            size += len(piece)
    assert size == OBJECT_BYTES
    return size / (time.monotonic() - began)


def slow_bytes(gateway: GatewayProcess) -> float:
    """What all workers have counted, read from the files that they share: it needs no living background process."""
    by_slot, *_ = metric_reading.by_label(in_memory_directory(gateway.directory), "slot", metrics.ORIGIN_BYTES)
    return by_slot.get("slow", 0.0)


def watch(gateway: GatewayProcess, running: list[Future[float]]) -> list[tuple[float, float]]:
    """(time, bytes) again and again until all have ended."""
    samples = []
    while not all(one.done() for one in running):
        samples.append((time.monotonic(), slow_bytes(gateway)))
        time.sleep(0.05)
    return samples


def assert_never_above(samples: list[tuple[float, float]], ceiling: float, streams: int) -> None:
    """In no span of time. Bytes count when they have arrived: each stream may have a piece at the gate."""
    slack = TOLERANCE * ceiling * BURST_SECONDS + (streams + WORKERS) * PIECE_BYTES_MAX
    for i, (start, before) in enumerate(samples):
        for end, after in samples[i:]:
            assert after - before <= TOLERANCE * ceiling * (end - start + 0.1) + slack


def ranges_asked(origin: StrictOrigin, bucket: str) -> int:
    """Bytes that the origin was asked for."""
    asked = [call.headers["range"] for call in origin.model.calls if call.method == "GET" and call.bucket == bucket]
    ends = [one.removeprefix("bytes=").split("-") for one in asked]
    return sum(int(last) - int(first) + 1 for first, last in ends)


@pytest.mark.slow
def test_10_1_one_busy_worker_has_the_ceiling_of_all_and_other_slots_have_theirs(origin: StrictOrigin) -> None:
    """10.1 It has what the idle workers leave, which is all of it. Other slots are not held up."""
    with gateway_with(origin) as gateway, ThreadPoolExecutor(2) as pool:
        slow = pool.submit(read, f"{gateway.s3_url}/slow/object0")
        free = pool.submit(read, f"{gateway.s3_url}/free/object0")
        assert free.result() > 2 * CEILING
        assert not slow.done()
        assert 0.8 * CEILING < slow.result() <= TOLERANCE * CEILING
        print(f"alone: {slow.result() / CEILING:.0%} of the ceiling; beside it: {free.result() / CEILING:.0%}")
    assert ranges_asked(origin, "slow") == OBJECT_BYTES


@pytest.mark.slow
def test_10_2_a_killed_background_process_lets_nobody_above_the_ceiling_and_stops_nobody(origin: StrictOrigin) -> None:
    """10.2 Killed twice while several workers read: all reads end, at the same rate."""
    with gateway_with(origin) as gateway, ThreadPoolExecutor(5) as pool:
        began = time.monotonic()
        running = [pool.submit(read, f"{gateway.s3_url}/slow/object{i}") for i in range(4)]
        watching = pool.submit(watch, gateway, running)
        for _ in range(2):
            time.sleep(2.0)
            background = gateway.status()["gateway"]["processes"][-1]
            os.kill(background["process_id"], signal.SIGKILL)
            gateway.wait_for_worker(WORKERS, other_than=background["process_id"])
        for one in running:
            one.result()
        rate = 4 * OBJECT_BYTES / (time.monotonic() - began)
        samples = watching.result()
    print(f"{rate / CEILING:.0%} of the ceiling over all, {len(samples)} samples")
    assert 0.8 * CEILING < rate <= TOLERANCE * CEILING
    assert len(samples) > 20
    assert_never_above(samples, CEILING, streams=4)
    assert ranges_asked(origin, "slow") == 4 * OBJECT_BYTES


@pytest.mark.slow
def test_10_2_a_background_process_that_is_stuck_is_as_good_as_none(origin: StrictOrigin) -> None:
    """10.2 Stopped for longer than any wait, it goes on as if nothing had been: nobody is above the ceiling."""
    with gateway_with(origin) as gateway, ThreadPoolExecutor(3) as pool:
        background = gateway.status()["gateway"]["processes"][-1]["process_id"]
        running = [pool.submit(read, f"{gateway.s3_url}/slow/object{i}") for i in range(2)]
        watching = pool.submit(watch, gateway, running)
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT):
            time.sleep(1.5)
            os.kill(background, number)
        for one in running:
            one.result()
        samples = watching.result()
    assert len(samples) > 20
    assert_never_above(samples, CEILING, streams=2)


@pytest.mark.slow
def test_10_2_a_killed_worker_takes_its_part_with_it_for_a_moment_only(origin: StrictOrigin) -> None:
    """10.2 The others have what it had; its successor shares it like all others."""
    with gateway_with(origin, workers=2) as gateway, ThreadPoolExecutor(3) as pool:
        killed = gateway.kill_worker(0)
        running = [pool.submit(read, f"{gateway.s3_url}/slow/object{i}") for i in range(2)]
        samples = watch(gateway, running)
        assert gateway.wait_for_worker(0, other_than=killed)
    rate = sum(one.result() for one in running)
    assert rate > 0.5 * CEILING
    assert_never_above(samples, CEILING, streams=2)


def put(url: str, size_bytes: int) -> None:
    pieces = (bytes(64 * 1024) for _ in range(size_bytes // (64 * 1024)))
    headers = {"content-length": str(size_bytes)}
    with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        assert client.put(url, content=pieces, headers=headers).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_10_1_the_links_ceiling_holds_for_all_slots_together(origin: StrictOrigin, workers: int) -> None:
    """10.1 Writes of two slots: one below its own ceiling, one without, both on the link."""
    with (
        gateway_with(origin, workers=workers, link={"write_bandwidth": "8MiB/s"}) as gateway,
        ThreadPoolExecutor(3) as pool,
    ):
        size, began = 12 * MIB, time.monotonic()
        running = [pool.submit(put, f"{gateway.s3_url}/{bucket}/new", size) for bucket in ("slow", "free")]
        for one in running:
            one.result()
        rate = 2 * size / (time.monotonic() - began)
    print(f"{workers} workers: {rate / (8 * MIB):.0%} of the link's ceiling")
    assert 0.4 * 8 * MIB < rate <= TOLERANCE * 8 * MIB
