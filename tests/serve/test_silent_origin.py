"""A running gateway whose origin accepts connections and says nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess

FIRST_SECONDS = 3.0
"""Long beside what a busy machine takes for an answer that waits for nothing."""


class SwitchedOrigin:
    """Says nothing while `is_silent`, and 404 to everything otherwise."""

    def __init__(self) -> None:
        self.is_silent = True
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(64 * 1024):
                if not self.is_silent:
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


@contextmanager
def switched_origin() -> Iterator[SwitchedOrigin]:
    origin = SwitchedOrigin()
    try:
        yield origin
    finally:
        origin.close()


def ask(gateway: GatewayProcess, method: str, path: str, content: bytes | None = None) -> tuple[httpx.Response, float]:
    """On a connection of its own, so that any worker may get it."""
    began = time.monotonic()
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.request(method, f"{gateway.s3_url}{path}", content=content)
    return answer, time.monotonic() - began


@pytest.mark.slow
def test_8_1_a_silent_origin_is_503_within_the_first_byte_timeout_and_at_once_from_then_on() -> None:
    """8.1 On every worker, whatever is asked; and served again when it answers."""
    with switched_origin() as origin:
        config: dict[str, Mapping[str, Any]] = {
            "origin": {"endpoint_url": origin.url, "first_byte_timeout": f"{FIRST_SECONDS}s"},
            "server": {"workers": 2, "allow_unsigned": True},
        }
        with GatewayProcess(config) as gateway:
            first, seconds = ask(gateway, "GET", "/bucket/key")
            assert first.status_code == 503
            assert first.headers["retry-after"] == "1"
            assert 0.5 * FIRST_SECONDS < seconds < FIRST_SECONDS + 3.0
            for number in range(10):
                for method, path, content in (
                    ("GET", f"/bucket/{number}", None),
                    ("HEAD", f"/bucket/{number}", None),
                    ("PUT", f"/bucket/{number}", b"x"),
                    ("GET", "/bucket?list-type=2", None),
                ):
                    answer, seconds = ask(gateway, method, path, content)
                    assert answer.status_code == 503
                    assert seconds < 0.5 * FIRST_SECONDS
            origin.is_silent = False
            deadline = time.monotonic() + 20
            while ask(gateway, "GET", "/bucket/key")[0].status_code == 503:
                assert time.monotonic() < deadline, gateway.log
            answer, _ = ask(gateway, "GET", "/bucket/key")
            assert answer.status_code in (404, 503)
