"""Ray Data: Parquet written and read by Ray's workers through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000
python examples/ray_data.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import uuid

import ray
from pyarrow import fs

folder = f"{sys.argv[1].rstrip('/')}/ray-{uuid.uuid4().hex[:8]}"  # whatever else lies there
path = folder.removeprefix("s3://")
s3 = fs.S3FileSystem(
    endpoint_override=os.environ["AWS_ENDPOINT_URL"],  # Forebay: each worker reaches the gateway of its own node
    region=os.environ.get("AWS_REGION", "us-east-1"),
)

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.data.range(10_000).write_parquet(path, filesystem=s3)
for _ in range(2):
    assert ray.data.read_parquet(path, filesystem=s3).sum("id") == sum(range(10_000))
ray.shutdown()
print("ok: 10000 rows")
