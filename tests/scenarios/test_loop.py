"""An origin that leads back to the gateway by a way that the settings cannot see."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from gateway.demo.bucket import Shape, ShapingRelay
from loadtests.harness.server_process import held_port
from tests.support.gateway_process import ORIGIN_KEYS, GatewayProcess


@pytest.fixture
def own_port() -> Iterator[int]:
    with held_port() as holder:
        yield holder.getsockname()[1]


@pytest.fixture
def round_trip(own_port: int) -> Iterator[GatewayProcess]:
    """A gateway whose origin is a relay to itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    relay = ShapingRelay(own_port, Shape(0.0, 1e12))
    try:
        relay_port = asyncio.run_coroutine_threadsafe(relay.start(), loop).result(10)
        origin = {"endpoint_url": f"http://127.0.0.1:{relay_port}"}
        with GatewayProcess({"server": {"port": own_port}, "origin": origin}) as gateway:
            yield gateway
    finally:
        asyncio.run_coroutine_threadsafe(relay.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.mark.slow
def test_7_7_a_request_that_comes_round_ends_at_once(round_trip: GatewayProcess) -> None:
    """7.7 It is refused with 508 the first time it comes back, and the caller hears why."""
    client = boto3.client(
        "s3",
        endpoint_url=round_trip.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ORIGIN_KEYS[0],
        aws_secret_access_key=ORIGIN_KEYS[1],
        config=Config(retries={"total_max_attempts": 1}),
    )
    with pytest.raises(ClientError) as refused:
        client.list_buckets()
    assert refused.value.response["Error"]["Code"] == "LoopDetected"
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 508
    client.close()
