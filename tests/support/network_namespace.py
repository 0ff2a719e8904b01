"""The network namespace of a thread, and of the threads and processes that it starts from then on."""

from __future__ import annotations

import ctypes
import os

VARIABLE = "GATEWAY_PROCESS_TEST_NAMESPACE"
"""Names the one of a gateway, by its path (`prepared_gateway`)."""

OWN = "/proc/thread-self/ns/net"

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    """Enter the one of a path."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


def enter_new() -> None:
    if _libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
