"""Errors that end the demo early."""

from __future__ import annotations

from gateway.core.errors import ForebayError


class DemoError(ForebayError):
    """A step failed. The message says which and why; `log` is the end of the log that tells more, or empty."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Interrupted(BaseException):
    """A signal asked the demo to stop. Not an Exception: nothing on the way to the clean-up may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.signal_number = signal_number
