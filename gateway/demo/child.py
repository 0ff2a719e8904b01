"""Runs a command that ends when its parent ends: `python -m gateway.demo.child PARENT_PID COMMAND…`.

Only for the case that the demo itself is killed with -9; otherwise it ends its children in order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); the setting survives the exec


def main(parent_pid: int, command: list[str]) -> None:
    """Become `command`, to be sent SIGTERM when the parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before the call above
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
