"""Makes the processes of the gateway, and waits once for each that ends.

A process that has loaded their code and does nothing else forks them. Loading takes a second of CPU. So a worker that
ends is back in a few hundredths of that, and all processes share the memory of the code. The idea is that of
`multiprocessing`'s "forkserver"; unlike there, a process becomes a child of the supervisor, which signals it and waits
for it.

    argv: MODULE DESCRIPTOR FURTHER...

MODULE is imported and its `load()` called; then the FURTHER modules are. DESCRIPTOR is a socket: after `loaded`, the
version of the code, and the number of threads that loading has started, on it, each message with descriptors asks for a
process, and is answered with its id, or with `no` and the error number.

SIGCHLD reports an end, and a look every second finds missed ones. No thread waits for a child. Orphans become children
of the supervisor, too: those that the fork server makes for it, and, where it is PID 1 of a container, all other
orphans there. They are waited for as they end, so that none stays as a zombie.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import orjson
import structlog

import gateway
from gateway import __version__
from gateway.core.errors import StartupError
from gateway.serve.pipes import end_with_parent
from gateway.serve.system import answered, set_process_title

LOOK_SECONDS = 1.0
UNKNOWN_STATUS = 255
"""Status of a child for which other code has waited: as asyncio has it."""

_AT_ONCE_MAX = 256
"""Limit of orphans handled before the event loop goes on: there may be any number."""

_PR_SET_CHILD_SUBREAPER = 36
_WNOTHREAD = 0x20000000
"""waitpid(2): not those that another thread has made (`subprocess.run`), which waits for them by itself. Orphans are
given to the main thread."""

_log = structlog.get_logger("forebay.serve")

LOADING_SECONDS = 120.0
"""For loading the code, from a disk that is slow, beside much else."""

FORK_SECONDS = 10.0
"""For one process more. A fork server that is stopped or hangs is ended, and another one is started."""

STEADY_SECONDS = 30.0
"""One that lived so long was well: its death begins a new row."""

_END_SECONDS = 5.0
"""For a process that was killed to be gone. Longer takes only one that waits for a dead disk."""

_ANSWER_BYTES_MAX = 64
_REQUEST_BYTES_MAX = 64 * 1024
_DESCRIPTORS_MAX = 200
"""The kernel passes at most 253 at a time (SCM_MAX_FD, unix(7))."""

# The child looks for modules exactly where this process does. Without it, `python -m` would take a package named
# `gateway` in the directory where the user happens to be.
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from gateway.serve.fork_server import main; main(sys.argv[2:])"
)
_BOOTSTRAP_OF_ONE = (
    "import sys, json, importlib; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(sys.argv[3:])"
)

_ADVICE = {
    errno.EAGAIN: ": the limit of processes is reached (ulimit -u, TasksMax=, pids.max)",
    errno.EMFILE: ": the limit of open files of the fork server is reached (ulimit -n, LimitNOFILE=)",
}


def restart_delay_seconds(deaths_in_a_row: int) -> float:
    """Return 0 after the first death, then 0.1 s doubling to 10 s."""
    return 0.0 if deaths_in_a_row <= 1 else min(10.0, 0.1 * 2.0 ** min(deaths_in_a_row - 2, 10))


def describe_exit(status: int) -> str:
    """`exit code 1`, `SIGKILL`."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-status}"


class Child:
    """A followed child. `Children` makes it."""

    def __init__(self, pid: int, status: asyncio.Future[int]) -> None:
        self.pid = pid
        self._status = status

    @property
    def has_ended(self) -> bool:
        return self._status.done()

    async def wait(self) -> int:
        """Return the exit status; negative is a signal."""
        return await asyncio.shield(self._status)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless it is gone. Until its end is known it is a zombie, and no other process has its id."""
        if not self._status.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Children:
    """Main thread, and an event loop that runs there.

    `ends_orphans`: wait for unfollowed children, too. Only for a process that follows all children of its main
    thread.
    """

    def __init__(self, *, ends_orphans: bool = False) -> None:
        self._ends_orphans = ends_orphans
        self._followed: dict[int, asyncio.Future[int]] = {}
        self._expecting = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, the end of each is noticed. Orphans are adopted from now on. OSError."""
        _adopt_orphans()
        looking = asyncio.create_task(self._look_again(), name="children")
        try:
            with answered(signal.SIGCHLD, self.look):
                yield
        finally:
            looking.cancel()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """While this lasts, a child that is not followed yet stays, ended or not, until it is."""
        self._expecting += 1
        try:
            yield
        finally:
            self._expecting -= 1
            self.look()

    def follow(self, pid: int) -> Child:
        """Care for a child. Its end is noticed also where it was before this."""
        status = self._followed[pid] = asyncio.get_running_loop().create_future()
        self._look_at(pid)
        return Child(pid, status)

    def look(self) -> None:
        """Notice who has ended."""
        for pid in list(self._followed):
            self._look_at(pid)
        if self._ends_orphans and not self._expecting:
            self._wait_for_orphans()

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def _look_at(self, pid: int) -> None:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            _log.warning("how a process ended is not known: something else has waited for it", process_id=pid)
            self._end(pid, UNKNOWN_STATUS)
        else:
            if ended:
                self._end(pid, os.waitstatus_to_exitcode(status))

    def _wait_for_orphans(self) -> None:
        for _ in range(_AT_ONCE_MAX):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | _WNOTHREAD)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._followed:  # it has ended since it was looked at
                self._end(pid, os.waitstatus_to_exitcode(status))
        asyncio.get_running_loop().call_soon(self.look)

    def _end(self, pid: int, status: int) -> None:
        future = self._followed.pop(pid)
        if not future.done():
            future.set_result(status)


