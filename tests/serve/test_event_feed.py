"""Events from an SQS queue, through a running gateway: moto's S3 sends them to moto's SQS, as AWS does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import boto3
import httpx
import pytest

from tests.serve.test_origin_state import metrics_of
from tests.support.changing_slots import client_of
from tests.support.gateway_process import GatewayProcess
from tests.support.sts import moto_sts
from tests.support.waiting import eventually

KEY = ("AKIDEXAMPLE", "secret-of-the-origin")
WINDOW_SECONDS = 3.0
BUCKET = "train"


class Aws:
    """A bucket whose events go to a queue."""

    def __init__(self, endpoint_url: str) -> None:
        self.endpoint_url = endpoint_url
        self.s3 = client_of(endpoint_url, KEY)
        names = {"aws_access_key_id": KEY[0], "aws_secret_access_key": KEY[1], "region_name": "us-east-1"}
        self.sqs = boto3.client("sqs", endpoint_url=endpoint_url, **names)
        self.s3.create_bucket(Bucket=BUCKET)
        self.queue_url = self.sqs.create_queue(QueueName="events")["QueueUrl"]
        self.sends(True)

    def sends(self, does: bool) -> None:
        to_queue = {"QueueArn": "arn:aws:sqs:us-east-1:123456789012:events"}
        configured = [{**to_queue, "Events": ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]}] if does else []
        self.s3.put_bucket_notification_configuration(
            Bucket=BUCKET, NotificationConfiguration={"QueueConfigurations": configured}
        )

    def waiting(self) -> int:
        """Messages in the queue, received or not."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=names)["Attributes"]
        return sum(map(int, found.values()))


@pytest.fixture
def aws() -> Iterator[Aws]:
    with moto_sts() as endpoint_url:
        yield Aws(endpoint_url)


def config_of(aws: Aws, **source: Any) -> dict[str, Any]:
    return {
        "origin": {"endpoint_url": aws.endpoint_url, "access_key_id": KEY[0], "secret_access_key": KEY[1]},
        "slots": [
            {"name": "d", "prefix": f"s3://{BUCKET}/data/", "consistency": "ttl", "metadata_ttl": "1h", "index": True}
        ],
        "event_sources": [{"queue_url": aws.queue_url, **source}],
    }


def listed(client: Any) -> list[str]:
    return [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix="data/").get("Contents", ())]


@pytest.mark.slow
def test_3_12_an_event_from_the_queue_shows_what_others_have_changed(aws: Aws) -> None:
    """3.12 In a slot that would not look for an hour; messages are deleted, those too that are no events."""
    aws.s3.put_object(Bucket=BUCKET, Key="data/old", Body=b"old")
    with GatewayProcess(config_of(aws)) as gateway:
        client = client_of(gateway.s3_url, KEY)
        eventually(lambda: gateway.status()["indexes"][0]["complete"])
        assert listed(client) == ["data/old"]
        assert client.get_object(Bucket=BUCKET, Key="data/old")["Body"].read() == b"old"
        began = time.monotonic()
        aws.s3.put_object(Bucket=BUCKET, Key="data/new", Body=b"new")
        eventually(lambda: listed(client) == ["data/new", "data/old"])
        took_seconds = time.monotonic() - began
        print(f"event to LIST: {took_seconds:.2f} s")
        aws.s3.put_object(Bucket=BUCKET, Key="data/old", Body=b"newer")
        eventually(lambda: client.get_object(Bucket=BUCKET, Key="data/old")["Body"].read() == b"newer")
        aws.s3.delete_object(Bucket=BUCKET, Key="data/new")
        eventually(lambda: listed(client) == ["data/old"])
        aws.sqs.send_message(QueueUrl=aws.queue_url, MessageBody="no event")
        eventually(lambda: metrics_of(gateway)['forebay_origin_events_total{outcome="malformed"}'] == 1.0)
        eventually(lambda: aws.waiting() == 0)
        assert metrics_of(gateway)['forebay_event_source_up{queue="events"}'] == 1.0
        assert "a message of a queue holds no event" in gateway.log


@pytest.mark.slow
def test_a_canary_tells_when_events_cease_and_when_they_come_again(aws: Aws) -> None:
    """Within two windows; in /readyz, the status, the metrics and the log."""
    source = {"canary": f"s3://{BUCKET}/forebay/", "canary_window": f"{WINDOW_SECONDS}s"}
    with GatewayProcess(config_of(aws, **source)) as gateway:

        def problem() -> str | None:
            found = httpx.get(f"{gateway.admin_url}/readyz", timeout=30)
            assert found.status_code == 200
            told: str | None = found.json()["events_problem"]
            return told

        def lag_seconds() -> float | None:
            found: float | None = gateway.status()["event_sources"][0]["lag_seconds"]
            return found

        eventually(lambda: lag_seconds() is not None)
        assert problem() is None
        assert "events" in gateway.log
        aws.sends(False)
        began = time.monotonic()
        eventually(lambda: problem() is not None)
        took_seconds = time.monotonic() - began
        print(f"canary lost: {took_seconds:.2f} s, {took_seconds / WINDOW_SECONDS:.2f} windows")
        assert "has not come: does the bucket send its events to" in str(problem())
        eventually(lambda: metrics_of(gateway)['forebay_event_source_up{queue="events"}'] == 0.0)
        assert "has not come" in gateway.command("status").stdout
        aws.sends(True)
        eventually(lambda: problem() is None)
        assert "events come again" in gateway.log
        assert [
            one["Key"].rpartition("-")[0]
            for one in aws.s3.list_objects_v2(Bucket=BUCKET, Prefix="forebay/")["Contents"]
        ] == ["forebay/.forebay/feed"]


@pytest.mark.slow
def test_a_queue_that_is_not_there_is_told_and_asked_again(aws: Aws) -> None:
    aws.sqs.delete_queue(QueueUrl=aws.queue_url)
    with GatewayProcess(config_of(aws)) as gateway:
        eventually(lambda: "QueueDoesNotExist" in str(gateway.status()["event_sources"][0]["problem"]))
        eventually(lambda: metrics_of(gateway)['forebay_event_source_up{queue="events"}'] == 0.0)
        aws.sqs.create_queue(QueueName="events")
        eventually(lambda: gateway.status()["event_sources"][0]["problem"] is None)
