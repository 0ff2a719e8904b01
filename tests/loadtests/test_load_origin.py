from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import Reading, WrongAnswer, in_parallel, reader
from loadtests.harness.stream import stream_seconds
from loadtests.harness.trainer import UNET3D, Model, train
from tests.support.waiting import eventually

SMALL = Family("small/", 20, 100_000)
LARGE = Family("large/", 1, 9_000_000)


@pytest.fixture(scope="module")
def started() -> Iterator[LoadOrigin]:
    with LoadOrigin([SMALL, LARGE]) as origin:
        yield origin


@pytest.fixture
def origin(started: LoadOrigin) -> LoadOrigin:
    started.shape()
    return started


def read(origin: LoadOrigin, work: list[tuple[LoadObject, int, int | None]], connections: int = 1) -> list[Reading]:
    async def run() -> list[Reading]:
        async with reader(origin.address, connections) as client:
            return await in_parallel(work, client, connections)

    return asyncio.run(run())


def small() -> list[tuple[LoadObject, int, int | None]]:
    return [(load_object(path, SMALL.size_bytes), 0, None) for path in SMALL.paths()]


@pytest.mark.slow
def test_what_is_read_is_counted(origin: LoadOrigin) -> None:
    """Whole objects and a range longer than the pattern's period arrive in full, and the origin counts each byte."""
    before = origin.settled_counts()
    readings = read(origin, [*small(), (load_object(LARGE.path(0), LARGE.size_bytes), 5, 8_500_000)], connections=4)
    after = origin.settled_counts()
    assert sum(one.size_bytes for one in readings) == 20 * 100_000 + 8_500_000
    assert (after.gets - before.gets, after.sent_bytes - before.sent_bytes) == (21, 20 * 100_000 + 8_500_000)
    assert stream_seconds(origin.address, load_object(LARGE.path(0), LARGE.size_bytes)) > 0


def test_other_bytes_or_another_length_are_no_reading(origin: LoadOrigin) -> None:
    """A server that answers with the wrong object, length or status is not timed but refused."""
    with pytest.raises(ExceptionGroup) as wrong:
        read(origin, [(load_object(SMALL.path(0), SMALL.size_bytes + 1), 0, None)])
    assert wrong.group_contains(WrongAnswer, match="with 100000 bytes")
    lying = load_object(SMALL.path(0), SMALL.size_bytes)
    with pytest.raises(ExceptionGroup) as wrong:
        read(origin, [(LoadObject(lying.path, lying.size_bytes, lying.etag, lying.phase + 1), 0, None)])
    assert wrong.group_contains(WrongAnswer, match="other bytes")
    with pytest.raises(ExceptionGroup) as wrong:
        read(origin, [(load_object("/load/absent", 10), 0, None)])
    assert wrong.group_contains(WrongAnswer, match="404")


def test_what_is_put_is_given_back_until_it_is_deleted(origin: LoadOrigin) -> None:
    """For peers that keep objects of their own there: whole, in ranges, written anew."""
    url, body = f"{origin.url}/load/chunks/1", bytes(range(256)) * 2000
    with httpx.Client(trust_env=False) as client:
        for content in (b"before", body):
            assert client.put(url, content=content).status_code == 200
        assert client.get(url).content == body
        assert client.get(url, headers={"range": "bytes=300-999"}).content == body[300:1000]
        assert client.delete(url).status_code == 204
        assert client.get(url).status_code == 404


def test_connections_that_end_within_an_answer_are_counted(origin: LoadOrigin) -> None:
    """Whoever leaves before the last byte has had the origin send for nothing."""
    before = origin.counts().lost
    origin.shape(stall_every=1)
    with socket.create_connection(origin.address) as wire:
        wire.sendall(f"GET {LARGE.path(0)} HTTP/1.1\r\n\r\n".encode())
        assert wire.recv(1000)
    eventually(lambda: origin.counts().lost > before)
    assert origin.counts().lost == before + 1


def test_latency_delays_the_first_byte(origin: LoadOrigin) -> None:
    """No answer begins before the latency is over."""
    origin.shape(latency_seconds=0.05)
    assert min(one.first_byte_seconds for one in read(origin, small(), connections=20)) >= 0.05


def test_pace_is_per_connection_and_rate_for_all_of_them(origin: LoadOrigin) -> None:
    """100,000 bytes at 1 MB/s take a tenth of a second on each of twenty connections; 20 requests at 100/s a fifth."""
    origin.shape(bytes_per_second=1e6)
    large = (load_object(LARGE.path(0), LARGE.size_bytes), 0, 400_000)
    readings = read(origin, [large, large], connections=2)
    assert min(one.seconds for one in readings) >= 0.1  # the first and the last piece do not wait
    origin.shape(requests_per_second=100)
    started = time.perf_counter()
    read(origin, small(), connections=20)
    assert time.perf_counter() - started >= 0.19


@pytest.mark.slow
def test_a_trainer_reads_each_record_once_and_starves_at_a_slow_origin(origin: LoadOrigin) -> None:
    """Utilisation is near 1 where data waits for compute, and low where compute waits for data."""
    job = Model("small", SMALL.size_bytes, 2, 0.02, SMALL.count)
    before = origin.settled_counts().gets
    fast = train(origin.address, job, loaders=4, seed=1)
    assert origin.settled_counts().gets - before == SMALL.count
    origin.shape(requests_per_second=8)  # on a busy machine what computes for 20 ms takes longer
    slow = train(origin.address, job, loaders=4, seed=2)
    assert slow.utilisation < 0.5
    assert slow.utilisation < fast.utilisation <= 1
    assert fast.seconds >= 9 * 0.02  # from the first batch on


def test_a_scaled_model_keeps_its_demand() -> None:
    """Smaller records with as much less compute ask for the same bytes per second; slower accelerators for fewer."""
    smaller = UNET3D.scaled(slower=1, smaller=10)
    assert smaller.demand_bytes_per_second == pytest.approx(UNET3D.demand_bytes_per_second, rel=1e-6)
    assert UNET3D.scaled(slower=8).demand_bytes_per_second == pytest.approx(UNET3D.demand_bytes_per_second / 8)
