"""Warm GETs from `wrk` against every cache there is here: what `warm_ranges` and `warm_small` share."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from loadtests.harness import player, wrk
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, those_installed, turn
from loadtests.harness.content import Family, load_object
from loadtests.harness.gateway import gateway
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.peers import JuiceFS, Nginx, Rclone, Varnish
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.signed_requests import Signer

IMMUTABLE = "forebay, immutable"
STRICT = "forebay, strict"
_FILLERS = 16
_FILLS = 2
"""The first brings the bytes, the second is the first to read them back: Forebay compares its checksums then."""

WHOSE_CPU = (
    "The kernel sends what waits in a socket's buffer when an acknowledgement arrives, and on loopback that happens on "
    "the client's core. A server that waits for a slower client thus leaves TCP's work to the client: compare server "
    "and client together, too."
)

Series = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Whole objects, or ranges of `range_bytes` where they are larger than that."""

    objects: Family
    range_bytes: int
    connections: int
    requests: int

    @property
    def body_bytes(self) -> int:
        return min(self.range_bytes, self.objects.size_bytes)

    def pieces(self) -> list[tuple[int, int, int | None]]:
        """Number of the object, first byte, length (None: whole) of every piece, interleaved over the objects."""
        if self.objects.size_bytes <= self.range_bytes:
            return [(number, 0, None) for number in range(self.objects.count)]
        firsts = range(0, self.objects.size_bytes, self.range_bytes)
        return [(number, first, self.range_bytes) for first in firsts for number in range(self.objects.count)]

    def signed(self, host: str) -> list[bytes]:
        """Requests for every piece in turn, dated over the last ten minutes: no two in a row alike."""
        signer, pieces, now = Signer(host), self.pieces(), time.time()
        requests = []
        for count in range(max(self.requests, len(pieces))):
            number, first, length = pieces[count % len(pieces)]
            byte_range = None if length is None else f"{first}-{first + length - 1}"
            requests.append(signer.get(self.objects.path(number), byte_range, at=now - count % 600))
        return requests


@dataclass(slots=True)
class Result:
    """By contender and round; the client is the same for all of them."""

    notes: list[str]
    cpu_microseconds: Series = field(default_factory=lambda: defaultdict(list))
    with_client_cpu_microseconds: Series = field(default_factory=lambda: defaultdict(list))
    requests_per_second: Series = field(default_factory=lambda: defaultdict(list))
    p99_milliseconds: Series = field(default_factory=lambda: defaultdict(list))


def measure(work: Workload, options: Options) -> Result:
    """Start everything, fill every cache, measure in turns."""
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([work.objects]))
        peers, notes = stack.enter_context(
            those_installed(
                [
                    lambda: Nginx(origin, tcp_nopush=False),
                    lambda: Nginx(origin, tcp_nopush=True),
                    lambda: Varnish(origin),
                    lambda: Rclone(origin),
                    lambda: JuiceFS(origin),
                ]
            )
        )
        contenders: list[Contender] = [
            stack.enter_context(gateway(origin, name=IMMUTABLE)),
            stack.enter_context(gateway(origin, name=STRICT, slot={"consistency": "strict"})),
            *peers,
        ]
        result = Result([WHOSE_CPU, *notes])
        requests = {one.name: work.signed("{}:{}".format(*one.address)) for one in contenders}
        for one in contenders:
            progress(f"filling {one.name}")
            if isinstance(one, JuiceFS):
                one.take(work.objects)
            for _ in range(_FILLS):
                fill(one, work)
        for number in range(options.rounds):
            for one in turn(contenders, number):
                progress(f"round {number + 1}: {one.name}")
                round_of(one, work, requests[one.name], options.seconds, result)
        return result


def fill(contender: Contender, work: Workload) -> None:
    """Read every piece once."""

    async def read() -> None:
        pieces: Sequence[tuple[int, int, int | None]] = work.pieces()
        found = [
            (load_object(work.objects.path(number), work.objects.size_bytes), first, length)
            for number, first, length in pieces
        ]
        async with reader(contender.address, _FILLERS) as client:
            await in_parallel(found, client, _FILLERS)

    asyncio.run(read())


def round_of(one: Contender, work: Workload, requests: list[bytes], seconds: float, result: Result) -> int:
    """Send requests for so many seconds and add what that has cost to the result; how many were answered."""
    before = one.cpu_seconds()
    seen = wrk.run(one.url, requests, connections=work.connections, seconds=seconds, body_bytes=work.body_bytes)
    _add(one, seen, one.cpu_seconds() - before, result)
    return seen.requests


def played(one: Contender, requests: Sequence[player.Request], connections: int, result: Result) -> None:
    """Send each request once, with a client that spins, and add what that has cost to the result."""
    before = one.cpu_seconds()
    seen = player.play(one.address[1], requests, connections)
    _add(one, seen, one.cpu_seconds() - before, result)


def _add(one: Contender, seen: wrk.WrkFigures | player.Played, used: float, result: Result) -> None:
    result.cpu_microseconds[one.name].append(used / seen.requests * 1e6)
    result.with_client_cpu_microseconds[one.name].append((used + seen.cpu_seconds) / seen.requests * 1e6)
    result.requests_per_second[one.name].append(seen.requests_per_second)
    result.p99_milliseconds[one.name].append(seen.p99_seconds * 1e3)
