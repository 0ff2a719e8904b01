"""LitData: optimized chunks in a bucket, streamed through Forebay, which speaks https here.

export AWS_ENDPOINT_URL=https://localhost:9000     # Forebay: with server.certificate_file and key_file
export AWS_CA_BUNDLE=ca.pem SSL_CERT_FILE=ca.pem   # Forebay: whom boto3 and obstore trust
python examples/litdata_https.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from pathlib import Path

import boto3
from litdata import StreamingDataset
from litdata.streaming.cache import Cache

if __name__ == "__main__":
    folder = f"{sys.argv[1].rstrip('/')}/litdata-{uuid.uuid4().hex[:8]}"  # whatever else lies there
    bucket, _, prefix = folder.removeprefix("s3://").partition("/")
    with tempfile.TemporaryDirectory() as local:
        cache = Cache(local, chunk_size=100)
        for number in range(1000):
            cache[number] = number
        cache.done()
        cache.merge()
        s3 = boto3.client("s3")
        for file in Path(local).iterdir():
            s3.upload_file(str(file), bucket, f"{prefix}/{file.name}")

    for _epoch in range(2):
        with tempfile.TemporaryDirectory() as local:
            dataset = StreamingDataset(
                folder,
                cache_dir=local,
                storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},  # Forebay
            )
            assert sorted(dataset[index] for index in range(len(dataset))) == list(range(1000))
    print("ok: 1000 samples")
