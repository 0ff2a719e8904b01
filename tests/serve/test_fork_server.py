"""Processes that are forked from one that has loaded the code."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import gateway.serve.background
import gateway.serve.worker
from gateway.core.errors import StartupError
from gateway.edge.response import next_request_id
from gateway.serve import fork_server
from gateway.serve.child_monitor import ChildProcess, ChildSpec
from gateway.serve.fork_server import Children, ForkServer, ForkServerEnded
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import children_of, is_over
from tests.support.waiting import until

WAIT_SECONDS = 30.0

MODULE = """
import os, signal, sys
def load():
    %s
def main(arguments):
    what, report, extra = arguments[0], int(arguments[1]), arguments[2:]
    os.read(0, 1)
    os.write(report, f"{what} {os.getppid()} {os.getsid(0) == os.getpid()} {len(extra)}".encode())
    os.close(report)
    if os.read(0, 10) == b"die":
        signal.raise_signal(signal.SIGKILL)
    sys.exit(7)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of one that the fork server can load."""
    (tmp_path / "forked_in_test.py").write_text(MODULE % "pass")
    monkeypatch.syspath_prepend(tmp_path)
    yield "forked_in_test"
    sys.modules.pop("forked_in_test", None)


@contextmanager
def pipes() -> Iterator[tuple[int, int, int, int]]:
    """Ends of standard input and of the report: the process's, and ours."""
    descriptors = [*os.pipe(), *os.pipe()]
    stdin, telling, hearing, reporting = descriptors
    try:
        yield stdin, reporting, telling, hearing
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@asynccontextmanager
async def a_fork_server(module: str) -> AsyncIterator[ForkServer]:
    """Ended again, whatever comes of the test."""
    children = Children()
    with children.watched():
        forks = ForkServer(module, children)
        try:
            yield forks
        finally:
            await forks.close()


async def forked(forks: ForkServer, word: bytes) -> tuple[str, int]:
    """What a process says of itself, and how it ends when it is told `word`."""
    with pipes() as (stdin, reporting, telling, hearing):
        process = await forks.fork(["name"], stdin, reporting, stdin, stdin)
        os.write(telling, b"?")  # the process between the two forks is gone by now
        said = (await asyncio.to_thread(os.read, hearing, 100)).decode()
        os.write(telling, word)
        return said, await asyncio.wait_for(process.wait(), WAIT_SECONDS)


def test_what_is_forked_is_a_child_of_who_asked(module: str) -> None:
    """With a session of its own, the descriptors that it was given, and an exit status; one after the other."""

    async def scenario() -> None:
        async with a_fork_server(module) as forks:
            for word, status in ((b"end", 7), (b"die", -signal.SIGKILL)):
                said, ended = await forked(forks, word)
                assert said == f"name {os.getpid()} True 2"
                assert ended == status

    asyncio.run(scenario())


def test_code_that_starts_threads_is_loaded_by_each_process(tmp_path: Path, module: str) -> None:
    """LD_PRELOAD, or a sitecustomize: a fork would have the locks of threads that it has not."""
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / f"{module}.py").write_text(MODULE % thread)

    async def scenario() -> None:
        async with a_fork_server(module) as forks:
            assert await forked(forks, b"end") == (f"name {os.getpid()} True 2", 7)

    asyncio.run(scenario())


