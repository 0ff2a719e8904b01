"""A load client in C that sends each request once: compiled when it is first needed, as fast as a client is."""

from __future__ import annotations

import functools
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.harness import machine, tools
from loadtests.harness.content import Family, LoadObject
from loadtests.harness.reader import WrongAnswer
from loadtests.harness.signed_requests import Signer

_SOURCE = Path(__file__).with_name("player.c")
_BEFORE = struct.Struct("<IQ")
_TIMEOUT_SECONDS = 600

Request = tuple[bytes, int]
"""The bytes, and the length of the body that answers them."""


@dataclass(frozen=True, slots=True)
class Played:
    """One run, as the client saw it. Its CPU time means nothing if it spins."""

    requests: int
    seconds: float
    received_bytes: int
    cpu_seconds: float
    p50_seconds: float
    p99_seconds: float

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds


def whole(address: tuple[str, int], objects: Family) -> list[Request]:
    """A signed GET of each object."""
    signer = Signer("{}:{}".format(*address))
    return [(signer.get(path), objects.size_bytes) for path in objects.paths()]


def parts(address: tuple[str, int], of: LoadObject, part_bytes: int) -> list[Request]:
    """Signed GETs of ranges that make up the object."""
    signer, firsts = Signer("{}:{}".format(*address)), range(0, of.size_bytes, part_bytes)
    ends = [min(first + part_bytes, of.size_bytes) for first in firsts]
    return [(signer.get(of.path, f"{first}-{end - 1}"), end - first) for first, end in zip(firsts, ends, strict=True)]


def play(port: int, requests: Sequence[Request], connections: int, *, spin: bool = True) -> Played:
    """Send each request once, over so many connections to this machine. Raises WrongAnswer, and Missing.

    With `spin` the client does not sleep while it waits: a server that answers a client asleep on another core pays for
    waking it, which is the virtual machine's price and no server's.
    """
    with tempfile.NamedTemporaryFile(prefix="forebay-load-") as file:
        for request, body_bytes in requests:
            file.write(_BEFORE.pack(len(request), body_bytes) + request)
        file.flush()
        command = [str(_program()), str(port), str(connections), file.name, str(int(spin))]
        with machine.on_cores(machine.client_cores()):
            ran = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_SECONDS)
    if ran.returncode:
        raise WrongAnswer(ran.stderr.decode("utf-8", "replace"))
    count, seconds, received, cpu, p50, p99 = ran.stdout.split()
    return Played(int(count), float(seconds), int(received), float(cpu), float(p50), float(p99))


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forebay-load-")


@functools.cache
def _program() -> Path:
    program = Path(_directory().name) / "player"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([tools.program("cc"), *flags, "-o", str(program), str(_SOURCE)], check=True)
    return program
