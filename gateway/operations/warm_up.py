"""Warming by plain S3: a HEAD with `Range: bytes=0-0` fetches the whole object into the cache, in the background.

    answered as any HEAD (read_object.py) ─▶ the version of the answer ─▶ cached already, or not kept? ─▶ the queue

The answer's `x-forebay-cache` tells whether all bytes of the object are here (`hit`); otherwise they are on their way,
unless it says `not-kept`.
"""

from __future__ import annotations

from gateway.blocks.cache import BlockCache
from gateway.core.errors import OriginBodyError, StoreUnavailable
from gateway.core.model import ObjectVersion
from gateway.metadata.entries import object_head_of_get
from gateway.operations.context import Answer, RequestContext, Response, awaited
from gateway.operations.pending_versions import PendingVersions
from gateway.operations.read_object import VersionSource, head_object
from gateway.operations.read_wishes import WARM_UP_RANGE, head_must_bypass, vary_headers
from gateway.operations.version_answers import has_cacheable_bytes
from gateway.s3.error_codes import s3_error


def head_object_and_warm(versions: VersionSource) -> Answer:
    """Answer a HEAD, and begin a warm-up if it asks for one.

    S3Error SlowDown if the queue is full: nothing was done then, and SDKs ask again.
    """
    answer = head_object(versions)
    request = versions.context.request
    if request.headers.get("range") != WARM_UP_RANGE or head_must_bypass(request) or vary_headers(versions.headers):
        return answer  # of a part, a version, with a key: blocks do not hold these
    if isinstance(versions, PendingVersions):
        return answer  # its bytes are here
    return _warmed(versions.context, answer)


async def _warmed(context: RequestContext, answer: Answer) -> Response:
    reply = await awaited(answer)
    try:
        version = _version(context, reply)
        if version is not None:
            await _begin(context, version, reply)
    except BaseException:
        await reply.aclose()
        raise
    return reply


def _version(context: RequestContext, reply: Response) -> ObjectVersion | None:
    """Return the version of an answer; None: it has none, or one that is useless for the cache."""
    if reply.status not in (200, 206):
        return None
    headers = dict([*reply.encoded.pairs, *reply.headers])
    if reply.length_bytes is not None:
        headers.setdefault("content-length", str(reply.length_bytes))
    try:
        head, _ = object_head_of_get(context.object_key, reply.status, headers)
    except OriginBodyError:
        return None
    return head.version if has_cacheable_bytes(head) and head.version.size_bytes > 0 else None


async def _begin(context: RequestContext, version: ObjectVersion, reply: Response) -> None:
    """Fetch the version if it is kept and not here; set the label of the answer accordingly."""
    services, slot = context.services, context.slot
    blocks, queue = services.blocks, services.warm_ups
    reply.cache, reply.reason = "miss", "not-kept"
    if queue is None or not isinstance(blocks, BlockCache):
        return
    try:
        found = await queue.look(version, slot)
        if found.here is not None and found.here.here == found.here.blocks:
            reply.cache, reply.reason = "hit", None
            return
        if found.why_not_kept is not None or version.size_bytes > blocks.obtainable_bytes(slot.name):
            return
    except StoreUnavailable:
        return
    if not queue.begin(version, slot, context.credential):
        message = "Too many objects wait to be warmed. Please reduce your request rate."
        raise s3_error("SlowDown", message, headers={"retry-after": "1"})
    if found.here is not None and found.here.here_bytes:
        reply.cache = "partial"
    here = found.here
    if here is not None and here.evicted:
        reply.reason = "evicted"
    else:
        is_other = found.holding.blocks and (here is None or not here.here_bytes)
        reply.reason = "changed" if is_other else "first-read"
