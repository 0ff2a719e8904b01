"""Cold small objects over several workers: each crosses once, and a killed worker holds nobody up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.content import GeneratedContent
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

pytestmark = pytest.mark.slow

OBJECTS = 24
SIZE_BYTES = 50_000
CLIENTS = 6


@pytest.fixture(params=["strict", "immutable"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin() as origin:
        for number in range(OBJECTS):
            origin.model.put_generated("cold", f"k{number}", SIZE_BYTES, seed=number)
        config: dict[str, Any] = {
            "server": {"workers": 3},
            "origin": origin.settings,
            "cache": {"capacity": "256MiB"},
            "slots": [{"name": "cold", "prefix": "s3://cold/", "consistency": request.param}],
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


def get(gateway: GatewayProcess, number: int, at_the_door: threading.Barrier) -> str:
    """`right`, `wrong`, or `broken`: no answer, or one that ended early."""
    client = boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(retries={"total_max_attempts": 1}, response_checksum_validation="when_required"),
    )
    at_the_door.wait()
    try:
        content = client.get_object(Bucket="cold", Key=f"k{number}")["Body"].read()
    except (BotoCoreError, ClientError, OSError):
        return "broken"
    return "right" if content == GeneratedContent(SIZE_BYTES, seed=number).read(0, SIZE_BYTES) else "wrong"


def crowd(gateway: GatewayProcess, number: int, pool: ThreadPoolExecutor) -> list[Any]:
    at_the_door = threading.Barrier(CLIENTS)
    return [pool.submit(get, gateway, number, at_the_door) for _ in range(CLIENTS)]


def test_5_3_a_cold_small_object_crosses_once(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """5.3 However many clients ask several workers for an object that nobody knows, its bytes are asked for once."""
    gateway, origin = running
    origin.latency_seconds = 0.02
    with ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(OBJECTS):
            assert [one.result() for one in crowd(gateway, number, pool)] == ["right"] * CLIENTS
    asked = Counter(call.key for call in origin.model.calls if call.method == "GET" and call.key is not None)
    assert asked == {f"k{number}": 1 for number in range(OBJECTS)}


def test_5_2_a_worker_killed_in_a_first_look_holds_nobody_up(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """5.2 Whoever waits for a first look of a killed worker is answered, and so is everybody after it."""
    gateway, origin = running
    origin.latency_seconds, answers = 0.4, list[str]()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(3):
            waiting = crowd(gateway, number, pool)
            threading.Event().wait(0.3)
            gateway.kill_worker(number)
            answers += [one.result(timeout=20) for one in waiting]
            assert get(gateway, number, threading.Barrier(1)) == "right"
    assert "wrong" not in answers
    assert "right" in answers
