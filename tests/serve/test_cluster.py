"""Whole gateways that read from each other: the bucket gives each byte once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.counted_origin import CountedOrigin, counted_origin
from tests.serve.test_peer_port import free_port
from tests.support.gateway_process import GatewayProcess

PATIENCE_SECONDS = 60.0
MIB = 1024 * 1024
SECRET = "the secret of the cluster: 32 characters or more"


class Cluster:
    """Gateways of one cluster, before one origin."""

    def __init__(self, origin: CountedOrigin, gateways: list[GatewayProcess]) -> None:
        self.origin = origin
        self.gateways = gateways

    def get(self, number: int, key: str, **headers: str) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
            return client.get(f"{self.gateways[number].s3_url}/bucket/{key}", headers=headers)

    def read(self, number: int, key: str) -> str:
        """Read an object whole; where it came from."""
        answer = self.get(number, key)
        content = self.origin.content(f"/bucket/{key}")
        assert answer.status_code == 200, answer.text
        assert answer.content == content
        assert not [name for name in answer.headers if name.startswith("x-forebay-") and name not in _FOR_CLIENTS]
        return answer.headers["x-forebay-cache"].partition(";")[0]


_FOR_CLIENTS = {"x-forebay-cache", "x-forebay-origin-request-id", "x-forebay-request-id"}


@contextmanager
def cluster_of(tmp_path: Path, count: int, **slot: Any) -> Iterator[Cluster]:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    with ExitStack() as stack:
        origin = stack.enter_context(counted_origin())
        gateways = []
        for number, address in enumerate(addresses):
            cluster = {"name": "train", "secret_file": str(secret), "listen": address, "advertise": address}
            config: dict[str, Mapping[str, Any] | list[Mapping[str, Any]]] = {
                "origin": {"endpoint_url": origin.url},
                "server": {"allow_unsigned": True, "workers": 2},
                "cache": {"block_size": "1MiB", "capacity": "256MiB"},
                "slots": [{"name": "data", "prefix": "s3://bucket/", **slot}],
                "cluster": {**cluster, "members": addresses},
            }
            gateways.append(stack.enter_context(GatewayProcess(config, directory=tmp_path / str(number))))
        yield Cluster(origin, gateways)


READ_ONLY = {"mode": "read-only", "consistency": "ttl", "metadata_ttl": "60s"}


def test_each_byte_comes_from_the_bucket_once(tmp_path: Path) -> None:
    with cluster_of(tmp_path, 3, **READ_ONLY) as cluster:
        keys = [f"o{number}-{size}" for number, size in enumerate((10, 70_000, 300_000, MIB, 5 * MIB + 1, 9 * MIB))]
        for number in range(3):
            for key in keys:
                cluster.read(number, key)
        assert cluster.origin.repeated() == {}
        assert {cluster.read(number, key) for number in range(3) for key in keys} == {"hit"}
        assert cluster.origin.repeated() == {}


def test_many_readers_at_once_get_each_byte_from_the_bucket_once(tmp_path: Path) -> None:
    with cluster_of(tmp_path, 3, **READ_ONLY) as cluster, ThreadPoolExecutor(12) as pool:
        keys = [f"o{number}-{4 * MIB}" for number in range(4)]
        reads = [pool.submit(cluster.read, number, key) for key in keys for number in (0, 1, 2) * 3]
        assert {read.result() for read in reads} <= {"hit", "partial", "miss", "peer"}
        assert cluster.origin.repeated() == {}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_gone_fails_no_read(tmp_path: Path, how: signal.Signals) -> None:
    with cluster_of(tmp_path, 3, **READ_ONLY) as cluster:
        keys = [f"o{number}-{3 * MIB}" for number in range(6)]
        for key in keys[:3]:
            cluster.read(0, key)
        gone = cluster.gateways[2]
        pids = [gone.pid, *(child for child in children(gone.pid))]
        for pid in pids:
            os.kill(pid, how)
        try:
            for key in keys:
                cluster.read(1, key)
        finally:
            for pid in pids:
                if how == signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found
