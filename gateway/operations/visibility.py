"""Read your writes: what an own write changes is forgotten by the catalog before it is sent and when it is answered.

Whatever asked the origin before the second moment may have seen the state before the write, so none of it is believed
from then on. The first moment is for a worker that is killed in between, and for answers that never come. From the
first moment on, and until it has caught up, the listing index is asked nothing about the key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from gateway.metadata.catalog import Catalog
from gateway.metadata.listing.dirty_keys import OwnWrite
from gateway.objects import BodyStream, HeldSpan, ObjectKey
from gateway.operations.exchange import Exchange
from gateway.operations.reply import Closable, Reply
from gateway.policy.slots import Slots


class Change:
    """What a write may change: these keys of a bucket, or, without keys, all that it holds."""

    def __init__(self, catalog: Catalog, slots: Slots, bucket: str | None, keys: Iterable[str] | None) -> None:
        self._catalog = catalog
        self._bucket = bucket
        self._keys = None if keys is None else [ObjectKey(bucket or "", key) for key in keys]
        self._listed = [] if self._keys is None else [key.key for key in self._keys if _is_indexed(slots, key)]
        self._write: OwnWrite | None = None

    def forget(self) -> None:
        """Believe nothing that was asked until now."""
        if self._keys is None:
            self._catalog.forget_bucket(self._bucket)
        for key in self._keys or ():
            self._catalog.forget(key)
        if self._write is not None:
            self._catalog.listing.void_if_not_noted(self._write)

    async def begin(self) -> None:
        """To be called before the write is sent."""
        if self._listed:
            self._write = await self._catalog.listing.begin_write(self._bucket or "", self._listed)

    async def end(self) -> None:
        """To be called when the origin has done its work, or has not; until then LIST asks it about the keys."""
        write, self._write = self._write, None
        if write is not None:
            await self._catalog.listing.end_write(write)


async def visible(change: Change, write: Awaitable[Reply]) -> Reply:
    """Carry out a write such that everybody sees it when the client has its answer.

    An answer that begins before the work is done (CopyObject, CompleteMultipartUpload) says so in its last bytes, so
    that the catalog forgets before any piece of a body is passed on.
    """
    reply = None
    try:
        await change.begin()
        change.forget()
        reply = await write
    finally:
        change.forget()
        if reply is None or isinstance(reply.body, (bytes, memoryview, HeldSpan)):
            await change.end()
    if not isinstance(reply.body, (bytes, memoryview, HeldSpan)):
        reply.body = _forgetting(reply.body, change.forget)
        reply.resource = _Changing(change, reply.resource)
    return reply


async def doubt(change: Change) -> None:
    """The origin has turned out to have another version than the one remembered: it is asked again, by LIST too."""
    change.forget()
    await change.begin()
    await change.end()


def changed_by(exchange: Exchange) -> Change:
    """What a request that changes something may change: its key, or all that its bucket holds where it names none."""
    services, request = exchange.services, exchange.request
    is_of_one_key = request.key is not None and "x-amz-rename-source" not in request.headers
    keys = [request.key] if request.key is not None and is_of_one_key else None
    return Change(services.catalog, services.slots, request.bucket, keys)


def changed_keys(exchange: Exchange, keys: Iterable[str]) -> Change:
    """What a request changes that names its keys in its body."""
    return Change(exchange.services.catalog, exchange.services.slots, exchange.request.bucket, keys)


def _is_indexed(slots: Slots, key: ObjectKey) -> bool:
    return slots.find(key.bucket, key.key).consistency != "strict"


@dataclass(slots=True)
class _Changing:
    """Ends the change when its answer is over, sent or not."""

    change: Change
    resource: Closable | None

    async def aclose(self) -> None:
        try:
            if self.resource is not None:
                await self.resource.aclose()
        finally:
            await self.change.end()


async def _forgetting(body: BodyStream, forget: Callable[[], None]) -> BodyStream:
    async with aclosing(body):
        async for piece in body:
            forget()
            yield piece
        forget()
