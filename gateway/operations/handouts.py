"""Which nodes have just got bytes from this process, so that the next ones can ask them.

What all nodes want at once would take the bandwidth of one node as often as there are nodes. So a few get it, the
others wait for these moments, and then ask who has got it; whom they ask does the same.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.core.model import ByteRange, ObjectVersion

SENT_AT_ONCE = 4
"""Nodes that one process sends the same bytes to at a time; the next one asks another node for them."""

TAKERS_NAMED_MAX = 3
WAIT_SECONDS_MAX = 2.0
"""Seconds for which a node waits until it is sent the bytes, or told who has them."""

REMEMBERED_MAX = 4096

Bytes = tuple[ObjectVersion, ByteRange]
"""The exact range that nodes ask for: a node that has got only a part of it is no help."""


@dataclass(slots=True)
class _Handout:
    count: int = 0
    """Nodes that they are being sent to now."""

    takers: tuple[str, ...] = ()
    """Addresses, the last one first; one more than are named, as the asker itself may be among them."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def others(self, asker: str) -> Sequence[str]:
        return [one for one in self.takers if one != asker][:TAKERS_NAMED_MAX]


class Handouts:
    """Counts what one process sends now, and remembers who got it, for the last bytes. Event loop only."""

    def __init__(self) -> None:
        self._of: OrderedDict[Bytes, _Handout] = OrderedDict()

    def others(self, asked: Bytes, asker: str) -> Sequence[str] | None:
        """Return the addresses that an asker is to ask instead; none: send it the bytes; None: it waits (`turn`)."""
        handout = self._of.get(asked)
        if handout is None or handout.count < SENT_AT_ONCE:
            return ()
        others = handout.others(asker)
        return others if len(others) == TAKERS_NAMED_MAX else None

    async def turn(self, asked: Bytes, asker: str) -> Sequence[str]:
        """Return as `others`, when the asker need not wait, or has waited for long enough."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                while (others := self.others(asked, asker)) is None:
                    await self._of[asked].changed.wait()
                return others
        handout = self._of.get(asked)
        return handout.others(asker) if handout is not None and handout.count else ()

    def begin(self, asked: Bytes) -> None:
        """Count bytes that are being sent; `end` follows."""
        self._of.setdefault(asked, _Handout()).count += 1

    def end(self, asked: Bytes, taker: str) -> None:
        """Note that bytes are no longer being sent; `taker` is who has got all of them, or empty."""
        handout = self._of[asked]
        handout.count -= 1
        if taker and taker not in handout.takers:
            handout.takers = (taker, *handout.takers[:TAKERS_NAMED_MAX])
        self._of.move_to_end(asked)
        over = (one for one, of in self._of.items() if not of.count)
        if len(self._of) > REMEMBERED_MAX and (oldest := next(over, None)) is not None:
            del self._of[oldest]
        handout.changed.set()  # who waits now looks again
        handout.changed.clear()
