"""PyTorch S3 connector: map-style and iterable data sets, and a checkpoint, through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000
python examples/pytorch_datasets.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

import torch
from s3torchconnector import S3Checkpoint, S3IterableDataset, S3MapDataset
from torch.utils.data import DataLoader

region = os.environ.get("AWS_REGION", "us-east-1")
endpoint = os.environ["AWS_ENDPOINT_URL"]  # Forebay: passed on, below


def sample(item: Any) -> tuple[str, bytes]:
    """What a data loader can hand on: a reader cannot be pickled."""
    return item.key, item.read()


if __name__ == "__main__":
    folder = f"{sys.argv[1].rstrip('/')}/datasets-{uuid.uuid4().hex[:8]}"  # whatever else lies there
    checkpoint = S3Checkpoint(region=region, endpoint=endpoint)  # Forebay: endpoint
    for number in range(10):
        with checkpoint.writer(f"{folder}/data/{number}.bin") as writer:
            writer.write(bytes([number]) * 1000)

    by_index = S3MapDataset.from_prefix(f"{folder}/data/", region=region, endpoint=endpoint)  # Forebay: endpoint
    assert sorted(by_index[index].read()[0] for index in range(len(by_index))) == list(range(10))

    iterable = S3IterableDataset.from_prefix(
        f"{folder}/data/",
        region=region,
        endpoint=endpoint,  # Forebay
        transform=sample,
        enable_sharding=True,
    )
    loader = DataLoader(iterable, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    for _ in range(2):
        assert sorted(content[0] for _, content in loader) == list(range(10))

    model = torch.nn.Linear(100, 10)
    with checkpoint.writer(f"{folder}/model.pt") as writer:
        torch.save(model.state_dict(), writer)
    with checkpoint.reader(f"{folder}/model.pt") as reader:
        assert torch.equal(torch.load(reader, weights_only=True)["weight"], model.weight)
    print("ok: 10 samples, 1 checkpoint")
