"""Every counter with labels stands at 0 on a gateway that has just started: `increase()` and `rate()` do not see the
event by which one appears. What does not is named here, with the reason."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from gateway.telemetry.metric_kinds import Counter, Histogram
from gateway.telemetry.metrics import DECLARED
from tests.support.gateway_process import GatewayProcess, wait_for_metric
from tests.support.strict_origin import StrictOrigin

RARE_OPERATION = "an operation that is not among the usual: S3 has some hundred, and each would take lines of each slot"
ANY_STATUS = "a status or cache outcome that is not among the usual: alerts are about 5xx, which are"

LATER: dict[str, str] = {
    "forebay_requests_total": f"{RARE_OPERATION}; {ANY_STATUS}",
    "forebay_request_duration_seconds": RARE_OPERATION,
    "forebay_sent_bytes_total": RARE_OPERATION,
    "forebay_received_bytes_total": RARE_OPERATION,
    "forebay_misses_total": RARE_OPERATION,
    "forebay_bucket_metadata_answers_total": RARE_OPERATION,
    "forebay_origin_requests_total": f"method, status and purpose that are not among the usual; {ANY_STATUS}",
}
"""Counters of which some numbers appear with their first event. The usual ones of each stand at 0."""

OF_NO_SLOT = "none"
"""`slot` of requests that were refused before their key was known: what they are is told by other labels."""

_NUMBER = re.compile(r"([a-z_]+)\{(.*)\} \S+")


def numbers(gateway: GatewayProcess) -> dict[str, set[str]]:
    """By metric, the labels of all that is told of it."""
    found: dict[str, set[str]] = {}
    for line in httpx.get(f"{gateway.admin_url}/metrics", timeout=60).text.splitlines():
        match = _NUMBER.fullmatch(line)
        if match is not None:
            found.setdefault(match[1], set()).add(match[2])
    return found


def client(gateway: GatewayProcess, key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=key,
        aws_secret_access_key=f"{key}-secret-0123456789",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.mark.slow
def test_every_counter_with_labels_stands_at_zero_before_its_first_event() -> None:
    """Of every slot, origin, process, credential and limit that is configured: nothing is told after all kinds of
    requests that was not told before them, but for what is named above."""
    with StrictOrigin() as origin:
        for number in range(3):
            origin.model.put("bucket", f"data/{number}", b"x" * 1000)
        slots = [
            {"name": "data", "prefix": "s3://bucket/data/", "consistency": "immutable", "mode": "read-only"},
            {"name": "checkpoints", "prefix": "s3://bucket/checkpoints/", "write": "back", "consistency": "ttl"},
        ]
        credentials = [
            {"access_key_id": name, "secret_access_key": f"{name}-secret-0123456789", "allow": ["s3://"], **limits}
            for name, limits in {
                "limited": {"requests_per_second": 1, "write_bandwidth": "64KiB/s"},
                "other": {},
            }.items()
        ]
        classes = [{"name": "boto", "product": "Boto3", "max_concurrent_requests": 100}]
        config: dict[str, Any] = {
            "server": {"workers": 2, "caller_wait_max": "0s"},
            "cache": {"persistent": True},
            "origin": origin.settings,
            "slots": slots,
            "credentials": credentials,
            "caller_classes": classes,
        }
        with GatewayProcess(config) as gateway:
            before = numbers(gateway)
            s3, limited = client(gateway, "other"), client(gateway, "limited")
            for key in ("data/0", "data/0", "elsewhere", "data/none"):
                with suppress(s3.exceptions.ClientError):  # 404
                    s3.head_object(Bucket="bucket", Key=key)
                    s3.get_object(Bucket="bucket", Key=key)["Body"].read()
            s3.list_objects_v2(Bucket="bucket", Prefix="data/")
            s3.head_bucket(Bucket="bucket")
            s3.get_bucket_location(Bucket="bucket")
            for prefix in ("checkpoints", "elsewhere"):
                s3.put_object(Bucket="bucket", Key=f"{prefix}/one", Body=b"x" * 1000)
                s3.get_object(Bucket="bucket", Key=f"{prefix}/one")["Body"].read()
                s3.delete_object(Bucket="bucket", Key=f"{prefix}/one")
            limited.put_object(Bucket="bucket", Key="checkpoints/two", Body=b"x" * 200_000)
            for _ in range(20):
                with suppress(s3.exceptions.ClientError):  # 503
                    limited.get_object(Bucket="bucket", Key="data/1")["Body"].read()
            with pytest.raises(ClientError, match="InvalidAccessKeyId"):
                client(gateway, "nobody").get_object(Bucket="bucket", Key="data/0")
            gateway.kill_worker(1)
            wait_for_metric(gateway, r'forebay_worker_restarts_total\{process="worker1"\} 1')
            wait_for_metric(
                gateway, r'forebay_caller_refused_total\{limit="rate",name="limited",scope="credential"\} 1'
            )
            wait_for_metric(gateway, r'forebay_writeback_flushed_objects_total\{slot="checkpoints"\} [1-9]')
            after = numbers(gateway)
    for metric in DECLARED:
        if not metric.labels or not isinstance(metric, Counter | Histogram):
            continue
        name = f"{metric.name}_count" if isinstance(metric, Histogram) else metric.name
        assert before.get(name), f"{name} stands nowhere before its first event"
        appeared = {one for one in after[name] - before[name] if f'slot="{OF_NO_SLOT}"' not in one}
        assert not appeared or metric.name in LATER, f"{name} appears with its first event: {sorted(appeared)}"


def test_what_appears_later_is_said_of_metrics_that_there_are() -> None:
    """A name that is gone from the code goes from the list."""
    assert LATER.keys() <= {metric.name for metric in DECLARED}
