"""The package is removed from the disk, or another version put in its place, while the gateway runs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.processes import children_of
from tests.support.waiting import eventually

PACKAGE = Path(gateway.__file__).parent


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory with a copy of the package."""
    shutil.copytree(PACKAGE, tmp_path / "code" / "gateway", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


@pytest.fixture
def running(code: Path, request: pytest.FixtureRequest) -> Iterator[GatewayProcess]:
    """Without a key pair of its own, so that processes look for one."""
    config: dict[str, dict[str, Any]] = {
        "server": {"workers": 1},
        "origin": {
            "endpoint_url": "http://127.0.0.1:1",
            "access_key_id": None,
            "secret_access_key": None,
            "require_credentials": False,
        },
    }
    with GatewayProcess(config, code=code) as one:
        yield one


def background_of(one: GatewayProcess) -> dict[str, Any]:
    found: dict[str, Any] = one.status()["gateway"]["processes"][-1]
    return found


def until_logged(one: GatewayProcess, text: str) -> None:
    eventually(lambda: text in one.log, lambda: one.log)


@pytest.mark.slow
def test_all_processes_come_back_without_the_package(running: GatewayProcess, code: Path) -> None:
    """With the dashboard; the gateway stops as it should."""
    shutil.rmtree(code / "gateway")
    worker = running.kill_worker(0)
    running.wait_for_worker(0, other_than=worker)
    background = background_of(running)["process_id"]
    os.kill(background, signal.SIGKILL)
    running.wait_for_worker(-1, other_than=background)
    assert "<html" in httpx.get(f"{running.admin_url}/", timeout=ANSWER_SECONDS_MAX).text
    assert running.terminate() == 0


@pytest.mark.slow
def test_another_version_is_not_run_beside_this_one(running: GatewayProcess, code: Path) -> None:
    """A fork server that is killed cannot come back: that is said, and what runs serves on."""
    (code / "gateway" / "__init__.py").write_text('__version__ = "99.0.0"\n')
    [forks] = [
        child for child in children_of(running.pid) if b"fork server" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(forks, signal.SIGKILL)
    until_logged(running, "Forebay 99.0.0 was installed in the place of")
    assert "the fork server cannot be started" in running.log
    assert httpx.get(f"{running.s3_url}/bucket/key", timeout=ANSWER_SECONDS_MAX).status_code == 403
    assert running.terminate() == 0
