"""An origin that takes so many requests per second, behind a gateway of several processes, as boto3 sees it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.gateway_process import GatewayProcess
from tests.support.limited_origin import RequestLimits
from tests.support.memory_origin.faults import Answer, Call, Fault
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

LIMIT = 40.0
SETTLING_SECONDS = 12.0
SECONDS = 8.0
WEIGHTS = {"a": 3, "b": 1}


@contextmanager
def limited_origin(limits: RequestLimits) -> Iterator[StrictOrigin]:
    """A bucket whose requests beyond the limit are answered 503 SlowDown."""
    with StrictOrigin() as origin:
        for slot in WEIGHTS:
            for number in range(2000):
                origin.model.put("bucket", f"data/{slot}/{number}", b"x" * 100)

        def is_refused(call: Call) -> bool:
            return not limits.takes(call.method, call.bucket or "", call.key or "", time.monotonic())

        origin.model.faults.append(Fault(is_refused, Answer(503, "SlowDown"), times=None))
        yield origin


def gateway_of(origin: StrictOrigin, **more: Any) -> GatewayProcess:
    slots: list[Mapping[str, Any]] = [
        {"name": slot, "prefix": f"s3://bucket/data/{slot}/", "weight": weight, "consistency": "immutable"}
        for slot, weight in WEIGHTS.items()
    ]
    return GatewayProcess(
        {
            "server": {"workers": 2},
            "origin": {**origin.settings, **more},
            "cache": {"readahead": 0},
            "slots": slots,
        }
    )


def client_of(gateway: GatewayProcess) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(retries={"total_max_attempts": 1}, max_pool_connections=64),
    )


class Readers:
    """Threads that read small objects which nobody has read, each slot's through a client of its own."""

    def __init__(self, gateway: GatewayProcess, clients: dict[str, int]) -> None:
        self.read = Counter[str]()
        self.failed = Counter[str]()
        self.errors = list[str]()
        self._numbers = {slot: iter(range(2000)) for slot in clients}
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(sum(clients.values()))
        for slot, count in clients.items():
            client = client_of(gateway)
            for _ in range(count):
                self._pool.submit(self._read, client, slot)

    def _read(self, client: Any, slot: str) -> None:
        while not self._ended.is_set():
            try:
                client.get_object(Bucket="bucket", Key=f"data/{slot}/{next(self._numbers[slot])}")["Body"].read()
                self.read[slot] += 1
            except (ClientError, BotoCoreError) as error:
                self.failed[slot] += 1
                self.errors.append(f"{time.monotonic():.1f} {error!r} {getattr(error, 'response', None)}")

    def end(self) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)


def metric(gateway: GatewayProcess, name: str) -> dict[str, float]:
    """By its labels, as they are written."""
    text = httpx.get(f"{gateway.admin_url}/metrics", trust_env=False, timeout=30).text
    found = [line.removeprefix(name).rsplit(" ", 1) for line in text.splitlines() if line.startswith(name + "{")]
    return {labels: float(value) for labels, value in found}


@pytest.mark.slow
def test_10_10_slots_share_what_the_origin_takes_and_hardly_a_request_is_refused() -> None:
    """10.10 By weight, over two workers: clients see no errors; metrics and the admin port tell what holds back."""
    with limited_origin(RequestLimits(LIMIT, LIMIT)) as origin, gateway_of(origin) as gateway:
        readers = Readers(gateway, {"a": 16, "b": 16})
        try:
            time.sleep(SETTLING_SECONDS)
            before, failed = readers.read.copy(), readers.failed.total()
            asked, refused = len(origin.model.calls), _refused(origin)
            time.sleep(SECONDS)
            got = {slot: (readers.read[slot] - before[slot]) / SECONDS for slot in WEIGHTS}
            asked, refused = len(origin.model.calls) - asked, _refused(origin) - refused
            slots = httpx.get(f"{gateway.admin_url}/api/v1/slots", trust_env=False, timeout=30).json()["slots"]
            rates = metric(gateway, "forebay_origin_request_rate")
            throttled = metric(gateway, "forebay_origin_throttled_total")
        finally:
            readers.end()
    print(got, f"{refused} of {asked} refused", rates)
    assert readers.failed.total() == failed
    assert 0.7 * LIMIT <= sum(got.values()) <= 1.1 * LIMIT
    assert got["a"] == pytest.approx(0.75 * sum(got.values()), rel=0.1)
    assert refused <= 0.05 * asked
    by_name = {slot["name"]: slot for slot in slots}
    assert all("request-rate" in by_name[slot]["binds"] for slot in WEIGHTS)
    assert by_name["a"]["origin_requests"]["slow_down"] > 0
    assert rates == {'{bucket="bucket",direction="read"}': pytest.approx(LIMIT, rel=0.3)}
    assert min(throttled['{slot="a"}'], throttled['{slot="b"}']) > 0


