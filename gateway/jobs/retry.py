"""Asking again while the origin is down or busy, beyond what one request is tried (origin/retry.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.core.clock import Clock
from gateway.core.errors import OriginAnswered, OriginUnreachable

T = TypeVar("T")

ATTEMPTS_MAX = 6
"""About half a minute with the pauses between them."""

_FIRST_PAUSE_SECONDS = 1.0
_RETRYABLE = frozenset({429, 500, 502, 503, 504})


async def with_retries(clock: Clock, ask: Callable[[], Awaitable[T]]) -> T:
    """Return the answer within ATTEMPTS_MAX tries; raise as the last did, at once if it is no "later"."""
    pause_seconds = _FIRST_PAUSE_SECONDS
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            return await ask()
        except (OriginUnreachable, OriginAnswered) as error:
            if isinstance(error, OriginAnswered) and error.status not in _RETRYABLE:
                raise
        await clock.sleep(pause_seconds)
        pause_seconds *= 2
    return await ask()
