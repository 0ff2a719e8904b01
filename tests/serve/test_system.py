"""Signals that come in storms, messages to the service manager, the limit of open files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.serve.system import answered, notify_ready, notify_stopping
from tests.serve.test_supervisor import supervised
from tests.support.cache_directory import begun
from tests.support.gateway_process import GatewayProcess

SIGNALS = 5000
"""More than a pipe between the signal and the event loop has room for."""

STORM = """
import os, signal, sys
while True:
    os.kill(int(sys.argv[1]), signal.SIGHUP)
"""


def test_a_signal_behind_thousands_of_others_is_answered() -> None:
    """While the event loop is busy. Those of a kind that come meanwhile are answered together."""

    async def scenario() -> None:
        many, one = asyncio.Event(), asyncio.Event()
        with answered(signal.SIGUSR1, many.set), answered(signal.SIGUSR2, one.set):
            for _ in range(SIGNALS):
                os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
            async with asyncio.timeout(60):
                await many.wait()
                await one.wait()
            many.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            async with asyncio.timeout(60):
                await many.wait()

    asyncio.run(scenario())


def test_a_late_signal_does_what_was_said() -> None:
    async def scenario() -> None:
        with answered(signal.SIGUSR1, lambda: None, signal.SIG_IGN), answered(signal.SIGUSR2, lambda: None):
            assert signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN

    try:
        asyncio.run(scenario())
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.slow
def test_a_storm_of_sighup_keeps_nobody_from_stopping_the_gateway() -> None:
    """One SIGTERM is enough, and the exit code is that of a good stop."""
    with GatewayProcess({"origin": {"endpoint_url": "http://127.0.0.1:1"}, "server": {"workers": 1}}) as gateway:
        storm = subprocess.Popen([sys.executable, "-c", STORM, str(gateway.pid)], stderr=subprocess.DEVNULL)
        try:
            while gateway.log.count("settings were changed") < 20:
                assert storm.poll() is None
            assert gateway.terminate() == 0
        finally:
            storm.kill()
            storm.wait()


PATIENCE_SECONDS = 60.0


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A service manager's end of the socket."""
    address = begun(tmp_path) / "notify"
    receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiving.bind(str(address))
    receiving.settimeout(PATIENCE_SECONDS)
    monkeypatch.setenv("NOTIFY_SOCKET", str(address))
    return receiving


def heard(manager: socket.socket) -> dict[str, str]:
    """The next message."""
    return dict(line.split("=", 1) for line in manager.recv(4096).decode().splitlines())


def test_the_service_manager_is_told_of_start_reload_and_stop(manager: socket.socket, tmp_path: Path) -> None:
    """READY when all is served, RELOADING and READY around a SIGHUP, STOPPING at SIGTERM, each in its time."""
    with manager, supervised(tmp_path, "") as process:
        ready = heard(manager)
        assert ready["READY"] == "1"
        assert ready["STATUS"].startswith("S3 on http://127.0.0.1:")
        process.send_signal(signal.SIGHUP)
        reloading = heard(manager)
        assert reloading["RELOADING"] == "1"
        assert int(reloading["MONOTONIC_USEC"]) > 0
        assert heard(manager)["READY"] == "1"
        process.terminate()
        assert heard(manager)["STOPPING"] == "1"
        assert process.wait(PATIENCE_SECONDS) == 0


def test_a_name_without_a_file_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux's abstract socket names are written with an @ in the variable."""
    name = f"forebay-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(f"\0{name}")
        receiving.settimeout(PATIENCE_SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify_stopping()
        assert heard(receiving)["STOPPING"] == "1"


def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable, or a socket that is gone: the gateway goes on."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_ready("served")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_ready("served")
