"""The `forebay` command."""

import signal
import sys

if sys.argv[1:2] == ["serve"]:
    # It would end the process while code is loaded, for a second: it waits until the supervisor answers to it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

from gateway.cli.commands import app, main

__all__ = ["app", "main"]
