"""WebDataset: a shard in the bucket, read through Forebay by `aws s3 cp`.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change, the AWS CLI reads it
python examples/webdataset_shards.py s3://bucket/examples
"""

from __future__ import annotations

import io
import sys
import tarfile
import uuid

import boto3
import webdataset

folder = f"{sys.argv[1].rstrip('/')}/webdataset-{uuid.uuid4().hex[:8]}"  # whatever else lies there
bucket, _, prefix = folder.removeprefix("s3://").partition("/")
shard = io.BytesIO()
with tarfile.open(fileobj=shard, mode="w") as tar:
    for number in range(100):
        member = tarfile.TarInfo(f"{number:06d}.cls")
        member.size = len(str(number))
        tar.addfile(member, io.BytesIO(str(number).encode()))
boto3.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/000000.tar", Body=shard.getvalue())

url = f"pipe:aws s3 cp s3://{bucket}/{prefix}/000000.tar -"
for _epoch in range(2):
    labels = [int(sample["cls"]) for sample in webdataset.WebDataset([url], shardshuffle=False)]
    assert labels == list(range(100))
print("ok: 100 samples")
