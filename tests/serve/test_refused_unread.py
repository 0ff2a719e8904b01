"""Requests that no application sees, because they cannot be read: who watches the gateway sees them."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from tests.support.gateway_process import GatewayProcess, wait_for_metric


@pytest.mark.slow
def test_requests_that_are_refused_unread_are_counted() -> None:
    """Among all others, by their status."""
    with GatewayProcess({"origin": {"endpoint_url": "http://127.0.0.1:9"}}) as gateway:
        url = urlsplit(gateway.s3_url)
        assert url.hostname is not None
        wait_for_metric(gateway, _series("503", 0))
        for line in (b"CONNECT a:1 HTTP/1.1", b"GET /b/\xff HTTP/1.1", b"GET / HTTP/9.9"):
            with socket.create_connection((url.hostname, url.port or 0)) as wire:
                wire.sendall(line + b"\r\nHost: s3.local\r\n\r\n")
                assert wire.recv(12).startswith(b"HTTP/1.1 4")
        for status, count in (("405", 1), ("400", 2)):
            wait_for_metric(gateway, _series(status, count))


def _series(status: str, count: int) -> str:
    labels = f'cache="none",operation="Unknown",slot="none",status="{status}"'
    return rf"forebay_requests_total\{{{labels}\}} {count}\.0"
