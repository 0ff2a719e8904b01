"""What one client may cost."""

from gateway.edge.server_state import ServerLimits


def test_many_connections_share_what_may_be_received_ahead() -> None:
    """A thousand uploads that wait for the origin must not hold a thousand times what a single one may."""
    limits = ServerLimits()
    assert limits.receive_buffer_of_one(0) == limits.receive_buffer_of_one(1) == limits.receive_buffer_bytes
    assert limits.receive_buffer_of_one(256) * 256 <= limits.receive_buffers_bytes
    assert limits.receive_buffer_of_one(limits.max_connections) == 64 * 1024
