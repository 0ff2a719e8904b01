"""Shuffled epochs of a data set of which half fits, policy `epoch`: hit ratio by epoch, and a second data set after it.

    python -m loadtests.epochs [--rounds 5] [--scale 1] [--record]

512 objects of 1 MiB, a fresh shuffle every epoch, four readers; each round with an empty cache. A hit ratio is the
share of the bytes read that the origin did not send. Never evicting hits 0.5; LRU hits 0.15.
"""

from __future__ import annotations

import asyncio
import random

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.content import Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_least

_SIZE_BYTES = 1024**2
_READERS = 4
_FIRST_EPOCHS = 5
_SECOND_EPOCHS = 3
_OVERHEAD = 1.01
"""A cached block takes a little more than its bytes: checksums, whole pages."""
_LEAST_RATIO = 0.001
"""Stands for 0 where a logarithm is taken."""


def test(options: Options) -> Report:
    count = options.of(512, least=64)
    first, second = Family("first/", count, _SIZE_BYTES), Family("second/", count, _SIZE_BYTES)
    report = Report("epochs", f"Shuffled epochs of {count} objects of 1 MiB, half fits", options.command("epochs"))
    ratios: dict[str, list[float]] = {}
    capacity = str(int(count * _SIZE_BYTES / 2 * _OVERHEAD))
    for number in range(options.rounds):
        slot = {"eviction": "epoch", "block_size": "1MiB", "capacity": capacity, "capacity_limit": capacity}
        with (
            LoadOrigin([first, second]) as origin,
            gateway(origin, capacity=capacity, block_size="1MiB", slot=slot) as ours,
        ):
            progress(f"round {number + 1}")
            for name, family, epochs in (("first", first, _FIRST_EPOCHS), ("second", second, _SECOND_EPOCHS)):
                for epoch in range(1, epochs + 1):
                    hits = _hit_ratio(ours, origin, family, seed=100 * number + epoch)
                    ratios.setdefault(f"{name} data set, epoch {epoch}", []).append(max(hits, _LEAST_RATIO))
            notes = ours.ignored_settings()
    later = [ratios[f"first data set, epoch {epoch}"] for epoch in range(2, _FIRST_EPOCHS + 1)]
    worst = [min(values) for values in zip(*later, strict=True)]
    report.verdicts = [
        Verdict("hit ratio, worst epoch from the second on", mean_of(worst), at_least(0.48)),
        Verdict(
            f"hit ratio, second data set, epoch {_SECOND_EPOCHS}",
            mean_of(ratios[f"second data set, epoch {_SECOND_EPOCHS}"]),
            at_least(0.48),
        ),
    ]
    report.tables = [Measured("hit ratio", "share of bytes", ratios)]
    report.notes = [f"The gateway says: {note}" for note in notes]
    return report


def _hit_ratio(ours: Gateway, origin: LoadOrigin, family: Family, *, seed: int) -> float:
    """One epoch in a fresh order; what the origin sent is counted once nothing is fetched any more."""
    paths = family.paths()
    random.Random(seed).shuffle(paths)
    before = origin.counts().sent_bytes

    async def read() -> None:
        work = [(load_object(path, family.size_bytes), 0, None) for path in paths]
        async with reader(ours.address, _READERS) as client:
            await in_parallel(work, client, _READERS)

    asyncio.run(read())
    return 1 - (origin.settled_counts().sent_bytes - before) / (family.count * family.size_bytes)


if __name__ == "__main__":
    command.main(test, __doc__)
