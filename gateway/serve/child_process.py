"""One process of the gateway as the supervisor sees it: started, ready, ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from gateway.core.errors import StartupError, StoreUnavailable
from gateway.serve.children import Child, describe_exit
from gateway.serve.fork_server import ForkServer, ForkServerEnded

READY_SECONDS = 3600.0
"""For a child that turns: it may have a large directory to look through. One that hangs is ended by the hang watch."""
_REPORT_LINE_BYTES = 2**18
_ABOUT_THE_START = frozenset({"ready", "failed", "unusable"})

_log = structlog.get_logger("forebay.serve")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child to start. `descriptors` are its listeners; `shared` are inherited but not named to it (the lock)."""

    name: str
    descriptors: tuple[int, ...]
    shared: tuple[int, ...] = ()


class KilledEarly(StartupError):
    """A child was killed before it was ready, and has said nothing of why."""


class ChildProcess:
    def __init__(
        self,
        name: str,
        process: Child,
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
        """Its reports before it was ready: the background process already answers on the admin port by then."""

    @classmethod
    async def start(cls, forks: ForkServer, spec: ChildSpec, config_lines: bytes) -> ChildProcess:
        """Start a process with its configuration. OSError: it cannot be made, StartupError: its code cannot load."""
        try:
            return await cls._start(forks, spec, config_lines)
        except ForkServerEnded as error:  # another one is loaded: with pipes of its own, as this one may be made yet
            _log.warning("a process is asked for again", name=spec.name, error=str(error))
            return await cls._start(forks, spec, config_lines)

    @classmethod
    async def _start(cls, forks: ForkServer, spec: ChildSpec, config_lines: bytes) -> ChildProcess:
        with ExitStack() as opened:  # a process that was made ends by itself when its standard input is closed
            stdin, telling = _pipe(opened)
            hearing, reporting = _pipe(opened)
            process = await forks.fork([spec.name], stdin, reporting, *spec.descriptors, kept=spec.shared)
            report, ear = await _reader(os.dup(hearing))
            try:
                told = await _writer(os.dup(telling))
            except BaseException:
                ear.close()
                raise
        child = cls(spec.name, process, told, report, ear)
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
        """Wait until the child serves. Raises StartupError with the child's own reason if it does not come to that.

        StoreUnavailable if the reason is the disk under the cache directory, KilledEarly if there is none.
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
        status = await self.ended()
        kind = KilledEarly if status < 0 else StartupError
        raise kind(f"{self.name} ended before it was ready ({describe_exit(status)})")

    async def _how_it_started(self) -> tuple[str, str]:
        """`ready`, or `failed` or `unusable` and why; no word where it says no more. All else is for `reports`."""
        while line := await self._report.readline():
            word, rest = _words(line)
            if word in _ABOUT_THE_START:
                return word, rest
            self._said_before.append((word, rest))
        return "", ""

    async def reports(self) -> AsyncIterator[tuple[str, str]]:
        """Yield its reports, except that it is ready, each as the first word and the rest, until it ends."""
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
        """Return the exit status; negative is a signal."""
        status = await self._process.wait()
        self._told.close()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the child is gone."""
        self._process.send_signal(number)


def _pipe(opened: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed with `opened`."""
    ends = os.pipe()
    for end in ends:
        opened.callback(os.close, end)
    return ends


def _words(line: bytes) -> tuple[str, str]:
    """Return the first word, and the rest."""
    word, _, rest = line.decode(errors="replace").rstrip("\n").partition(" ")
    return word, rest


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Return a reader; close the descriptor on failure."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_REPORT_LINE_BYTES)
    with ExitStack() as undo:
        pipe = undo.enter_context(os.fdopen(descriptor, "rb", buffering=0))
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        undo.pop_all()
    return reader, transport


async def _writer(descriptor: int) -> asyncio.WriteTransport:
    with ExitStack() as undo:
        pipe = undo.enter_context(os.fdopen(descriptor, "wb", buffering=0))
        transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
        undo.pop_all()
    return transport
