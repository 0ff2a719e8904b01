"""Let a test that runs as root ask a file system as a process with few rights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_VERSION_3 = 0x20080522


def with_plain_rights(function: Callable[[], T]) -> T:
    """Run it on a thread to which the rights of files mean what they say."""
    with ThreadPoolExecutor(1, initializer=_give_up) as thread:
        return thread.submit(function).result()


def _give_up() -> None:
    """Take the capabilities that overrule rights from this thread (capget(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)  # the effective ones
    assert libc.capset(header, data) == 0
