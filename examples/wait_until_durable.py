"""Wait until the bucket has a checkpoint that was saved through Forebay: plain S3, no admin token.

    python examples/wait_until_durable.py s3://checkpoints/run-7/step-100/.metadata --timeout 600

In a training job:

    dcp.save(state, storage_writer=writer)
    wait_until_durable(boto3.client("s3"), "checkpoints", "run-7/step-100/.metadata")

HEAD of a checkpoint's manifest, through the gateway, says `x-forebay-durable`: `false` while only its node has it, and
`true` when the bucket has it, and everything that it names.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import boto3

HEADER = "x-forebay-durable"


class NotDurable(Exception):
    """The bucket does not have it yet, or nobody can tell."""


def is_durable(s3: Any, bucket: str, key: str) -> bool:
    """Whether the bucket has the checkpoint whose manifest lies under a key; `s3` is a boto3 client of the gateway.

    NotDurable where the answer does not tell: the key is no marker of a slot with `write = "back"`. botocore's
    ClientError where there is no such object.
    """
    told = s3.head_object(Bucket=bucket, Key=key)["ResponseMetadata"]["HTTPHeaders"].get(HEADER)
    if told is None:
        raise NotDurable(f"s3://{bucket}/{key} is no marker of a slot that writes back, or this is no Forebay")
    return bool(told == "true")


def wait_until_durable(
    s3: Any, bucket: str, key: str, *, timeout_seconds: float | None = None, poll_seconds: float = 1.0
) -> None:
    """Return when `is_durable` says so; NotDurable when that takes longer than `timeout_seconds`."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while not is_durable(s3, bucket, key):
        if deadline is not None and time.monotonic() >= deadline:
            raise NotDurable(f"s3://{bucket}/{key} is not at the bucket after {timeout_seconds:g} seconds")
        time.sleep(poll_seconds)


def main() -> None:
    """Exit code 0 when the bucket has it, 1 when the time is over. The endpoint is AWS_ENDPOINT_URL's."""
    parser = argparse.ArgumentParser(description="Wait until the bucket has a checkpoint.")
    parser.add_argument("manifest", metavar="s3://BUCKET/KEY")
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    parser.add_argument("--poll", type=float, default=1.0, metavar="SECONDS")
    asked = parser.parse_args()
    bucket, _, key = asked.manifest.removeprefix("s3://").partition("/")
    try:
        wait_until_durable(boto3.client("s3"), bucket, key, timeout_seconds=asked.timeout, poll_seconds=asked.poll)
    except NotDurable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
