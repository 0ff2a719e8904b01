"""Read your writes: what an own write changes is forgotten by the catalog before it is sent and when it is answered.

Whatever asked the origin before the second moment may have seen the state before the write, so none of it is believed
from then on. The first moment is for a worker that is killed in between, and for answers that never come.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing

from gateway.objects import BodyStream, HeldSpan, ObjectKey
from gateway.operations.exchange import Exchange
from gateway.operations.reply import Reply

Forget = Callable[[], None]
"""Makes the catalog forget what a write changes."""


async def visible(forget: Forget, write: Awaitable[Reply]) -> Reply:
    """Carry out a write such that everybody sees it when the client has its answer.

    An answer that begins before the work is done (CopyObject, CompleteMultipartUpload) says so in its last bytes, so
    that the catalog forgets before any piece of a body is passed on.
    """
    forget()
    try:
        reply = await write
    finally:
        forget()
    if not isinstance(reply.body, (bytes, memoryview, HeldSpan)):
        reply.body = _forgetting(reply.body, forget)
    return reply


def changed_by(exchange: Exchange) -> Forget:
    """What a request that changes something may change: its key, or all that its bucket holds where it names none."""
    catalog, request = exchange.services.catalog, exchange.request
    if request.bucket is None or request.key is None or "x-amz-rename-source" in request.headers:
        return lambda: catalog.forget_bucket(request.bucket)
    return lambda: catalog.forget(exchange.object_key)


def changed_keys(exchange: Exchange, keys: Iterable[str]) -> Forget:
    """What a request changes that names its keys in its body."""
    bucket = exchange.request.bucket or ""
    changed = [ObjectKey(bucket, key) for key in keys]

    def forget() -> None:
        for key in changed:
            exchange.services.catalog.forget(key)

    return forget


async def _forgetting(body: BodyStream, forget: Forget) -> BodyStream:
    async with aclosing(body):
        async for piece in body:
            forget()
            yield piece
        forget()