def _refused(origin: StrictOrigin) -> int:
    return sum(call.status == 503 for call in origin.model.calls)


@pytest.mark.slow
def test_10_10_weights_that_change_while_requests_wait_count_at_once() -> None:
    """10.10 A new weight, and a new slot, over the admin port: no request fails by it."""
    with limited_origin(RequestLimits(LIMIT, LIMIT)) as origin, gateway_of(origin) as gateway:
        readers = Readers(gateway, {"a": 16, "b": 16})
        try:
            time.sleep(SETTLING_SECONDS)
            failed = readers.failed.total()
            change = {"prefix": "s3://bucket/other/", "weight": 5}
            url = f"{gateway.admin_url}/api/v1/slots/other"
            assert httpx.put(url, json=change, trust_env=False, timeout=30).status_code == 200
            time.sleep(2.0)
            before, refused = readers.read.copy(), _refused(origin)
            time.sleep(SECONDS)
            got = {slot: (readers.read[slot] - before[slot]) / SECONDS for slot in WEIGHTS}
            refused = _refused(origin) - refused
        finally:
            readers.end()
    assert readers.failed.total() == failed, readers.errors[failed:][:3]
    assert got["a"] == pytest.approx(0.75 * sum(got.values()), rel=0.1)
    assert sum(got.values()) >= 0.7 * LIMIT
    assert refused <= 0.05 * SECONDS * LIMIT


@pytest.mark.slow
def test_10_10_a_worker_that_is_stopped_or_killed_leaves_its_part_to_the_others() -> None:
    """10.10 A second later they have all that the origin takes; and next to nothing is refused when it is back."""
    with limited_origin(RequestLimits(LIMIT, LIMIT)) as origin, gateway_of(origin) as gateway:
        readers = Readers(gateway, {"a": 24, "b": 24})
        try:
            time.sleep(SETTLING_SECONDS)

            def rate_over(seconds: float) -> float:
                before, began = readers.read.total(), time.monotonic()
                time.sleep(seconds)
                return (readers.read.total() - before) / (time.monotonic() - began)

            all_work = rate_over(5.0)  # what the machine lets them read, if it is busy
            pid = gateway.worker_pids()[0]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.0)
            stopped = rate_over(5.0)
            os.kill(pid, signal.SIGCONT)
            time.sleep(2.0)
            refused = _refused(origin)
            back = rate_over(5.0)
            refused = _refused(origin) - refused
            assert gateway.kill_worker(0) == pid
            time.sleep(1.0)
            killed = rate_over(5.0)
        finally:
            readers.end()
    print(f"{all_work=:.0f} {stopped=:.0f} {back=:.0f} {killed=:.0f}, {refused} refused")
    assert min(stopped, back, killed) >= 0.7 * min(LIMIT, all_work)
    assert max(stopped, back, killed) <= 1.1 * LIMIT
    assert refused <= 0.05 * 5.0 * LIMIT


@pytest.mark.slow
def test_10_10_who_waits_for_too_long_is_answered_slow_down() -> None:
    """10.10 After `connection_wait`, with Retry-After; nothing was asked of the origin for it then."""
    with limited_origin(RequestLimits(1.0, 1.0)) as origin, gateway_of(origin, connection_wait="1s") as gateway:
        client, told = client_of(gateway), list[dict[str, Any]]()

        def read(number: int) -> None:
            try:
                client.get_object(Bucket="bucket", Key=f"data/a/{number}")
            except ClientError as error:
                told.append(error.response)

        with ThreadPoolExecutor(40) as pool:
            began = time.monotonic()
            while not any("retry-after" in one["ResponseMetadata"]["HTTPHeaders"] for one in told):
                assert time.monotonic() < began + 60
                list(pool.map(read, range(80)))
    assert {one["Error"]["Code"] for one in told} == {"SlowDown"}
    assert {one["ResponseMetadata"]["HTTPStatusCode"] for one in told} == {503}
