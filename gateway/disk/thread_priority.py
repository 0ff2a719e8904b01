"""How a thread yields to others: to the event loop of its process, and to the disk traffic of everybody."""

from __future__ import annotations

import ctypes
import os
import threading

_NICER = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine, -1)
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3


def prefer_event_loop() -> None:
    """Let the scheduler prefer the event loop to this thread where both want a processor.

    Linux keeps a nice value for each thread (setpriority(2)); weights are those of sched-nice-design. The loop takes a
    tenth of a millisecond for a request, and would wait for a slice of each thread that is at work otherwise.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICER))


def only_idle_disk() -> None:
    """Put this thread into the idle class (ioprio_set(2)): I/O schedulers that know it let everybody else go first."""
    ctypes.CDLL(None, use_errno=True).syscall(_IOPRIO_SET, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << 13)
