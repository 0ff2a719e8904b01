"""Processes that are forked from one that has loaded the code."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gateway.serve.background
import gateway.serve.worker
from gateway.edge.server.response import next_request_id
from gateway.errors import StartupError
from gateway.serve import fork_server
from gateway.serve.child_process import Adopted
from gateway.serve.fork_server import ForkServer
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import children_of, is_over
from tests.support.serving import until

WAIT_SECONDS = 30.0

MODULE = """
import os, signal, sys
def load():
    %s
def main(arguments):
    what, report, extra = arguments[0], int(arguments[1]), arguments[2:]
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


async def forked(forks: ForkServer, word: bytes) -> tuple[str, int]:
    """What a process says of itself, and how it ends when it is told `word`."""
    with pipes() as (stdin, reporting, telling, hearing):
        process = Adopted(await forks.fork(["name"], stdin, reporting, stdin, stdin))
        said = (await asyncio.to_thread(os.read, hearing, 100)).decode()
        os.write(telling, word)
        return said, await asyncio.wait_for(process.wait(), WAIT_SECONDS)


def test_what_is_forked_is_a_child_of_who_asked(module: str) -> None:
    """With a session of its own, the descriptors that it was given, and an exit status; one after the other."""

    async def scenario() -> None:
        forks = ForkServer(module)
        try:
            for word, status in ((b"end", 7), (b"die", -signal.SIGKILL)):
                said, ended = await forked(forks, word)
                assert said == f"name {os.getpid()} True 2"
                assert ended == status
        finally:
            await forks.close()

    asyncio.run(scenario())


def test_code_that_cannot_be_loaded_is_an_error_of_the_start(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(MODULE % "raise ImportError('no such part')")

    async def scenario() -> None:
        forks = ForkServer(module)
        with pipes() as (stdin, reporting, _, _), pytest.raises(StartupError, match="fork server has ended"):
            await forks.fork(["name"], stdin, reporting)

    asyncio.run(scenario())


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_is_gone_or_stands_is_replaced(
    module: str, by: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start that meets it fails, and is tried again like that of any process that does not come up."""
    monkeypatch.setattr(fork_server, "FORK_SECONDS", 0.2)

    async def scenario() -> None:
        forks = ForkServer(module)
        try:
            await forked(forks, b"end")
            [old] = children_of(os.getpid())
            os.kill(old, by)
            with pytest.raises((StartupError, OSError)):
                await forked(forks, b"end")
            assert is_over(old)
            monkeypatch.setattr(fork_server, "FORK_SECONDS", WAIT_SECONDS)
            assert (await forked(forks, b"end"))[1] == 7
        finally:
            await forks.close()
        assert children_of(os.getpid()) == []

    asyncio.run(scenario())


def test_a_start_that_is_given_up_leaves_no_answer_behind(module: str) -> None:
    """The next one would take it for its own, and know a process by the id of another."""

    async def scenario() -> None:
        forks = ForkServer(module)
        try:
            for _ in range(3):
                starting = asyncio.create_task(forked(forks, b"end"))
                await until(lambda: bool(children_of(os.getpid())))
                starting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await starting
            said, status = await forked(forks, b"end")
            assert (said.split()[0], status) == ("name", 7)
        finally:
            await forks.close()

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
    renewed = {("gateway.edge.server.response", "_numbers")}
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
        assert one.terminate() == 0
