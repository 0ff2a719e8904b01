"""How much of request bodies may lie in memory at once, whole or in part, in one worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.s3.error_codes import s3_error

BUFFERED_SIZE_BYTES_MAX_TOTAL = 64 * 1024**2


class Buffers:
    """Counts the bytes of bodies that are received whole.

    One such body is small, but a slow client takes as long over it as its rate allows, and there may be thousands.
    """

    def __init__(self, size_bytes_max: int = BUFFERED_SIZE_BYTES_MAX_TOTAL) -> None:
        self._size_bytes_max = size_bytes_max
        self.held_bytes = 0

    @contextmanager
    def holding(self) -> Iterator[Held]:
        """Room for one body; what it has taken is given back at the end."""
        held = Held(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.size_bytes

    def take(self, size_bytes: int) -> None:
        """Count more bytes; S3Error SlowDown when there are too many."""
        if self.held_bytes + size_bytes > self._size_bytes_max:
            raise s3_error("SlowDown", "Too many request bodies are arriving at once. Please reduce your request rate.")
        self.held_bytes += size_bytes


class Held:
    """What one body takes."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.size_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """As `Buffers.take`."""
        self._buffers.take(size_bytes)
        self.size_bytes += size_bytes
