"""Checkpoints saved into the write-back buffer by the PyTorch S3 connector, while the origin is away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY
from tests.clients.saving import BUCKET, Saving, saving

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saving]:
    with saving(tmp_path_factory.mktemp("saving") / "cache") as one:
        yield one


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, saved: Saving) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", saved.gateway.s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)


def _state(seed: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 512))
    state: dict[str, Any] = layers.state_dict()
    return state


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_torch_save(saved: Saving) -> None:
    """Saved twice and loaded in between, with nobody behind the gateway; then the origin has the second one."""
    import torch
    from s3torchconnector import S3Checkpoint

    checkpoint = S3Checkpoint(region=REGION)
    with saved.origin_away("saved/model.pt"):
        for seed in (1, 2):
            with checkpoint.writer(f"s3://{BUCKET}/saved/model.pt") as writer:
                torch.save(_state(seed), writer)
            with checkpoint.reader(f"s3://{BUCKET}/saved/model.pt") as reader:
                assert _equal(torch.load(reader, weights_only=True), _state(seed))


def test_a_distributed_checkpoint(saved: Saving) -> None:
    """DCP writes its shards, and renames its metadata: a copy and a deletion, of what only this node has."""
    import torch.distributed.checkpoint as dcp
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    path = f"s3://{BUCKET}/saved/step-1/"
    state = _state(3)
    dcp.save(state, storage_writer=S3StorageWriter(REGION, path), no_dist=True)
    loaded = _state(4)
    dcp.load(loaded, storage_reader=S3StorageReader(REGION, path), no_dist=True)
    assert _equal(loaded, state)
    keys = saved.arrived("saved/step-1/")
    assert "saved/step-1/.metadata" in keys
    assert not [key for key in keys if key.endswith(".tmp")]
