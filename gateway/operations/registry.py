"""The registry of the cluster, as operations ask it: keys that other nodes have pending, and keys that have changed.

A write stamps its keys when it begins and when it ends. A reader that meets a stamp that it has not applied forgets
what it remembers of the key, as after a write of its own. What a node's buffer takes is claimed before its journal has
it, so that every node finds it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.core.model import Claim, Known, ObjectKey
from gateway.policy.slots import Slot


class Registry(Protocol):
    """All but `asks` and `is_of_this_run` raise RegistryAway. The keys of one call are of one bucket."""

    def asks(self, slot: Slot) -> bool:
        """Return whether requests in a slot ask the registry: another node may write there."""

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]: ...

    async def rows(self, bucket: str, start: bytes, stop: bytes | None) -> Sequence[tuple[bytes, Known]]:
        """Return all that is known of keys from `start` on and before `stop`, in S3's order; None: to the end."""

    async def begin(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        """Stamp keys that are about to be written past the buffer."""

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        """Stamp keys again, when the write is over or in doubt."""

    async def claim(self, claims: Sequence[Claim]) -> Sequence[Known]:
        """Claim keys for this node's store, before its journal has them. If any has another store, none is claimed."""

    def is_of_this_run(self, sequence: int) -> bool:
        """Return whether a number is of the run that this node believes, or is about to.

        A writer whose claim is not claims again, once its journal has the write.
        """
