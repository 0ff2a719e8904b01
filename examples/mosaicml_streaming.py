"""MosaicML Streaming: shards written and streamed through Forebay.

export S3_ENDPOINT_URL=http://127.0.0.1:9000       # Forebay: Streaming has a variable of its own
python examples/mosaicml_streaming.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid

os.environ.setdefault("S3_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT_URL", ""))  # Forebay: or take it from the usual

from streaming import MDSWriter, StreamingDataset

if __name__ == "__main__":
    folder = f"{sys.argv[1].rstrip('/')}/streaming-{uuid.uuid4().hex[:8]}"  # whatever else lies there
    with MDSWriter(out=folder, columns={"number": "int"}, size_limit=4096) as writer:
        for number in range(1000):
            writer.write({"number": number})

    for _ in range(2):
        with tempfile.TemporaryDirectory() as local:
            dataset = StreamingDataset(remote=folder, local=local, shuffle=False, batch_size=1)
            assert [int(sample["number"]) for sample in dataset] == list(range(1000))
    print("ok: 1000 samples")
