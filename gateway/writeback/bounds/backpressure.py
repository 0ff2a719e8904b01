"""Delays of acknowledgements while the buffer fills, so that writers slow to the speed of the flush. Pure.

The flush sends the oldest writes first. So it empties a buffer of `used` bytes, the oldest `age` seconds old, at about
`used / age` bytes a second, and needs a body's length over that rate for the body. (In a burst's first seconds nothing
is old, and the rate seems too high: hence FLUSH_BYTES_PER_SECOND.) From BACKPRESSURE_FROM on, a write waits for its own
flush time, times a factor that grows as the room shrinks: where the factor is the number of writers, the buffer fills
as fast as it empties.
"""

from __future__ import annotations

BACKPRESSURE_FROM = 0.75
"""The fill of the buffer, or of the allowed exposure, from which on acknowledgements wait."""

FLUSH_BYTES_PER_SECOND = 100e6
"""No flush is expected to be faster: an origin's usual share for one node, and near enough for any."""

DELAY_SECONDS_MAX = 5.0
"""Clients give up after some 60 seconds without an answer."""

RETRY_SECONDS_MAX = 30


def delay_seconds(size_bytes: int, used_bytes: int, allowed_bytes: int, age_seconds: float | None) -> float:
    """Return the seconds for which an acknowledgement waits.

    `age_seconds` None: nothing is on its way to the origin, so waiting would make no room.
    """
    fill = used_bytes / allowed_bytes
    if age_seconds is None or fill < BACKPRESSURE_FROM or used_bytes <= 0:
        return 0.0
    strength = min(0.999, (fill - BACKPRESSURE_FROM) / (1 - BACKPRESSURE_FROM))
    backlog_seconds = max(0.0, age_seconds) / used_bytes
    flush_seconds = size_bytes * max(backlog_seconds, 1 / FLUSH_BYTES_PER_SECOND)
    return min(DELAY_SECONDS_MAX, flush_seconds * strength / (1 - strength))


def retry_after_seconds(size_bytes: int, used_bytes: int, age_seconds: float | None) -> int:
    """Return after how many seconds to retry a refused write: when the flush will probably have made room."""
    if age_seconds is None or used_bytes <= 0:
        return RETRY_SECONDS_MAX // 3
    return max(1, min(RETRY_SECONDS_MAX, round(size_bytes * age_seconds / used_bytes)))
