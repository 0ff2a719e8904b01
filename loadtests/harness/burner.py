"""A server that uses CPU time, as much as it is told to: in place of work that another server does not do.

    python -m loadtests.harness.burner PORT

Whoever connects says how many seconds of CPU time to use, and does not wait for it: two threads use them, one piece
after another, like the workers of an nginx. Or it says how much of each second to use, a little at a time, on a thread
of its own until the connection is closed.
"""

from __future__ import annotations

import hashlib
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtests.harness.server_process import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]
_ASKED = struct.Struct("!cd")
_ONCE, _STEADILY = b"o", b"s"
_TURN_SECONDS = 0.02
_THREADS = 2
_BLOCK = bytes(64 * 1024)


class Burner(ServerProcess):
    """On one core, as all servers."""

    name = "burner"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "loadtests.harness.burner", str(self.port)]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_REPOSITORY)}


class Fuel:
    """A connection to a burner."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._wire = socket.create_connection(address)
        self._wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def burn(self, cpu_seconds: float) -> None:
        """As soon as what was asked for before is used up."""
        self._wire.sendall(_ASKED.pack(_ONCE, cpu_seconds))

    def burn_steadily(self, cpu_seconds_per_second: float) -> None:
        """Until it is closed."""
        self._wire.sendall(_ASKED.pack(_STEADILY, cpu_seconds_per_second))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wire.close()


def _burn(cpu_seconds: float) -> None:
    end = time.thread_time() + cpu_seconds
    while time.thread_time() < end:
        hashlib.md5(_BLOCK, usedforsecurity=False)


def _serve(wire: socket.socket, pool: ThreadPoolExecutor) -> None:
    with wire:
        while asked := wire.recv(_ASKED.size, socket.MSG_WAITALL):
            how, cpu_seconds = _ASKED.unpack(asked)
            if how == _STEADILY:
                _burn_steadily(wire, cpu_seconds)
                return
            pool.submit(_burn, cpu_seconds).result()


def _burn_steadily(wire: socket.socket, part: float) -> None:
    due = time.monotonic()
    while not select.select([wire], [], [], max(0.0, due - time.monotonic()))[0]:
        _burn(part * _TURN_SECONDS)
        due += _TURN_SECONDS


def main(port: int) -> None:
    with socket.create_server(("127.0.0.1", port), backlog=128) as listener, ThreadPoolExecutor(_THREADS) as pool:
        while True:
            wire, _ = listener.accept()
            threading.Thread(target=_serve, args=(wire, pool), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
