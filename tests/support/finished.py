"""Requests that are over, for tests of who keeps them."""

from __future__ import annotations

from gateway.shared.recent_requests import FinishedRequest

FINISHED = FinishedRequest(
    "GetObject", "bucket", "key", "default", "200", "hit", None, None, 0.001, 10, 0, "someone", "ID", "127.0.0.1"
)


def finished(seconds: float = 0.001, status: str = "200", key: str | None = "key") -> FinishedRequest:
    """One that differs from FINISHED in what is looked at."""
    return FINISHED._replace(seconds=seconds, status=status, key=key)
