"""Which descriptors this process has open, for tests that nothing is left open."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """Their numbers. What tests before have left to Python's collector is closed first: it may come at any moment."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