def _adopt_orphans() -> None:
    """Make a process below this one whose parent has ended a child of this one: prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class ForkServerEnded(StartupError):
    """While it was asked for a process. A process that it made then ends with the pipe of its standard input."""


class ForkServer:
    """The supervisor's end of the line to the process that forks; that one is started when it is needed first."""

    def __init__(self, module: str, children: Children, further: Sequence[str] = ()) -> None:
        """`further` modules are loaded, too, for processes that need them seldom."""
        self._module = module
        self._further = further
        self._children = children
        self._process: Child | None = None
        self._line: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._is_closed = False

    async def fork(self, arguments: Sequence[str], stdin: int, *given: int, kept: Sequence[int] = ()) -> Child:
        """Return a new process, a child of this one, that runs `main` of the module.

        `main` gets `arguments` and the numbers that the descriptors `given` have there; `kept` are only held open.
        Raises OSError when no process can be made, ForkServerEnded when it may have been: it must not be asked for
        again with the same `stdin`. StartupError when the code cannot be loaded.
        """
        async with self._turn:
            line = await self._loaded_line()
            request = orjson.dumps([arguments, len(given), 1 + len(given) + len(kept)])
            with self._children.expecting():
                try:
                    socket.send_fds(line, [request], [stdin, *given, *kept])
                    word, _, number = (await self._answer(line, FORK_SECONDS)).partition(b" ")
                    if word != b"no":
                        return self._children.follow(int(word))
                except ConnectionError:
                    raise ForkServerEnded(f"the fork server has ended ({await self._end()})") from None
                except BaseException:  # no caller would hear the answer
                    await self._end()
                    raise
        if not int(number):
            raise ForkServerEnded("the process between the fork server and a new process was killed")
        raise OSError(int(number), os.strerror(int(number)) + _ADVICE.get(int(number), ""))

    async def keep(self) -> None:
        """Replace, until closed, an ended fork server at once: a process that ends later need not wait for its code."""
        loop, deaths_in_a_row, told = asyncio.get_running_loop(), 0, ""
        while not self._is_closed:
            began = loop.time()
            try:
                async with self._turn:
                    await self._loaded_line()
                    process = self._process
                told = ""
                if process is not None:
                    await process.wait()
            except (StartupError, OSError) as error:
                if str(error) != told and not self._is_closed:
                    _log.error("the fork server cannot be started: it is tried again", error=str(error))
                told = str(error)
            deaths_in_a_row = 1 if loop.time() - began > STEADY_SECONDS else deaths_in_a_row + 1
            await asyncio.sleep(restart_delay_seconds(deaths_in_a_row))

    def kill(self) -> None:
        """End the process that forks, for good; its callers learn of it. Its children live on."""
        self._is_closed = True
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        self.kill()
        async with self._turn:
            await self._end()

    async def _loaded_line(self) -> socket.socket:
        """To one that lives, as far as that is known."""
        if self._process is not None and self._process.has_ended and not self._is_closed:
            _log.error("the fork server ended unexpectedly", process_id=self._process.pid, how=await self._end())
        if self._is_closed:
            raise StartupError("the gateway is being stopped")
        if self._line is not None:
            return self._line
        try:
            return await self._start()
        except BaseException:
            await self._end()
            raise

    async def _start(self) -> socket.socket:
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        with other:
            self._process = self._children.follow(_begin(self._module, other.fileno(), self._further))
        try:
            answer = (await self._answer(self._line, LOADING_SECONDS)).decode(errors="replace")
        except ConnectionError:
            how = await self._end()
            raise StartupError(f"the fork server has ended ({how}) before the code was loaded{_why(how)}") from None
        loaded, _, threads = answer.rpartition(" ")
        if loaded != f"loaded {__version__}" or not threads.isdecimal():
            found = loaded.removeprefix("loaded ") or "of another version"
            raise StartupError(
                f"Forebay {found} was installed in the place of {__version__}, which runs: restart the gateway"
            )
        if int(threads) > 1:
            _log.warning(
                "something has started threads while the code was loaded (LD_PRELOAD, a sitecustomize?): each process "
                "loads the code by itself, which takes about a second",
                threads=int(threads),
            )
        return self._line

    async def _answer(self, line: socket.socket, timeout_seconds: float) -> bytes:
        """ConnectionError where it has ended, ForkServerEnded where it does not answer."""
        loop = asyncio.get_running_loop()
        try:
            answer = await asyncio.wait_for(loop.sock_recv(line, _ANSWER_BYTES_MAX), timeout_seconds)
        except TimeoutError:
            raise ForkServerEnded(f"the fork server did not answer for {timeout_seconds:g} seconds") from None
        if not answer:
            raise ConnectionResetError
        return answer

    async def _end(self) -> str:
        process, self._process = self._process, None
        if self._line is not None:
            self._line.close()
            self._line = None
        if process is None:
            return "it was not there"
        process.send_signal(signal.SIGKILL)
        try:
            return describe_exit(await asyncio.wait_for(process.wait(), _END_SECONDS))
        except TimeoutError:
            return "it is killed, and not gone yet"


