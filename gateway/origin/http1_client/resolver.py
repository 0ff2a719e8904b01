"""Addresses of origins: asked of the system's resolver, and kept for some seconds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohappyeyeballs import AddrInfoType

KEPT_SECONDS = 10.0
"""S3 gives other addresses all the time, so that its clients spread; many connections begin at once, though."""


@dataclass(slots=True)
class Resolver:
    """Event loop only. The system's runs in a thread; who asks for a name that it looks up already waits with them."""

    _found: dict[tuple[str, int], tuple[float, asyncio.Task[Sequence[AddrInfoType]]]] = field(default_factory=dict)

    async def addresses(self, host: str, port: int) -> Sequence[AddrInfoType]:
        """Where to connect to; OSError when the name is unknown."""
        now, endpoint = asyncio.get_running_loop().time(), (host, port)
        asked_at, looking = self._found.get(endpoint, (0.0, None))
        if looking is None or now - asked_at > KEPT_SECONDS or _has_failed(looking):
            self._found = {known: found for known, found in self._found.items() if now - found[0] <= KEPT_SECONDS}
            looking = asyncio.create_task(_look_up(host, port), name="look up an origin")
            self._found[endpoint] = now, looking
        return await asyncio.shield(looking)


def _has_failed(looking: asyncio.Task[Sequence[AddrInfoType]]) -> bool:
    return looking.done() and (looking.cancelled() or looking.exception() is not None)


async def _look_up(host: str, port: int) -> Sequence[AddrInfoType]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
