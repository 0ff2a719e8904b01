"""The demo's job from beginning to end: upload, list, read epochs, save and restore checkpoints, in rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.demo.clients import CacheTally, Checkpointer, Reader, Reading, s3_client, upload
from gateway.demo.dataset import (
    CHECKPOINT_PREFIX,
    DATA_PREFIX,
    PlannedObject,
    StoredObject,
    Workload,
    checkpoint_bytes,
    files,
    shards,
)
from gateway.demo.report import Comparison, Narrator, Report
from gateway.demo.stack import DemoError, Stack


@dataclass(frozen=True, slots=True)
class _Route:
    """One way to the bucket: straight, through Forebay as README recommends, or through strict slots."""

    name: str
    reader: Reader
    checkpointer: Checkpointer


_Work = Callable[[_Route, int], Reading]
"""A step of the job over one route, in the round of this number; 0 is the first time, with nothing cached."""


def run_job(workload: Workload, stack: Stack, narrator: Narrator) -> Report:
    """Do the whole job over each route; DemoError at the first wrong byte."""
    job = _Job(
        workload,
        narrator,
        direct=_route("the bucket", stack.bucket_url, workload, stack),
        forebay=_route("Forebay", stack.forebay_url, workload, stack),
        strict=_route("Forebay, strict", stack.strict_url, workload, stack),
    )
    stored_shards = job.upload("shards", shards(workload))
    stored_files = job.upload("files", files(workload))
    return Report(
        workload=workload,
        comparisons=[
            job.list_objects([*stored_shards, *stored_files]),
            job.epochs(f"{len(stored_shards)} shards", stored_shards),
            job.epochs(f"{len(stored_files)} files", stored_files),
            *job.saves(),
            job.restores(),
        ],
    )


def _route(name: str, url: str, workload: Workload, stack: Stack) -> _Route:
    client = s3_client(url, stack.keys, connections=workload.readers)
    tally = CacheTally()
    tally.watch(client)
    return _Route(
        name,
        Reader(client, tally, workload.bucket, workload.readers),
        Checkpointer(client, tally, workload.bucket, stack.directory),
    )


@dataclass(frozen=True, slots=True)
class _Job:
    workload: Workload
    narrator: Narrator
    direct: _Route
    forebay: _Route
    strict: _Route

    def upload(self, what: str, planned: Sequence[PlannedObject]) -> list[StoredObject]:
        """Straight into the bucket, as data sets come there: the first epoch through Forebay finds nothing cached."""
        client = self.direct.reader.client
        client.create_bucket(Bucket=self.workload.bucket)
        total = sum(one.size_bytes for one in planned)
        with self.narrator.step(f"upload {len(planned)} {what}", total) as advance:
            return upload(client, self.workload.bucket, planned, self.workload.readers, advance)

    def list_objects(self, stored: Sequence[StoredObject]) -> Comparison:
        expected = {one.key: one.size_bytes for one in stored}

        def once(route: _Route, _round: int) -> Reading:
            seconds, found = route.reader.list_all(DATA_PREFIX)
            if found != expected:
                raise DemoError(f"{route.name}: LIST shows {len(found)} objects; {len(expected)} were uploaded")
            return Reading(seconds, 0, route.reader.tally.take())

        with self.narrator.step(f"list {len(stored)} objects, each way"):
            return self._compare(f"list {len(stored)} objects", once)

    def epochs(self, what: str, stored: Sequence[StoredObject]) -> Comparison:
        total = sum(one.size_bytes for one in stored)

        def once(route: _Route, number: int) -> Reading:
            with self.narrator.step(f"read {what}, {route.name}, {_when(number)}", total) as advance:
                return route.reader.epoch(stored, self.workload.seed + number, advance)

        return self._compare(f"read {what}", once, rereads=True)

    def saves(self) -> list[Comparison]:
        """Measure how long the job waits for a save, and when the bucket has it. Strict slots save the same way."""
        size = self.workload.checkpoint_bytes
        saves: dict[str, list[Reading]] = {self.direct.name: [], self.forebay.name: []}
        arrivals: dict[str, list[Reading]] = {self.direct.name: [], self.forebay.name: []}
        for number in range(1, self.workload.rounds + 1):
            state = checkpoint_bytes(self.workload, number)
            for route in (self.direct, self.forebay):
                key = self._checkpoint_key(route, number)
                with self.narrator.step(f"save a checkpoint, {route.name}, {_when(number)}", size) as advance:
                    begun = time.perf_counter()
                    reading, saved = route.checkpointer.save(key, state, advance)
                    self.direct.checkpointer.wait_for(saved, route.checkpointer.etag(key))
                    arrivals[route.name].append(replace(reading, seconds=time.perf_counter() - begun))
                saves[route.name].append(reading)
        return [
            Comparison("save a checkpoint", saves[self.direct.name], saves[self.forebay.name]),
            Comparison("until bucket has it", arrivals[self.direct.name], arrivals[self.forebay.name]),
        ]

    def restores(self) -> Comparison:
        """Restore the newest checkpoint saved through Forebay. Its gateway has it; the strict one reads it first."""
        size = self.workload.checkpoint_bytes
        last = self.workload.rounds
        state = checkpoint_bytes(self.workload, last)

        def once(route: _Route, number: int) -> Reading:
            key = self._checkpoint_key(self.forebay, last)
            with self.narrator.step(f"restore a checkpoint, {route.name}, {_when(number)}", size) as advance:
                return route.checkpointer.restore(key, state, advance)

        return self._compare("restore it", once, rereads=True)

    def _checkpoint_key(self, route: _Route, number: int) -> str:
        writer = "forebay" if route is self.forebay else "direct"
        return f"{CHECKPOINT_PREFIX}{writer}/step-{number}"

    def _compare(self, what: str, once: _Work, *, rereads: bool = False) -> Comparison:
        """Time a first run through Forebay, then rounds in which the routes take turns: all meet the same machine."""
        first = once(self.forebay, 0)
        once(self.strict, 0)
        rounds = [
            [once(route, n) for route in (self.direct, self.forebay, self.strict)]
            for n in range(1, self.workload.rounds + 1)
        ]
        direct, forebay, strict = ([one[place] for one in rounds] for place in range(3))
        return Comparison(what, direct, forebay, first=first, strict=strict, rereads=rereads)


def _when(number: int) -> str:
    return f"round {number}" if number else "first time"
