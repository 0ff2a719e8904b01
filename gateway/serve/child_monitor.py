"""One process of the gateway as the supervisor sees it: started, ready, ended; kept running until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from gateway.api.documents import Process
from gateway.core.errors import StartupError, StoreUnavailable
from gateway.serve.child_config import SHOWS_READY, generation_of, process_number
from gateway.serve.fork_server import Child, ForkServer, ForkServerEnded, describe_exit, restart_delay_seconds
from gateway.serve.shared_directory import SharedFiles
from gateway.telemetry import metric_kinds, metrics

READY_SECONDS = 3600.0
"""For a child that turns: it may have a large directory to look through. One that hangs is ended by the hang watch."""
_REPORT_LINE_BYTES = 2**18
_ABOUT_THE_START = frozenset({"ready", "failed", "unusable"})

_log = structlog.get_logger("forebay.serve")

STEADY_SECONDS = 30.0
"""A child that lived this long was well: its death begins a new row."""

HANG_LOOKS = 30
HANG_LOOK_SECONDS = 1.0
HANG_TOLD_LOOKS = 5
"""Looks at a child whose event loop does not turn before it is killed. Looks are counted, not time: a machine that
stands still as a whole stops the supervisor, too. After HANG_TOLD_LOOKS it is reported to hang."""

FIRST_BEAT_LOOKS = 120
"""Looks that a child may take to load its code, before its event loop turns for the first time."""

SLOW_START_SECONDS = 60.0
"""Seconds of a start after which it is reported, again and again."""

KILLED_STARTS_MAX = 5
"""One that is killed so often before it is ready ends the gateway's start: the machine lacks memory, say."""


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


