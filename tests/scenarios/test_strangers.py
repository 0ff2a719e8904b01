"""What callers cost whom nobody knows: requests without number that are refused, each as large as it may be."""

from __future__ import annotations

import asyncio
import random
import re
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess

REQUESTS = 4_000
CONNECTIONS = 8
HEAD_BYTES = 60 * 1024
GROWTH_KIB_MAX = 16 * 1024
WARM_UP = 600
"""Requests after which a worker has imported and allocated what it ever needs."""

CREDENTIAL = "Credential={}/20260101/us-east-1/s3/aws4_request"


def by_header(rng: random.Random, filler: str) -> str:
    signed = f"SignedHeaders=host;x-amz-date;{filler[:1000]}, Signature={rng.getrandbits(256):064x}"
    credential = CREDENTIAL.format(f"AK{rng.getrandbits(64)}{filler}")
    return f"GET /bucket/key HTTP/1.1\r\nHost: h\r\nAuthorization: AWS4-HMAC-SHA256 {credential}, {signed}\r\n\r\n"


def by_query(rng: random.Random, filler: str) -> str:
    query = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AK{rng.getrandbits(64)}%2F20260101%2Fus-east-1%2Fs3%2F"
    query += (
        f"aws4_request&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-Signature=0&X-Amz-SignedHeaders=host&{filler}"
    )
    return f"GET /bucket/key?{query} HTTP/1.1\r\nHost: h\r\n\r\n"


def by_names(rng: random.Random, filler: str) -> str:
    """Buckets, hosts, dates and header names that were never seen before."""
    number = rng.getrandbits(64)
    fields = f"Date: {filler[:39]}\r\nx-{number}: {filler[:50_000]}\r\nIf-Modified-Since: {number}\r\n"
    return f"GET /bucket-{number}/key HTTP/1.1\r\nHost: {number}.s3.local\r\n{fields}\r\n"


def by_known_key(rng: random.Random, filler: str) -> str:
    """A key id is no secret."""
    credential = f"Credential=job-a/20260101/{rng.getrandbits(64)}/s3/aws4_request"
    signed = f"SignedHeaders=host;x-amz-date, Signature={filler}"
    fields = f"x-amz-date: 20260101T000000Z\r\nAuthorization: AWS4-HMAC-SHA256 {credential}, {signed}\r\n"
    return f"GET /bucket/key HTTP/1.1\r\nHost: h\r\n{fields}\r\n"


KINDS: tuple[Callable[[random.Random, str], str], ...] = (by_header, by_query, by_names, by_known_key)


async def flood(port: int, seed: int, count: int) -> set[bytes]:
    """Statuses of requests on one connection after the other; each connection is used as long as it lasts."""
    rng, statuses, left = random.Random(seed), set(), count
    while left:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while left:
                filler = f"{rng.getrandbits(200):x}" * (HEAD_BYTES // 50)
                writer.write(rng.choice(KINDS)(rng, filler[: HEAD_BYTES - 2000]).encode())
                left -= 1
                head = await reader.readuntil(b"\r\n\r\n")
                statuses.add(head[9:12])
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length is not None else 0)
                if b"connection: close" in head:
                    break
        finally:
            writer.close()
    return statuses


async def floods(port: int, seed: int, count: int) -> set[bytes]:
    found = await asyncio.gather(*(flood(port, seed + one, count // CONNECTIONS) for one in range(CONNECTIONS)))
    return set.union(*found)


def resident_kib(pid: int) -> int:
    line = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert line is not None
    return int(line[1])


@pytest.mark.slow
def test_a_flood_of_refused_requests_leaves_memory_where_it_was() -> None:
    """4,000 of full size, no two alike, by every way to say who is calling."""
    caller = {"access_key_id": "job-a", "secret_access_key": "s" * 20, "allow": ["s3://"]}
    config: dict[str, Any] = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "credentials": [caller]}
    with GatewayProcess(config) as gateway:
        port = int(gateway.s3_url.rpartition(":")[2])
        [pid, *_] = gateway.worker_pids()
        assert pid is not None
        asyncio.run(floods(port, 1, WARM_UP))
        before = resident_kib(pid)
        assert asyncio.run(floods(port, 1000, REQUESTS)) <= {b"400", b"403"}
        assert resident_kib(pid) - before < GROWTH_KIB_MAX, f"{before} → {resident_kib(pid)} KiB"
        print(f"{before} → {resident_kib(pid)} KiB")


HELD_CONNECTIONS = 1_000
ROUNDS = REQUESTS // HELD_CONNECTIONS
AMPERSANDS = "&" * HEAD_BYTES

HALF_SENT = f"GET /bucket/key HTTP/1.1\r\nHost: h\r\nX: {AMPERSANDS}"[:HEAD_BYTES].encode()


def unknown_key() -> bytes:
    return by_header(random.Random(1), AMPERSANDS[: HEAD_BYTES - 2000]).encode()


def known_key_that_did_not_sign() -> bytes:
    """Its answer shows what should have been signed."""
    timestamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    signed = "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-meta-a, Signature=0"
    scope = f"Credential=job-a/{timestamp[:8]}/us-east-1/s3/aws4_request"
    fields = f"x-amz-date: {timestamp}\r\nx-amz-content-sha256: UNSIGNED-PAYLOAD\r\n"
    fields += f"x-amz-meta-a: {AMPERSANDS[: HEAD_BYTES - 2000]}\r\n"
    authorization = f"Authorization: AWS4-HMAC-SHA256 {scope}, {signed}\r\n"
    return f"GET /bucket/key HTTP/1.1\r\nHost: h\r\n{fields}{authorization}\r\n".encode()


def idle_connections(port: int, stack: ExitStack) -> list[socket.socket]:
    """Each has had an answer, and takes little more."""
    found = []
    for _ in range(HELD_CONNECTIONS):
        one = stack.enter_context(socket.socket())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(30)
        one.connect(("127.0.0.1", port))
        one.sendall(b"GET /bucket/key HTTP/1.1\r\nHost: h\r\n\r\n")
        assert one.recv(65536).startswith(b"HTTP/1.1 403")
        found.append(one)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("say", [lambda: HALF_SENT, unknown_key, known_key_that_did_not_sign])
def test_a_flood_that_is_held_open_leaves_memory_where_it_was(say: Callable[[], bytes]) -> None:
    """4,000 heads that are not whole, or whose refusals nobody reads: beside the connections, they cost nothing."""
    caller = {"access_key_id": "job-a", "secret_access_key": "s" * 20, "allow": ["s3://"]}
    config: dict[str, Any] = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "credentials": [caller]}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with GatewayProcess(config) as gateway:
            port = int(gateway.s3_url.rpartition(":")[2])
            [pid, *_] = gateway.worker_pids()
            assert pid is not None
            asyncio.run(floods(port, 1, WARM_UP))
            for _ in range(3):  # what closed connections leave is collected now and then
                with ExitStack() as stack:
                    idle_connections(port, stack)
            grown: list[int] = []
            for _ in range(ROUNDS):
                with ExitStack() as stack:
                    connections = idle_connections(port, stack)
                    if not grown:
                        before = resident_kib(pid)
                    for one in connections:
                        with suppress(ConnectionError):  # it has made room
                            one.sendall(say())
                    asyncio.run(floods(port, 2, CONNECTIONS))  # by their end the worker has seen all of those
                    grown.append(resident_kib(pid) - before)
            assert max(grown) < GROWTH_KIB_MAX, grown
            print("KiB more:", grown)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
