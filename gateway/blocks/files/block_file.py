"""A file of blocks that this process has open."""

from __future__ import annotations

from typing import TypeAlias

from gateway.file_lease import FileLease, SharedFile


class BlockFile(SharedFile):
    """A published file or one that is being filled: shared by its readers, and by threads that work for them."""


BlockLease: TypeAlias = FileLease[BlockFile]


def lease_of(descriptor: int) -> BlockLease:
    """The first lease on a file that was just opened."""
    return FileLease(BlockFile(descriptor))
