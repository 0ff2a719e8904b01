"""How large the demo's job is, and how far away its bucket."""

from __future__ import annotations

from dataclasses import dataclass

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
