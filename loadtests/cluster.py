"""Nodes that read from each other: what the bucket gives, what a hit at a peer costs both ends, an owner that is lost.

    python -m loadtests.cluster [--rounds 5] [--scale 1] [--record]

All nodes share the server core, one worker each; origin and clients have the rest. CPU is that of the workers, by
thread. An asker's includes what it costs to answer its client; a local hit of the owner is measured in turns with it.
Hits at a peer are of objects that the asker has never read, and that lie warm at their owner. Clients of CPU figures
are written in C and spin; first bytes are seen by one connection.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.harness import command, player
from loadtests.harness.cold import Memory, WorkerThreads
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, turn
from loadtests.harness.content import Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import Interval, mean_of, percentile, ratio_of
from loadtests.harness.nodes import Nodes, nodes
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import WrongAnswer, reader
from loadtests.harness.report import Measured, Report, Target, Verdict, at_most
from loadtests.harness.signed_requests import Signer
from tests.support.redis_server import RedisServer

_MIB, _SMALL_BYTES, _BLOCK_BYTES = 1024**2, 100 * 1024, 8 * 1024**2
_READERS = 8
_READ_ONLY = {"mode": "read-only", "consistency": "ttl", "metadata_ttl": "1h"}
_WRITABLE = {"mode": "read-write", "consistency": "ttl", "metadata_ttl": "1h"}
_REVALIDATED_SECONDS = 30
_KEEPS = ("none", "all")
_FIRST_BYTES = "first-bytes"
_SETTLED_SECONDS = 0.3
"""For what the asker still writes when its client has all."""

_PEER, _LOCAL, _BUCKET = "a peer", "its own disk", "the bucket"

Paths = Sequence[tuple[str, int]]
"""Paths and sizes."""


def test(options: Options) -> Report:
    report = Report("cluster", "Nodes that read from each other", options.command("cluster"))
    _epochs(report, options)
    _revalidated(report, options)
    for size in (_LARGE, _SMALL):
        _hits(report, options, size)
    _lost_owner(report, options)
    _alone(report, options)
    return report


def _single(what: str, value: float, target: Target | None = None) -> Verdict:
    return Verdict(what, Interval(value, None, None), target)


def _all_of(*families: Family) -> list[tuple[str, int]]:
    return [(path, family.size_bytes) for family in families for path in family.paths()]


# What the bucket gives


def _epoch(cluster: Nodes, work: Paths, seed: int) -> float:
    """Let all nodes read all objects at once, each in its own order; how long it took."""

    async def read(of: Gateway, number: int) -> None:
        own = random.Random(seed + number).sample(work, len(work))
        pieces = iter(own)
        async with reader(of.address, _READERS) as client:

            async def one() -> None:
                for path, size_bytes in pieces:
                    await client.get(load_object(path, size_bytes))

            await asyncio.gather(*(one() for _ in range(_READERS)))

    async def all_of_them() -> None:
        await asyncio.gather(*(read(of, number) for number, of in enumerate(cluster.gateways)))

    began = time.monotonic()
    asyncio.run(all_of_them())
    return time.monotonic() - began


def _epochs(report: Report, options: Options) -> None:
    """Measure epochs over objects of less than a block, of one block and of several."""
    families = (
        Family("part/", options.of(1000, least=50), _SMALL_BYTES),
        Family("one/", options.of(32, least=4), _BLOCK_BYTES),
        Family("many/", options.of(8, least=2), 3 * _BLOCK_BYTES + 4099),
    )
    work = _all_of(*families)
    size_bytes = sum(size for _, size in work)
    shares: dict[str, list[float]] = {"cold epoch": [], "second epoch": []}
    for number in range(min(options.rounds, 2)):
        with LoadOrigin(families) as origin, nodes(origin, 3, slot={**_READ_ONLY, "copies": "none"}) as cluster:
            for name, values in shares.items():
                progress(f"three nodes, round {number + 1}: {name}")
                before = origin.settled_counts().sent_bytes
                _epoch(cluster, work, seed=10 * number)
                values.append((origin.settled_counts().sent_bytes - before) / size_bytes)
    report.verdicts += [
        _single("bytes from the bucket / data, cold epoch of three nodes", max(shares["cold epoch"]), at_most(1.02)),
        _single("bytes from the bucket / data, second epoch", max(shares["second epoch"]), at_most(0)),
    ]


def _revalidated(report: Report, options: Options) -> None:
    """A second epoch after `metadata_ttl`: each object is asked about again."""
    family = Family("ttl/", options.of(3000, least=100), _SMALL_BYTES)
    work, slot = _all_of(family), {**_READ_ONLY, "metadata_ttl": f"{_REVALIDATED_SECONDS}s", "copies": "none"}
    with LoadOrigin([family]) as origin, nodes(origin, 3, slot=slot) as cluster:
        progress("second epoch after metadata_ttl")
        _epoch(cluster, work, seed=1)
        time.sleep(_REVALIDATED_SECONDS + 1)
        before = origin.settled_counts()
        seconds = _epoch(cluster, work, seed=2)
        after = origin.settled_counts()
    asked = after.heads + after.gets - before.heads - before.gets
    what = (
        f"requests to the bucket per object, second epoch of three nodes after metadata_ttl, {family.count:,} objects"
    )
    report.verdicts.append(_single(what, asked / family.count, at_most(1.05)))
    if seconds > _REVALIDATED_SECONDS:
        report.notes.append(f"The second epoch took {seconds:.0f} s: longer than metadata_ttl, so it asked twice.")


# What a hit at a peer costs


@dataclass(frozen=True, slots=True)
class _Size:
    name: str
    size_bytes: int
    count: int
    least: int
    unit: str
    per_answer: float
    """The bytes of one answer in GB, or its milliseconds: figures are for one `unit` of these."""

    owner: Target
    asker: Mapping[str, Target | None]
    first_byte_milliseconds: Target


_LARGE = _Size(
    "8 MiB",
    _BLOCK_BYTES,
    48,
    16,
    "s/GB",
    _BLOCK_BYTES / 1e9,
    at_most(0.3),
    {"none": at_most(0.6), "all": at_most(0.9)},
    at_most(3),
)
_SMALL = _Size(
    "100 KiB", _SMALL_BYTES, 2000, 400, "ms", 1e-3, at_most(0.35), {"none": at_most(0.7), "all": None}, at_most(2)
)


class _Found:
    """By what the asker keeps; and first bytes by where they come from."""

    def __init__(self, asker: Gateway, owner: Gateway) -> None:
        self.asker, self.owner, self.local = (
            {kind: WorkerThreads(of) for kind in _KEEPS} for of in (asker, owner, owner)
        )
        self.first_byte: dict[str, list[float]] = {_PEER: [], _LOCAL: [], _BUCKET: []}


def _hits(report: Report, options: Options, size: _Size) -> None:
    count, kinds, memory = options.of(size.count, least=size.least), (*_KEEPS, _FIRST_BYTES), Memory()
    families = {
        (kind, number): Family(f"{kind}/{number}/", 3 * count, size.size_bytes)
        for kind in kinds
        for number in range(options.rounds)
    }
    copying = {"name": "copying", "prefix": "s3://load/all/", **_READ_ONLY, "copies": "all"}
    slots: dict[str, Any] = {"slot": {**_READ_ONLY, "copies": "none"}, "more_slots": [copying]}
    with (
        LoadOrigin(list(families.values())) as origin,
        nodes(origin, 2, capacity="16GiB", **slots) as both,
    ):
        asker, owner = both.gateways
        found = _Found(asker, owner)
        for number in range(options.rounds):
            for kind in turn(kinds, number):
                progress(f"{size.name}, round {number + 1}: {kind}")
                paths = both.owned_by(1, families[kind, number].paths())[:count]
                memory.touch(2 * len(paths) * size.size_bytes)
                for _ in range(2):  # the second is the first to read them back
                    _play(owner, paths, size.size_bytes)
                    origin.settled_counts()
                if kind == _FIRST_BYTES:
                    _first_bytes(found, {_PEER: asker, _LOCAL: owner, _BUCKET: origin}, paths, size.size_bytes)
                else:
                    _round_of_hits(found, kind, asker, owner, paths, size)
    _tell_hits(report, size, found, memory)


def _round_of_hits(found: _Found, kind: str, asker: Gateway, owner: Gateway, paths: Sequence[str], size: _Size) -> None:
    for of, measured in ((asker, (found.owner[kind], found.asker[kind])), (owner, (found.local[kind],))):
        for threads in measured:
            threads.begin()
        _play(of, paths, size.size_bytes)
        time.sleep(_SETTLED_SECONDS)
        for threads in measured:
            threads.end(size.per_answer * len(paths))


def _play(of: Contender, paths: Sequence[str], size_bytes: int) -> player.Played:
    signer = Signer("{}:{}".format(*of.address))
    return player.play(of.address[1], [(signer.get(path), size_bytes) for path in paths], _READERS)


def _first_bytes(found: _Found, sources: Mapping[str, Contender], paths: Sequence[str], size_bytes: int) -> None:
    """Note the median of each; each object from all of them in turns, so that they meet the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in sources}

    async def read() -> None:
        async with AsyncExitStack() as stack:
            clients = [
                (seconds[name], await stack.enter_async_context(reader(of.address, 1))) for name, of in sources.items()
            ]
            for path in paths:
                for values, client in clients:
                    values.append((await client.get(load_object(path, size_bytes))).first_byte_seconds)

    asyncio.run(read())
    for name, values in seconds.items():
        found.first_byte[name].append(percentile(values, 0.5) * 1e3)


