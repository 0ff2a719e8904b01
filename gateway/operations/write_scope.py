"""The keys that a write may change. This node forgets them around the write, and so do the others of its cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gateway.core.model import ObjectKey
from gateway.metadata.catalog import Catalog
from gateway.metadata.listing.dirty_keys import OwnWrite
from gateway.policy.registry import WHOLE_BUCKET
from gateway.policy.slots import Slots


class Announcer(Protocol):
    """Tells the other nodes of the cluster about writes that go through this one."""

    def must_know(self, key: ObjectKey) -> bool:
        """Return whether other nodes look whether the key has changed."""

    async def begin(self, keys: Sequence[ObjectKey]) -> None:
        """Tell that a write is about to be sent, once no other node has one of its keys pending. S3Error."""

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        """Tell that the keys have changed. RegistryAway."""

    async def forget_bucket(self, bucket: str) -> None:
        """Tell the other nodes to forget a bucket. A node that does not answer keeps to its bounds."""


class WriteScope:
    """The keys of a bucket that a write may change, or, without keys, all that it holds."""

    def __init__(
        self,
        catalog: Catalog,
        slots: Slots,
        bucket: str | None,
        keys: Iterable[str] | None,
        announcer: Announcer | None = None,
    ) -> None:
        """`announcer` tells the other nodes of the cluster; None: they need not know."""
        self._catalog = catalog
        self._bucket = bucket
        self._keys = None if keys is None else [ObjectKey(bucket or "", key) for key in keys]
        told = self._keys if self._keys is not None else [ObjectKey(bucket, WHOLE_BUCKET)] if bucket else []
        self._told = [key for key in told if announcer is not None and announcer.must_know(key)]
        self._announcer = announcer if self._told else None
        self._of_bucket = announcer if keys is None and bucket else None
        self._listed = [key.key for key in self._keys or () if slots.find(*key).consistency != "strict"]
        self._write: OwnWrite | None = None
        self._written_down: Sequence[int] = ()

    def forget(self) -> None:
        """Believe no answer to earlier questions."""
        if self._keys is None:
            self._catalog.forget_bucket(self._bucket)
        for key in self._keys or ():
            self._catalog.forget(key)
        if self._write is not None:
            self._catalog.listing.void_if_not_noted(self._write)

    def write_down(self) -> None:
        """Note the keys, so that the next process voids them if this one is killed before the end."""
        self._written_down = self._catalog.begin_write(self._bucket, self._keys)

    async def begin(self) -> None:
        """Begin the change, before the write is sent."""
        if self._announcer is not None:
            await self._announcer.begin(self._told)
        if self._listed:
            self._write = await self._catalog.listing.begin_write(self._bucket or "", self._listed)

    async def forget_everywhere(self) -> None:
        """Believe no answer to earlier questions, on all nodes. RegistryAway."""
        self.forget()
        if self._announcer is not None:
            await self._announcer.end(self._told)
        if self._of_bucket is not None and self._bucket is not None:
            await self._of_bucket.forget_bucket(self._bucket)

    async def end(self) -> None:
        """End the change, when the origin has done its work or failed; until then LIST asks it about the keys."""
        written_down, self._written_down = self._written_down, ()
        self._catalog.end_write(written_down)
        write, self._write = self._write, None
        if write is not None:
            await self._catalog.listing.end_write(write)

    def end_later(self) -> None:
        """End the change when the origin's outcome is unknown."""

        async def end() -> None:
            await self.forget_everywhere()
            await self.end()

        self._catalog.in_doubt.add(end)


async def invalidate(change: WriteScope) -> None:
    """Forget a version, as the origin has another one: it is asked again, by LIST too."""
    change.forget()
    try:
        await change.begin()
    finally:
        await change.end()
