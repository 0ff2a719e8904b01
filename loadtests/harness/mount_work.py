"""Does the work that the load test of mounts times: `python -m loadtests.harness.mount_work NAME DIRECTORY SCALE`.

Imports next to nothing: the process starts many times.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

_LARGE_BYTES = 256 * 10**6
SMALL_BYTES = 4096
FEW = 12
_FILES = 200


def _write_large(here: Path, scale: float) -> None:
    piece = os.urandom(2**20)
    with (here / "large").open("wb") as file:
        for _ in range(large_bytes(scale) // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _read_large(here: Path, scale: float) -> None:
    left = large_bytes(scale)
    with (here / "large").open("rb", buffering=0) as file:
        while data := file.read(2**20):
            left -= len(data)
    if left:
        raise RuntimeError(f"{left} bytes are missing")


def _write_files(here: Path, scale: float) -> None:
    for number in range(files(scale)):
        (here / f"{number:04}").write_bytes(b"%4d" % number * (SMALL_BYTES // 4))


def _list_files(here: Path, scale: float) -> None:
    sizes = [entry.stat().st_size for entry in os.scandir(here) if entry.name != "large"]
    if sizes != [SMALL_BYTES] * files(scale):
        raise RuntimeError(f"{len(sizes)} files, of {set(sizes)} bytes")


def _read_files(here: Path, scale: float) -> None:
    for number in range(files(scale)):
        if (here / f"{number:04}").read_bytes() != b"%4d" % number * (SMALL_BYTES // 4):
            raise RuntimeError(f"file {number} has other bytes")


def _few_files(here: Path, _: float) -> None:
    for number in range(FEW):
        path = here / f"few-{number}"
        if path.exists():
            raise RuntimeError(f"{path} is there already")
        path.write_bytes(b"x" * SMALL_BYTES)
        if path.stat().st_size != SMALL_BYTES:
            raise RuntimeError(f"{path} is not as it was written")


_WORK: dict[str, Callable[[Path, float], None]] = {
    "write_large": _write_large,
    "read_large": _read_large,
    "write_files": _write_files,
    "list_files": _list_files,
    "read_files": _read_files,
    "few_files": _few_files,
}


def large_bytes(scale: float) -> int:
    """Whole mebibytes."""
    return max(1, round(_LARGE_BYTES * scale) // 2**20) * 2**20


def files(scale: float) -> int:
    return max(5, round(_FILES * scale))


def _main(name: str, directory: Path, scale: float) -> None:
    """Do one piece of work in the mount, in a process of its own, and print the seconds it took."""
    directory.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    _WORK[name](directory, scale)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