class ChildMonitor:
    """One child's place. `changed` is called after every change of `state`.

    `make` starts a child. `config_lines` gives its first configuration, `shared_files` the files that it shares with
    the others for its whole life. `unusable` is called when a child that is started again finds that the disk under the
    cache directory fails, `asked` with each request of a child.
    """

    def __init__(
        self,
        spec: ChildSpec,
        make: Callable[[ChildSpec, bytes], Awaitable[ChildProcess]],
        config_lines: Callable[[SharedFiles], bytes],
        shared_files: Callable[[], Awaitable[SharedFiles]],
        changed: Callable[[], None],
        unusable: Callable[[str], None],
        asked: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._make = make
        self._config_lines = config_lines
        self._shared_files = shared_files
        self._changed = changed
        self._unusable = unusable
        self._asked = asked
        self._child: ChildProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._generation = 0
        self._files: SharedFiles | None = None
        self._told_before: list[bytes] | None = None
        """Lines for a child that is being made, which it gets as soon as it exists; None otherwise."""
        self._ready = False
        self._restarts = 0
        self._hangs = False
        self._was_hung = False
        self._last_end: str | None = None
        self._last_end_at: float | None = None
        self._restarting = False
        self._stopping = asyncio.Event()
        self.shows_ready = asyncio.Event()
        """Set once the child, the background process, has told others that the gateway is ready."""

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def state(self) -> Process:
        process_id = self._child.process_id if self._child else None
        return Process(
            name=self.name,
            process_id=process_id,
            ready=self._ready,
            restarts=self._restarts,
            generation=self._generation,
            hangs=self._hangs,
            last_end=self._last_end,
            last_end_at=self._last_end_at,
        )

    @property
    def files(self) -> SharedFiles | None:
        """The files that the child shares with the others; None while there is no child, and none is being made."""
        return self._files

    @property
    def is_starting(self) -> bool:
        """True while a child is starting, or will soon be restarted."""
        return self._restarting or self._told_before is not None or (self._child is not None and not self._ready)

    def tell(self, line: bytes) -> None:
        """Send a line to the child, if there is one, or to the one that is being made: its first lines are fixed."""
        if self._told_before is not None:
            self._told_before.append(line)
        elif self._child is not None:
            self._child.tell(line)

    async def start(self) -> None:
        """Start the child for the first time. Raises StartupError when it does not become ready.

        A child that is killed meanwhile is started again, a few times.
        """
        kills = 0
        while True:
            try:
                return await self._start(counts=kills > 0)
            except StoreUnavailable as error:
                self._unusable(str(error))
            except StartupError as error:
                kills += 1
                may_again = isinstance(error, KilledEarly) and kills < KILLED_STARTS_MAX
                if not self._restarting and (not may_again or self._was_hung or self._stopping.is_set()):
                    raise
            await self._wait_for_end()
            self._restarting = False
            await self._rest(restart_delay_seconds(kills))

    async def keep(self) -> None:
        """After `start`: until stopped, wait for the child's end and start it again. Returns when it is gone."""
        deaths_in_a_row = 0
        while True:
            began = time.monotonic()
            await self._wait_for_end()
            if self._stopping.is_set():
                return
            if self._restarting:
                began = -STEADY_SECONDS
            deaths_in_a_row = 1 if time.monotonic() - began > STEADY_SECONDS else deaths_in_a_row + 1
            await self._rest(restart_delay_seconds(deaths_in_a_row))
            if self._stopping.is_set():
                return
            await self._start_again()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask (SIGTERM) or force (SIGKILL) the child to end, for good."""
        self._stopping.set()
        if self._child is not None:
            self._child.signal(number)

    def restart(self) -> None:
        """Let the child end in good order, and start it again with the configuration of that time."""
        self._restarting = True
        if self._child is not None:
            self._child.signal(signal.SIGTERM)

    async def gone(self) -> None:
        """Wait for the end of a child that is not kept."""
        if self._child is not None:
            await self._child.ended()

    async def _start(self, *, counts: bool = False) -> None:
        files = await self._shared_files()
        lines = self._config_lines(files)
        self._generation = generation_of(lines)
        self._child = await self._made(files, lines)
        if counts:
            self._restarts += 1
            metrics.WORKER_RESTARTS.add(1, self.name)
        self._watch = asyncio.create_task(self._end_when_hung(self._child, files), name="hang watch")
        self._changed()
        if self._stopping.is_set() or self._restarting:
            self._child.signal(signal.SIGTERM)  # told to stop, or to begin anew, while it was being made
        await self._until_ready(self._child)
        self._ready = True
        self._listening = asyncio.create_task(self._listen(self._child), name="reports")
        self._changed()

    async def _made(self, files: SharedFiles, lines: bytes) -> ChildProcess:
        """Start a child that gets `lines`, and then the changes that came while it started."""
        self._files, self._told_before = files, []
        try:
            child = await self._make(self._spec, lines)
            for line in self._told_before:
                child.tell(line)
        except BaseException:
            self._files = None
            raise
        finally:
            self._told_before = None
        return child

    async def _listen(self, child: ChildProcess) -> None:
        async for word, rest in child.reports():
            if word == "follows":
                self._generation = int(rest)
                self._changed()
            elif word == "behind":
                _log.error(
                    "a process cannot put changed settings in force, and is replaced", name=self.name, error=rest
                )
                self.restart()
            elif word == "asks":
                self._asked(rest)
            elif word == SHOWS_READY:
                self.shows_ready.set()

    async def _until_ready(self, child: ChildProcess) -> None:
        """Wait. A child that turns may take its time; the hang watch kills one that does not."""
        waiting = asyncio.ensure_future(child.wait_until_ready())
        try:
            while not (await asyncio.wait((waiting,), timeout=SLOW_START_SECONDS))[0]:
                _log.warning("a process takes long to start", name=self.name, process_id=child.process_id)
            waiting.result()
        finally:
            waiting.cancel()

    async def _start_again(self) -> None:
        counts, self._restarting = not self._restarting, False
        try:
            await self._start(counts=counts)
        except StoreUnavailable as error:
            self._unusable(str(error))
        except (StartupError, OSError) as error:
            if not self._stopping.is_set():
                _log.error("a process could not be started again", name=self.name, error=str(error))
            if self._child is not None:
                self._child.signal(signal.SIGKILL)

    async def _wait_for_end(self) -> None:
        if self._child is None:
            return
        process_id, status = self._child.process_id, await self._child.ended()
        for task in (self._watch, self._listening):
            if task is not None:
                task.cancel()
        if self._files is not None:
            metric_kinds.forget_process(self._files.path, self.name)
        self._child = self._files = self._watch = self._listening = None
        self._ready = False
        if not self._stopping.is_set() and not self._restarting:
            self._last_end, self._last_end_at = "hung, killed" if self._was_hung else describe_exit(status), time.time()
            _log.error("a process ended unexpectedly", name=self.name, process_id=process_id, how=self._last_end)
        self._hangs = self._was_hung = False
        self._changed()

    async def _end_when_hung(self, child: ChildProcess, files: SharedFiles) -> None:
        number = process_number(self.name)
        unchanged, looks = 0, FIRST_BEAT_LOOKS
        stamp = files.heartbeats.stamp(number)
        while unchanged < looks:
            await asyncio.sleep(HANG_LOOK_SECONDS)
            before, stamp = stamp, files.heartbeats.stamp(number)
            if stamp == before:
                unchanged += 1
            else:
                unchanged, looks = 0, HANG_LOOKS
            self._tell_of_hang(child, looks - unchanged, hangs=looks == HANG_LOOKS and unchanged >= HANG_TOLD_LOOKS)
        self._was_hung = True
        _log.error("a process hangs and is killed", name=self.name, process_id=child.process_id)
        child.signal(signal.SIGKILL)

    def _tell_of_hang(self, child: ChildProcess, looks_left: int, *, hangs: bool) -> None:
        if hangs == self._hangs:
            return
        self._hangs = hangs
        if hangs:
            _log.warning(
                "a process does not answer: it is killed if that lasts",
                name=self.name,
                process_id=child.process_id,
                in_seconds=round(looks_left * HANG_LOOK_SECONDS),
            )
        else:
            _log.warning("a process answers again", name=self.name, process_id=child.process_id)
        self._changed()

    async def _rest(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
