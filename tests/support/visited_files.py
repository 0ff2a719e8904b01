"""Which files of the gateway one request runs through, in a worker's S3 application and server in this process."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gateway

PACKAGE = str(Path(gateway.__file__).parent)


@dataclass
class Visits:
    """What ran: `files` below `gateway/`, and each function once."""

    functions: set[CodeType] = field(default_factory=set)

    @property
    def files(self) -> list[str]:
        return sorted({code.co_filename.removeprefix(PACKAGE + "/") for code in self.functions})


class Watch:
    """To be made before the threads of what it watches are started."""

    def __init__(self) -> None:
        self._visits: Visits | None = None
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    @contextmanager
    def visits(self) -> Iterator[Visits]:
        """What runs meanwhile in any thread."""
        self._visits = found = Visits()
        try:
            yield found
        finally:
            self._visits = None

    def close(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        visits = self._visits
        if visits is not None and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            visits.functions.add(frame.f_code)


async def in_thread(call: Callable[[], Any]) -> Any:
    """A client's call, which blocks."""
    return await asyncio.to_thread(call)
