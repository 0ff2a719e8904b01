"""What the connections of one server share."""

from __future__ import annotations

import asyncio

from uvicorn.server import ServerState

from gateway.edge.server.half_closed import HalfClosed


class S3ServerState(ServerState):
    """uvicorn's, and what the drain needs to know."""

    def __init__(self) -> None:
        super().__init__()
        self.default_lines = b""
        """`default_headers` once more, as lines of a response head."""
        self.draining = False
        self.nothing_open = asyncio.Event()
        self.nothing_open.set()
        self.half_closed = HalfClosed()
