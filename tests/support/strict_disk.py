"""What a power cut may leave of a process's files, by POSIX and nothing else, computed from what the process has done.

A file's bytes survive when they were synced after they were written, a name when its directory was synced after the
name had changed; of everything else each change may have survived or not, one write by one, whatever its order. That is
less than any file system gives; it needs no root, and finds what ext4 forgives.

    process = subprocess.Popen(command, env=traced(library, trace, directory))
    ...
    for moment in moments(trace):
        moment.after_a_cut(image, dice, chance)
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).with_name("disk_trace.c")
_RECORD = struct.Struct("<IIQII")


def built(scratch: Path) -> Path:
    """The library that writes down; takes `cc`."""
    library = scratch / "disk_trace.so"
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True)
    return library


def traced(library: Path, trace: Path, directory: Path, without: str | None = None) -> dict[str, str]:
    """An environment: what its processes do below `directory` goes to `trace`.

    Syncs of names that fit the pattern `without` (fnmatch, `*` is no slash) are left out.
    """
    traced = {"LD_PRELOAD": str(library), "DISK_TRACE": str(trace), "DISK_TRACE_DIRECTORY": str(directory)}
    return dict(os.environ) | traced | ({} if without is None else {"DISK_TRACE_WITHOUT": without})


class Moment:
    """What lies on the disk when the process says something; good until the next one is asked for."""

    def __init__(self, said: bytes, disk: _Disk) -> None:
        self.said = said
        """Everything until then, this included."""

        self._disk = disk

    def after_a_cut(self, image: Path, dice: random.Random, chance: float) -> None:
        """Make in `image`, which is not there, what may be left: each change that was not synced by this chance."""
        image.mkdir()
        self._disk.leave(image, dice, chance)


def moments(trace: Path) -> Iterator[Moment]:
    """Each time that the process has said something, in order."""
    disk, said = _Disk(), b""
    for change in _changes(trace):
        if change.kind == "a":
            said += change.data
            yield Moment(said, disk)
        else:
            disk.do(change)


def synced_names(trace: Path) -> set[str]:
    """Of files and directories ("" is the traced one itself)."""
    return {change.name for change in _changes(trace) if change.kind == "S"}


class _Change(NamedTuple):
    """A record of disk_trace.c."""

    kind: str
    thread: int
    offset: int
    name: str
    data: bytes


def _changes(trace: Path) -> Iterator[_Change]:
    """But for what the process was about to write down when it was killed."""
    content, position = trace.read_bytes(), 0
    while position + _RECORD.size <= len(content):
        kind, thread, offset, name_bytes, data_bytes = _RECORD.unpack_from(content, position)
        start = position + _RECORD.size + name_bytes
        position = start + data_bytes
        if position <= len(content):
            name = content[start - name_bytes : start].decode()
            yield _Change(chr(kind), thread, offset, name, content[start:position])


@dataclass(frozen=True, slots=True)
class _Write:
    """Bytes at an offset; or the file was cut, or grew, to that length."""

    offset: int
    data: bytes
    is_cut: bool

    def carry_out(self, content: bytearray) -> None:
        if self.is_cut:
            del content[self.offset :]
        end = self.offset + len(self.data)
        content.extend(bytes(max(0, end - len(content))))
        content[self.offset : end] = self.data


class _File:
    """`safe` is what was synced, `loose` are the changes since."""

    def __init__(self) -> None:
        self.safe = bytearray()
        self.loose: list[_Write] = []

    def make_safe(self, count: int) -> None:
        """The first changes."""
        for write in self.loose[:count]:
            write.carry_out(self.safe)
        del self.loose[:count]

    def after_a_cut(self, dice: random.Random, chance: float) -> bytes:
        content = bytearray(self.safe)
        for write in self.loose:
            if dice.random() < chance:
                write.carry_out(content)
        return bytes(content)


_Names = dict[str, "_File | None"]
"""A directory is a name whose file is None."""


class _Disk:
    def __init__(self) -> None:
        self._now: _Names = {}
        self._safe: _Names = {}
        self._syncing: dict[tuple[int, str], int | _Names] = {}

    def do(self, change: _Change) -> None:
        match change.kind:
            case "o":
                self._now.setdefault(change.name, _File())
            case "m":
                self._now[change.name] = None
            case "u":
                del self._now[change.name]
            case "r":
                self._now[change.data.decode()] = self._now.pop(change.name)
            case "w" | "t":
                if (file := self._now.get(change.name)) is not None:
                    file.loose.append(_Write(change.offset, change.data, is_cut=change.kind == "t"))
            case "s":
                file = self._now.get(change.name)
                begun = len(file.loose) if file is not None else _within(self._now, change.name)
                self._syncing[change.thread, change.name] = begun
            case "S":
                self._synced(change.name, self._syncing.pop((change.thread, change.name)))

    def _synced(self, name: str, begun: int | _Names) -> None:
        if isinstance(begun, dict):
            for entry in _within(self._safe, name):
                del self._safe[entry]
            self._safe |= begun
        elif (file := self._now.get(name)) is not None:
            file.make_safe(begun)

    def leave(self, image: Path, dice: random.Random, chance: float) -> None:
        for name in sorted(self._safe.keys() | self._now.keys()):
            is_settled = name in self._safe and name in self._now and self._safe[name] is self._now[name]
            names = self._now if is_settled or dice.random() < chance else self._safe
            if name in names and (image / name).parent.is_dir():
                _leave(names[name], image / name, dice, chance)


def _leave(file: _File | None, path: Path, dice: random.Random, chance: float) -> None:
    if file is None:
        path.mkdir()
    else:
        path.write_bytes(file.after_a_cut(dice, chance))


def _within(names: _Names, directory: str) -> _Names:
    return {name: file for name, file in names.items() if name.rpartition("/")[0] == directory}
