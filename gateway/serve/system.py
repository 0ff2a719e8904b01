"""The process and its system: signals, messages to the service manager, the title in `ps`, the limit of files."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import structlog

from gateway.core.errors import StartupError

DESCRIPTORS_MIN = 256
DESCRIPTORS_ADVISED = 4096

_log = structlog.get_logger("forebay.serve")


@contextmanager
def answered(
    number: signal.Signals, answer: Callable[[], None], afterwards: signal.Handlers = signal.SIG_DFL
) -> Iterator[None]:
    """While this lasts, the running loop calls `answer` after one or several of these. Main thread.

    asyncio tells signals apart by bytes in a pipe: a storm of SIGHUP fills it, and a SIGTERM among them would be lost.
    Python itself remembers which ones have come.
    """
    loop = asyncio.get_running_loop()
    is_due = False

    def come(_number: int, _frame: FrameType | None) -> None:
        """Between any two steps of the main thread."""
        nonlocal is_due
        if not is_due:
            is_due = True
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(give)

    def give() -> None:
        nonlocal is_due
        is_due = False
        answer()

    signal.signal(number, come)
    signal.siginterrupt(number, False)
    try:
        yield
    finally:
        signal.signal(number, afterwards)


def notify_ready(status: str) -> None:
    """All ports are served. Also ends a reload. `status` is the line that `systemctl status` shows."""
    _send(f"READY=1\nSTATUS={status}")


def notify_reloading() -> None:
    """Announce that settings are read anew; `notify_ready` follows, whatever comes of it."""
    _send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def notify_stopping() -> None:
    """Announce that the gateway drains, and ends."""
    _send("STOPPING=1\nSTATUS=requests in flight are answered")


def _send(message: str) -> None:
    """Send a datagram of sd_notify(3). systemd sets NOTIFY_SOCKET for a unit with `Type=notify`.

    A service manager that takes none is no reason to stop serving: it is logged.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name that is no file: Linux writes it with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.setblocking(False)  # no answer of clients waits for it
            manager.sendto(message.encode(errors="backslashreplace"), address)
    except OSError as error:
        _log.warning("the service manager cannot be notified", message=message.partition("\n")[0], error=error.strerror)


def set_process_title(name: str) -> None:
    """Show this process as `forebay: NAME`; `worker0` is shown as `worker 0`.

    The title takes the place of the command line. /proc/PID/environ stays as it is: setproctitle would otherwise use
    its room, too, and a process could not be found by its environment any more.
    """
    os.environ["SPT_NOENV"] = "1"
    try:
        from setproctitle import setproctitle  # looks at the variable when it is loaded

        setproctitle(f"forebay: {name.replace('worker', 'worker ')}")
    finally:
        del os.environ["SPT_NOENV"]


def raise_descriptor_limit() -> None:
    """Take all file descriptors that the hard limit allows: every connection and every open block needs one.

    Raises StartupError when even that is too little to work with.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS_ADVISED:
        return
    message = f"the limit of open files is {hard}; raise it (ulimit -n, LimitNOFILE=) to {DESCRIPTORS_ADVISED} or more"
    if hard < DESCRIPTORS_MIN:
        raise StartupError(message)
    _log.warning(message)
