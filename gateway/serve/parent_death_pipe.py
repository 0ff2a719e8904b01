"""Standard input of a child: its configuration, and the proof that the supervisor lives."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

_STDIN = 0
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 65536


def lines(descriptor: int = _STDIN) -> Iterator[bytes]:
    """Yield complete lines until the other end is closed.

    Reads the descriptor itself: a thread that waits in a buffered reader when the interpreter ends makes it abort.
    """
    rest = b""
    while piece := os.read(descriptor, _READ_BYTES):
        *complete, rest = (rest + piece).split(b"\n")
        yield from complete


def end_with_parent() -> None:
    """Make the kernel end this process when its parent ends, even if it is stopped: prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hold(lines: Iterator[bytes], obey: Callable[[bytes], None]) -> None:
    """From a thread, hand every further line to `obey`; end this process at once when the supervisor is gone.

    The kernel ends it, too, where it is stopped then: no gateway could start on its cache directory.
    """
    end_with_parent()

    def follow() -> None:
        for line in lines:
            obey(line)
        os._exit(1)

    threading.Thread(target=follow, name="parent-death-pipe", daemon=True).start()
