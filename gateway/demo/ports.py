"""Ports for servers that are told theirs before they start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST, _ATTEMPTS = 10_000, 1_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_kept = list[socket.socket]()


def free_port() -> int:
    """Return a port that nobody else gets before its server has it, of all addresses.

    A port that a listener on port 0 got may be the next connection's source. So it is one that the system gives to
    nobody, and this process keeps a socket bound to it: other callers cannot bind theirs, whereas servers can, because
    they set SO_REUSEADDR.
    """
    first_of_system = int(_RANGE.read_text().split()[0])
    for _ in range(_ATTEMPTS):
        kept = socket.socket()
        try:
            kept.bind(("", random.SystemRandom().randrange(_LOWEST, first_of_system)))
        except OSError:
            kept.close()
            continue
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _kept.append(kept)
        return int(kept.getsockname()[1])
    raise OSError(f"none of {_ATTEMPTS} ports below {first_of_system} is free")
