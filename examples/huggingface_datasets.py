"""Hugging Face datasets: Parquet in a bucket, streamed through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change, s3fs reads it
python examples/huggingface_datasets.py s3://bucket/text
"""

from __future__ import annotations

import sys

import datasets

made = datasets.Dataset.from_dict({"text": [f"line {number}" for number in range(1000)]})
made.to_parquet(f"{sys.argv[1]}/train.parquet")

for _ in range(2):
    stream = datasets.load_dataset(
        "parquet", data_files={"train": f"{sys.argv[1]}/train.parquet"}, split="train", streaming=True
    )
    assert [one["text"] for one in stream] == made["text"][:]
print("ok: 1000 rows")
