"""Callers with limits in front of a gateway of two workers, and what it must keep to while they want more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
from botocore.config import Config

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

MIB = 2**20
BUCKET = "bucket"
REGION = "us-east-1"
KEYS = {
    "job": "job-secret-0123456789",
    "fast": "fast-secret-0123456789",
    "slow": "slow-secret-0123456789",
    "heavy": "heavy-secret-0123456789",
}
LIMITS: dict[str, dict[str, Any]] = {
    "job": {"max_concurrent_requests": 4, "requests_per_second": 60},
    "fast": {},
    "slow": {"read_bandwidth": "4MiB/s", "write_bandwidth": "4MiB/s"},
    "heavy": {"max_concurrent_requests": 2, "read_bandwidth": "8MiB/s", "write_bandwidth": "8MiB/s"},
}
"""`heavy` holds its two places for longer than another request waits for one: it is refused, and must come again."""

HEAVY_CLIENTS = 3 * 2
HEAVY_OBJECTS = 2
"""Of each client: written, then read."""

HEAVY_BYTES = 7 * MIB
MORE_BYTES_MAX = 24 * MIB
"""What a worker may take more for itself under overload: two bodies under way in pieces, and Python's own. That is less
than what the four others have, who wait or were refused."""

OBJECTS = 60
_LOOK_SECONDS = 0.05


@contextmanager
def limited_origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        for number in range(OBJECTS):
            one.model.put_generated(BUCKET, f"small/{number}", 100_000, seed=number)
        one.model.put_generated(BUCKET, "large", 12 * MIB, seed=99)
        yield one


@contextmanager
def limited_gateway(origin: StrictOrigin) -> Iterator[GatewayProcess]:
    credentials = [
        {"access_key_id": key, "secret_access_key": secret, "allow": ["s3://"], **LIMITS[key]}
        for key, secret in KEYS.items()
    ]
    config: dict[str, Any] = {
        "server": {"workers": 2, "caller_wait_max": "2s"},
        "origin": {
            "endpoint_url": origin.endpoint_url,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        },
        "credentials": credentials,
        "caller_classes": [{"name": "batch", "app": "batch", "max_concurrent_requests": 2}],
    }
    with GatewayProcess(config) as one:
        yield one


def client(gateway: GatewayProcess, key: str, connections: int = 12, app: str | None = None, attempts: int = 12) -> Any:
    config = Config(
        max_pool_connections=connections,
        retries={"mode": "standard", "max_attempts": attempts},
        s3={"addressing_style": "path"},
        user_agent_appid=app,
    )
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=key,
        aws_secret_access_key=KEYS[key],
        region_name=REGION,
        config=config,
    )


def metric(gateway: GatewayProcess, beginning: str) -> float:
    """The sum of all lines that begin so."""
    lines = httpx.get(f"{gateway.admin_url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning))


def heavy_content(prefix: str) -> Mapping[str, bytes]:
    """By key, what the clients of `heavy` write: no two alike."""
    names = [f"{prefix}/{client}-{number}" for client in range(HEAVY_CLIENTS) for number in range(HEAVY_OBJECTS)]
    return {name: (name.encode() + b"|") * (HEAVY_BYTES // (len(name) + 1)) for name in names}


@contextmanager
def overloaded(gateway: GatewayProcess, origin: StrictOrigin, content: Mapping[str, bytes]) -> Iterator[None]:
    """The clients of `heavy` write and read `content` within. Some were refused and came again; the origin has every
    byte; no worker has held what was waiting; and nothing is left of it.
    """
    workers = [pid for pid in gateway.worker_pids() if pid is not None]
    refused, before = metric(gateway, REFUSED), {pid: own_bytes(pid) for pid in workers}
    over, most = threading.Event(), dict(before)

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            for pid in workers:
                most[pid] = max(most[pid], own_bytes(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    print({pid: f"{(most[pid] - before[pid]) / MIB:.1f} MiB more" for pid in workers})
    assert [pid for pid in gateway.worker_pids() if pid is not None] == workers
    assert all(most[pid] - before[pid] < MORE_BYTES_MAX for pid in workers)
    assert metric(gateway, REFUSED) > refused
    assert metric(gateway, "forebay_caller_running{") == 0
    assert metric(gateway, "forebay_caller_waiting{") == 0
    for key, data in content.items():
        assert origin.model.data(BUCKET, key) == data, key


REFUSED = 'forebay_caller_refused_total{limit="concurrency",name="heavy"'


def own_bytes(pid: int) -> int:
    """What a process has in memory for itself (RssAnon)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024