def _tell_hits(report: Report, size: _Size, found: _Found, memory: Memory) -> None:
    for kind in _KEEPS:
        what = f"{size.name} from a peer, copies = {kind}: CPU of the"
        report.verdicts += [
            Verdict(f"{what} owner, {size.unit}", mean_of(found.owner[kind].totals()), size.owner),
            Verdict(f"{what} asker, {size.unit}", mean_of(found.asker[kind].totals()), size.asker[kind]),
            Verdict(f"{what} owner / a local hit", ratio_of(found.owner[kind].totals(), found.local[kind].totals())),
        ]
        report.tables += [
            found.owner[kind].table(f"{what} owner", size.unit),
            found.asker[kind].table(memory.of(f"{what} asker"), size.unit),
        ]
    first = found.first_byte
    report.verdicts += [
        Verdict(
            f"{size.name}: first byte from a peer, median, ms", mean_of(first[_PEER]), size.first_byte_milliseconds
        ),
        Verdict(f"{size.name}: first byte, a peer / own disk", ratio_of(first[_PEER], first[_LOCAL])),
        Verdict(f"{size.name}: first byte, a peer / the bucket", ratio_of(first[_PEER], first[_BUCKET])),
    ]
    report.tables.append(Measured(f"first byte of {size.name}, median, one connection", "ms", first))


