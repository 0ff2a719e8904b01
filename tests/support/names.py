"""Names of hosts for gateways of tests: each of their look-ups reads a file, in place of the system's resolver."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from gateway.disk.atomic_write import write_durably

NAMES_VARIABLE = "NAMES_OF_TESTS"
"""The environment variable that names the file."""


def tell(file: Path, names: Mapping[str, Sequence[str] | None]) -> None:
    """Have names stand for these addresses from now on; None: nobody can find out for which."""
    write_durably(file, orjson.dumps(names))


def looked_up_in(file: Path) -> Path:
    """Return the file whose time of modification is that of the last look-up."""
    return file.with_suffix(".looked-up")


def look_up_in_file() -> None:
    """Have this process, and those that it forks, look up names in the file; others than it has, as ever."""
    file, real = Path(os.environ[NAMES_VARIABLE]), socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **named: Any) -> list[Any]:
        names = orjson.loads(file.read_bytes())
        looked_up_in(file).touch()
        if host not in names:
            return real(host, port, *arguments, **named)
        if names[host] is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [found for one in names[host] for found in real(one, port, *arguments, **named)]

    socket.getaddrinfo = getaddrinfo
