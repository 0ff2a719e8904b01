"""A child process of the demo: it says when it is ready, always ends, and has a log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.demo.errors import DemoError

_PACKAGE_HOME = Path(__file__).resolve().parents[2]
_READY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_EXCERPT_LINES = 20


class DemoProcess:
    """`python -m MODULE ARGUMENTS…` in a process group of its own, so that the terminal's Ctrl-C reaches only the demo.

    stdout and stderr go to `log`. Raises DemoError when the child ends, or takes over a minute, before a line of its
    stdout matches `ready`.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], ready: re.Pattern[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._ready = ready
        self._match: re.Match[str] | None = None
        self._answered = threading.Event()
        python = [sys.executable, "-P", "-m"]  # -P: a folder named gateway where the user stands is not ours
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                [*python, "gateway.demo.child", str(os.getpid()), *python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**environment, "PYTHONPATH": str(_PACKAGE_HOME)},
                start_new_session=True,
            )
        self._pump = threading.Thread(target=self._read_stdout, name=f"{name}-stdout", daemon=True)
        self._pump.start()

    def wait_until_ready(self) -> re.Match[str]:
        """Return the match of the readiness line."""
        self._answered.wait(_READY_SECONDS)
        if self._match is None:
            state = f"ended with code {self._process.poll()}" if self._answered.is_set() else "did not become ready"
            raise DemoError(f"{self.name} {state}", self.log_excerpt())
        return self._match

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to its whole group when that is not heeded in ten seconds. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._pump.join()

    def log_excerpt(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_EXCERPT_LINES:])

    def _read_stdout(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - a pipe was asked for
        with stdout, self.log.open("ab") as log:
            for raw in stdout:
                log.write(raw)
                log.flush()
                self._look_for_readiness(raw.decode(errors="replace"))
        self._answered.set()

    def _look_for_readiness(self, line: str) -> None:
        if self._match is None and (found := self._ready.search(line)):
            self._match = found
            self._answered.set()
