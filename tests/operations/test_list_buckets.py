"""ListBuckets where buckets are at several homes: the origin's answer, with those that are elsewhere."""

from __future__ import annotations

import pytest

from gateway.operations.buckets import with_buckets

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
