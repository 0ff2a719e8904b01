"""PutObject and UploadPart, written through: the client's 200 is the origin's.

Bodies stream to the origin verified (see payload.py); a body that breaks off or fails a check stores nothing.
"""

from __future__ import annotations

from gateway.operations.exchange import Exchange
from gateway.operations.passthrough import forward, forward_write
from gateway.operations.reply import Reply


async def put_object(exchange: Exchange) -> Reply:
    """Store an object at the origin; every reader sees it when the 200 is sent."""
    return await forward_write(exchange)


async def upload_part(exchange: Exchange) -> Reply:
    """Store a part at the origin; nothing becomes visible before the upload is completed."""
    return await forward(exchange)
