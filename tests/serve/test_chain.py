"""A node's gateway whose origin is another gateway, that of the region: what the node's words mean then."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.changing_slots import KEY, client_of
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

MARKER = "step-1/.metadata"


def config_of(origin_url: str, write: str) -> dict[str, Any]:
    return {
        "origin": {"endpoint_url": origin_url, "access_key_id": KEY[0], "secret_access_key": KEY[1]},
        "cache": {"persistent": True, "capacity": "64MiB"},
        "slots": [{"name": "ckpt", "prefix": "s3://train/", "write": write, "consistency": "ttl"}],
    }


@pytest.mark.slow
@pytest.mark.parametrize("region_writes", ["through", "back"])
def test_6_8_durable_is_of_the_bucket_in_a_chain_too(region_writes: str) -> None:
    """6.8 A flush is a conditional write, and the region's gateway lets the bucket judge it, even if it writes back."""
    with StrictOrigin() as bucket:
        bucket.model.create_bucket("train")
        with (
            GatewayProcess(config_of(bucket.endpoint_url, region_writes)) as region,
            GatewayProcess(config_of(region.s3_url, "back")) as node,
        ):
            client = client_of(node.s3_url)
            client_of(region.s3_url).put_object(Bucket="train", Key="first", Body=b"x")  # tells what the bucket is
            for name in ("first", "second"):
                client.put_object(Bucket="train", Key=name, Body=b"x")
            eventually(lambda: "second" in bucket.model.buckets["train"].objects)

            def durable(key: str = MARKER) -> str | None:
                found = client.head_object(Bucket="train", Key=key)["ResponseMetadata"]["HTTPHeaders"]
                told: str | None = found.get("x-forebay-durable")
                return told

            with bucket.refused():
                if region_writes == "back":  # what the region's own clients have written there
                    client_of(region.s3_url).put_object(Bucket="train", Key="step-0/.metadata", Body=b"whole")
                    assert durable("step-0/.metadata") == "false"
                client.put_object(Bucket="train", Key=MARKER, Body=b"whole")
                eventually(lambda: node.status()["writeback"]["slots"][0]["reason"] is not None)
                assert durable() == "false"
            eventually(lambda: durable() == "true")
            assert MARKER in bucket.model.buckets["train"].objects
