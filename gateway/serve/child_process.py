"""One child as the supervisor sees it: started, ready, ended; and how long to wait before it is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson

from gateway.errors import StartupError, StoreUnavailable

READY_SECONDS = 3600.0
"""For a child that turns: it may have a large directory to look through. One that hangs is ended by the hang watch."""
_REPORT_LINE_BYTES = 2**18
_ABOUT_THE_START = frozenset({"ready", "failed", "unusable"})

# The child looks for modules exactly where this process does. Without it, `python -m` would take a package named
# `gateway` in the directory where the user happens to be.
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from importlib import import_module; import_module(sys.argv[2]).main(sys.argv[3:])"
)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. `descriptors` are its listeners; `shared` are inherited but not named to it (the lock)."""

    name: str
    descriptors: tuple[int, ...]
    shared: tuple[int, ...] = ()
    module: str = "gateway.serve.child"


def restart_delay_seconds(deaths_in_a_row: int) -> float:
    """Nothing after the first death, then 0.1 s doubling to 10 s."""
    return 0.0 if deaths_in_a_row <= 1 else min(10.0, 0.1 * 2.0 ** min(deaths_in_a_row - 2, 10))


class ChildProcess:
    """A started child."""

    def __init__(self, name: str, process: Process, report: asyncio.StreamReader, transport: asyncio.ReadTransport):
        self.name = name
        self._process = process
        self._report = report
        self._transport = transport
        self._said_before: list[tuple[str, str]] = []
        """What it had to say before it was ready: the background process answers on the admin port by then."""

    @classmethod
    async def start(cls, spec: ChildSpec, config_lines: bytes) -> ChildProcess:
        """Spawn it and give it its configuration. Raises OSError when no process can be made."""
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(spec, writing),
                stdin=PIPE,
                stdout=sys.stderr.fileno(),  # standard output has the one readiness line and nothing else
                pass_fds=(writing, *spec.descriptors, *spec.shared),
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which lets its children drain
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        report, transport = await _reader(reading)
        child = cls(spec.name, process, report, transport)
        child.tell(config_lines)
        return child

    @property
    def process_id(self) -> int:
        return self._process.pid

    def tell(self, line: bytes) -> None:
        """Send a further line; nothing happens when the child is gone."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.is_closing():
            pipe.write(line)

    async def wait_until_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        """Until the child serves. Raises StartupError with the child's own reason when it does not come to that,
        StoreUnavailable when the reason is the disk under the cache directory.
        """
        try:
            word, reason = await asyncio.wait_for(self._how_it_started(), timeout_seconds)
        except TimeoutError:
            self._transport.close()
            raise StartupError(f"{self.name} was not ready after {timeout_seconds:g} seconds") from None
        except BaseException:
            self._transport.close()
            raise
        if word == "ready":
            return
        self._transport.close()
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
            self._transport.close()

    async def ended(self) -> int:
        """The exit status; negative is a signal."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the child is gone."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def _words(line: bytes) -> tuple[str, str]:
    """The first one, and the rest."""
    word, _, rest = line.decode(errors="replace").rstrip("\n").partition(" ")
    return word, rest


def describe_exit(status: int) -> str:
    """`exit code 1`, `SIGKILL`."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


def _command(spec: ChildSpec, report: int) -> Sequence[str]:
    path = orjson.dumps([os.path.abspath(entry) for entry in sys.path]).decode()
    numbers = [str(number) for number in (report, *spec.descriptors)]
    return [sys.executable, "-P", "-c", _BOOTSTRAP, path, spec.module, spec.name, *numbers]


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_REPORT_LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader, transport
