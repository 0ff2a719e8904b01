"""Arrow: a Parquet data set that pyarrow filters, through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000
python examples/arrow_parquet.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import uuid

import pyarrow
import pyarrow.dataset
import pyarrow.parquet
from pyarrow import fs

folder = f"{sys.argv[1].rstrip('/')}/arrow-{uuid.uuid4().hex[:8]}"  # whatever else lies there
path = folder.removeprefix("s3://")
s3 = fs.S3FileSystem(
    endpoint_override=os.environ["AWS_ENDPOINT_URL"],  # Forebay: given, so that every version of Arrow takes it
    region=os.environ.get("AWS_REGION", "us-east-1"),
)

table = pyarrow.table({"id": range(100_000), "label": [number % 10 for number in range(100_000)]})
pyarrow.parquet.write_table(table, f"{path}/part-0.parquet", filesystem=s3, row_group_size=10_000)

dataset = pyarrow.dataset.dataset(path, filesystem=s3, format="parquet")
for _ in range(2):
    found = dataset.to_table(columns=["id"], filter=pyarrow.dataset.field("label") == 3)
    assert found.num_rows == 10_000
print("ok: 10000 rows")
