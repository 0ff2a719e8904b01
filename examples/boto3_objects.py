"""boto3: write an object through Forebay, read it twice, list it.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change
python examples/boto3_objects.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import uuid

import boto3

folder = f"{sys.argv[1].rstrip('/')}/boto3-{uuid.uuid4().hex[:8]}"  # whatever else lies there
bucket, _, prefix = folder.removeprefix("s3://").partition("/")
s3 = boto3.client("s3")  # Forebay: unchanged, boto3 reads AWS_ENDPOINT_URL
content = os.urandom(1_000_000)

key = f"{prefix}/sample.bin"
s3.put_object(Bucket=bucket, Key=key, Body=content)
for epoch in range(2):
    answer = s3.get_object(Bucket=bucket, Key=key)
    assert answer["Body"].read() == content
    # "miss" when the bytes came from the bucket, "hit" when they came from this node's disk
    print(f"read {epoch + 1}, x-forebay-cache:", answer["ResponseMetadata"]["HTTPHeaders"].get("x-forebay-cache"))
assert [one["Key"] for one in s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]] == [key]
print("ok: 1 object")
