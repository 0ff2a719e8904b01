"""Many clients over several workers on one cold object: the origin is not made to pay for the crowd."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from gateway.origin.hedging import SHARE_MAX
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.living_files import living_files
from tests.support.memory_origin.content import GeneratedContent
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

CLIENTS = 32
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
                **origin.settings,
                "stall_timeout": "60s",  # a machine that does much else keeps the origin from sending
            },
            "cache": {"capacity": "256MiB", "block_size": "8MiB"},
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


def client_of(s3_url: str) -> Any:
    config = Config(
        max_pool_connections=CLIENTS, retries={"total_max_attempts": 1}, response_checksum_validation="when_required"
    )
    return boto3.client(
        "s3",
        endpoint_url=s3_url,
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


def answers_of_all(s3_url: str) -> list[str]:
    """What all clients got, who asked at once."""
    expected = memoryview(GeneratedContent(OBJECT_SIZE_BYTES, seed=5).read(0, OBJECT_SIZE_BYTES))
    client, at_the_door = client_of(s3_url), threading.Barrier(CLIENTS)
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda _: get(client, expected, at_the_door), range(CLIENTS)))


@contextmanager
def crowd(gateway: GatewayProcess) -> Iterator[Future[list[str]]]:
    """All clients, in a process of their own: threads that compare bytes would keep the origin beside them waiting for
    the interpreter's lock, a second and more, and a read that is silent for a second is sent again.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool.submit(answers_of_all, gateway.s3_url)


def ranges_asked(origin: StrictOrigin) -> list[tuple[int, int]]:
    calls = [call for call in origin.model.calls if call.method == "GET" and call.key is not None]
    asked = [call.headers["range"].removeprefix("bytes=") for call in calls]
    return sorted((int(first), int(last)) for first, _, last in (one.partition("-") for one in asked))


BLOCKS = [
    (first, min(first + BLOCK_SIZE_BYTES, OBJECT_SIZE_BYTES) - 1)
    for first in range(0, OBJECT_SIZE_BYTES, BLOCK_SIZE_BYTES)
]


def assert_within_blocks(asked: list[tuple[int, int]]) -> None:
    """All blocks, and besides them only what a read of a block may still want: the block, or the rest of it."""
    assert set(BLOCKS) <= set(asked)
    ends = {last for _, last in BLOCKS}
    assert all(last in ends and last - first < BLOCK_SIZE_BYTES for first, last in asked)


def hedges_max(origin: StrictOrigin, processes: int) -> float:
    """How many reads so many processes may send again, however long the origin was silent: one each, and a share."""
    return processes + SHARE_MAX * len(origin.model.calls)


def hedges(gateway: GatewayProcess) -> float:
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        lines = client.get(f"{gateway.admin_url}/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("forebay_origin_hedges_total{"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_5_3_a_cold_object_crosses_once_for_all_clients(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """32 clients over four workers on one cold 64 MB object: each block is asked for once, every answer is right.

    Where the machine keeps the origin from sending for a second, a worker takes its read for stuck and hedges it
    (decision 27). Nothing else is ever asked for again.
    """
    gateway, origin = running
    with crowd(gateway) as waiting:
        assert waiting.result() == ["right"] * CLIENTS
    asked = ranges_asked(origin)
    assert_within_blocks(asked)
    assert len(asked) - len(BLOCKS) <= hedges(gateway) <= hedges_max(origin, WORKERS)
    print(f"the origin sent {OBJECT_SIZE_BYTES} bytes in {len(asked)} answers for {CLIENTS} clients")


def kill_leading_worker(gateway: GatewayProcess) -> None:
    """Kill a worker that fills a block right now, has written some of it, and has a second's work to do at least."""
    while True:
        pids = gateway.worker_pids()
        for path, status in living_files(gateway.directory / "blocks" / "partial"):
            if stat.S_ISDIR(status.st_mode):
                continue
            pid = pids[int(path.parent.name.removeprefix("w"))]
            if pid is not None and BEGUN_BYTES < status.st_size < BLOCK_SIZE_BYTES // 2:
                with suppress(ProcessLookupError):  # it was killed before, and nobody has noticed yet
                    os.kill(pid, signal.SIGKILL)
                    return
        threading.Event().wait(0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_5_3_killed_workers_cost_the_others_of_a_crowd_nothing(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """Leading workers killed while the crowd reads: all others are answered rightly, only lost blocks cross again."""
    gateway, origin = running
    rng, kills = random.Random(SEED), 2
    with crowd(gateway) as waiting:
        for _ in range(kills):
            threading.Event().wait(rng.uniform(0.8, 1.4))
            kill_leading_worker(gateway)
        answers = waiting.result()
    assert "wrong" not in answers
    assert 0 < answers.count("right") < CLIENTS
    asked = ranges_asked(origin)
    assert_within_blocks(asked)
    again = len(asked) - len(BLOCKS)
    assert 0 < again <= kills * BLOCKS_AT_ONCE + hedges_max(origin, WORKERS + kills)
    print(f"{answers.count('broken')} clients broken; ranges asked {asked}")
