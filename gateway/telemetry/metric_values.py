"""Keeps the numbers of metrics in files that the admin port reads, 8 bytes each.

The files are those of prometheus_client's multi-process mode. Its own values look up process id and place at every
addition, and a request makes twenty.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.values import MutexValue

from gateway.disk.atomic_write import UNFINISHED, set_aside

GROWTH_BYTES = 2**18
"""A full file grows by this size and is mapped anew; its earlier mappings stay."""

_VALUE_BYTES = 24
"""The size of a value without its key, with padding: the key's length, the number and its time."""

_lock = Lock()


Rename = Callable[[str, Mapping[str, str]], Mapping[str, str] | None]
"""Maps a metric's name and the labels of a number to its new labels; None drops the number."""


def _renamed(key: str, renamed: Rename) -> str | None:
    metric, name, labels, text = json.loads(key)
    becomes = renamed(metric, labels)
    if becomes is None or becomes == labels:
        return None if becomes is None else key
    return mmap_key(metric, name, list(becomes), list(becomes.values()), text)


class Value(Protocol):
    """One number."""

    def inc(self, amount: float) -> None: ...
    def set(self, value: float, timestamp: float | None = None) -> None: ...
    def get(self) -> float: ...


class SharedValue:
    """A number in a file, with the signature of prometheus_client's values. Processes must not fork."""

    def __init__(
        self,
        file_of: Callable[[str], _WholeFile],
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
            # Value and time; the file stays mapped here as long as this lives, also when it is mapped larger.
            self._cells = file.cells(key)
            file.values[key] = self

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

    def move_to(self, cells: memoryview[float]) -> None:
        """Count on in these cells, from their number. The caller holds the lock."""
        self._cells, self._value = cells, cells[0]


class SharedValues:
    """Makes values that count into the files of `slot`.

    A value without room in its file counts in this process's memory, and is not exported: `on_lost` gets the error.
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

    def fold(self, renamed: Rename) -> None:
        """Give numbers other labels, and sum those with equal ones. A reader sees the old file or the new one.

        OSError, and no change, without room for the new file.
        """
        with _lock:
            for kind, file in list(self._files.items()):
                if file.needs(renamed):
                    self._files[kind] = file.folded(renamed)

    def close(self) -> None:
        """Make no further values. Those in use go on counting."""
        for file in self._files.values():
            file._f.close()

    def _file(self, kind: str) -> _WholeFile:
        if kind not in self._files:
            self._files[kind] = _WholeFile(self._directory / f"{kind}_{self._slot}.db")
        return self._files[kind]


class _WholeFile(MmapedDict):
    """A file whose pages the file system has all set aside: a process that touches a missing page is killed.

    Bytes 4 to 7, which prometheus_client does not use, tell the file from an earlier one with its name.
    """

    def __init__(self, path: Path) -> None:
        """Make the file if there is none. OSError."""
        set_aside(path, GROWTH_BYTES)
        super().__init__(os.fspath(path))  # type: ignore[no-untyped-call]
        if not any(self._m[4:8]):
            self._m[4:8] = (1 + secrets.randbelow(2**31 - 1)).to_bytes(4, sys.byteorder)
        self.path = path
        self.values: dict[str, SharedValue] = {}

    def cells(self, key: str) -> memoryview[float]:
        place = self._positions[key]
        return memoryview(self._m)[place : place + 16].cast("d")

    def needs(self, renamed: Rename) -> bool:
        return any(_renamed(key, renamed) != key for key in self._positions)

    def folded(self, renamed: Rename) -> _WholeFile:
        """Replace the file by one with other labels. OSError."""
        path = self.path.with_suffix(UNFINISHED)
        path.unlink(missing_ok=True)
        new = _WholeFile(path)
        try:
            for key in self._positions:
                becomes = _renamed(key, renamed)
                if becomes is not None:
                    if becomes not in new._positions:
                        new._init_value(becomes)
                    cells, (value, at) = new.cells(becomes), self.cells(key)
                    cells[0], cells[1] = cells[0] + value, max(cells[1], at)
            path.rename(self.path)
        except OSError:
            path.unlink(missing_ok=True)
            new._f.close()
            raise
        new.path = self.path
        for key, value_of in self.values.items():
            if key in new._positions:
                new.values[key] = value_of
                value_of.move_to(new.cells(key))
        self._f.close()
        return new

    def _init_value(self, key: str) -> None:
        """Add a value. OSError, and no change, without room for it."""
        needed = self._used + len(key.encode()) + _VALUE_BYTES + 8
        if needed > self._capacity:
            size_bytes = -(-needed // GROWTH_BYTES) * GROWTH_BYTES
            descriptor = self._f.fileno()
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._m = mmap.mmap(descriptor, size_bytes)
            self._capacity = size_bytes
        super()._init_value(key)  # type: ignore[no-untyped-call]
