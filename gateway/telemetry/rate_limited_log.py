"""Log events that may happen a thousand times a second: each kind once a minute."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

_TOLD_AGAIN_SECONDS = 60.0


class RateLimitedLog:
    """Logs each kind of event once a minute, with the number of events left out since."""

    def __init__(self, log: Any, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._monotonic = monotonic
        self._told: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, message: str, kind: str, **fields: Any) -> None:
        """Log an event. `kind` comes from a short list, never from a client."""
        self._tell("warning", message, kind, fields)

    def error(self, message: str, kind: str, **fields: Any) -> None:
        """Log an event, as `warning` does."""
        self._tell("error", message, kind, fields)

    def _tell(self, level: str, message: str, kind: str, fields: dict[str, Any]) -> None:
        now = self._monotonic()
        if kind in self._told and now - self._told[kind] < _TOLD_AGAIN_SECONDS:
            self._left_out[kind] += 1
            return
        self._told[kind] = now
        left_out = self._left_out.pop(kind, 0)
        getattr(self._log, level)(message, **fields, **({"not_told_since": left_out} if left_out else {}))
