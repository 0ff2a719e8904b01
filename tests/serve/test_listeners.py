"""Listening sockets."""

from __future__ import annotations

import socket

import pytest

from gateway.core.errors import StartupError
from gateway.serve.listeners import close_all, open_listeners, port_of, url


def test_port_0_picks_one_free_port_for_all_addresses() -> None:
    """`localhost` may be two addresses; clients may use either."""
    opened = open_listeners("server", "localhost", 0)
    try:
        assert {one.getsockname()[1] for one in opened} == {port_of(opened)}
        for one in opened:
            with socket.create_connection(one.getsockname()[:2], timeout=5):
                pass
    finally:
        close_all(opened)


def test_a_taken_port_is_refused_by_name() -> None:
    """And what was opened is closed again."""
    opened = open_listeners("server", "127.0.0.1", 0)
    try:
        with pytest.raises(
            StartupError, match=rf"admin: cannot listen on 127\.0\.0\.1:{port_of(opened)}: .*another admin\.port"
        ):
            open_listeners("admin", "127.0.0.1", port_of(opened))
    finally:
        close_all(opened)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    """192.0.2.0/24 is nobody's (RFC 5737), .invalid never resolves (RFC 2606)."""
    with pytest.raises(StartupError, match=r"server"):
        open_listeners("server", host, 0)


def test_urls_bracket_ipv6() -> None:
    """RFC 3986, 3.2.2."""
    assert url("http", "127.0.0.1", 9000) == "http://127.0.0.1:9000"
    assert url("https", "::1", 9000) == "https://[::1]:9000"
