"""Checkpoints by the PyTorch S3 connector: single files, and distributed checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.boto import read
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, random_bytes
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, http_endpoint: Endpoint) -> None:
    """Keys, and the endpoint, which the storage classes of DCP have no parameter for, come from the environment.

    The connector reads AWS_ENDPOINT_URL; AWS_ENDPOINT_URL_S3 it does not know.
    """
    monkeypatch.setenv("AWS_ENDPOINT_URL", http_endpoint.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)


def _model(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("size", [0, 1, 8 * MIB, 20 * MIB + 5])
def test_what_a_writer_wrote_a_reader_reads(size: int, direct: Any, bucket: str, origin: Origin) -> None:
    """Bytes of any size arrive at the origin and come back; the second restore moves none of them again."""
    from s3torchconnector import S3Checkpoint

    checkpoint = S3Checkpoint(region=REGION)
    content = random_bytes(size)
    with checkpoint.writer(f"s3://{bucket}/step+1.ckpt") as writer:
        writer.write(content)
    assert read(direct, bucket, "step+1.ckpt") == content
    for _ in range(2):
        before = len(origin.object_reads(bucket))
        with checkpoint.reader(f"s3://{bucket}/step+1.ckpt") as reader:
            assert reader.read() == content
        reads = origin.object_reads(bucket)[before:]
    # An empty object is asked for by part number, which only the origin can answer; it moves no byte.
    assert [one for one in reads if content] == []


def test_a_model_saved_and_loaded(bucket: str) -> None:
    """torch.save and torch.load through the connector give every tensor back, and the latest of two saves."""
    import torch
    from s3torchconnector import S3Checkpoint

    checkpoint = S3Checkpoint(region=REGION)
    for seed in (1, 2):
        state = _model(seed).state_dict()
        with checkpoint.writer(f"s3://{bucket}/model.pt") as writer:
            torch.save(state, writer)
        with checkpoint.reader(f"s3://{bucket}/model.pt") as reader:
            assert _equal(torch.load(reader, weights_only=True), state)


@pytest.mark.parametrize("reader", ["sequential", "range_based", "dcp_optimized"])
def test_a_distributed_checkpoint(reader: str, direct: Any, bucket: str, origin: Origin) -> None:
    """DCP writes parts, renames its metadata by a copy and finds it at once; loading twice moves the bytes once."""
    import torch.distributed.checkpoint as dcp
    from s3torchconnector import S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    path = f"s3://{bucket}/step-1/"
    saved = _model(1).state_dict()
    dcp.save(saved, storage_writer=S3StorageWriter(REGION, path), no_dist=True)
    keys = [one["Key"] for one in direct.list_objects_v2(Bucket=bucket)["Contents"]]
    assert "step-1/.metadata" in keys
    assert not [key for key in keys if key.endswith(".tmp")]
    constructor = getattr(S3ReaderConstructor, reader)()
    for _ in range(2):
        before = len(origin.object_reads(bucket))
        loaded = _model(2).state_dict()
        storage = S3StorageReader(REGION, path, reader_constructor=constructor)
        dcp.load(loaded, storage_reader=storage, no_dist=True)
        assert _equal(loaded, saved)
        reads = origin.object_reads(bucket)[before:]
    assert reads == []


def test_saving_over_an_older_distributed_checkpoint(bucket: str) -> None:
    """After a second save to the same path, a load gives the second state, though the first one was cached."""
    import torch.distributed.checkpoint as dcp
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    path = f"s3://{bucket}/latest/"
    for seed in (1, 2):
        saved = _model(seed).state_dict()
        writer = S3StorageWriter(REGION, path, overwrite=True)
        dcp.save(saved, storage_writer=writer, no_dist=True)
        loaded = _model(3).state_dict()
        dcp.load(loaded, storage_reader=S3StorageReader(REGION, path), no_dist=True)
        assert _equal(loaded, saved)