def _begin(module: str, descriptor: int, further: Sequence[str]) -> int:
    """Return the id of a new fork server."""
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-c", _BOOTSTRAP, _module_path(), module, str(descriptor), *further],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),  # standard output has the one readiness line and nothing else
        pass_fds=(descriptor,),
        start_new_session=True,  # Ctrl-C reaches the supervisor alone
    )
    process.returncode = 0  # this object waits for no process: `Children` does
    return process.pid


def _module_path() -> str:
    return orjson.dumps([os.path.abspath(entry) for entry in sys.path]).decode()


def _why(how: str) -> str:
    code = Path(gateway.__file__)
    if not code.exists():
        return f": it is gone from {code.parent}, so install Forebay again, and restart the gateway"
    return "; what it wrote to standard error says why" if how.startswith("exit code") else ""


def main(arguments: Sequence[str]) -> None:
    """Load the code; then fork for each request, until the supervisor is gone."""
    end_with_parent()
    set_process_title("fork server")
    module = importlib.import_module(arguments[0])
    module.load()
    for further in arguments[2:]:
        importlib.import_module(further)
    threads = _thread_count()
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=int(arguments[1]))
    line.send(f"loaded {__version__} {threads}".encode())
    new = _next_process(line)
    if threads > 1:  # a fork has the one that asks for it alone, and the locks of all
        _load_anew(arguments[0], *new)
    module.main([*new[0], *map(str, new[1])])


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # /proc is not mounted here: use those that Python knows
        return threading.active_count()


def _next_process(line: socket.socket) -> tuple[list[str], list[int]]:
    """Fork for each request. Returns in each new process, with the arguments and the descriptors of its `main`."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, _REQUEST_BYTES_MAX, _DESCRIPTORS_MAX)
        if not request:
            sys.exit()
        arguments, given, passed = orjson.loads(request)
        try:
            if len(descriptors) != passed:  # the limit of open files: the kernel has dropped the others
                raise OSError(errno.EMFILE, "")
            made = _fork_orphan()
        except OSError as error:
            line.send(b"no %d" % (error.errno or 0))
            made = -1
        if made == 0:
            line.close()
            os.setsid()
            os.dup2(descriptors[0], 0)
            os.close(descriptors[0])
            return arguments, descriptors[1 : 1 + given]
        for descriptor in descriptors:
            os.close(descriptor)
        if made > 0:
            line.send(b"%d" % made)


def _load_anew(module: str, arguments: Sequence[str], descriptors: Sequence[int]) -> NoReturn:
    """Become a process that loads the code by itself, with all descriptors that this one was given."""
    text = [_BOOTSTRAP_OF_ONE, _module_path(), module, *arguments, *map(str, descriptors)]
    os.execv(sys.executable, [sys.executable, "-P", "-c", *text])  # noqa: S606 - there is no shell


def _fork_orphan() -> int:
    """Fork a child of its adopter, the supervisor. OSError, with number 0 if the process between was killed."""
    told, telling = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_between(telling)
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


def _fork_between(telling: int) -> None:
    """Return in the new process alone. The one between never goes on as a second fork server."""
    made = -errno.EAGAIN
    try:
        end_with_parent()  # a killed fork server leaves no process that still forks
        made = os.fork()
    except OSError as error:
        made = -(error.errno or errno.EAGAIN)
    finally:
        if made != 0:
            try:
                os.write(telling, b"%d" % made)
            finally:
                os._exit(0)
