"""Children that end, those that nobody asked for, and those that something else waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.serve.fork_server import UNKNOWN_STATUS, Children, describe_exit

REPOSITORY = Path(__file__).resolve().parents[2]

ADOPTING = """
import asyncio, os, subprocess, sys, threading
from gateway.serve.fork_server import Children
from tests.support.processes import children_of
from tests.support.waiting import until

def orphans(count):
    # A process that makes others, one in a session of its own, and ends: its children end later.
    if (between := os.fork()) == 0:
        for number in range(count):
            if os.fork() == 0:
                if number == 0:
                    os.setsid()
                os.read(told, 1)
                os._exit(3)
        os._exit(0)
    return between

def of_a_thread(codes):
    # The subprocess has ended long before it is waited for.
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    loop.call_soon_threadsafe(looked.set)
    asked.wait()
    codes.append(process.wait())

async def scenario():
    global loop, looked, asked, told
    loop, looked, asked, codes = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []
    told, telling = os.pipe()
    mine = Children(ends_orphans=True)
    with mine.watched():
        with mine.expecting():
            between = mine.follow(orphans(300))
            assert await between.wait() == 0
            assert len(children_of(os.getpid())) == 300
            os.write(telling, b"." * 300)
            await asyncio.sleep(0.3)
            assert len(children_of(os.getpid())) == 300, "an end that somebody may still ask for"
        await until(lambda: children_of(os.getpid()) == [])
        thread = threading.Thread(target=of_a_thread, args=(codes,))
        thread.start()
        await looked.wait()
        mine.look()
        asked.set()
        thread.join()
        assert codes == [5], codes

asyncio.run(scenario())
print("well")
"""


def forked(status: int) -> int:
    """The id of a child that ends with this."""
    if (pid := os.fork()) == 0:
        os._exit(status)
    return pid


def ended(status: int) -> int:
    """The id of a child that has ended with this; nobody has waited for it."""
    pid = forked(status)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def wait_for(pid: int) -> None:
    """What is not to happen behind the back of `Children`."""
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_orphans_leave_no_zombie_and_who_waits_by_itself_is_left_alone() -> None:
    """Neither those that ended while a process was being made, nor hundreds at once, nor one of another session. What
    `subprocess` has started in a thread has its exit status still."""
    done = subprocess.run(
        [sys.executable, "-c", ADOPTING], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("well\n", 0), done.stderr


def test_the_end_of_each_is_noticed() -> None:
    """Of one that ended before anybody followed it, too."""

    async def scenario() -> None:
        mine = Children()
        with mine.watched():
            early = ended(3)
            followed = [mine.follow(early), *(mine.follow(forked(status)) for status in (0, 7))]
            async with asyncio.timeout(60):
                assert [await one.wait() for one in followed] == [3, 0, 7]
            followed[0].send_signal(signal.SIGKILL)  # it is gone: nobody gets it

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_end_is_noticed_without_its_signal() -> None:
    """SIGCHLD may be lost, and that of several children may be one: there is a look every second."""

    async def scenario() -> None:
        mine = Children()
        with mine.watched():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            async with asyncio.timeout(60):
                assert await mine.follow(forked(4)).wait() == 4

    asyncio.run(scenario())


def test_an_end_that_something_else_has_waited_for_is_an_end() -> None:
    """Nobody waits for ever for what nobody knows."""

    async def scenario() -> None:
        mine = Children()
        with mine.watched():
            pid = ended(0)
            wait_for(pid)
            async with asyncio.timeout(60):
                assert await mine.follow(pid).wait() == UNKNOWN_STATUS

    asyncio.run(scenario())


def test_who_stops_waiting_takes_the_end_from_nobody() -> None:
    async def scenario() -> None:
        mine = Children()
        with mine.watched():
            reading, writing = os.pipe()
            if (pid := os.fork()) == 0:
                os.read(reading, 1)
                os._exit(6)
            child = mine.follow(pid)
            waiting = asyncio.create_task(child.wait())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            os.write(writing, b".")
            async with asyncio.timeout(60):
                assert await child.wait() == 6
            os.close(reading)
            os.close(writing)

    asyncio.run(scenario())


def test_any_signal_has_a_name() -> None:
    assert describe_exit(-40) == "signal 40"
    assert describe_exit(-9) == "SIGKILL"
