"""What a launcher may leave to `forebay serve` with which it could not work: signals and standard streams."""

from __future__ import annotations

import os
import signal
import sys


def put_in_order() -> None:
    """Before anything is opened and any code loaded that needs time.

    A blocked SIGTERM could not stop the gateway, and an ignored SIGCHLD has the kernel keep no exit status of any
    process. SIGHUP would end the process while code is loaded: it waits until the supervisor answers to it.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGHUP})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
