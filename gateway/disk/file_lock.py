"""Locks on whole files, by which processes keep out of each other's way: flock(2). They end with their process."""

from __future__ import annotations

import fcntl
import time

_TRY_SECONDS = 0.01


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, seconds: float) -> bool:
    give_up_at = time.monotonic() + seconds
    while not try_lock(descriptor):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(_TRY_SECONDS)
    return True
