"""Buckets at several homes are listed; CreateBucket: what S3 answers a bucket's owner, and the origin alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.core.clock import SystemClock
from gateway.operations.buckets import with_buckets
from gateway.policy.slots import EVERYTHING, Grant, Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.gateway_app import gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterHeaders, Answer, Unreachable, on
from tests.support.slots import Slot

BEFORE = b"<?xml version='1.0'?><ListAllMyBucketsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
OWNER = b"<Owner><ID>o</ID></Owner>"
NEAR = b"<Bucket><Name>near</Name><CreationDate>2026-01-01T00:00:00.000Z</CreationDate></Bucket>"
FAR = b"<Bucket><Name>far</Name><CreationDate>1970-01-01T00:00:00.000Z</CreationDate></Bucket>"
END = b"</ListAllMyBucketsResult>"


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        (b"<Buckets>" + NEAR + b"</Buckets>", b"<Buckets>" + NEAR + FAR + b"</Buckets>"),
        (b"<Buckets/>", b"<Buckets>" + FAR + b"</Buckets>"),
        (b"<Buckets></Buckets>", b"<Buckets>" + FAR + b"</Buckets>"),
        (b"<s:Buckets />", b"<s:Buckets>" + FAR + b"</s:Buckets>"),
        (b"<Buckets>" + FAR + b"</Buckets>", b"<Buckets>" + FAR + b"</Buckets>"),
        (
            b"<Buckets>" + NEAR + b"</Buckets><ContinuationToken>t</ContinuationToken>",
            b"<Buckets>" + NEAR + b"</Buckets><ContinuationToken>t</ContinuationToken>",
        ),
        (b"<Something/>", b"<Something/>"),
    ],
)
def test_buckets_elsewhere_come_behind_the_last_page(buckets: bytes, expected: bytes) -> None:
    """Once, and the rest of the answer as it was."""
    assert with_buckets(BEFORE + OWNER + buckets + END, ["far"]) == BEFORE + OWNER + expected + END


KEPT = Slot("kept", Prefix("bucket", "kept/"), "read-only")
ELSEWHERE = b"<CreateBucketConfiguration><LocationConstraint>eu-west-1</LocationConstraint></CreateBucketConfiguration>"


def ask(
    directory: Path,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    bucket: str = "bucket",
    region: str = "us-east-1",
    grant: Grant = EVERYTHING,
    fault: Answer | Unreachable | AlterHeaders | None = None,
) -> tuple[Got, list[Operation]]:
    """The answer where a part of `bucket` is read-only, and what the origin was asked."""

    async def scenario() -> tuple[Got, list[Operation]]:
        origin = MemoryOrigin(SystemClock(), region=region)
        origin.create_bucket("bucket")
        async with gateway_app(directory, origin=origin, slots=[KEPT], grant=grant) as gateway:
            if fault is not None:
                origin.inject(on(Operation.HEAD_BUCKET), fault, times=None)
            answer = await call(gateway.app, "PUT", f"/{bucket}", headers or {}, body)
            return answer, [one.operation for one in origin.calls]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("region", "headers", "body", "status"),
    [
        ("us-east-1", {}, b"", 200),
        ("us-east-1", {}, b"<CreateBucketConfiguration/>", 200),
        ("us-east-1", {}, ELSEWHERE.replace(b"eu-west-1", b"us-east-1"), 200),
        ("us-east-1", {}, ELSEWHERE.replace(b"LocationConstraint", b"Bucket"), 409),
        ("us-east-1", {"x-amz-acl": "private"}, b"", 409),
        ("us-east-1", {"x-amz-acl": "public-read"}, b"", 409),
        ("us-east-1", {"x-amz-grant-read": "id=1"}, b"", 409),
        ("us-east-1", {"x-amz-bucket-object-lock-enabled": "true"}, b"", 409),
        ("us-east-1", {"x-amz-object-ownership": "ObjectWriter"}, b"", 409),
        ("us-east-1", {}, ELSEWHERE, 409),
        ("eu-west-1", {}, b"", 409),
        ("eu-west-1", {}, ELSEWHERE, 409),
    ],
)
def test_a_bucket_that_is_there_is_answered_for_and_left_alone(
    tmp_path: Path, region: str, headers: Mapping[str, str], body: bytes, status: int
) -> None:
    """200 where S3 lets its owner create it once more, and a bucket that is as the request says would be no lie."""
    answer, asked = ask(tmp_path, headers, body, region=region)
    assert (answer.status, asked) == (status, [Operation.HEAD_BUCKET])
    assert (b"<Code>BucketAlreadyOwnedByYou</Code>" in answer.body) == (status == 409)


@pytest.mark.parametrize("body", [b"region=eu", b"{}", b"<a", b" ", b"<Tagging/>", b"<!DOCTYPE a><a/>", b"x" * 300_000])
@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
def test_a_body_that_is_no_configuration_of_a_bucket_is_refused(tmp_path: Path, body: bytes, region: str) -> None:
    """As S3 refuses it, whether the bucket is there or not."""
    for headers in ({}, {"x-amz-acl": "private"}):
        answer, _ = ask(tmp_path, headers, body, region=region)
        assert (answer.status, b"<Code>MalformedXML</Code>" in answer.body) == (400, True)


def test_an_origin_that_names_no_region_has_the_callers(tmp_path: Path) -> None:
    """The one that the caller signs for."""
    answer, _ = ask(tmp_path, region="eu-west-1", fault=AlterHeaders({"x-amz-bucket-region": None}))
    assert answer.status == 200


@pytest.mark.parametrize(
    ("grant", "status"),
    [
        (Grant((Prefix("bucket", "job/"),)), 200),
        (Grant((Prefix("bucket", "kept/"),)), 200),
        (Grant((Prefix("bucket"),), read_only=True), 403),
        (Grant((Prefix("other"),)), 403),
    ],
)
def test_whoever_may_write_something_in_the_bucket_may_ask(tmp_path: Path, grant: Grant, status: int) -> None:
    """As nothing is changed; another caller is told nothing, and the origin is not asked."""
    answer, asked = ask(tmp_path, grant=grant)
    assert (answer.status, len(asked)) == (status, status == 200)


def test_a_bucket_that_is_not_there_is_the_origins_to_create(tmp_path: Path) -> None:
    """Where the caller may change all of it."""
    answer, asked = ask(tmp_path / "may", bucket="new")
    assert (answer.status, asked) == (200, [Operation.HEAD_BUCKET, Operation.CREATE_BUCKET])
    answer, asked = ask(tmp_path / "prefix", bucket="new", grant=Grant((Prefix("new", "job/"),)))
    assert (answer.status, asked) == (403, [Operation.HEAD_BUCKET])
    # Somebody else's, for all that is known.
    answer, asked = ask(tmp_path / "refused", fault=Answer(403, "AccessDenied"))
    assert (answer.status, asked) == (403, [Operation.HEAD_BUCKET])
    assert b"kept" in answer.body


@pytest.mark.parametrize("fault", [Answer(503), Unreachable()], ids=str)
def test_an_origin_that_does_not_say_is_asked_for_nothing_else(tmp_path: Path, fault: Answer | Unreachable) -> None:
    """503, which clients try again."""
    answer, asked = ask(tmp_path, fault=fault)
    assert (answer.status, {*asked}) == (503, {Operation.HEAD_BUCKET})
