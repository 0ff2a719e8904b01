"""Signals that come in storms: none hides another, and none ends what it should not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from gateway.serve.signals import answered
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
