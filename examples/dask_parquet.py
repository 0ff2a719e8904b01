"""Dask: a Parquet data set written and read in parallel through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change, s3fs reads it
python examples/dask_parquet.py s3://bucket/examples
"""

from __future__ import annotations

import sys
import uuid

import dask.dataframe
import pandas

folder = f"{sys.argv[1].rstrip('/')}/dask-{uuid.uuid4().hex[:8]}"  # whatever else lies there
frame = pandas.DataFrame({"id": range(10_000), "label": [number % 10 for number in range(10_000)]})
dask.dataframe.from_pandas(frame, npartitions=4).to_parquet(folder)

for _ in range(2):
    found = dask.dataframe.read_parquet(folder, columns=["label"])
    assert int((found["label"] == 3).sum().compute()) == 1000
print("ok: 1000 rows")
