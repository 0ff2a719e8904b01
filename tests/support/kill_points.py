"""Kills of a gateway's processes at a chosen system call: the n-th durable call or send that a process of a role makes.

    with KillPoints.made(tmp_path, cache_directory) as points:
        with GatewayProcess(config, environment=points.environment) as gateway:
            points.arm("worker", countdown=7, after=False)
            ...requests...
            points.fired   # what has died, and at which call; None: it did not come to that

Counted are the calls of all threads and all processes of the role together, each once. The library that does it is
compiled (`cc`) from kill_points.c and preloaded. A kill before a call is at its entry, one after it at its return.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SOURCE = Path(__file__).with_name("kill_points.c")
_PIDS_MAX = 16
_PAGE = struct.Struct(f"<iiii{_PIDS_MAX}iii32s256s32s256s")
_ARMED = struct.Struct("<i")
_SEEN_OFFSET = 4 * (4 + _PIDS_MAX)
_MANY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fired:
    """A kill: which process has died by itself, at which call, on what."""

    process_id: int
    call: str
    object: str


class KillPoints:
    """The page that the processes share."""

    def __init__(self, library: Path, page: Path, directory: Path) -> None:
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "KILL_POINTS_PAGE": str(page)}
        self._directory = directory
        page.write_bytes(bytes(_PAGE.size))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE.size)

    @classmethod
    @contextmanager
    def made(cls, scratch: Path, directory: Path) -> Iterator[Self]:
        """For calls on files under `directory`; what it needs is put into `scratch`."""
        library = scratch / "kill_points.so"
        if not library.exists():
            command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
            subprocess.run(command, check=True)
        points = cls(library, scratch / "kill_points.page", directory)
        try:
            yield points
        finally:
            points._page.close()

    def arm(
        self, role: str, countdown: int = _MANY, *, after: bool = False, besides: Sequence[int] = (), within: str = ""
    ) -> None:
        """From now on count the calls of `role` ("worker", "background", "supervisor"); 1 is the next one.

        `besides` are processes that die at the same instant; `within` is a directory below the one given.
        """
        pids = [*besides, *[0] * (_PIDS_MAX - len(besides))]
        packed = _PAGE.pack(
            0, countdown, after, len(besides), *pids, 0, 0, role.encode(), bytes(self._directory / within), b"", b""
        )
        self._page[: _PAGE.size] = packed
        self._page[: _ARMED.size] = _ARMED.pack(1)

    def disarm(self) -> int:
        """Let everything pass again; how many calls were counted."""
        self._page[: _ARMED.size] = _ARMED.pack(0)
        seen: int = struct.unpack_from("<i", self._page, _SEEN_OFFSET)[0]
        return seen

    @property
    def fired(self) -> Fired | None:
        """What has died since it was armed."""
        *_, process_id, _, _, call, name = _PAGE.unpack(self._page[: _PAGE.size])
        return Fired(process_id, _text(call), _text(name)) if process_id else None


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
