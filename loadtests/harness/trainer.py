"""A training job that computes by sleeping: loaders read records ahead, batches wait for their records.

Constants: MLPerf Storage (record size, batch, compute per batch on one H100), scaled down for a small machine: `slower`
times slower accelerators, and records `smaller` times smaller with as much less compute, which leaves the demand per
second.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from loadtests.harness.content import Family, load_object
from loadtests.harness.reader import reader

_BATCHES_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Model:
    """One job. `records` is the data set's number of objects."""

    name: str
    record_bytes: int
    batch: int
    compute_seconds: float
    records: int

    def data(self) -> Family:
        return Family(f"{self.name}/", self.records, self.record_bytes)

    @property
    def batches(self) -> int:
        return self.records // self.batch

    @property
    def demand_bytes_per_second(self) -> float:
        return self.record_bytes * self.batch / self.compute_seconds

    @property
    def demand_records_per_second(self) -> float:
        return self.batch / self.compute_seconds

    def scaled(self, *, slower: float = 1, smaller: int = 1, records: int | None = None) -> Model:
        return Model(
            self.name,
            self.record_bytes // smaller,
            self.batch,
            self.compute_seconds * slower / smaller,
            self.records if records is None else records,
        )


UNET3D = Model("unet3d", 146_600_628, 7, 0.323, 168)
RESNET50 = Model("resnet50", 114_660, 400, 0.224, 10_000)
COSMOFLOW = Model("cosmoflow", 2_828_486, 1, 0.0035, 1_000)
RETINANET = Model("retinanet", 322_957, 24, 0.04755, 1_170_301)
"""On one B200: MLPerf Storage v3.0, `configs/dlio/workload/retinanet_b200.yaml` of github.com/mlcommons/storage at
11460d0; its least utilisation of the accelerator is 0.85."""
TEXT = Model("text", 1024**2, 1, 0.25, 40)
"""Not MLPerf's: a language model that computes a quarter of a second per MiB of tokens, so nothing waits for data."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """`utilisation` is the share of the time from the first full batch on that the accelerator computed."""

    seconds: float
    utilisation: float


def train(address: tuple[str, int], model: Model, *, loaders: int, seed: int) -> Epoch:
    """One epoch in the order of `seed`."""
    return asyncio.run(_train(address, model, loaders, seed))


async def _train(address: tuple[str, int], model: Model, loaders: int, seed: int) -> Epoch:
    paths = model.data().paths()
    random.Random(seed).shuffle(paths)
    records = iter(paths[: model.batches * model.batch])
    room = asyncio.Semaphore(_BATCHES_AHEAD * model.batch + loaders)
    ready: asyncio.Queue[None] = asyncio.Queue()
    async with reader(address, loaders) as client, asyncio.TaskGroup() as group:

        async def load() -> None:
            for path in records:
                await room.acquire()
                await client.get(load_object(path, model.record_bytes))
                ready.put_nowait(None)

        for _ in range(loaders):
            group.create_task(load())
        return await _consume(model, ready, room)


async def _consume(model: Model, ready: asyncio.Queue[None], room: asyncio.Semaphore) -> Epoch:
    started: float | None = None
    computed = 0.0
    for _ in range(model.batches):
        for _ in range(model.batch):
            await ready.get()
        before = time.perf_counter()
        started = before if started is None else started
        for _ in range(model.batch):
            room.release()
        await asyncio.sleep(model.compute_seconds)
        computed += time.perf_counter() - before
    assert started is not None, "an epoch has at least one batch"
    seconds = time.perf_counter() - started
    return Epoch(seconds, computed / seconds)
