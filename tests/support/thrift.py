"""What processes of a test run leave undone, as it takes CPU and changes nothing that a test looks at."""

from __future__ import annotations

import functools
import os
import shutil

import httpx

from gateway.origin.http1_client import client as http1_client

MEMORY = "/dev/shm"
IS_ROOM_IN_MEMORY = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * 1024**3

_LARGE_BYTES = 2 * 1024**2
_allocate = os.posix_fallocate


def save_cpu() -> None:
    """Let large files in memory have holes, and read all authorities' certificates once.

    To fill a catalog's file with zeros takes each test that opens one 20 ms. Each client of an origin reads the
    certificates, or of httpx, although most never speak TLS: 10 and 24 ms.
    """
    os.posix_fallocate = _with_holes
    http1_client._ssl_context = functools.cache(http1_client._ssl_context)
    httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)  # type: ignore[attr-defined]
    http1_client._ssl_context(None)


def _with_holes(descriptor: int, offset: int, count: int, /) -> None:
    facts = os.fstat(descriptor)
    if count < _LARGE_BYTES or not IS_ROOM_IN_MEMORY or facts.st_dev != os.stat(MEMORY).st_dev:
        _allocate(descriptor, offset, count)
    elif facts.st_size < offset + count:
        os.truncate(descriptor, offset + count)
