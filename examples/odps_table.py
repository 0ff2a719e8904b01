"""MaxCompute (ODPS): export a table as Parquet into a bucket through Forebay, and read the rows from there.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000
export ODPS_ACCESS_ID=... ODPS_ACCESS_KEY=... ODPS_PROJECT=...
export ODPS_ENDPOINT=https://service.cn-hangzhou.maxcompute.aliyun.com/api
python examples/odps_table.py s3://scratch/tables my_table

Each export is a folder of its own, named by when the table's data were changed. Its objects never change, so that a
slot over it may be `immutable`. A slot with `write = "back"` takes them at the speed of the local disk.
"""

from __future__ import annotations

import os
import sys
import time

import pyarrow
import pyarrow.dataset
import pyarrow.parquet
from odps import ODPS
from odps.apis.storage_api import (
    ReadRowsRequest,
    SessionRequest,
    SessionStatus,
    StorageApiArrowClient,
    TableBatchScanRequest,
)
from pyarrow import fs

target, name = sys.argv[1].rstrip("/"), sys.argv[2]
project = ODPS(
    os.environ["ODPS_ACCESS_ID"],
    os.environ["ODPS_ACCESS_KEY"],
    project=os.environ["ODPS_PROJECT"],
    endpoint=os.environ["ODPS_ENDPOINT"],
)
table = project.get_table(name)
changed = table.last_data_modified_time
s3 = fs.S3FileSystem(
    endpoint_override=os.environ["AWS_ENDPOINT_URL"],  # Forebay
    region=os.environ.get("AWS_REGION", "us-east-1"),
)
folder = f"{target.removeprefix('s3://')}/{name}-{changed:%Y%m%dT%H%M%S}"

client = StorageApiArrowClient(project, table)
session = client.create_read_session(TableBatchScanRequest())  # splits of 256 MB
while session.session_status == SessionStatus.INIT:
    time.sleep(1)
    session = client.get_read_session(SessionRequest(session.session_id))
assert session.session_status == SessionStatus.NORMAL, session.session_status
table.reload()
assert table.last_data_modified_time == changed, "the table was changed just now: run it again"

rows = 0
for split in range(session.split_count):
    reader = client.read_rows_arrow(ReadRowsRequest(session_id=session.session_id, split_index=split))
    first = reader.read()
    if first is None:
        continue
    with pyarrow.parquet.ParquetWriter(f"{folder}/part-{split:05}.parquet", first.schema, filesystem=s3) as writer:
        batch = first
        while batch is not None:
            writer.write_batch(batch)
            rows += batch.num_rows
            batch = reader.read()
with s3.open_output_stream(f"{folder}/_SUCCESS"):  # Forebay: a marker, which the bucket gets behind all before it
    pass

dataset = pyarrow.dataset.dataset(folder, filesystem=s3, format="parquet")
for _ in range(2):  # the second time from this node's disk
    assert dataset.count_rows() == rows
print(f"ok: {rows} rows in s3://{folder}/")
