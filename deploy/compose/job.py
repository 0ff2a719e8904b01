"""A job of a minute: saves an object, reads it twice, and prints where each answer came from.

It knows no Forebay: AWS_ENDPOINT_URL_S3 leads there. The image brings botocore, which Forebay needs itself.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import botocore.exceptions
import botocore.session

SIZE_BYTES = 64 * 1024**2


def main() -> int:
    """Exit code 0 when each byte that was read is the one that was saved, and the second read came from the cache."""
    s3 = botocore.session.get_session().create_client("s3")
    for bucket in ("train", "checkpoints"):
        make_bucket(s3, bucket)
    shard, checkpoint = os.urandom(SIZE_BYTES), os.urandom(SIZE_BYTES)
    s3.put_object(Bucket="train", Key="shard-000000.tar", Body=shard)
    answers = [read(s3, "train", "shard-000000.tar", shard) for _ in range(2)]
    # The first write to a bucket goes through: Forebay learns from it how the bucket makes its ETags.
    for step in (1, 2):
        saved = s3.put_object(Bucket="checkpoints", Key=f"step-{step}/model.safetensors", Body=checkpoint)
        print(f"saved s3://checkpoints/step-{step}/: x-forebay-cache:", cache_header(saved))
    read(s3, "checkpoints", "step-2/model.safetensors", checkpoint)
    return 0 if answers[1].startswith("hit") else 1


def make_bucket(s3: Any, bucket: str) -> None:
    """Unless it is there."""
    try:
        s3.create_bucket(Bucket=bucket)
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise


def read(s3: Any, bucket: str, key: str, expected: bytes) -> str:
    """Return where the bytes came from, as the gateway says. ValueError when they are others than `expected`."""
    answer = s3.get_object(Bucket=bucket, Key=key)
    body = answer["Body"].read()
    if hashlib.sha256(body).digest() != hashlib.sha256(expected).digest():
        raise ValueError(f"s3://{bucket}/{key}: other bytes were read than were saved")
    print(f"read s3://{bucket}/{key}: x-forebay-cache:", cache_header(answer))
    return cache_header(answer)


def cache_header(answer: Any) -> str:
    return str(answer["ResponseMetadata"]["HTTPHeaders"].get("x-forebay-cache", "none: this is no Forebay"))


if __name__ == "__main__":
    sys.exit(main())
