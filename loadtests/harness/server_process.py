"""A server in a process of its own: started, waited for, measured, never left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtests.harness import machine

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.02


def held_port() -> socket.socket:
    """Bound to a port of 127.0.0.1 that nobody else is given while it is open.

    A server can listen on it all the same: both allow the address to be used again (SO_REUSEADDR), and one listens.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _die_with_parent() -> None:
    """In the child: SIGTERM when the load test ends, however it ends (prctl(2), PR_SET_PDEATHSIG is 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class ServerProcess:
    """Runs `command(...)` in a session of its own, with a directory that leaving removes.

    Subclasses say `name` and build the command; `port` is chosen already. Leaving sends SIGTERM to the session, and
    SIGKILL to what is left after ten seconds.
    """

    name = "server"

    def __init__(self, *, cores: set[int] | None = None) -> None:
        self._holder = held_port()
        self.port = int(self._holder.getsockname()[1])
        self._cores = cores or machine.server_core()
        self._temporary = tempfile.TemporaryDirectory(prefix="forebay-load-", ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """What to run."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare what the first start needs, once."""

    def environment(self) -> Mapping[str, str]:
        """Variables on top of this process's."""
        return {}

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far."""
        assert self._process is not None, "not started"
        return machine.cpu_seconds(self._process.pid)

    def kill_and_restart(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """SIGKILL all its processes, and start it again on the same directory and port."""
        assert self._process is not None, "not started"
        self._signal(signal.SIGKILL)
        self._process.wait(_STOP_SECONDS)
        meanwhile()
        self._start()
        self._wait_for_port()

    def __enter__(self) -> Self:
        try:
            self.prepare()
            self._start()
            self._wait_for_port()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        with machine.on_cores(self._cores), (self.directory / "output.log").open("wb") as log:
            self._process = subprocess.Popen(
                list(self.command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env=os.environ | dict(self.environment()),
            )

    def _wait_for_port(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(self.address) == 0:
                    return
            time.sleep(_POLL_SECONDS)
        log = (self.directory / "output.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{self.name} did not start\n{log[-4000:]}")

    def _stop(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
            self._signal(signal.SIGKILL)
            self._process.wait(_STOP_SECONDS)
        self._holder.close()
        self._temporary.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # all of them have gone
