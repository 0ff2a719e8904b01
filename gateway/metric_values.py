"""Where a metric's numbers stand: in a file that the admin port reads, a slot of 8 bytes each.

The files are those of prometheus_client's multi-process mode; its own values look up process id and place at every
addition, which a request would pay for twenty times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from prometheus_client.mmap_dict import MmapedDict, mmap_key

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
        help_text: str,
        multiprocess_mode: str = "",
        **_: Any,
    ) -> None:
        with _lock:
            file = file_of(f"{typ}_{multiprocess_mode}" if typ == "gauge" else typ)
            key = mmap_key(metric_name, name, list(labelnames), list(labelvalues), help_text)
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
    """Makes the values that count into the files of `slot`."""

    def __init__(self, directory: Path, slot: str) -> None:
        self._directory = directory
        self._slot = slot
        self._files: dict[str, MmapedDict] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> SharedValue:
        return SharedValue(self._file, *arguments, **keywords)

    def close(self) -> None:
        """No further values are made; those that are there go on counting."""
        for file in self._files.values():
            file._f.close()

    def _file(self, kind: str) -> MmapedDict:
        if kind not in self._files:
            path = os.fspath(self._directory / f"{kind}_{self._slot}.db")
            self._files[kind] = MmapedDict(path)  # type: ignore[no-untyped-call]
        return self._files[kind]
