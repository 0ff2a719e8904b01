"""A checkpoint as PyTorch DCP saves it: a file of each rank, in parts and at once, then the manifest."""

from __future__ import annotations

import os
from functools import partial

from loadtests.harness.saver import Part, Saver, at_once

PART_BYTES = 8 * 1024**2
MANIFEST_BYTES = 256 * 1024


class CheckpointSaver:
    """Saves checkpoints of `ranks` files of `parts` parts to one server, a thread and a connection a rank.

    With `tells_md5` every body goes with `Content-MD5`.
    """

    def __init__(self, ranks: int, parts: int, part: Part | None = None, *, tells_md5: bool = False) -> None:
        self._ranks = ranks
        self._parts = parts
        self._part = part or Part.of(os.urandom(PART_BYTES))
        self._tells_md5 = tells_md5

    @property
    def objects(self) -> int:
        """So many there are of one checkpoint."""
        return self._ranks + 1

    @property
    def size_bytes(self) -> int:
        return self._ranks * self._parts * PART_BYTES + MANIFEST_BYTES

    def save(self, address: tuple[str, int], prefix: str) -> float:
        """Seconds until the manifest is acknowledged. RuntimeError for any answer but 200."""
        savers = [Saver(address, self._part, tells_md5=self._tells_md5) for _ in range(self._ranks)]
        try:
            keys = keys_of(prefix, self._ranks)
            seconds = at_once([partial(one.save, key, self._parts) for one, key in zip(savers, keys, strict=True)])
            return seconds + at_once([partial(savers[0].put, f"{prefix}/.metadata", bytes(MANIFEST_BYTES))])
        finally:
            for one in savers:
                one.close()


def keys_of(prefix: str, ranks: int) -> list[str]:
    """The keys of the ranks' files."""
    return [f"{prefix}/__{rank}_0.distcp" for rank in range(ranks)]
