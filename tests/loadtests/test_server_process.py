from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

import pytest

from loadtests.harness import machine
from loadtests.harness.server_process import ServerProcess, held_port
from tests.support.waiting import eventually

LISTEN = "import socket, time; s = socket.create_server(('127.0.0.1', {port})); {rest}; time.sleep(60)"


class Script(ServerProcess):
    """Listens on its port, then runs `rest`."""

    name = "script"

    def __init__(self, rest: str = "pass", *, source: str = LISTEN) -> None:
        super().__init__()
        self._source = source.format(port=self.port, rest=rest)

    def command(self) -> Sequence[str]:
        return [sys.executable, "-c", self._source]


def test_it_is_held_to_its_core_and_ended_with_everything_it_started() -> None:
    """A server runs on the first core only; leaving ends it and its children, and removes its directory."""
    with Script("import subprocess; subprocess.Popen(['sleep', '60'])") as server:
        root = server._process.pid if server._process else 0
        eventually(lambda: len(machine.tree(root)) == 2)
        pids = machine.tree(root)
        assert os.sched_getaffinity(root) == machine.server_core()
        assert server.directory.is_dir()
    assert not server.directory.exists()
    eventually(lambda: not any(map(_is_running, pids)))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_cpu_time_is_that_of_all_its_processes() -> None:
    """A child's work counts: a server may do everything in a worker process."""
    burn = "import os; child = os.fork(); [sum(range(10**5)) for _ in range(10**9) if not child]"
    with Script(burn) as server:
        eventually(lambda: server.cpu_seconds() >= 0.3)


def test_a_server_that_ends_at_once_is_reported_with_its_own_words() -> None:
    """Why a peer did not start stands in the error; its directory is removed."""
    server = Script(source="raise SystemExit('no such directive in line 7')")
    with pytest.raises(RuntimeError, match="script did not start\nno such directive in line 7"):
        server.__enter__()
    assert not server.directory.exists()


def test_a_held_port_is_given_to_nobody_but_a_server() -> None:
    """Before a server listens on it: connections are refused, and whoever picks a port picks another."""
    with held_port() as holder, socket.socket() as other, socket.socket() as server:
        address = holder.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        socket.create_connection(address).close()
