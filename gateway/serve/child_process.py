"""One child as the supervisor sees it: started, ready, ended; and how long to wait before it is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from gateway.errors import StartupError, StoreUnavailable
from gateway.serve.fork_server import ForkServer

READY_SECONDS = 3600.0
"""For a child that turns: it may have a large directory to look through. One that hangs is ended by the hang watch."""
_REPORT_LINE_BYTES = 2**18
_ABOUT_THE_START = frozenset({"ready", "failed", "unusable"})


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. `descriptors` are its listeners; `shared` are inherited but not named to it (the lock)."""

    name: str
    descriptors: tuple[int, ...]
    shared: tuple[int, ...] = ()


def restart_delay_seconds(deaths_in_a_row: int) -> float:
    """Nothing after the first death, then 0.1 s doubling to 10 s."""
    return 0.0 if deaths_in_a_row <= 1 else min(10.0, 0.1 * 2.0 ** min(deaths_in_a_row - 2, 10))


class ChildProcess:
    """A started child."""

    def __init__(
        self,
        name: str,
        process: Adopted,
        told: asyncio.WriteTransport,
        report: asyncio.StreamReader,
        ear: asyncio.ReadTransport,
    ):
        self.name = name
        self._process = process
        self._told = told
        self._report = report
        self._ear = ear
        self._said_before: list[tuple[str, str]] = []
        """What it had to say before it was ready: the background process answers on the admin port by then."""

    @classmethod
    async def start(cls, forks: ForkServer, spec: ChildSpec, config_lines: bytes) -> ChildProcess:
        """Make it and give it its configuration. Raises OSError when no process can be made, StartupError when its code
        cannot be loaded.
        """
        stdin, telling = os.pipe()
        hearing, reporting = os.pipe()
        try:
            process_id = await forks.fork([spec.name], stdin, reporting, *spec.descriptors, kept=spec.shared)
        except BaseException:
            os.close(telling)
            os.close(hearing)
            raise
        finally:
            os.close(stdin)
            os.close(reporting)
        report, ear = await _reader(hearing)
        child = cls(spec.name, Adopted(process_id), await _writer(telling), report, ear)
        child.tell(config_lines)
        return child

    @property
    def process_id(self) -> int:
        return self._process.pid

    def tell(self, line: bytes) -> None:
        """Send a further line; nothing happens when the child is gone."""
        if not self._told.is_closing():
            self._told.write(line)

    async def wait_until_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        """Until the child serves. Raises StartupError with the child's own reason when it does not come to that,
        StoreUnavailable when the reason is the disk under the cache directory.
        """
        try:
            word, reason = await asyncio.wait_for(self._how_it_started(), timeout_seconds)
        except TimeoutError:
            self._ear.close()
            raise StartupError(f"{self.name} was not ready after {timeout_seconds:g} seconds") from None
        except BaseException:
            self._ear.close()
            raise
        if word == "ready":
            return
        self._ear.close()
        if word == "unusable":
            raise StoreUnavailable(reason)
        if word == "failed":
            raise StartupError(f"{self.name}: {reason}")
        raise StartupError(f"{self.name} ended before it was ready ({describe_exit(await self.ended())})")

    async def _how_it_started(self) -> tuple[str, str]:
        """`ready`, or `failed` or `unusable` and why; no word where it says no more. All else is for `reports`."""
        while line := await self._report.readline():
            word, rest = _words(line)
            if word in _ABOUT_THE_START:
                return word, rest
            self._said_before.append((word, rest))
        return "", ""

    async def reports(self) -> AsyncIterator[tuple[str, str]]:
        """What it says besides that it is ready, each the first word and the rest, until it is gone."""
        try:
            while self._said_before:
                yield self._said_before.pop(0)
            while line := await self._report.readline():
                yield _words(line)
        except ValueError:  # a line of more than _REPORT_LINE_BYTES: nothing that it says can be told apart any more
            return
        finally:
            self._ear.close()

    async def ended(self) -> int:
        """The exit status; negative is a signal."""
        status = await self._process.wait()
        self._told.close()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the child is gone."""
        self._process.send_signal(number)


class Adopted:
    """A child that another process has forked. Exit status and signals are those of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = loop.create_future()
        threading.Thread(target=self._look, args=(loop,), name=f"wait for {pid}", daemon=True).start()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread, as asyncio does where the kernel has no pidfd. The process stays a zombie until the loop knows:
        no signal goes to another one that has its id by then."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):  # the loop has ended: nobody asks any more
            loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        if not self._status.done():
            self._status.set_result(os.waitstatus_to_exitcode(status))

    async def wait(self) -> int:
        """The exit status; negative is a signal."""
        return await asyncio.shield(self._status)

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens when it is gone."""
        if not self._status.done():
            os.kill(self.pid, number)


def _words(line: bytes) -> tuple[str, str]:
    """The first one, and the rest."""
    word, _, rest = line.decode(errors="replace").rstrip("\n").partition(" ")
    return word, rest


def describe_exit(status: int) -> str:
    """`exit code 1`, `SIGKILL`."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_REPORT_LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader, transport


async def _writer(descriptor: int) -> asyncio.WriteTransport:
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(
        asyncio.BaseProtocol, os.fdopen(descriptor, "wb", buffering=0)
    )
    return transport
