"""How training frameworks save, into a slot with `write = "back"`: restored byte for byte, and all of it arrives.

DCP by the PyTorch S3 connector is in test_torch_saving.py.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.boto import read
from tests.clients.filesystems import closed
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY
from tests.clients.saving import BUCKET, Saving, saving

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

RANKS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saving]:
    with saving(tmp_path_factory.mktemp("savers") / "cache") as one:
        yield one


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, saved: Saving) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", saved.gateway.s3_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", saved.gateway.s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)


@pytest.fixture
def filesystem(saved: Saving) -> Iterator[Any]:
    import s3fs

    made = s3fs.S3FileSystem(
        key=ACCESS_KEY_ID, secret=SECRET_ACCESS_KEY, endpoint_url=saved.gateway.s3_url, skip_instance_cache=True
    )
    with closed(made) as found:
        yield found


def state_of(seed: int) -> dict[str, Any]:
    """10 MB of tensors."""
    import torch

    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256))
    state: dict[str, Any] = layers.state_dict()
    return state


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_distributed_checkpoint_through_fsspec(saved: Saving, filesystem: Any) -> None:
    """DCP's FsspecWriter on s3fs: `.metadata` is written under another name and renamed, which s3fs does by a copy."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    path, options = f"s3://{BUCKET}/fsspec/step-1", {"endpoint_url": saved.gateway.s3_url}
    state = state_of(1)
    dcp.save(state, storage_writer=FsspecWriter(path, **options), no_dist=True)
    loaded = state_of(2)
    dcp.load(loaded, storage_reader=FsspecReader(path, **options), no_dist=True)
    assert equal(loaded, state)
    keys = saved.arrived("fsspec/step-1/")
    assert "fsspec/step-1/.metadata" in keys
    assert not [key for key in keys if key.endswith(".tmp")]


def test_an_asynchronous_distributed_checkpoint(saved: Saving) -> None:
    """`async_save` returns before anything is written; two saves follow each other, and each is whole."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for step in (1, 2):
            path = f"s3://{BUCKET}/async/step-{step}/"
            state = state_of(step)
            dcp.async_save(state, storage_writer=S3StorageWriter(REGION, path)).result()
            loaded = state_of(3)
            dcp.load(loaded, storage_reader=S3StorageReader(REGION, path))
            assert equal(loaded, state)
    finally:
        dist.destroy_process_group()
    keys = saved.arrived("async/")
    assert {"async/step-1/.metadata", "async/step-2/.metadata"} <= set(keys)


def _save_rank(rank: int) -> None:
    import torch
    from s3torchconnector import S3Checkpoint

    with S3Checkpoint(region=REGION).writer(f"s3://{BUCKET}/ranks/step-1/rank-{rank}.pt") as writer:
        torch.save(state_of(rank), writer)


def test_ranks_that_save_for_themselves(saved: Saving) -> None:
    """`torch.save` by four processes at once, an object each; then `latest`, which another process reads first."""
    import torch
    from s3torchconnector import S3Checkpoint

    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_save_rank, args=(rank,)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    saved.through.put_object(Bucket=BUCKET, Key="ranks/latest", Body=b"step-1")
    assert read(saved.through, BUCKET, "ranks/latest") == b"step-1"
    for number in range(RANKS):
        with S3Checkpoint(region=REGION).reader(f"s3://{BUCKET}/ranks/step-1/rank-{number}.pt") as reader:
            assert equal(torch.load(reader, weights_only=True), state_of(number))
    assert len(saved.arrived("ranks/")) == RANKS + 1


def test_safetensors_in_shards_with_an_index(saved: Saving, filesystem: Any) -> None:
    """As Hugging Face saves: shards, then `model.safetensors.index.json`, by which they are found and loaded."""
    from safetensors.torch import load, save

    state, prefix = state_of(5), f"{BUCKET}/hf/checkpoint-10"
    names = sorted(state)
    shards = [names[:2], names[2:]]
    weight_map: dict[str, str] = {}
    for number, held in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = save({one: state[one] for one in held}, metadata={"format": "pt"})
        with filesystem.open(f"{prefix}/{name}", "wb", block_size=5 * 1024**2) as file:
            file.write(content)
        weight_map |= dict.fromkeys(held, name)
    index = {"metadata": {"total_size": sum(one.nbytes for one in state.values())}, "weight_map": weight_map}
    filesystem.pipe_file(f"{prefix}/model.safetensors.index.json", json.dumps(index).encode())
    found = json.loads(filesystem.cat_file(f"{prefix}/model.safetensors.index.json"))
    loaded: dict[str, Any] = {}
    for name in sorted(set(found["weight_map"].values())):
        loaded |= load(filesystem.cat_file(f"{prefix}/{name}"))
    assert equal(loaded, state)
    assert len(saved.arrived("hf/checkpoint-10/")) == len(shards) + 1
