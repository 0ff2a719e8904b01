"""The demo's data set: the same bytes in every run, in the layout that WebDataset reads."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace

import pytest

from gateway.demo.dataset import Workload, checkpoint_bytes, files, shards

SMALL = Workload(image_bytes=1_500, shard_count=3, images_per_shard=5, file_count=4, checkpoint_bytes=10_000)


def test_objects_are_the_same_in_every_run() -> None:
    """Two plans of one workload generate equal bytes under equal keys; another seed generates others."""
    first, second = [*shards(SMALL), *files(SMALL)], [*shards(SMALL), *files(SMALL)]
    assert [(one.key, one.make()) for one in first] == [(one.key, one.make()) for one in second]
    other = [*shards(replace(SMALL, seed=1)), *files(replace(SMALL, seed=1))]
    assert not {one.make() for one in first} & {one.make() for one in other}


@pytest.mark.parametrize("image_bytes", [511, 512, 1_500, 114_660])
def test_planned_sizes_are_the_real_ones(image_bytes: int) -> None:
    """The size that a plan announces is the number of bytes it makes."""
    workload = replace(SMALL, image_bytes=image_bytes)
    for planned in (*shards(workload), *files(workload)):
        assert len(planned.make()) == planned.size_bytes, planned.key


def test_a_shard_pairs_each_image_with_its_class() -> None:
    """Samples are (NAME.jpg, NAME.cls) in order, numbered through all shards, with the images of the single files."""
    content: dict[str, bytes] = {}
    for planned in shards(SMALL):
        with tarfile.open(fileobj=io.BytesIO(planned.make())) as archive:
            for member in archive:
                opened = archive.extractfile(member)
                content[member.name] = opened.read() if opened else b""
    assert list(content) == [f"{index:08d}.{kind}" for index in range(15) for kind in ("jpg", "cls")]
    assert content["00000002.jpg"] == files(SMALL)[2].make()
    assert content["00000007.cls"] == b"007"


def test_checkpoints_differ_from_step_to_step() -> None:
    """A restore that gives an older step's bytes cannot pass for the right one."""
    one, two = checkpoint_bytes(SMALL, 1), checkpoint_bytes(SMALL, 2)
    assert len(one) == len(two) == SMALL.checkpoint_bytes
    assert one != two
