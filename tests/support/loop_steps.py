"""How much the event loop does between two of its turns."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import gateway


class LongestStep:
    """`lines` of the gateway that ran in one callback of the event loop, and where most of them were."""

    def __init__(self) -> None:
        self.lines = 0
        self.where: Counter[str] = Counter()
        self._now: Counter[str] = Counter()

    def __str__(self) -> str:
        return f"{self.lines} lines: {self.where.most_common(5)}"

    def on_event(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call" and frame.f_code is _ONE_CALLBACK:
            self.end()
        elif event == "line":
            self._now[frame.f_code.co_qualname] += 1
        return self.on_event if frame.f_code.co_filename.startswith(_GATEWAY) else None

    def end(self) -> None:
        lines = self._now.total()
        if lines > self.lines:
            self.lines, self.where = lines, self._now
        self._now = Counter()


_GATEWAY = str(Path(gateway.__file__).parent)
_ONE_CALLBACK = asyncio.Handle._run.__code__


@contextmanager
def longest_step() -> Iterator[LongestStep]:
    """Of this thread's event loop, inside of the block."""
    longest, before = LongestStep(), sys.gettrace()
    sys.settrace(longest.on_event)
    try:
        yield longest
    finally:
        sys.settrace(before)
        longest.end()
