"""Asks the origin whether it can take a key at all, before a write of it is acknowledged.

Stores that are no S3 cannot have every key: no file of a directory is called `a//b`, nor `a/b` while `a` is a file. An
acknowledged write of such a key could never be flushed.
"""

from __future__ import annotations

from gateway.core.errors import OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.metadata.listing.pages import prefix_end
from gateway.operations.context import RequestContext
from gateway.s3.error_codes import s3_error

_LISTED = 100
"""Rows of one look at what is pending below a key; a page of tombstones alone is not looked behind."""


async def check_place(context: RequestContext) -> None:
    """Raise the S3Error by which the origin refuses the key, or would once all that is pending has been flushed.

    While the origin is away, only what needs no look at it is refused.
    """
    check, key = context.services.check_place, context.object_key
    if check is None or context.slot.write == "scratch":
        return
    try:
        if not await check(key):
            return
    except OriginUnreachable:
        pass
    names = key.key.rstrip("/").split("/")
    for count in range(1, len(names)):
        above = context.buffer.pending(ObjectKey(key.bucket, "/".join(names[:count])))
        if above is not None and not above.deleted:
            message = "A file is about to lie where this key needs a directory."
            raise s3_error("ObjectParentIsFile", message, status=409, Key=key.key)
    if key.key.endswith("/"):
        return
    below = f"{key.key}/".encode()
    found = context.buffer.look(lambda tx: tx.writes.listing(key.bucket, below, prefix_end(below), _LISTED))
    if any(not one.deleted for one in found):
        message = "A directory is about to lie under this key."
        raise s3_error("ExistingObjectIsDirectory", message, status=409, Key=key.key)
