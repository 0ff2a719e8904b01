"""Dask: a Parquet data set written and read in parallel through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change, s3fs reads it
python examples/dask_parquet.py s3://bucket/table
"""

from __future__ import annotations

import sys

import dask.dataframe
import pandas

frame = pandas.DataFrame({"id": range(10_000), "label": [number % 10 for number in range(10_000)]})
dask.dataframe.from_pandas(frame, npartitions=4).to_parquet(sys.argv[1])

for _ in range(2):
    found = dask.dataframe.read_parquet(sys.argv[1], columns=["label"])
    assert int((found["label"] == 3).sum().compute()) == 1000
print("ok: 1000 rows")
