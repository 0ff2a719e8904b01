"""Another process that is stopped (SIGSTOP) while it writes to an LMDB environment: it holds the lock, and lives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCRIPT = """
import os, signal, sys
import lmdb
environment = lmdb.open(sys.argv[1], max_dbs=4, max_readers=1024, map_size=2**30, lib_version=int(sys.argv[2]))
with environment.begin(write=True):
    os.kill(os.getpid(), signal.SIGSTOP)
environment.close()
"""


@contextmanager
def stopped_writer(environment: Path, *, engine: int) -> Iterator[subprocess.Popen[bytes]]:
    """Stopped as long as the context lasts, unless it is continued; then killed."""
    process = subprocess.Popen([sys.executable, "-c", _SCRIPT, str(environment), str(engine)])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield process
    finally:
        process.kill()
        process.wait()
