"""JSON lines in a file that all processes append to, and that others may rename at any time, as logrotate does.

Whole lines are appended (O_APPEND), so lines of several processes never mix. A renamed file is made anew within a
second; until then lines go to the old one. No process waits for the disk: lines that it does not take in time are lost
and counted, and a later line reports them.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

WAITING_BYTES_MAX = 1024 * 1024
"""The default memory of unwritten lines."""

CLOSING_SECONDS = 1.0
"""A process that ends waits this long for its last lines."""


def write_bounded(descriptor: int, text: str) -> None:
    """Write to a standard stream, and wait a second at most for its reader."""
    sink = LogSink(descriptor, lambda _: "")
    sink.write(text)
    sink.close()


@dataclass(frozen=True, slots=True)
class _Batch:
    lines: Iterable[str]
    count: int
    size_bytes: int


class LogSink:
    """Writes the lines of one descriptor in order.

    `told_lost` makes the line that reports lost lines; `on_lost` gets their number each time. A `descriptor` that may
    change is called before each write, and every `look_seconds` without lines: a removed file takes its room on the
    disk until every process has closed it. OSError counts as a full disk.

    With `is_shared` several processes append to the file, which is open for reading too: a line that the disk took in
    part does not swallow the next one. Waiting lines are written together, up to `at_once_bytes`, and lost together.
    """

    def __init__(
        self,
        descriptor: int | Callable[[], int],
        told_lost: Callable[[int], str],
        on_lost: Callable[[int], None] = lambda _: None,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        *,
        is_shared: bool = False,
        at_once_bytes: int = 1,
        look_seconds: float | None = None,
    ) -> None:
        self._descriptor = descriptor
        self._told_lost = told_lost
        self._on_lost = on_lost
        self._waiting_bytes_max = waiting_bytes_max
        self._is_shared = is_shared
        self._at_once_bytes = at_once_bytes
        self._look_seconds = look_seconds
        self._change = threading.Condition()
        self._waiting: list[_Batch] = []
        self._waiting_bytes = 0
        self._lost = 0
        self._is_writing = self._is_closed = self._is_torn = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Take a line. Any thread; it never waits and never fails."""
        self.write_all((text,), 1, len(text.encode("utf-8", "backslashreplace")))

    def write_all(self, lines: Iterable[str], count: int, size_bytes: int) -> None:
        """Take `count` lines, all or none. They take `size_bytes` until the thread makes and writes them."""
        with self._change:
            if self._is_closed or self._waiting_bytes + size_bytes > self._waiting_bytes_max:
                self._lost += count
                self._on_lost(count)
                return
            self._waiting.append(_Batch(lines, count, size_bytes))
            self._waiting_bytes += size_bytes
            self._change.notify_all()

    def flush(self) -> None:
        """Do nothing: no caller waits."""

    def drain(self, seconds: float) -> bool:
        """Wait until all lines are written or lost; return False after `seconds`."""
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._is_writing, seconds)

    def close(self) -> None:
        """Write the remaining lines, for a second at most."""
        self.drain(CLOSING_SECONDS)
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                self._is_writing = False
                self._change.notify_all()
                self._change.wait_for(lambda: bool(self._waiting) or self._is_closed, self._look_seconds)
                if not self._waiting and self._is_closed:
                    return
                batches, self._waiting = self._waiting, []
                lost, self._lost = (self._lost, 0) if batches else (0, self._lost)
                self._is_writing = True
            if batches:
                self._write(batches, lost)
            elif not isinstance(self._descriptor, int):
                with suppress(OSError):
                    self._descriptor()
            with self._change:
                self._waiting_bytes -= sum(batch.size_bytes for batch in batches)

    def _write(self, batches: list[_Batch], lost: int) -> None:
        missing = sum(batch.count for batch in batches)
        try:
            if lost:
                self._write_lines(self._told_lost(lost).encode("utf-8", "backslashreplace"))
                lost = 0
            gathered, gathered_bytes = list[bytes](), 0
            for text in chain.from_iterable(batch.lines for batch in batches):
                gathered.append(text.encode("utf-8", "backslashreplace"))
                gathered_bytes += len(gathered[-1])
                if gathered_bytes >= self._at_once_bytes:
                    self._write_lines(b"".join(gathered))
                    missing -= len(gathered)
                    gathered, gathered_bytes = [], 0
            if gathered:
                self._write_lines(b"".join(gathered))
        except OSError:  # its disk is full, or its reader has gone: others may be taken later
            with self._change:
                self._lost += lost + missing
            self._on_lost(missing)

    def _write_lines(self, lines: bytes) -> None:
        descriptor = self._descriptor if isinstance(self._descriptor, int) else self._descriptor()
        first = lines[: lines.index(b"\n") + 1] if self._is_shared else b""
        if self._is_torn and not (self._is_shared and _ends_a_line(descriptor, os.fstat(descriptor).st_size)):
            lines, first = b"\n" + lines, b""
        self._write_bytes(descriptor, lines)
        if first and not _ends_a_line(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR) - len(lines)):
            # Another process had written a part of a line before: the first is a part of that, and comes once more.
            self._write_bytes(descriptor, first)

    def _write_bytes(self, descriptor: int, line: bytes) -> None:
        left = memoryview(line)
        while left:
            left = left[os.write(descriptor, left) :]
            self._is_torn = bool(left)


