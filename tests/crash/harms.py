"""What can happen to files behind a running gateway's back.

IN_PLACE harms change bytes that a response may just be reading, through the page cache: nothing can keep a response
under way from sending them, so they are done while no response is. BY_NAME harms leave what is open as it is.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from gateway.blocks.fetch_locks import _COUNTS, _WORD_BYTES
from gateway.shared.heartbeats import PROCESSES_MAX

PAGE_BYTES = 4096
_COUNT = struct.Struct("Q")

Harm: TypeAlias = Callable[[random.Random, Sequence[Path]], Sequence[Path]]
"""Does it to one of these files, or two, and gives them. FileNotFoundError when one has gone meanwhile."""


def flip_bit(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    path = rng.choice(files)
    with path.open("r+b") as file:
        position = rng.randrange(max(1, os.fstat(file.fileno()).st_size))
        file.seek(position)
        byte = file.read(1) or b"\0"
        file.seek(position)
        file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    return [path]


def truncate(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    path = rng.choice(files)
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)))
    return [path]


def zero_page(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    """As after a power cut: the length is right, a page is not."""
    return _overwrite_page(rng, files, bytes(PAGE_BYTES))


def scribble_page(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    return _overwrite_page(rng, files, rng.randbytes(PAGE_BYTES))


def swap_contents(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    """Each is whole, and has the other's bytes."""
    one, other = _two(rng, files)
    first, second = one.read_bytes(), other.read_bytes()
    for path, content in ((one, second), (other, first)):
        with path.open("r+b") as file:
            file.write(content)
            file.truncate()
    return [one, other]


def append(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    """Behind the end, wherever that is at the moment of writing: the file may be growing."""
    path = rng.choice(files)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, rng.randbytes(rng.randrange(1, 200_000)))
    finally:
        os.close(descriptor)
    return [path]


def unlink(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    path = rng.choice(files)
    path.unlink()
    return [path]


def swap_names(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    one, other = _two(rng, files)
    aside = one.with_name(one.name + ".aside")
    one.rename(aside)
    try:
        other.rename(one)
    finally:
        aside.rename(other)
    return [one, other]


def rename_over(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    """One is gone, and stands in another's place."""
    one, other = _two(rng, files)
    one.rename(other)
    return [one, other]


def replace_by_noise(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    """Another file of the same name and length."""
    path = rng.choice(files)
    aside = path.with_name(path.name + ".aside")
    aside.write_bytes(rng.randbytes(path.stat().st_size))
    aside.rename(path)
    return [path]


IN_PLACE: list[Harm] = [flip_bit, flip_bit, truncate, zero_page, scribble_page, swap_contents]
BY_NAME: list[Harm] = [append, unlink, swap_names, rename_over, replace_by_noise]


def drop_from_memory(path: Path) -> None:
    """Have a file's bytes come from the device again, as far as nobody uses them just now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class RunningFetches:
    """How many blocks the processes of a gateway fetch just now: each says so in a table that they share."""

    def __init__(self, worker_pid: int) -> None:
        maps = Path(f"/proc/{worker_pid}/maps").read_text(encoding="utf-8").splitlines()
        tables = {line.split(maxsplit=5)[5] for line in maps if line.endswith("/fetch-locks")}
        assert len(tables) == 1, f"one table of fetch locks was expected, these are mapped: {tables}"
        self._table = os.open(tables.pop(), os.O_RDONLY)

    def __call__(self) -> int:
        counts = os.pread(self._table, PROCESSES_MAX * _COUNT.size, _COUNTS * _WORD_BYTES)
        return sum(count for (count,) in _COUNT.iter_unpack(counts))

    def close(self) -> None:
        os.close(self._table)


def _overwrite_page(rng: random.Random, files: Sequence[Path], content: bytes) -> Sequence[Path]:
    path = rng.choice(files)
    with path.open("r+b") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = rng.randrange(max(1, size_bytes)) // PAGE_BYTES * PAGE_BYTES
        file.seek(start)
        file.write(content[: size_bytes - start])
    return [path]


def _two(rng: random.Random, files: Sequence[Path]) -> Sequence[Path]:
    return rng.sample(files, 2) if len(files) > 1 else [files[0], files[0]]
