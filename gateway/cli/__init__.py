"""The `forebay` command. `serve` first corrects what it has inherited: signals, streams, variables, a mask."""

from __future__ import annotations

import os
import signal
import sys

_ABOUT_THE_INTERPRETER = frozenset({"PYTHONINSPECT", "PYTHONWARNINGS"})
"""Variables that a training job sets for itself. The first keeps each process from ending, and makes it read commands
from its standard input; the second may turn a library's warning into an error."""

_PID_OF_INIT = 1


def put_in_order() -> None:
    """Correct the inherited state before anything is opened and slow code is loaded.

    A blocked SIGTERM could not stop the gateway, and with an ignored SIGCHLD the kernel keeps no exit status of any
    process. SIGHUP would end the process while code is loaded: it waits until the supervisor answers to it. So do
    SIGTERM and SIGINT in the first process of a container: the kernel drops them while no handler exists.
    A mask under which we could not enter the directories that we make is none.
    """
    _begin_anew_without_variables()
    held = {signal.SIGHUP}
    if os.getpid() == _PID_OF_INIT:
        held |= {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(os.umask(0o077) & 0o077)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file or socket would get the number, and the log be written there
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _begin_anew_without_variables() -> None:
    """Restart the process, as the interpreter has looked at the variables already; its id stays the same."""
    set_ones = _ABOUT_THE_INTERPRETER & os.environ.keys()
    if not set_ones or not sys.executable:
        return
    for name in set_ones:
        del os.environ[name]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - what runs already


if sys.argv[1:2] == ["serve"]:
    put_in_order()

from gateway.cli.commands import app, main  # noqa: E402 - what was inherited is in order before slow code is loaded

__all__ = ["app", "main"]