def _ends_a_line(descriptor: int, end: int) -> bool:
    return end <= 0 or os.pread(descriptor, 1, end - 1) == b"\n"


LOOK_SECONDS = 1.0
"""The interval between checks for a renamed file."""

_WAITING_BYTES_MAX = 32 * 1024 * 1024
"""The memory of unwritten lines. A DeleteObjects with 1,000 keys of 1 KiB takes a few MiB of it."""

_MODE = 0o600
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LogFile(LogSink):
    """One process's lines. Any thread; it never waits and never fails."""

    def __init__(
        self,
        path: Path,
        process: str,
        on_lost: Callable[[int], None],
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once_bytes: int = 1,
    ) -> None:
        """OSError if the file cannot be opened. `on_lost` and `at_once_bytes` are as in LogSink."""
        self.now = wall
        self._process = process
        self._named = _RenamedFile(path, clock)
        self._named.descriptor()
        super().__init__(
            self._named.descriptor,
            lambda count: self.line({"event": "lost", "lines": count}, self.now()),
            on_lost,
            _WAITING_BYTES_MAX,
            is_shared=True,
            at_once_bytes=at_once_bytes,
            look_seconds=LOOK_SECONDS,
        )

    def line(self, fields: Mapping[str, Any], at: float) -> str:
        """Return an event as a line. Bytes of a key that are no UTF-8 become backslash escapes."""
        time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        told = {"time": time, "process": self._process, **fields}
        try:
            return orjson.dumps(told).decode() + "\n"
        except orjson.JSONEncodeError:
            texts = {name: value for name, value in told.items() if isinstance(value, str)}
            told |= {name: value.encode("utf-8", "backslashreplace").decode() for name, value in texts.items()}
            return orjson.dumps(told).decode() + "\n"

    def close(self) -> None:
        super().close()
        self._named.close()


class _RenamedFile:
    """A file that may be renamed. For one thread at a time."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._opened = -1
        self._looked_at = float("-inf")

    def descriptor(self) -> int:
        """Return the descriptor of the file that has the name, or had it a second ago; OSError."""
        now = self._clock()
        if self._opened < 0 or now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = now
            try:
                named = os.stat(self._path, follow_symlinks=False)
                is_current = self._opened >= 0 and os.path.samestat(named, os.fstat(self._opened))
            except FileNotFoundError:
                is_current = False
            if not is_current:
                self._reopen()
        return self._opened

    def _reopen(self) -> None:
        """Open the name anew. If that fails, keep a renamed file, but not a removed one, which has no reader."""
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
        opened, self._opened = self._opened, -1
        if opened >= 0:
            os.close(opened)


def _open_file(path: Path) -> int:
    """Open a plain file; OSError for anything else: a FIFO or a device could hold up the thread for ever."""
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
