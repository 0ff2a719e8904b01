"""safetensors written and read through s3fs: whole, tensor by tensor, and as a file fetched for safe_open."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import read
from tests.clients.conftest import Endpoint
from tests.clients.filesystems import closed, s3_filesystem
from tests.clients.origins import Origin
from tests.clients.warmth import reads_at

pytestmark = pytest.mark.clients


@pytest.fixture
def filesystem(endpoint: Endpoint) -> Iterator[Any]:
    with closed(s3_filesystem(endpoint)) as found:
        yield found


def _tensors() -> dict[str, Any]:
    """About 13 MB in tensors of many sizes, an empty one among them."""
    import numpy

    random = numpy.random.default_rng(1)
    shapes = {"embedding": (1000, 3000), "norm/é": (7,), "empty": (0, 4), "scalar": (), "half": (300, 400)}
    types = {"half": numpy.float16}
    return {name: random.random(shape).astype(types.get(name, numpy.float32)) for name, shape in shapes.items()}


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == one.dtype and found[name].shape == one.shape and found[name].tobytes() == one.tobytes()
        for name, one in expected.items()
    )


def test_whole_files(filesystem: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """Saved through the gateway, the bytes are those that save makes; loaded again they come from cache."""
    from safetensors.numpy import load, save

    tensors = _tensors()
    with filesystem.open(f"{bucket}/model.safetensors", "wb", block_size=5 * 1024**2) as file:
        file.write(save(tensors, metadata={"format": "np"}))
    assert read(direct, bucket, "model.safetensors") == save(tensors, metadata={"format": "np"})
    for _ in range(2):
        with reads_at(origin, bucket) as reads:
            assert _same(load(filesystem.cat_file(f"{bucket}/model.safetensors")), tensors)
    assert reads == []


def test_single_tensors_by_range(filesystem: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """The header's length, the header, then each tensor by its offsets, as loaders over the network read them."""
    import numpy
    from safetensors.numpy import save

    tensors = _tensors()
    direct.put_object(Bucket=bucket, Key="model.safetensors", Body=save(tensors))
    path = f"{bucket}/model.safetensors"
    for _ in range(2):
        with reads_at(origin, bucket) as reads:
            (header_bytes,) = struct.unpack("<Q", filesystem.cat_file(path, start=0, end=8))
            header = json.loads(filesystem.cat_file(path, start=8, end=8 + header_bytes))
            for name, one in header.items():
                begin, end = (8 + header_bytes + offset for offset in one["data_offsets"])
                found = filesystem.cat_file(path, start=begin, end=end) if begin < end else b""
                assert numpy.frombuffer(found, tensors[name].dtype).tobytes() == tensors[name].tobytes()
    assert header.keys() == tensors.keys()
    assert reads == []


def test_safe_open_of_a_fetched_file(filesystem: Any, direct: Any, bucket: str, tmp_path: Path) -> None:
    """The file that s3fs fetches is one that safe_open maps, slices included."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    tensors = _tensors()
    save_file(tensors, tmp_path / "up.safetensors")
    filesystem.put_file(str(tmp_path / "up.safetensors"), f"{bucket}/model.safetensors")
    assert read(direct, bucket, "model.safetensors") == (tmp_path / "up.safetensors").read_bytes()
    filesystem.get_file(f"{bucket}/model.safetensors", str(tmp_path / "down.safetensors"))
    with safe_open(tmp_path / "down.safetensors", framework="np") as file:
        assert _same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118 - no mapping
        assert (file.get_slice("embedding")[10:20] == tensors["embedding"][10:20]).all()
