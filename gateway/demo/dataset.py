"""The demo's data set: the same images once as WebDataset-style tar shards and once as single files.

Every byte follows from the seed, so each object can be verified by its SHA-256 without keeping a second copy.
"""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

DATA_PREFIX = "data/"
"""Keys of the data set begin with it: the read-only slot."""

CHECKPOINT_PREFIX = "checkpoints/"
"""Keys of checkpoints begin with it: the slot that writes back."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training job in small. The defaults keep the whole demo well under two minutes on two cores.

    The record size is MLPerf Storage's for ResNet-50; latency and bandwidth are of the order that one connection to an
    object store in the same region gives.
    """

    bucket: str = "train"
    image_bytes: int = 114_660
    shard_count: int = 24
    images_per_shard: int = 144
    file_count: int = 400
    readers: int = 4
    rounds: int = 3
    checkpoint_bytes: int = 96 * 1024 * 1024
    first_byte_seconds: float = 0.025
    connection_bytes_per_second: float = 90e6
    seed: int = 20_261_120


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as uploaded. The read must return exactly these bytes."""

    key: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """An object before its upload; `make` generates its bytes, the same at every call."""

    key: str
    size_bytes: int
    make: Callable[[], bytes]


def describe(key: str, content: bytes) -> StoredObject:
    return StoredObject(key, len(content), hashlib.sha256(content).hexdigest())


def shards(workload: Workload) -> Sequence[PlannedObject]:
    size = _tar_size(workload)
    return [
        PlannedObject(f"{DATA_PREFIX}shards/train-{index:05d}.tar", size, partial(shard_bytes, workload, index))
        for index in range(workload.shard_count)
    ]


def files(workload: Workload) -> Sequence[PlannedObject]:
    return [
        PlannedObject(
            f"{DATA_PREFIX}images/{index:06d}.jpg", workload.image_bytes, partial(image_bytes, workload, index)
        )
        for index in range(workload.file_count)
    ]


def image_bytes(workload: Workload, index: int) -> bytes:
    """One image: JPEG markers around bytes that compress as badly as a JPEG's."""
    noise = random.Random(f"{workload.seed}/{index}").randbytes(workload.image_bytes - 4)
    return b"\xff\xd8" + noise + b"\xff\xd9"


def shard_bytes(workload: Workload, shard: int) -> bytes:
    """Return a tar of (image, class) pairs that share a base name, as WebDataset expects them."""
    first = shard * workload.images_per_shard
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for index in range(first, first + workload.images_per_shard):
            _add(archive, f"{index:08d}.jpg", image_bytes(workload, index))
            _add(archive, f"{index:08d}.cls", f"{index % 1000:03d}".encode())
    return buffer.getvalue()


def checkpoint_bytes(workload: Workload, step: int) -> bytes:
    """Return the state after `step`: bytes of its own for every step."""
    return random.Random(f"{workload.seed}/checkpoint/{step}").randbytes(workload.checkpoint_bytes)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _tar_size(workload: Workload) -> int:
    def padded(size: int, unit: int) -> int:
        return -(-size // unit) * unit

    pair = 2 * tarfile.BLOCKSIZE + padded(workload.image_bytes, tarfile.BLOCKSIZE) + tarfile.BLOCKSIZE
    return padded(workload.images_per_shard * pair + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)
