"""Many clients over several workers on one cold object: the origin is not made to pay for the crowd."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.content import GeneratedContent
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

CLIENTS = 64
WORKERS = 4
OBJECT_SIZE_BYTES = 64 * 10**6
BLOCK_SIZE_BYTES = 8 * 1024**2
CHUNK_BYTES = 64 * 1024
ORIGIN_BYTES_PER_SECOND = 4e6
"""Per connection: a block takes two seconds."""

BEGUN_BYTES = 4 * CHUNK_BYTES
BLOCKS_AT_ONCE = 8
"""The whole object: what a killed worker may have been fetching."""

SEED = 20261121


@pytest.fixture
def running() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin() as origin:
        origin.model.put_generated("cold", "object", OBJECT_SIZE_BYTES, seed=5)
        origin.bytes_per_second = ORIGIN_BYTES_PER_SECOND
        config: dict[str, dict[str, Any]] = {
            "server": {"workers": WORKERS},
            "origin": {
                "endpoint_url": origin.endpoint_url,
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
            "cache": {"capacity": "256MiB", "block_size": "8MiB"},
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


def client_of(gateway: GatewayProcess) -> Any:
    config = Config(
        max_pool_connections=CLIENTS, retries={"total_max_attempts": 1}, response_checksum_validation="when_required"
    )
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=config,
    )


def get(client: Any, expected: memoryview, at_the_door: threading.Barrier) -> str:
    """`right`, `wrong`, or `broken`: the connection ended before the body did."""
    at_the_door.wait()
    position = 0
    try:
        body = client.get_object(Bucket="cold", Key="object")["Body"]
        while data := body.read(1024**2):
            if data != expected[position : position + len(data)]:
                return "wrong"
            position += len(data)
    except (BotoCoreError, ClientError, OSError):
        return "broken"
    return "right" if position == len(expected) else "wrong"


def crowd(gateway: GatewayProcess, pool: ThreadPoolExecutor) -> list[Any]:
    """All clients, off at once."""
    expected = memoryview(GeneratedContent(OBJECT_SIZE_BYTES, seed=5).read(0, OBJECT_SIZE_BYTES))
    client, at_the_door = client_of(gateway), threading.Barrier(CLIENTS)
    return [pool.submit(get, client, expected, at_the_door) for _ in range(CLIENTS)]


def ranges_asked(origin: StrictOrigin) -> list[tuple[int, int]]:
    calls = [call for call in origin.model.calls if call.method == "GET" and call.key is not None]
    asked = [call.headers["range"].removeprefix("bytes=") for call in calls]
    return sorted((int(first), int(last)) for first, _, last in (one.partition("-") for one in asked))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_5_3_a_cold_object_crosses_once_for_all_clients(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """64 clients over four workers on one cold 64 MB object: the origin sends each byte once, every answer is right."""
    gateway, origin = running
    with ThreadPoolExecutor(CLIENTS) as pool:
        assert [one.result() for one in crowd(gateway, pool)] == ["right"] * CLIENTS
    asked = ranges_asked(origin)
    blocks = [(first, last) for first, last in asked if first % BLOCK_SIZE_BYTES == 0]
    assert sum(last - first + 1 for first, last in blocks) == OBJECT_SIZE_BYTES
    assert [first for first, _ in blocks] == list(range(0, OBJECT_SIZE_BYTES, BLOCK_SIZE_BYTES))
    assert len(asked) - len(blocks) <= len(blocks) // 2, (
        "the rest of a body is asked for again where the machine stood still, no more"
    )
    print(f"the origin sent {OBJECT_SIZE_BYTES} bytes in {len(asked)} answers for {CLIENTS} clients")


def kill_leading_worker(gateway: GatewayProcess) -> None:
    """Kill a worker that fills a block right now, has written some of it, and has a second's work to do at least."""
    while True:
        pids = gateway.worker_pids()
        for path in gateway.directory.rglob("partial/w*/*"):
            pid = pids[int(path.parent.name.removeprefix("w"))]
            if pid is not None and BEGUN_BYTES < _size_bytes(path) < BLOCK_SIZE_BYTES // 2:
                with suppress(ProcessLookupError):  # it was killed before, and nobody has noticed yet
                    os.kill(pid, signal.SIGKILL)
                    return
        threading.Event().wait(0.01)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_5_3_killed_workers_cost_the_others_of_a_crowd_nothing(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """Leading workers killed while the crowd reads: all others are answered rightly, only lost blocks cross again."""
    gateway, origin = running
    rng, kills = random.Random(SEED), 2
    with ThreadPoolExecutor(CLIENTS) as pool:
        waiting = crowd(gateway, pool)
        for _ in range(kills):
            threading.Event().wait(rng.uniform(0.8, 1.4))
            kill_leading_worker(gateway)
        answers = [one.result() for one in waiting]
    assert "wrong" not in answers
    assert 0 < answers.count("right") < CLIENTS
    asked = ranges_asked(origin)
    blocks = range(0, OBJECT_SIZE_BYTES, BLOCK_SIZE_BYTES)
    assert {first for first, _ in asked} == set(blocks)
    assert len(blocks) < len(asked) <= len(blocks) + kills * BLOCKS_AT_ONCE
    print(f"{answers.count('broken')} clients broken; ranges asked {asked}")
