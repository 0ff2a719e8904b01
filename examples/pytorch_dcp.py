"""PyTorch distributed checkpoints (DCP) through Forebay: by the S3 connector's writer, and by fsspec's.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change, both writers read it
python examples/pytorch_dcp.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

region = os.environ.get("AWS_REGION", "us-east-1")


def save_and_load(writer: Any, reader: Any) -> None:
    """Save a model's state; load it into another model; compare."""
    saved, loaded = torch.nn.Linear(1000, 100).state_dict(), torch.nn.Linear(1000, 100).state_dict()
    dcp.save(saved, storage_writer=writer, no_dist=True)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


folder = f"{sys.argv[1].rstrip('/')}/run-{uuid.uuid4().hex[:8]}"  # whatever else lies there
step = f"{folder}/step-1/"
save_and_load(S3StorageWriter(region, step), S3StorageReader(region, step))
step = f"{folder}/step-2"
save_and_load(FsspecWriter(step), FsspecReader(step))
print("ok: 2 checkpoints")
