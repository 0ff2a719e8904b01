"""A launcher leaves signals and standard streams in any state: the gateway starts, keeps its processes, and stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess


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
