"""What a client is told of a write that the origin has carried out without saying so: real botocore, real processes."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from gateway.s3.requests import Operation
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Answer, Effect, Unreachable, on
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin


def _client(url: str, mode: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(retries={"mode": mode, "total_max_attempts": 4}, proxies={}, s3={"addressing_style": "path"}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("effect", [Unreachable(late=True), Answer(500, late=True)], ids=["no answer", "500"])
def test_4_9_a_conditional_write_whose_answer_is_lost_is_told_as_unknown(effect: Effect) -> None:
    """4.9 The client hears neither yes nor no, and botocore does not turn it into a no by asking again."""
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        settings = origin.settings
        with GatewayProcess({"origin": settings}) as gateway:
            for mode in ("legacy", "standard", "adaptive"):
                client = _client(gateway.s3_url, mode)
                origin.model.inject(on(Operation.PUT_OBJECT, key=mode), effect)
                with pytest.raises(ClientError) as caught:
                    client.put_object(Bucket="bucket", Key=mode, Body=b"mine", IfNoneMatch="*")
                error = caught.value.response
                assert error["Error"]["Code"] == "OutcomeUnknown"
                assert error["ResponseMetadata"]["HTTPStatusCode"] == 424
                assert error["ResponseMetadata"]["RetryAttempts"] == 0
                assert origin.model.data("bucket", mode) == b"mine"
            assert origin.model.count(Operation.PUT_OBJECT) == 3
