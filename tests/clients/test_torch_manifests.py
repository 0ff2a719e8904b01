"""What PyTorch writes as the manifest of a checkpoint is understood, by the version that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.model import ObjectKey
from gateway.writeback.checkpoints.manifests import NamedFiles, named_files

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def _saved(directory: Path, threads: int) -> set[str]:
    """The files of a checkpoint, written by so many threads."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"weights": {f"layer.{number}.weight": torch.ones(8, 4) for number in range(threads)}, "step": 100}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, thread_count=threads), no_dist=True)
    return {path.name for path in directory.iterdir()} - {".metadata"}


@pytest.mark.parametrize("files", [1, 3])
def test_the_files_of_a_checkpoint_are_named(tmp_path: Path, files: int) -> None:
    """All of them, and nothing else; nothing of the pickle is carried out."""
    names = _saved(tmp_path, files)
    assert len(names) == files
    found = named_files(ObjectKey("bucket", "step-100/.metadata"), (tmp_path / ".metadata").read_bytes())
    assert isinstance(found, NamedFiles)
    assert set(found.keys) == {f"step-100/{name}" for name in names}
