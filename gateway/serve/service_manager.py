"""Messages to the service manager that started the gateway: the protocol of sd_notify(3), without systemd's library.

systemd sets NOTIFY_SOCKET for a unit with `Type=notify`. Without the variable no message is sent.
"""

from __future__ import annotations

import os
import socket
import time

import structlog

_VARIABLE = "NOTIFY_SOCKET"

_log = structlog.get_logger("forebay.serve")


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
    """One datagram. A service manager that takes none is no reason to stop serving: it is logged."""
    address = os.environ.get(_VARIABLE)
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
