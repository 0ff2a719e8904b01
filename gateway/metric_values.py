"""Where a metric's numbers stand: in a file that the admin port reads, a slot of 8 bytes each.

The files are those of prometheus_client's multi-process mode; its own values look up process id and place at every
addition, which a request would pay for twenty times.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.values import MutexValue

from gateway.durable import set_aside

GROWTH_BYTES = 2**18
"""By so much a file grows that is full. It is mapped anew then, and what was mapped stays."""

_VALUE_BYTES = 24
"""What a value takes beside its key, with padding: the key's length, the number and its time."""

_lock = Lock()


class Value(Protocol):
    """One number."""

    def inc(self, amount: float) -> None: ...


class SharedValue:
    """What prometheus_client keeps a number in, with nothing in the way of an addition. Processes must not fork."""

    def __init__(
        self,
        file_of: Callable[[str], MmapedDict],
        typ: str,
        metric_name: str,
        name: str,
        labelnames: Sequence[str],
        labelvalues: Sequence[str],
        _help_text: str,
        multiprocess_mode: str = "",
        **_: Any,
    ) -> None:
        with _lock:
            file = file_of(f"{typ}_{multiprocess_mode}" if typ == "gauge" else typ)
            # Without the help text, which would be half of the file: who reads it knows it.
            key = mmap_key(metric_name, name, list(labelnames), list(labelvalues), "")
            self._value = file.read_value(key)[0]  # type: ignore[no-untyped-call]
            place = file._positions[key]
            # Value and time; the file stays mapped here as long as this lives, also when it is mapped larger.
            self._cells = memoryview(file._m)[place : place + 16].cast("d")

    def inc(self, amount: float) -> None:
        with _lock:
            self._value += amount
            self._cells[0] = self._value

    def set(self, value: float, timestamp: float | None = None) -> None:
        with _lock:
            self._value = self._cells[0] = value
            self._cells[1] = timestamp or 0.0

    def get(self) -> float:
        return float(self._value)

    def get_exemplar(self) -> None:
        """There are none."""


class SharedValues:
    """Makes the values that count into the files of `slot`.

    A value that a file has no room for is counted in this process's memory, where nobody else sees it: `on_lost` is
    called for each, with what the file system says.
    """

    def __init__(self, directory: Path, slot: str, on_lost: Callable[[OSError], None] = lambda _: None) -> None:
        self._directory = directory
        self._slot = slot
        self._on_lost = on_lost
        self._files: dict[str, _WholeFile] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> SharedValue | MutexValue:
        try:
            return SharedValue(self._file, *arguments, **keywords)
        except OSError as error:
            self._on_lost(error)
            return MutexValue(*arguments, **keywords)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """No further values are made; those that are there go on counting."""
        for file in self._files.values():
            file._f.close()

    def _file(self, kind: str) -> MmapedDict:
        if kind not in self._files:
            self._files[kind] = _WholeFile(self._directory / f"{kind}_{self._slot}.db")
        return self._files[kind]


class _WholeFile(MmapedDict):
    """A file whose every page the file system has set aside: touching one that it has no room for kills the process."""

    def __init__(self, path: Path) -> None:
        """Made where it is not there. OSError."""
        set_aside(path, GROWTH_BYTES)
        super().__init__(os.fspath(path))  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        """OSError, and nothing has changed, where there is no room for another value."""
        needed = self._used + len(key.encode()) + _VALUE_BYTES + 8
        if needed > self._capacity:
            size_bytes = -(-needed // GROWTH_BYTES) * GROWTH_BYTES
            descriptor = self._f.fileno()
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._m = mmap.mmap(descriptor, size_bytes)
            self._capacity = size_bytes
        super()._init_value(key)  # type: ignore[no-untyped-call]
