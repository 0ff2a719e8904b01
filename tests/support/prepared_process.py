"""Processes of their own that have imported the gateway when they begin: 20 ms of CPU each instead of 700.

So do the processes of a whole gateway, by `tests.support.prepared_gateway`: 400 ms instead of 1,700.

A process that has imported it, and does nothing else, is started once for each process of pytest. For each request it
forks twice: the one between ends at once, and what it leaves behind becomes a child of pytest itself, to be waited for,
stopped and killed like any other. It ends with pytest, as its line does.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gateway.serve.system import set_process_title
from tests.support import thrift
from tests.support.processes import NOT_COUNTED

ROOT = Path(__file__).resolve().parents[2]

_PRELOADED = (
    "tests.support.blocks",
    "tests.support.strict_origin",
    "tests.support.writeback",
    "tests.support.prepared_gateway",
)
_REQUEST_BYTES_MAX = 128 * 1024
_DESCRIPTORS_MAX = 16
_OUT_OF_THE_WAY = 300
"""Descriptors for a new process lie from this number on until each gets its own."""

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class PreparedProcess(subprocess.Popen[str]):
    """Runs a module, or code where the first argument is `-c`; its pipes are for text.

    Its working directory is the repository, its environment that of now unless given.
    """

    def __init__(
        self,
        command: Sequence[object],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            [*map(str, command)], stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, env=env, text=True
        )

    def _execute_child(self, command: list[str], *given: Any) -> None:
        """As Popen's, which calls it with these arguments from Python 3.9 on; there is no other way in."""
        passed, environment, ends = given[3], given[5], given[9:15]
        own_input, _, _, own_output, _, own_error = ends
        own = {number: one if one != -1 else number for number, one in enumerate((own_input, own_output, own_error))}
        descriptors = own | {descriptor: descriptor for descriptor in passed}
        self.pid = _forker().fork(command, descriptors, os.environ if environment is None else environment)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def run_prepared(
    *command: object, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` does, with both outputs."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with PreparedProcess(command, stdin=nothing, stdout=pipe, stderr=pipe, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess([*map(str, command)], process.returncode, stdout, stderr)


class _Forker:
    """The test's end of the line to the process that forks."""

    def __init__(self) -> None:
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[other.fileno()])
        NOT_COUNTED.add(self._process.pid)

    def fork(self, command: Sequence[str], descriptors: dict[int, int], environment: Mapping[str, str]) -> int:
        """The process id of a new child."""
        request = json.dumps([command, [*descriptors], dict(environment)]).encode()
        with self._turn:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._line, [request], [*descriptors.values()])
                answer = self._line.recv(64)
            finally:
                _adopt_orphans(False)
        assert answer, "the process that forks has ended"
        return int(answer)


_started: list[_Forker] = []
_starting = threading.Lock()


def _forker() -> _Forker:
    with _starting:
        if not _started:
            _started.append(_Forker())
    return _started[0]


def start_forker() -> None:
    """Start the process that forks, where this thread is now."""
    _forker()


def _adopt_orphans(wanted: bool) -> None:
    """Whether processes whose parents have ended become children of this one: prctl(2)."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(line: socket.socket) -> list[str]:
    """Fork for each request; returns in the new process, with what it is to run."""
    while True:
        request, received, _, _ = socket.recv_fds(line, _REQUEST_BYTES_MAX, _DESCRIPTORS_MAX)
        if not request:
            sys.exit()
        told, telling = os.pipe()
        between = os.fork()
        if not between:
            if child := os.fork():
                os.write(telling, str(child).encode())
                os._exit(0)
            for descriptor in (line.detach(), told, telling):
                os.close(descriptor)
            command, numbers, environment = json.loads(request)
            _become(dict(zip(numbers, received, strict=True)), environment)
            return [str(part) for part in command]
        for descriptor in (*received, telling):
            os.close(descriptor)
        os.waitpid(between, 0)
        line.send(os.read(told, 64))
        os.close(told)


def _become(descriptors: dict[int, int], environment: dict[str, str]) -> None:
    """Give each of the descriptors the number that it is to have."""
    lifted = {n: fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for n, one in descriptors.items()}
    for descriptor in descriptors.values():
        os.close(descriptor)
    for number, descriptor in lifted.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(command: list[str]) -> None:
    if command[0] != "-c":
        sys.argv = command
        if command[0] in _PRELOADED:
            sys.modules[command[0]].main()
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *command[2:]]
    exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})


def _end_after(run: Callable[[], None]) -> None:
    """As the interpreter does, but leave objects to the kernel: to free each copies the pages shared with this one."""
    code: object = 0
    try:
        run()
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's affair
    set_process_title("prepared for tests")  # what finds the room of the title works in this process alone
    for module in _PRELOADED:
        importlib.import_module(module)
    thrift.save_cpu()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a child would have one of them"
    gc.freeze()
    _run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    _end_after(lambda: main(int(sys.argv[1])))
