"""How long an acknowledgement is held back while the buffer fills: towards what the flush manages. Pure.

What was acknowledged first is flushed first. So a buffer that holds `used` bytes, the oldest of them `age` seconds old,
is emptied at some `used / age` bytes a second, and a body takes the flush its length over that. (In a burst's first
seconds, while nothing is old yet, that is too good to be true: hence FLUSH_BYTES_PER_SECOND.) From BACKPRESSURE_FROM
on, a write takes that time for itself, times a factor that grows as the room gets less: where the factor is the number
of writers, what comes in is what goes out.
"""

from __future__ import annotations

BACKPRESSURE_FROM = 0.75
"""Of the buffer, and of the exposure that is allowed; below it nobody is held back."""

FLUSH_BYTES_PER_SECOND = 100e6
"""No flush is expected to be faster: an origin's usual share for one node, and near enough for any."""

DELAY_SECONDS_MAX = 5.0
"""Clients give up after some 60 seconds without an answer."""

RETRY_SECONDS_MAX = 30


def delay_seconds(size_bytes: int, used_bytes: int, allowed_bytes: int, age_seconds: float | None) -> float:
    """How long the acknowledgement of so many bytes waits.

    `age_seconds` None: nothing is on its way to the origin, so that waiting would make no room.
    """
    fill = used_bytes / allowed_bytes
    if age_seconds is None or fill < BACKPRESSURE_FROM or used_bytes <= 0:
        return 0.0
    strength = min(0.999, (fill - BACKPRESSURE_FROM) / (1 - BACKPRESSURE_FROM))
    backlog_seconds = max(0.0, age_seconds) / used_bytes
    flush_seconds = size_bytes * max(backlog_seconds, 1 / FLUSH_BYTES_PER_SECOND)
    return min(DELAY_SECONDS_MAX, flush_seconds * strength / (1 - strength))


def retry_after_seconds(size_bytes: int, used_bytes: int, age_seconds: float | None) -> int:
    """When to try again what found no room: as long as the flush takes for it, as far as that can be told."""
    if age_seconds is None or used_bytes <= 0:
        return RETRY_SECONDS_MAX // 3
    return max(1, min(RETRY_SECONDS_MAX, round(size_bytes * age_seconds / used_bytes)))
