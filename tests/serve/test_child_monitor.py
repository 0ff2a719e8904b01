"""A child: its pipes, and what the supervisor makes of what it says, and of its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.core.errors import StartupError, StoreUnavailable
from gateway.serve import child_monitor
from gateway.serve.child_monitor import ChildMonitor, ChildProcess, ChildSpec
from gateway.serve.fork_server import Child
from gateway.serve.pipes import WAITING_BYTES_MAX, ReportPipe
from gateway.serve.shared_directory import SharedFiles
from tests.support.waiting import until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_nobody_waits_for_a_supervisor_that_does_not_read(pipe: tuple[int, int]) -> None:
    """What it has not taken is bounded; when it goes on it has every line that was not refused, whole and in order."""
    reading, writing = pipe

    async def scenario() -> None:
        report = ReportPipe(writing)
        report.follow(asyncio.get_running_loop())
        said, began = [], time.monotonic()
        for number in range(100):
            line = f"asks {number} " + "é" * 15_000
            if report.tell(line):
                said.append(line)
        assert time.monotonic() - began < 5
        assert 0 < len(said) * 30_000 < 2 * WAITING_BYTES_MAX
        assert len(said) < 100
        took = b""
        while took.count(b"\n") < len(said):
            took += await asyncio.to_thread(os.read, reading, 10_000)
        assert took.decode().splitlines() == said
        assert report.tell("follows 1\nand more")
        assert os.read(reading, 100) == b"follows 1 and more\n"

    asyncio.run(scenario())


def test_a_supervisor_that_is_gone_is_told_nothing(pipe: tuple[int, int]) -> None:
    """And nothing fails by it."""
    reading, writing = os.pipe()
    report = ReportPipe(writing)
    os.close(reading)
    assert report.tell("ready")
    os.close(writing)


class Ended:
    """A process that is over."""

    async def wait(self) -> int:
        return 1


class Told(asyncio.WriteTransport):
    """Nobody reads it."""

    def close(self) -> None:
        """There is nothing to let go of."""


class Pipe(asyncio.ReadTransport):
    """Notes that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def child_that_says(text: bytes) -> tuple[ChildProcess, Pipe]:
    """And nothing more. In a running event loop."""
    report, pipe = asyncio.StreamReader(), Pipe()
    report.feed_data(text)
    report.feed_eof()
    return ChildProcess("background", cast(Child, Ended()), Told(), report, pipe), pipe


def test_what_is_asked_before_a_child_is_ready_is_heard() -> None:
    """The admin port answers while the cache directory is being opened: a change of slots that comes then is no end of
    the start, and is not forgotten."""

    async def scenario() -> None:
        child, pipe = child_that_says(b"asks a\nasks b c\nready\nfollows 1\n")
        await child.wait_until_ready()
        assert not pipe.is_closed
        assert [report async for report in child.reports()] == [("asks", "a"), ("asks", "b c"), ("follows", "1")]
        assert pipe.is_closed

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("says", "error", "why"),
    [
        (b"asks a\nfailed a port is taken\n", StartupError, "background: a port is taken"),
        (b"unusable the disk fails\n", StoreUnavailable, "the disk fails"),
        (b"asks a\n", StartupError, r"ended before it was ready \(exit code 1\)"),
    ],
)
def test_a_start_that_fails_says_why(says: bytes, error: type[Exception], why: str) -> None:
    """Whatever was asked before."""

    async def scenario() -> None:
        child, pipe = child_that_says(says)
        with pytest.raises(error, match=why):
            await child.wait_until_ready()
        assert pipe.is_closed

    asyncio.run(scenario())


FIRST_LINES = b'{"generation": 1, "settings": {}}\n'
CHANGED = b'{"generation": 2, "settings": {}}\n'


class ChildDouble:
    """Is ready at once, keeps what it is told, and ends by SIGTERM."""

    process_id = 1

    def __init__(self, lines: bytes) -> None:
        self.heard = [lines]
        self._ended = asyncio.Event()

    def tell(self, line: bytes) -> None:
        self.heard.append(line)

    def signal(self, _number: signal.Signals) -> None:
        self._ended.set()

    async def wait_until_ready(self) -> None:
        """It is."""

    async def reports(self) -> AsyncIterator[tuple[str, str]]:
        await self._ended.wait()
        return
        yield

    async def ended(self) -> int:
        await self._ended.wait()
        return 0


