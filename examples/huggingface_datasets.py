"""Hugging Face datasets: Parquet in a bucket, streamed through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change, s3fs reads it
python examples/huggingface_datasets.py s3://bucket/examples
"""

from __future__ import annotations

import sys
import uuid

import datasets

folder = f"{sys.argv[1].rstrip('/')}/datasets-{uuid.uuid4().hex[:8]}"  # whatever else lies there
made = datasets.Dataset.from_dict({"text": [f"line {number}" for number in range(1000)]})
made.to_parquet(f"{folder}/train.parquet")

for _ in range(2):
    stream = datasets.load_dataset(
        "parquet", data_files={"train": f"{folder}/train.parquet"}, split="train", streaming=True
    )
    assert [one["text"] for one in stream] == made["text"][:]
print("ok: 1000 rows")
