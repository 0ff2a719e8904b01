"""The audit log: who has written and deleted what, and what operators did, a JSON line each, in a file.

Every process appends to the same file, a line with one `write` (O_APPEND), so lines of several never mix. The file may
be renamed at any time (logrotate): it is made anew within a second, and lines that come meanwhile go to the old one.
No line holds a secret or a body. Nobody waits for it: lines that the disk does not take are lost, counted, and told.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from gateway import metrics
from gateway.log_sink import LogSink

LOOK_SECONDS = 1.0
"""How often is looked whether the file was renamed."""

KEYS_MAX = 1000
"""Of one request: as many as DeleteObjects has."""

_MODE = 0o600
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_WAITING_BYTES_MAX = 32 * 1024 * 1024
"""Of what is not written yet: a DeleteObjects names up to 1,000 keys of 1 KiB, which takes a few MiB here, and a line
is made of each when it is written."""

_PROBLEM_CHARACTERS_MAX = 1000

_LINE_BYTES = 512
"""What a line takes until then, beside its key."""


class AuditLog:
    """Of one process. Any thread; never waits, never fails."""

    def __init__(
        self, path: Path, process: str, wall: Callable[[], float] = time.time, clock: Callable[[], float] = monotonic
    ) -> None:
        """OSError where the file cannot be opened."""
        self._process = process
        self._wall = wall
        self._file = _RenamedFile(path, clock)
        self._file.descriptor()
        self._sink = LogSink(
            self._file.descriptor, self._lost_line, metrics.AUDIT_LOST.add, _WAITING_BYTES_MAX, is_shared=True
        )

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
        """A request to change something was answered: a line for each key that it names. `answer` has what the answer's
        head says of the object: its ETag, its version."""
        named = tuple(keys[:KEYS_MAX])
        at = self._wall()
        before = {"caller": caller, "remote": remote, "operation": operation, "bucket": bucket}
        after = {"status": status, "request_id": request_id, "received_bytes": received_bytes, **answer}
        lines = (self._line({"event": "request", **before, "key": key, **after}, at) for key in named)
        self._sink.write_all(lines, len(named), sum(map(sys.getsizeof, named)) + _LINE_BYTES * len(named))

    def admin(self, *, remote: str | None, method: str, path: str, query: str, status: int) -> None:
        """Something was done over the admin port."""
        fields = {"remote": remote, "operation": f"{method} {path}", "query": query, "status": str(status)}
        self._write({"event": "admin", "caller": "admin", **fields})

    def change(self, *, caller: str, remote: str | None, operation: str, generation: int, problem: str | None) -> None:
        """The gateway's settings were changed, or, with why, were not. `generation` is that of the ones in force."""
        fields: dict[str, Any] = {"caller": caller, "remote": remote, "operation": operation}
        if problem is not None:
            fields["problem"] = problem[:_PROBLEM_CHARACTERS_MAX]
        status = "applied" if problem is None else "refused"
        self._write({"event": "change", **fields, "status": status, "generation": generation})

    def close(self) -> None:
        """Write what is left, as far as that is taken within a second."""
        self._sink.close()
        self._file.close()

    def _write(self, fields: dict[str, Any]) -> None:
        self._sink.write(self._line(fields, self._wall()))

    def _lost_line(self, count: int) -> str:
        return self._line({"event": "lost", "lines": count}, self._wall())

    def _line(self, fields: dict[str, Any], at: float) -> str:
        time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = {name: _safe(value) for name, value in fields.items()}
        return orjson.dumps({"time": time, "process": self._process, **text}).decode() + "\n"


def _safe(value: Any) -> Any:
    """Keys may hold what is no UTF-8: it is written as the backslashed code."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _open_file(path: Path) -> int:
    """A plain file: OSError where anything else has its name. A FIFO or a device might take lines and keep the thread
    for ever."""
    try:
        is_plain = stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        is_plain = True  # it is made
    if not is_plain:
        raise OSError(errno.EINVAL, "no plain file", os.fspath(path))
    opened = os.open(path, _FLAGS, _MODE)
    if not stat.S_ISREG(os.fstat(opened).st_mode):  # it has come just now
        os.close(opened)
        raise OSError(errno.EINVAL, "no plain file", os.fspath(path))
    return opened


class _RenamedFile:
    """A file to append to that others rename. For one thread at a time."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._opened = -1
        self._looked_at = float("-inf")

    def descriptor(self) -> int:
        """Of the file that has the name now, or had it a second ago; OSError."""
        now = self._clock()
        if self._opened < 0 or now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = now
            if self._opened < 0 or not self._has_name():
                self._reopen()
        return self._opened

    def _reopen(self) -> None:
        """The renamed one goes on where no other can be opened; not one that is removed: nobody would read it."""
        try:
            opened = _open_file(self._path)
        except OSError:
            if self._opened >= 0 and os.fstat(self._opened).st_nlink:
                return
            self.close()
            raise
        self.close()
        self._opened = opened

    def close(self) -> None:
        """Let go of the file."""
        opened, self._opened = self._opened, -1
        if opened >= 0:
            os.close(opened)

    def _has_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._opened))
        except FileNotFoundError:
            return False
