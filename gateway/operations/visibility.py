"""Read your writes: the catalog forgets what a write changes before it is sent and when it is answered.

Questions that the origin got before the second moment may show the state before the write, so none is believed.

If no answer comes, the origin may carry the write out later: what is learned until then is forgotten again
(metadata/entries.py); so it is when the worker is killed in between (`Catalog.begin_write`).

Changes by others come as the origin's events, late, twice, and in any order. An event is not believed itself: like an
own write, it voids what is remembered, and the next read asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gateway.blocks.cache import BlockCache
from gateway.core.errors import OriginAnswered, S3Error
from gateway.core.model import BodyStream, ObjectKey, PinnedFileSpan
from gateway.metadata.catalog import Catalog
from gateway.operations.context import Closable, RequestContext, Response
from gateway.operations.write_scope import WriteScope, invalidate
from gateway.origin.retry import may_be_done
from gateway.policy.registry import WHOLE_BUCKET, Stores
from gateway.policy.slots import Slots
from gateway.s3.events import ObjectEvent
from gateway.s3.headers import plain_etag


async def with_invalidation(change: WriteScope, write: Coroutine[Any, Any, Response]) -> Response:
    """Carry out a write so that all clients see it once its client has the answer.

    An answer that begins before the work is done (CopyObject, CompleteMultipartUpload) ends with its result, so the
    catalog forgets before each piece of the body is passed on.
    """
    try:
        with closing(write):  # it is not begun if the change is not
            change.write_down()
            await change.begin()
            change.forget()
            reply = await write
    except BaseException as error:
        change.forget()
        # The request has certainly ended if the origin has refused it, or was not asked. A 503 of the origin's own is a
        # refusal; one of this gateway's may mean that the origin has not answered.
        is_own_refusal = isinstance(error, S3Error) and error.status < _SERVER_ERROR
        if is_own_refusal or (isinstance(error, OriginAnswered) and not may_be_done(error.status)):
            await change.end()
        else:
            change.end_later()
        raise
    try:
        if reply.status < _BAD_REQUEST or may_be_done(reply.status):
            await change.forget_everywhere()
        else:
            change.forget()
    except BaseException:
        change.end_later()
        await reply.aclose()
        raise
    if not isinstance(reply.body, (bytes, memoryview, PinnedFileSpan)):
        changing = _Changing(change, reply.resource, is_over=reply.status != _OK and not may_be_done(reply.status))
        reply.body, reply.resource = changing.forgetting(reply.body, reply.status), changing
    elif may_be_done(reply.status):
        change.end_later()
    else:
        await change.end()
    return reply


_OK = 200
_BAD_REQUEST = 400
_SERVER_ERROR = 500


def changed_by(context: RequestContext) -> WriteScope:
    """Return what a request may change: its key, or without one, all that its bucket holds."""
    services, request = context.services, context.request
    is_of_one_key = request.key is not None and "x-amz-rename-source" not in request.headers
    keys = [request.key] if request.key is not None and is_of_one_key else None
    return WriteScope(services.catalog, services.slots, request.bucket, keys, services.cluster_writes)


def changed_keys(context: RequestContext, keys: Iterable[str]) -> WriteScope:
    services = context.services
    return WriteScope(services.catalog, services.slots, context.request.bucket, keys, services.cluster_writes)


@dataclass(slots=True)
class _Changing:
    """Ends the change when its answer is over, sent or not. `is_over`: the outcome is known."""

    change: WriteScope
    resource: Closable | None
    is_over: bool

    async def forgetting(self, body: BodyStream, status: int) -> BodyStream:
        """Yield the body; its last words are true when they are passed on."""
        async with aclosing(body):
            async for piece in body:
                await self.change.forget_everywhere()
                yield piece
        self.change.forget()
        self.is_over = not may_be_done(status)

    async def aclose(self) -> None:
        try:
            if self.resource is not None:
                await self.resource.aclose()
        finally:
            if self.is_over:
                await self.change.end()
            else:
                self.change.end_later()


_KEYS_AT_ONCE = 128
"""Keys per transaction of the dirty keys, so that own writes wait at most a millisecond."""


class OriginEvents:
    """Applies events for all workers, over their shared state, and for the other nodes of the cluster."""

    def __init__(self, catalog: Catalog, blocks: BlockCache, slots: Slots, others: Stores | None = None) -> None:
        """`others` are the other nodes of the cluster, which hear of the events too."""
        self._others = others
        self._catalog = catalog
        self._blocks = blocks
        self._slots = slots

    async def apply(self, events: Sequence[ObjectEvent]) -> list[str | None]:
        """Apply events; return for each why it was ignored, or None. Afterwards every read asks the origin first."""
        slots = [self._slots.find(event.bucket, event.key) for event in events]
        reasons = [f"the slot {slot.name} is frozen" if slot.consistency == "snapshot" else None for slot in slots]
        applied = [event for event, reason in zip(events, reasons, strict=True) if reason is None]
        outdated = [event for event in applied if not self._is_of_known_version(event)]
        by_bucket: dict[str, dict[str, None]] = defaultdict(dict)
        for event in applied:
            by_bucket[event.bucket][event.key] = None
        for bucket, keys in by_bucket.items():
            following = iter(keys)
            while batch := list(islice(following, _KEYS_AT_ONCE)):
                await invalidate(WriteScope(self._catalog, self._slots, bucket, batch))
                if self._others is not None:
                    await self._others.forget(bucket, batch)
        for key in {ObjectKey(event.bucket, event.key): None for event in outdated}:
            await self._blocks.invalidate(key)
        return reasons

    async def forget_bucket(self, bucket: str) -> None:
        """Remember nothing of a bucket and its keys on this node. Afterwards every read asks the origin first."""
        await invalidate(WriteScope(self._catalog, self._slots, bucket, None))

    async def forget_elsewhere(self, bucket: str) -> None:
        """Tell the other nodes to forget a bucket. A node that does not answer keeps to its bounds."""
        if self._others is not None:
            await self._others.forget(bucket, [WHOLE_BUCKET])

    def _is_of_known_version(self, event: ObjectEvent) -> bool:
        """Return whether the event is about the version whose blocks are here, as events of own writes are."""
        if event.etag is None:
            return False
        known = self._catalog.last_known(ObjectKey(event.bucket, event.key))
        return known is not None and plain_etag(known.version.etag) == plain_etag(event.etag)