# An owner that is lost


_LOST_SECONDS = 6.0


def _lost_owner(report: Report, options: Options) -> None:
    """The second of three nodes goes while the first reads: what became of its reads, until some seconds later."""
    family = Family("lost/", options.of(600, least=100), _SMALL_BYTES)
    for what, how in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        progress(f"an owner is {what}")
        with (
            LoadOrigin([family]) as origin,
            nodes(origin, 3, slot={**_READ_ONLY, "metadata_ttl": "1s", "copies": "none"}) as cluster,
        ):
            _epoch(cluster, _all_of(family), seed=1)
            seconds, failed = asyncio.run(_read_on(cluster, family, how))
        report.verdicts += [
            _single(f"failed of {len(seconds) + failed:,} reads while an owner is {what}", failed, at_most(0)),
            _single(f"slowest read while an owner is {what}, ms", max(seconds) * 1e3),
            _single(f"99th percentile of reads while an owner is {what}, ms", percentile(seconds, 0.99) * 1e3),
        ]


async def _read_on(cluster: Nodes, family: Family, how: signal.Signals) -> tuple[list[float], int]:
    seconds, failed, end = list[float](), 0, time.monotonic() + _LOST_SECONDS
    paths = itertools.cycle(family.paths())
    async with reader(cluster.gateways[0].address, _READERS) as client:

        async def one() -> None:
            nonlocal failed
            while time.monotonic() < end:
                try:
                    seconds.append((await client.get(load_object(next(paths), family.size_bytes))).seconds)
                except WrongAnswer:
                    failed += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(_READERS):
                group.create_task(one())
            await asyncio.sleep(_LOST_SECONDS / 4)
            cluster.signal(1, how)
    if how == signal.SIGSTOP:
        cluster.signal(1, signal.SIGCONT)
    return seconds, failed


# What [cluster] costs without a peer


def _alone(report: Report, options: Options) -> None:
    """Warm hits of 100 KiB with [cluster] and without: in a read-only slot, and in one that all nodes may write."""
    family = Family("warm/", options.of(2000, least=400), _SMALL_BYTES)
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([family]))
        (member,) = stack.enter_context(nodes(origin, 1, slot=_READ_ONLY)).gateways
        of_name = {"with [cluster]": member, "without": stack.enter_context(gateway(origin, slot=_READ_ONLY))}
        within, without = _warm(report, options, family, of_name)
        report.verdicts.append(
            Verdict("CPU of a warm hit, with [cluster] / without", ratio_of(within, without), at_most(1.02))
        )
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([family]))
        redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-load-"))))
        stack.callback(redis.stop)
        redis.start()
        asker, _ = stack.enter_context(nodes(origin, 2, slot=_WRITABLE, redis=redis.url)).gateways
        alone = stack.enter_context(gateway(origin, slot=_WRITABLE))
        of_name = {"two nodes that may write, with Redis": asker, "one that may write, without [cluster]": alone}
        within, without = _warm(report, options, family, of_name)
        report.verdicts.append(
            Verdict("CPU of a warm hit in a slot that may be written, with Redis / one node", ratio_of(within, without))
        )


def _warm(
    report: Report, options: Options, family: Family, of_name: Mapping[str, Gateway]
) -> tuple[Sequence[float], Sequence[float]]:
    """Measure the gateways in turns, and return the worker's CPU of both."""
    threads = {name: WorkerThreads(of) for name, of in of_name.items()}
    for of in of_name.values():
        for _ in range(2):  # the second is the first to read them back
            _play(of, family.paths(), _SMALL_BYTES)
    for number in range(3 * options.rounds):
        for name in turn(list(of_name), number):
            progress(f"warm hits, round {number + 1}: {name}")
            threads[name].begin()
            _play(of_name[name], family.paths() * 2, _SMALL_BYTES)
            threads[name].end(2 * family.count / 1e6)
    found = {name: one.totals() for name, one in threads.items()}
    report.tables.append(Measured("worker CPU per warm GET of 100 KiB", "µs", found))
    first, second = found.values()
    return first, second


if __name__ == "__main__":
    command.main(test, __doc__)