class Maker:
    """Stands for `ChildProcess`: makes children one by one, each when it is let."""

    def __init__(self) -> None:
        self.begun = 0
        self.failures = 0
        """So many of the next ones cannot be made."""
        self.made: list[ChildDouble] = []
        self._may = asyncio.Semaphore(0)

    async def start(self, _spec: ChildSpec, lines: bytes) -> ChildProcess:
        self.begun += 1
        if self.failures:
            self.failures -= 1
            raise BlockingIOError("no process can be made")
        await self._may.acquire()
        self.made.append(ChildDouble(lines))
        return cast(ChildProcess, self.made[-1])

    def let(self) -> None:
        self._may.release()


class Files:
    """What a monitor looks at of the files that processes share."""

    path = Path("/nowhere")

    class heartbeats:
        @staticmethod
        def stamp(_number: int) -> int:
            return 0


@pytest.fixture
def maker() -> Maker:
    return Maker()


def a_monitor(maker: Maker) -> ChildMonitor:
    def nothing(*_: Any) -> None:
        """Nobody is to be told."""

    async def shared() -> SharedFiles:
        return cast(SharedFiles, Files())

    return ChildMonitor(ChildSpec("worker0", ()), maker.start, lambda _: FIRST_LINES, shared, nothing, nothing)


def test_what_changes_while_a_child_is_made_is_told_to_it(maker: Maker) -> None:
    """Its first lines were fixed before: else it would keep to settings of before until the next change."""

    async def scenario() -> None:
        monitor = a_monitor(maker)
        starting = asyncio.create_task(monitor.start())
        await until(lambda: maker.begun == 1)
        assert monitor.files is not None
        assert monitor.is_starting
        monitor.tell(CHANGED)
        maker.let()
        await starting
        assert maker.made[0].heard == [FIRST_LINES, CHANGED]
        monitor.tell(b"later\n")
        assert maker.made[0].heard == [FIRST_LINES, CHANGED, b"later\n"]
        monitor.stop()
        await monitor.keep()

    asyncio.run(scenario())


def test_a_child_that_is_to_begin_anew_while_it_is_made_does(maker: Maker) -> None:
    """It was given a configuration that is not in force any more."""

    async def scenario() -> None:
        monitor = a_monitor(maker)
        starting = asyncio.create_task(monitor.start())
        await until(lambda: maker.begun == 1)
        monitor.restart()
        maker.let()
        await starting
        keeping = asyncio.create_task(monitor.keep())
        await until(lambda: maker.begun == 2)
        maker.let()
        await until(lambda: monitor.state.ready)
        assert not monitor.is_starting
        monitor.stop()
        await keeping

    asyncio.run(scenario())


def test_a_restart_is_counted_once_there_is_a_process(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often none could be made before: the count tells how often the process was another one."""
    monkeypatch.setattr(child_monitor, "restart_delay_seconds", lambda _: 0.0)

    async def scenario() -> None:
        monitor = a_monitor(maker)
        maker.let()
        await monitor.start()
        keeping = asyncio.create_task(monitor.keep())
        maker.failures = 3
        maker.made[0].signal(signal.SIGKILL)
        await until(lambda: maker.begun == 5)
        assert monitor.state.restarts == 0
        maker.let()
        await until(lambda: monitor.state.ready)
        assert monitor.state.restarts == 1
        monitor.stop()
        await keeping

    asyncio.run(scenario())


def test_a_child_that_hangs_is_told_before_it_is_killed_and_remembered_after(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before half a minute is over whoever asks learns which process does not answer; and later, how it ended."""
    looks = 0

    def stamp(_number: int) -> int:
        """Of one that turns ten times, and never again."""
        nonlocal looks
        looks += 1
        return min(looks, 10)

    monkeypatch.setattr(Files.heartbeats, "stamp", staticmethod(stamp))
    monkeypatch.setattr(child_monitor, "HANG_LOOK_SECONDS", 0.01)
    states = []

    async def scenario() -> None:
        monitor = a_monitor(maker)
        maker.let()
        await monitor.start()
        keeping = asyncio.create_task(monitor.keep())
        assert not monitor.state.hangs
        await until(lambda: monitor.state.hangs)
        states.append((looks, monitor.state))
        await until(lambda: maker.begun == 2)
        states.append((looks, monitor.state))
        maker.let()
        await until(lambda: monitor.state.ready)
        assert monitor.state.restarts == 1
        monitor.stop()
        await keeping

    asyncio.run(scenario())
    (told_after, hanging), (_, killed) = states
    assert 10 + child_monitor.HANG_TOLD_LOOKS <= told_after < 10 + child_monitor.HANG_LOOKS
    assert hanging.last_end is None
    assert (killed.hangs, killed.last_end, killed.restarts) == (False, "hung, killed", 0)
    assert killed.last_end_at is not None
