"""A launcher leaves signals and standard streams in any state: the gateway starts, keeps its processes, and stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.living_files import living_files


@pytest.mark.slow
@pytest.mark.parametrize(
    "left",
    [
        lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}),
        lambda: os.close(2),
    ],
    ids=["SIGCHLD ignored", "signals blocked", "standard error closed"],
)
def test_it_serves_and_stops_with_what_a_launcher_left(left: Callable[[], object]) -> None:
    config: dict[str, dict[str, Any]] = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "server": {"workers": 1}}
    with GatewayProcess(config, before_exec=lambda: (left(), None)[1]) as gateway:
        worker = gateway.kill_worker(0)
        gateway.wait_for_worker(0, other_than=worker)
        assert gateway.terminate() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONINSPECT": "1", "PYTHONWARNINGS": "error", "PYTHONSTARTUP": "/nowhere", "PYTHONBREAKPOINT": "no.such"},
        {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "64"},
        {"PYTHONOPTIMIZE": "2", "PYTHONDEVMODE": "1", "PYTHONMALLOC": "debug", "LD_PRELOAD": "/no/such.so"},
    ],
    ids=["that keep it from ending", "that change little", "that look for errors"],
)
def test_it_serves_and_stops_in_the_environment_of_a_training_job(variables: dict[str, str]) -> None:
    """A process that ends is started again, and a stop is a clean one."""
    config: dict[str, dict[str, Any]] = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "server": {"workers": 1}}
    with GatewayProcess(config, environment=variables) as gateway:
        worker = gateway.kill_worker(0)
        gateway.wait_for_worker(0, other_than=worker)
        assert gateway.terminate() == 0
        assert "Traceback" not in gateway.log


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0, 0o077, 0o777])
def test_no_mask_keeps_it_from_its_files_or_lets_others_in(mask: int) -> None:
    config: dict[str, dict[str, Any]] = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "server": {"workers": 1}}
    with GatewayProcess(config, before_exec=lambda: (os.umask(mask), None)[1]) as gateway:
        modes = {path: status.st_mode for path, status in living_files(gateway.directory)}
        for path, mode in {**modes, gateway.directory: gateway.directory.stat().st_mode}.items():
            assert mode & 0o600 == 0o600, f"{path} {mode:o}"
            assert not mode & 0o002, f"{path} {mode:o}"
        assert gateway.terminate() == 0
