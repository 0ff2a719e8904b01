"""The access log: a file with a JSON line for each finished request to the S3 port.

Requests are gathered for a moment; a thread formats and writes their lines. No line has a secret, a query or a header.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from gateway.shared.recent_requests import FinishedRequest
from gateway.telemetry import metrics
from gateway.telemetry.log_file import LogFile

GATHERED_SECONDS = 0.25
"""The longest time that a request waits for the thread."""

GATHERED_MAX = 512

_AT_ONCE_BYTES = 64 * 1024

_REQUEST_BYTES = 1024
"""The memory of a request until its line is written, without its key."""


class AccessLog:
    """One worker's access log. Event loop only; it never waits and never fails."""

    def __init__(
        self, path: Path, process: str, wall: Callable[[], float] = time.time, clock: Callable[[], float] = monotonic
    ) -> None:
        """OSError where the file cannot be opened."""
        self._file = LogFile(path, process, metrics.ACCESS_LOST.add, wall, clock, at_once_bytes=_AT_ONCE_BYTES)
        self._gathered: list[tuple[float, FinishedRequest]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request: FinishedRequest) -> None:
        self._gathered.append((self._file.now(), request))
        if len(self._gathered) >= GATHERED_MAX:
            self._hand_over()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHERED_SECONDS, self._hand_over)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered = self._gathered, []
        if gathered:
            size_bytes = sum(_REQUEST_BYTES + len(one.key or "") for _, one in gathered)
            self._file.write_all(map(self._line, gathered), len(gathered), size_bytes)

    async def aclose(self) -> None:
        """Write the remaining lines, for a second at most."""
        self._hand_over()
        await asyncio.to_thread(self._file.close)

    def _line(self, finished: tuple[float, FinishedRequest]) -> str:
        at, one = finished
        return self._file.line(
            {
                "request_id": one.request_id,
                "caller": one.caller,
                "remote": one.remote,
                "operation": one.operation,
                "bucket": one.bucket,
                "key": one.key,
                "slot": one.slot,
                "status": one.status,
                "error": one.error_code,
                "cache": one.cache,
                "reason": one.reason,
                "seconds": round(one.seconds, 6),
                "sent_bytes": one.sent_bytes,
                "received_bytes": one.received_bytes,
            },
            at,
        )
