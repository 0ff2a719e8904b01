"""What systemd hears of `forebay serve` in a unit with `Type=notify`."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from gateway.serve.service_manager import notify_ready, notify_stopping
from tests.serve.test_supervisor import supervised
from tests.support.cache_directory import begun

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
