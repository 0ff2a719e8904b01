"""`read_bandwidth = "auto"` in a whole gateway of two workers: found, shown, and kept when settings change."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from gateway.serve.shared_directory import in_memory_directory
from gateway.telemetry import metrics
from gateway.telemetry.metric_reading import MetricReading
from tests.support.connections import answering_aside, relay
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

MIB = 2**20
CAPACITY = 8 * MIB
OBJECT_BYTES = 4 * MIB
OBJECTS, READERS = 300, 12
PATIENCE_SECONDS = 60.0
_CHUNK_BYTES = 32 * 1024


class Link:
    """A link in front of a server: what comes from it waits in one queue, and leaves at CAPACITY."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def down(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(_CHUNK_BYTES):
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + len(chunk) / CAPACITY
            await asyncio.sleep(self._free_at - now)
            sink.write(chunk)
            await sink.drain()


@contextmanager
def reading(gateway: GatewayProcess) -> Iterator[None]:
    """Readers, each of what nobody has read, as long as the context lasts."""
    ended, numbers, failures = threading.Event(), iter(range(OBJECTS)), list[BaseException]()

    def read() -> None:
        try:
            with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
                while not ended.is_set() and (number := next(numbers, None)) is not None:
                    with client.stream("GET", f"{gateway.s3_url}/data/{number}") as answer:
                        assert answer.status_code == 200
                        for _ in answer.iter_raw():
                            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failures


def link_of(gateway: GatewayProcess) -> dict[str, Any]:
    document = httpx.get(f"{gateway.admin_url}/api/v1/slots", timeout=60).json()
    found: dict[str, Any] = document["link"]["read"]
    return found


def until(gateway: GatewayProcess, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds(link := link_of(gateway)):
        assert time.monotonic() < deadline, f"{what}: {link}"
    return link


def config_with(port: int, **origin: str) -> dict[str, Any]:
    key = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    return {
        "server": {"workers": 2, "allow_unsigned": True},
        "origin": {"endpoint_url": f"http://127.0.0.1:{port}", **key, **origin},
        "cache": {"capacity": "4GiB", "block_size": "1MiB"},
    }


def is_told(gateway: GatewayProcess) -> bool:
    """Whether metrics tell the link's capacity."""
    told = MetricReading(in_memory_directory(gateway.directory)).by_labels(("direction",), metrics.LINK_CAPACITY)
    return told["read",] > 0


def is_near(capacity: float | None) -> bool:
    return capacity is not None and 0.3 * CAPACITY < capacity < 1.6 * CAPACITY


@pytest.mark.slow
def test_a_real_gateway_finds_its_link_and_shows_it() -> None:
    """Clause 10.9: over two workers, one of which is killed; a changed slot does not lose it, a number replaces it."""
    with StrictOrigin(keep_bodies=False) as origin:
        for number in range(OBJECTS):
            origin.model.put_generated("data", str(number), OBJECT_BYTES, seed=number)
        port = int(origin.endpoint_url.rpartition(":")[2])
        with (
            answering_aside(relay(lambda: port, Link().down)) as linked,
            GatewayProcess(config_with(linked, read_bandwidth="auto")) as gateway,
        ):
            before = link_of(gateway)
            assert before["capacity_found"]
            assert before["capacity"] is None
            with reading(gateway):
                until(gateway, lambda link: is_near(link["capacity"]), "the link was not found")
                answer = httpx.put(f"{gateway.admin_url}/api/v1/slots/a", json={"prefix": "s3://a/"}, timeout=60)
                assert answer.status_code in (200, 202)
                assert link_of(gateway)["capacity"] is not None
            assert is_told(gateway)
            killed = gateway.worker_pids()[0]
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            until(gateway, lambda link: link["capacity"] is not None, "what was found was lost with a worker")
            text = gateway.config_file.read_text()
            gateway.config_file.write_text(text.replace('"auto"', '"5MB/s"'))
            os.kill(gateway.pid, signal.SIGHUP)
            link = until(gateway, lambda link: not link["capacity_found"], "the number is not in force")
            assert link["capacity"] == 5_000_000
            assert link["delay_seconds"] is None
            gateway.config_file.write_text(text)
            os.kill(gateway.pid, signal.SIGHUP)
            until(gateway, lambda link: link["capacity_found"], "auto is not in force again")
