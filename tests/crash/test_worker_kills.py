"""Workers killed with -9 in the middle of fills and writes, again and again (docs/semantics.md, clause 5.2).

The schedule comes from a seed, which a failure prints; FOREBAY_KILL_SEED and FOREBAY_KILLS repeat or lengthen a run.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

KILLS = int(os.environ.get("FOREBAY_KILLS", "12"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))

WORKERS = 2
READERS = 4
WRITERS = 2
OBJECTS = 24
OBJECT_SIZE_BYTES = 3 * 1024**2 + 12_345
BLOCK_SIZE_BYTES = 1024**2
CAPACITY_BYTES = 32 * BLOCK_SIZE_BYTES
"""Less than half of the objects fit: every run fills, evicts and refills."""


def content_of(name: str, size_bytes: int = OBJECT_SIZE_BYTES) -> bytes:
    return random.Random(name).randbytes(size_bytes)


@pytest.fixture
def running() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin() as origin:
        for number in range(OBJECTS):
            origin.model.put("bucket", f"read/{number}", content_of(f"read/{number}"))
        origin.bytes_per_second = 40e6
        config: dict[str, dict[str, Any]] = {
            "server": {"workers": WORKERS},
            "origin": {
                "endpoint_url": origin.endpoint_url,
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
            "cache": {"capacity": str(CAPACITY_BYTES), "block_size": str(BLOCK_SIZE_BYTES)},
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


def client_of(gateway: GatewayProcess) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=20, read_timeout=30),
    )


class Traffic:
    """Readers that compare every complete answer, and writers that remember what was acknowledged."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.stop = threading.Event()
        self.wrong: list[str] = []
        self.reads = self.broken = 0
        self.acknowledged: dict[str, str] = {}
        self._client = client_of(gateway)
        loops: list[Callable[[int], None]] = [*[self._read] * READERS, *[self._write] * WRITERS]
        self._threads = [threading.Thread(target=loop, args=(number,)) for number, loop in enumerate(loops)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client is stuck"

    def _read(self, number: int) -> None:
        choose = random.Random(SEED + number)
        while not self.stop.is_set():
            key = f"read/{choose.randrange(OBJECTS)}"
            expected = content_of(key)
            first = choose.randrange(OBJECT_SIZE_BYTES)
            last = choose.randrange(first, OBJECT_SIZE_BYTES)
            try:
                answer = self._client.get_object(Bucket="bucket", Key=key, Range=f"bytes={first}-{last}")
                body = answer["Body"].read()
            except (BotoCoreError, ClientError):
                self.broken += 1
                continue
            self.reads += 1
            if body != expected[first : last + 1]:
                self.wrong.append(f"{key} bytes {first}-{last}")

    def _write(self, number: int) -> None:
        serial = 0
        while not self.stop.is_set():
            serial += 1
            key = f"write/{number}/{serial % 5}"
            body = content_of(f"{key}#{serial}", 600_000)
            try:
                self._client.put_object(Bucket="bucket", Key=key, Body=body)
            except (BotoCoreError, ClientError):
                self.broken += 1
                self.acknowledged.pop(key, None)  # the old bytes or the new ones: both are right now
                continue
            self.acknowledged[key] = hashlib.md5(body).hexdigest()


def metric(gateway: GatewayProcess, name: str) -> float:
    """A gauge without labels."""
    with httpx.Client(trust_env=False, timeout=10) as client:
        text = client.get(f"{gateway.admin_url}/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


def unfinished_files(gateway: GatewayProcess) -> list[Path]:
    return [path for path in (gateway.directory / "blocks" / "partial").rglob("*") if path.is_file()]


def block_bytes_on_disk(gateway: GatewayProcess) -> int:
    """What the block files take, in whole pages."""
    return sum(
        -(-path.stat().st_size // 4096) * 4096
        for path in (gateway.directory / "blocks" / "data").rglob("*")
        if path.is_file()
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_5_2_killed_workers_cost_their_own_requests_only(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """5.2 No wrong byte, nothing acknowledged lost, nothing stuck, nothing left behind after a restart."""
    gateway, origin = running
    schedule = random.Random(SEED)
    print(f"replay with FOREBAY_KILL_SEED={SEED} FOREBAY_KILLS={KILLS}")
    with Traffic(gateway) as traffic:
        for _ in range(KILLS):
            traffic.stop.wait(schedule.uniform(0.05, 0.6))
            victim = schedule.randrange(WORKERS)
            killed = gateway.kill_worker(victim)
            gateway.wait_for_worker(victim, other_than=killed)
    assert not traffic.wrong
    assert traffic.reads > KILLS, "the readers hardly got through: this run shows nothing"
    client = client_of(gateway)
    for key, digest in traffic.acknowledged.items():
        assert hashlib.md5(client.get_object(Bucket="bucket", Key=key)["Body"].read()).hexdigest() == digest, key
    for number in range(OBJECTS):
        key = f"read/{number}"
        assert client.get_object(Bucket="bucket", Key=key)["Body"].read() == content_of(key)
    assert not origin.model.buckets["bucket"].uploads
    assert gateway.terminate() == 0
    assert not unfinished_files(gateway)
    gateway.start()
    assert not unfinished_files(gateway)
    assert block_bytes_on_disk(gateway) <= CAPACITY_BYTES
    assert metric(gateway, "forebay_cache_usage_bytes") == block_bytes_on_disk(gateway)
    assert metric(gateway, "forebay_cache_reserved_bytes") == 0
