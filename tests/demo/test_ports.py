"""Ports that are promised to a server."""

from __future__ import annotations

import errno
import socket
from contextlib import closing

import pytest

from gateway.demo.ports import free_port


def test_a_port_is_kept_for_its_server() -> None:
    """No other socket can bind it before the server, which may listen at any address of the machine."""
    port = free_port()
    with closing(socket.socket()) as other, pytest.raises(OSError) as refused:
        other.bind(("127.0.0.1", port))
    assert refused.value.errno == errno.EADDRINUSE
    for address in ("127.0.0.1", "127.0.0.2"):
        with closing(socket.create_server((address, port))) as server, socket.create_connection((address, port)):
            server.accept()[0].close()
