"""Limits on each client of the S3 port: its time and its bytes before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

_RECEIVE_BUFFER_BYTES_MIN = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one connection, and how many there may be.

    Timeouts are noticed by a sweep over all connections, up to a second late.
    """

    head_timeout_seconds: float = 20.0
    """From the connection, or from the first byte of a later request, to the end of the request's head."""
    body_timeout_seconds: float = 30.0
    """Longest silence in a request body while the gateway waits for it."""
    min_body_rate_bytes_per_second: int = 1024
    """Slowest average of a request body over the time spent waiting for it; judged after `body_timeout_seconds`."""
    keep_alive_timeout_seconds: float = 90.0
    """An idle connection stays open for this time; SDK connection pools expect more than a minute."""
    write_timeout_seconds: float = 60.0
    """A client may take no byte of a response for this time."""
    linger_seconds: float = 10.0
    """After a refusal: how long the rest of what the client sends is read and thrown away, so that it gets to read."""
    linger_bytes: int = 64 * 1024 * 1024
    """After a refusal: how much of what the client sends is read and thrown away."""
    max_header_bytes: int = 32 * 1024
    """Request line and header fields together."""
    max_headers: int = 256
    receive_buffer_bytes: int = 1024 * 1024
    """Received body that the application has not asked for yet: reading stops above it."""
    receive_buffers_bytes: int = 64 * 1024 * 1024
    """Limit for all connections together: each of many gets its share, 64 KiB at least."""
    unparsed_bytes: int = 4 * 1024 * 1024
    """Heads that are not whole, and what came behind a request, of all connections together: above it those that began
    first make room."""
    unsent_refusals_bytes: int = 4 * 1024 * 1024
    """Refusals that clients do not take, of all connections together: above it the oldest are dropped."""
    refusal_timeout_seconds: float = 5.0
    """A client may take this time over a refusal."""
    max_connections: int = 16_384
    """Above it connections that wait for a request make room, the longest first, then those that linger; else 503
    SlowDown."""
    refused_connections: int = 64
    """Connections accepted above the limit, to be refused. Further clients wait in the listener's queue, where another
    process may take them."""

    def connections_max(self, descriptors: int) -> int:
        """Return the limit of connections for a process that may open `descriptors` files.

        A connection may take up to three descriptors. The rest is for block files and the origin.
        """
        return max(1, min(self.max_connections, descriptors // 4))

    def receive_buffer_of_one(self, connections: int) -> int:
        """Return the bytes that one of `connections` may receive ahead."""
        share = self.receive_buffers_bytes // max(1, connections)
        return min(self.receive_buffer_bytes, max(share, _RECEIVE_BUFFER_BYTES_MIN))

    def sweep_seconds(self) -> float:
        """Return the time between two sweeps of the connections, so that a timeout is late by a quarter at most."""
        shortest = min(
            self.head_timeout_seconds,
            self.body_timeout_seconds,
            self.keep_alive_timeout_seconds,
            self.write_timeout_seconds,
            self.linger_seconds,
            self.refusal_timeout_seconds,
        )
        return min(1.0, shortest / 4)
