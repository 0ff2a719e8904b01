"""CopyObject and UploadPartCopy (S3 API): the origin copies on its own side, no byte passes through here.

The origin may answer 200 at once and send white space until the copy is done; its answer is streamed on as it comes.
"""

from __future__ import annotations

from gateway.operations.exchange import Exchange
from gateway.operations.passthrough import forward, forward_write
from gateway.operations.reply import Reply


async def copy_object(exchange: Exchange) -> Reply:
    """Copy an object at the origin. The caller's right to read the source has been checked."""
    return await forward_write(exchange)


async def upload_part_copy(exchange: Exchange) -> Reply:
    """Make a part from an object at the origin; nothing becomes visible before the upload is completed."""
    return await forward(exchange)
