"""Forks the gateway's processes from one that has loaded their code and does nothing else.

Loading takes a second of CPU. So a worker that ends is back in a few hundredths of that, and all processes share the
memory of the code. The idea is that of `multiprocessing`'s "forkserver"; unlike there, a process becomes a child of the
supervisor, which signals it and waits for it.

    argv: MODULE DESCRIPTOR

MODULE is imported and its `load()` called. DESCRIPTOR is a socket: after `loaded` on it, each message with descriptors
asks for a process, and is answered with its id, or with `no` and the error number.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress

import orjson

from gateway.errors import StartupError
from gateway.serve import parent_death_pipe
from gateway.serve.process_title import set_process_title

LOADING_SECONDS = 120.0
"""For loading the code, from a disk that is slow, beside much else."""

FORK_SECONDS = 30.0
"""For one process more. A fork server that is stopped or hangs is ended, and another one is started."""

_ANSWER_BYTES_MAX = 64
_REQUEST_BYTES_MAX = 64 * 1024
_DESCRIPTORS_MAX = 200
"""The kernel passes at most 253 at a time (SCM_MAX_FD, unix(7))."""

_PR_SET_CHILD_SUBREAPER = 36

# The child looks for modules exactly where this process does. Without it, `python -m` would take a package named
# `gateway` in the directory where the user happens to be.
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from gateway.serve.fork_server import main; main(sys.argv[2:])"
)


class ForkServer:
    """The supervisor's end of the line to the process that forks; that one is started when it is needed first."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: Process | None = None
        self._line: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def fork(self, arguments: Sequence[str], stdin: int, *given: int, kept: Sequence[int] = ()) -> int:
        """The id of a new process, a child of this one, that runs `main` of the module.

        `main` gets `arguments` and the numbers that the descriptors `given` have there; `kept` are only held open.
        Raises OSError when no process can be made, StartupError when the code cannot be loaded.
        """
        async with self._turn:
            try:
                line = self._line or await self._start()
                request = orjson.dumps([arguments, len(given)])
                socket.send_fds(line, [request], [stdin, *given, *kept])
                word, _, number = (await self._answer(line, FORK_SECONDS)).partition(b" ")
            except BaseException:  # what comes of the question nobody would hear
                await self._end()
                raise
        if word == b"no":
            raise OSError(int(number), os.strerror(int(number)))
        return int(word)

    async def close(self) -> None:
        """End the process that forks. Those that it made live on."""
        async with self._turn:
            await self._end()

    async def _start(self) -> socket.socket:
        _adopt_orphans()
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        with other:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _BOOTSTRAP, _module_path(), self._module, str(other.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # standard output has the one readiness line and nothing else
                pass_fds=(other.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
            )
        await self._answer(self._line, LOADING_SECONDS)
        return self._line

    async def _answer(self, line: socket.socket, timeout_seconds: float) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            answer = await asyncio.wait_for(loop.sock_recv(line, _ANSWER_BYTES_MAX), timeout_seconds)
        except TimeoutError:
            raise StartupError(f"the fork server did not answer for {timeout_seconds:g} seconds") from None
        except ConnectionError:
            answer = b""
        if not answer:
            raise StartupError("the fork server has ended; what it wrote to standard error says why")
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if self._line is not None:
            self._line.close()
            self._line = None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _module_path() -> str:
    return orjson.dumps([os.path.abspath(entry) for entry in sys.path]).decode()


def _adopt_orphans() -> None:
    """A process whose parent has ended becomes a child of this one: prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def main(arguments: Sequence[str]) -> None:
    """Load the code; then fork for each request, until the supervisor is gone."""
    parent_death_pipe.end_with_parent()
    set_process_title("fork server")
    module = importlib.import_module(arguments[0])
    module.load()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:  # a fork has the one that asks for it alone, and the locks of all
        raise RuntimeError(f"{len(threads)} threads run after the code was loaded")
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=int(arguments[1]))
    line.send(b"loaded")
    module.main(_next_process(line))


def _next_process(line: socket.socket) -> list[str]:
    """Fork for each request. Returns in each new process, with the arguments of its `main`."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, _REQUEST_BYTES_MAX, _DESCRIPTORS_MAX)
        if not request:
            sys.exit()
        try:
            made = _fork_orphan()
        except OSError as error:
            line.send(b"no %d" % (error.errno or 0))
            made = -1
        if made == 0:
            line.close()
            os.setsid()
            os.dup2(descriptors[0], 0)
            os.close(descriptors[0])
            arguments, count = orjson.loads(request)
            return [*arguments, *map(str, descriptors[1 : 1 + count])]
        for descriptor in descriptors:
            os.close(descriptor)
        if made > 0:
            line.send(b"%d" % made)


def _fork_orphan() -> int:
    """As `os.fork`; the new process has no parent but the one that adopts it, here the supervisor."""
    told, telling = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            try:
                made = os.fork()
            except OSError as error:
                made = -(error.errno or 1)
            if made != 0:
                os.write(telling, b"%d" % made)
                os._exit(0)
            return 0
        os.waitpid(between, 0)  # from now on the supervisor is its parent
        os.close(telling)
        telling = -1
        made = int(os.read(told, _ANSWER_BYTES_MAX) or 0)
    finally:
        os.close(told)
        if telling >= 0:
            os.close(telling)
    if made <= 0:
        raise OSError(-made, os.strerror(-made))
    return made
