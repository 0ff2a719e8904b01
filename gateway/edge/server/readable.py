"""Looking at a socket without waiting."""

from __future__ import annotations

import select


def readable(descriptor: int) -> bool:
    """Has the kernel bytes for us, or the end of the connection, that nobody has seen yet?"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
