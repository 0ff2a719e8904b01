"""Signals that end the demo, arriving only where nothing can be left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gateway.demo.errors import Interrupted

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruptions:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into `Interrupted`, raised in the main thread; ignores later ones.

    What runs at that moment may swallow it: a finalizer cannot raise anything. `check` raises it again.
    """

    def __init__(self) -> None:
        self._holds = 0
        self._pending: int | None = None
        self._raised = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals until the block ends. Only the main thread may enter."""
        before = {number: signal.signal(number, self._on_signal) for number in _ENDING_SIGNALS}
        try:
            yield
            self.check()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals until the end of the block, for steps that must not be interrupted, such as cleaning up."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        self._raise_pending()

    def check(self) -> None:
        """Raise the signal that has arrived, if any."""
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._raised:
            self._pending = number
            self._raise_pending()

    def _raise_pending(self) -> None:
        if self._pending is not None and not self._holds and not self._raised:
            self._raised = True
            raise Interrupted(self._pending)
