"""Many clients of several workers that want the same cold object at once."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

CLIENTS = 64
MIB = 2**20


async def read_all(port: int, key: str, spread_seconds: float) -> set[int]:
    """The lengths of what they get."""

    async def one(delay_seconds: float) -> int:
        await asyncio.sleep(delay_seconds)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /bucket/{key} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return len(answer.partition(b"\r\n\r\n")[2])

    return set(await asyncio.gather(*(one(random.uniform(0, spread_seconds)) for _ in range(CLIENTS))))


@pytest.mark.slow
@pytest.mark.parametrize("spread_seconds", [0.0, 0.2])
def test_5_3_sixty_four_clients_over_two_workers_cost_the_object_once(spread_seconds: float) -> None:
    """5.3 Every byte is asked for once, by one worker or the other, whether the readers come together or not."""
    sizes = {"small": 300_000, "block": MIB, "blocks": 5 * MIB + 777}
    with StrictOrigin() as origin:
        origin.latency_seconds = 0.02
        for seed, (key, size_bytes) in enumerate(sizes.items()):
            origin.model.put_generated("bucket", key, size_bytes, seed)
        config: dict[str, Any] = {
            "origin": origin.settings,
            "server": {"allow_unsigned": True, "workers": 2},
        }
        with GatewayProcess(config) as gateway:
            port = int(gateway.s3_url.rpartition(":")[2])
            for key, size_bytes in sizes.items():
                before = len(origin.request_lines)
                assert asyncio.run(read_all(port, key, spread_seconds)) == {size_bytes}
                asked = zip(origin.request_lines[before:], origin.request_headers[before:], strict=True)
                ranges = [
                    dict(headers)[b"range"].decode() for line, headers in asked if line.startswith(b"GET /bucket/")
                ]
                spans = sorted(tuple(map(int, re.findall(r"\d+", one))) for one in ranges)
                position = 0
                for first, last in spans:
                    assert first == position, f"{key}: {spans}"
                    position = last + 1
                assert position >= size_bytes
