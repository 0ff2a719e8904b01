"""The access log, a file with a JSON line for each finished request to the S3 port; and the audit log.

Requests are gathered for a moment; a thread formats and writes their lines. No line has a secret, a query or a header.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gateway.shared.recent_requests import FinishedRequest
from gateway.telemetry import metrics
from gateway.telemetry.log_file import LogFile
from gateway.telemetry.logs import harmless

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


KEYS_MAX = 1000
"""The keys of one request, as many as DeleteObjects may name."""

_PROBLEM_CHARACTERS_MAX = 1000

_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")
"""All that a slot, a snapshot or a job may be called. Anything else in a path may hold a secret."""

_LINE_BYTES = 512
"""The memory of a line until it is written, without its key."""


class AuditLog(LogFile):
    """One process's audit log. Any thread; it never waits and never fails."""

    def __init__(
        self, path: Path, process: str, wall: Callable[[], float] = time.time, clock: Callable[[], float] = monotonic
    ) -> None:
        """OSError where the file cannot be opened."""
        super().__init__(path, process, metrics.AUDIT_LOST.add, wall, clock)

    def request(
        self,
        *,
        caller: str,
        remote: str | None,
        operation: str,
        bucket: str | None,
        keys: Sequence[str | None],
        status: str,
        request_id: str,
        received_bytes: int,
        answer: Mapping[str, str],
    ) -> None:
        """Write a line for each key of a request that changes something. `answer` has its ETag and version."""
        named = tuple(keys[:KEYS_MAX])
        at = self.now()
        before = {"caller": caller, "remote": remote, "operation": operation, "bucket": bucket}
        after = {"status": status, "request_id": request_id, "received_bytes": received_bytes, **answer}
        lines = (self.line({"event": "request", **before, "key": key, **after}, at) for key in named)
        self.write_all(lines, len(named), sum(map(sys.getsizeof, named)) + _LINE_BYTES * len(named))

    def admin(self, *, remote: str | None, method: str, path: str, status: int) -> None:
        """Write a line about a request to the admin port."""
        named = "/".join(part if _NAME.fullmatch(part) else "(no name)" for part in path.split("/"))
        fields = {"remote": remote, "operation": f"{method} {named}", "status": str(status)}
        self._add({"event": "admin", "caller": "admin", **fields})

    def change(self, *, caller: str, remote: str | None, operation: str, generation: int, problem: str | None) -> None:
        """Write a line about a change of settings; with `problem`, a refused one. `generation` is the one in force."""
        fields: dict[str, Any] = {"caller": caller, "remote": remote, "operation": operation}
        if problem is not None:
            fields["problem"] = harmless(problem)[:_PROBLEM_CHARACTERS_MAX]
        status = "applied" if problem is None else "refused"
        self._add({"event": "change", **fields, "status": status, "generation": generation})

    def _add(self, fields: dict[str, Any]) -> None:
        self.write(self.line(fields, self.now()))