def test_code_that_cannot_be_loaded_is_an_error_of_the_start(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(MODULE % "raise ImportError('no such part')")

    async def scenario() -> None:
        message = r"has ended \(exit code 1\) before the code was loaded; what it wrote to standard error says why"
        async with a_fork_server(module) as forks:
            with pipes() as (stdin, reporting, _, _), pytest.raises(StartupError, match=message):
                await forks.fork(["name"], stdin, reporting)

    asyncio.run(scenario())


def test_code_that_is_gone_is_named(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forebay was uninstalled while it ran."""
    monkeypatch.setattr("gateway.__file__", str(tmp_path / "gateway" / "__init__.py"))
    monkeypatch.setattr(fork_server, "_BOOTSTRAP", "import a_package_that_is_gone")

    async def scenario() -> None:
        message = f"before the code was loaded: it is gone from {tmp_path / 'gateway'}, so install Forebay"
        async with a_fork_server(module) as forks:
            with pipes() as (stdin, reporting, _, _), pytest.raises(StartupError, match=message):
                await forks.fork(["name"], stdin, reporting)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("says", "found"), [("loaded 9.1.0 1", r"9\.1\.0"), ("loaded", "of another version"), ("?", "of another version")]
)
def test_code_of_another_version_is_not_run(
    module: str, says: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forebay was upgraded in place: what the supervisor of before tells its processes, others may not understand. It
    goes on, and says that it is to be restarted."""
    script = f"import socket, sys, time; socket.socket(fileno=int(sys.argv[3])).send(b'{says}'); time.sleep(60)"
    monkeypatch.setattr(fork_server, "_BOOTSTRAP", script)

    async def scenario() -> None:
        message = f"Forebay {found} was installed in the place of .*, which runs: restart the gateway"
        async with a_fork_server(module) as forks:
            with pipes() as (stdin, reporting, _, _), pytest.raises(StartupError, match=message):
                await forks.fork(["name"], stdin, reporting)
        assert children_of(os.getpid()) == []

    asyncio.run(scenario())


def test_a_fork_server_that_is_gone_is_replaced_and_the_process_made_once(module: str) -> None:
    """Whoever asks next notices nothing, whether its end is known by then or not."""

    async def scenario() -> None:
        async with a_fork_server(module) as forks:
            await forked(forks, b"end")
            for notices in (True, False):
                [old] = children_of(os.getpid())
                os.kill(old, signal.SIGKILL)
                if notices:
                    await until(lambda old=old: old not in children_of(os.getpid()))  # type: ignore[misc]
                child = await ChildProcess.start(forks, ChildSpec("name", ()), b"end")
                with pytest.raises(StartupError, match="exit code 7"):
                    await child.wait_until_ready()
        assert children_of(os.getpid()) == []

    asyncio.run(scenario())


def test_a_fork_server_that_stands_is_replaced(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds, and the process that was asked for is made by another one."""

    async def scenario() -> None:
        async with a_fork_server(module) as forks:
            await forked(forks, b"end")
            [old] = children_of(os.getpid())
            os.kill(old, signal.SIGSTOP)
            monkeypatch.setattr(fork_server, "FORK_SECONDS", 0.2)
            with pytest.raises(ForkServerEnded, match=r"did not answer for 0\.2 seconds"):
                await forked(forks, b"end")
            assert is_over(old)
            monkeypatch.setattr(fork_server, "FORK_SECONDS", WAIT_SECONDS)
            assert (await forked(forks, b"end"))[1] == 7
        assert children_of(os.getpid()) == []

    asyncio.run(scenario())


def test_another_fork_server_is_loaded_before_anybody_asks_for_it(module: str) -> None:
    """A worker that ends later is back at once, too; nothing is loaded any more when it is closed."""

    async def scenario() -> None:
        async with a_fork_server(module) as forks:
            keeping = asyncio.create_task(forks.keep())
            for _ in range(2):
                await until(lambda: bool(children_of(os.getpid())))
                [old] = children_of(os.getpid())
                os.kill(old, signal.SIGKILL)
                await until(lambda old=old: old not in children_of(os.getpid()))  # type: ignore[misc]
            await until(lambda: bool(children_of(os.getpid())))
            await forks.close()
            await asyncio.wait_for(keeping, WAIT_SECONDS)
        assert children_of(os.getpid()) == []

    asyncio.run(scenario())


def test_a_start_that_is_given_up_leaves_no_answer_behind(module: str) -> None:
    """The next one would take it for its own, and know a process by the id of another."""

    async def scenario() -> None:
        async with a_fork_server(module) as forks:
            for _ in range(3):
                starting = asyncio.create_task(forked(forks, b"end"))
                await until(lambda: bool(children_of(os.getpid())))
                starting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await starting
            said, status = await forked(forks, b"end")
            assert (said.split()[0], status) == ("name", 7)

    asyncio.run(scenario())


def test_a_process_that_lacks_descriptors_is_not_made(module: str) -> None:
    """The kernel drops those for which the fork server has no room, without an error."""

    async def scenario() -> None:
        async with a_fork_server(module) as forks:
            await forked(forks, b"end")
            [server] = children_of(os.getpid())
            before = resource.prlimit(server, resource.RLIMIT_NOFILE)
            resource.prlimit(server, resource.RLIMIT_NOFILE, (6, before[1]))
            with pytest.raises(
                OSError, match="Too many open files: the limit of open files of the fork server is reached"
            ):
                await forked(forks, b"end")
            resource.prlimit(server, resource.RLIMIT_NOFILE, before)
            assert (await forked(forks, b"end"))[1] == 7
            assert children_of(os.getpid()) == [server]

    asyncio.run(scenario())


def test_forked_processes_number_their_requests_differently() -> None:
    """Each begins at a place of its own, although all have loaded the code once."""
    ids = {next_request_id()}
    for _ in range(2):
        reading, writing = os.pipe()
        if (process := os.fork()) == 0:
            os.write(writing, next_request_id().encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(process, 0)
        ids.add(os.read(reading, 100).decode())
        os.close(reading)
    assert len(ids) == 3


def test_no_module_draws_by_lot_when_it_is_loaded() -> None:
    """It would draw the same in all processes. What is drawn anew after a fork is named here."""
    renewed = {("gateway.edge.response", "_numbers")}
    assert gateway.serve.worker
    assert gateway.serve.background
    found = {
        (name, key)
        for name, module in list(sys.modules.items())
        if name.startswith("gateway.")
        for key, value in vars(module).items()
        if isinstance(value, random.Random | itertools.count)
    }
    assert found == renewed


@pytest.mark.slow
def test_a_worker_comes_back_without_its_fork_server() -> None:
    """Killed together: another fork server is made, which loads the code anew."""
    with GatewayProcess({"origin": {"endpoint_url": "http://127.0.0.1:1"}, "server": {"workers": 2}}) as one:
        known = {one.pid, *(process["process_id"] for process in one.status()["gateway"]["processes"])}
        [forks] = set(children_of(one.pid)) - known
        assert b"forebay: fork server" in Path(f"/proc/{forks}/cmdline").read_bytes()
        worker = one.worker_pids()[0]
        assert worker is not None
        os.kill(forks, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        one.wait_for_worker(0, other_than=worker)
        assert one.status()["gateway"]["processes"][0]["restarts"] == 1
        assert "could not be started again" not in one.log
        assert "the fork server ended unexpectedly" in one.log or "a process is asked for again" in one.log
        assert one.terminate() == 0
