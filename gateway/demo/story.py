"""The demo's job from beginning to end: upload, list, read epochs, save and restore a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.demo.checkpoint import Checkpointer
from gateway.demo.clients import CacheTally, s3_client
from gateway.demo.dataset import PlannedObject, StoredObject, checkpoint_bytes, files, shards
from gateway.demo.epochs import Reader, Reading, upload
from gateway.demo.errors import DemoError
from gateway.demo.progress import Narrator
from gateway.demo.report import Comparison, Report
from gateway.demo.stack import Stack
from gateway.demo.workload import Workload

_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Route:
    """One way to the bucket: straight, or through Forebay."""

    name: str
    reader: Reader
    checkpointer: Checkpointer


def run_job(workload: Workload, stack: Stack, narrator: Narrator) -> Report:
    """Do the whole job both ways; DemoError at the first wrong byte."""
    direct = _route("direct", stack.bucket_url, workload, stack)
    forebay = _route("Forebay", stack.forebay_url, workload, stack)
    job = _Job(workload, narrator, direct, forebay)
    stored_shards = job.upload("shards", shards(workload))
    stored_files = job.upload("single files", files(workload))
    return Report(
        workload=workload,
        comparisons=[
            job.list_objects([*stored_shards, *stored_files]),
            job.epochs(f"{len(stored_shards)} tar shards", stored_shards),
            job.epochs(f"{len(stored_files)} single files", stored_files),
            *job.checkpoints(),
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
            seconds, found = route.reader.list_all("")
            if found != expected:
                raise DemoError(f"{route.name}: LIST shows {len(found)} objects; {len(expected)} were uploaded")
            return Reading(seconds, 0, route.reader.tally.take())

        return self._compare(f"list {len(stored)} objects", once, step_per_round=False)

    def epochs(self, what: str, stored: Sequence[StoredObject]) -> Comparison:
        total = sum(one.size_bytes for one in stored)

        def once(route: _Route, number: int) -> Reading:
            with self.narrator.step(f"read {what}, {route.name}, epoch {number}", total) as advance:
                return route.reader.epoch(stored, self.workload.seed + number, advance)

        return self._compare(f"read {what}", once, rereads=True)

    def checkpoints(self) -> list[Comparison]:
        size = self.workload.checkpoint_bytes
        saved: dict[str, StoredObject] = {}
        arrivals: dict[str, list[Reading]] = {self.direct.name: [], self.forebay.name: []}

        def save(route: _Route, number: int) -> Reading:
            key = f"checkpoints/{route.name.lower()}/step-{number}"
            state = checkpoint_bytes(self.workload, number)
            with self.narrator.step(f"save checkpoint, {route.name}, step {number}", size) as advance:
                begun = time.perf_counter()
                reading, saved[route.name] = route.checkpointer.save(key, state, advance)
                self.direct.checkpointer.wait_for(saved[route.name], route.checkpointer.etag(key))
                arrivals[route.name].append(replace(reading, seconds=time.perf_counter() - begun))
            return reading

        def restore(route: _Route, number: int) -> Reading:
            with self.narrator.step(f"restore checkpoint, {route.name}, time {number}", size) as advance:
                return route.checkpointer.restore(saved[route.name], advance)

        return [
            self._compare("save a checkpoint", save),
            Comparison("the bucket has it", arrivals[self.direct.name], arrivals[self.forebay.name], rereads=False),
            self._compare("restore it", restore, rereads=True),
        ]

    def _compare(
        self,
        what: str,
        once: Callable[[_Route, int], Reading],
        *,
        rereads: bool = False,
        step_per_round: bool = True,
    ) -> Comparison:
        def rounds(route: _Route) -> list[Reading]:
            return [once(route, number) for number in range(1, _ROUNDS + 1)]

        if step_per_round:
            return Comparison(what, rounds(self.direct), rounds(self.forebay), rereads)
        with self.narrator.step(f"{what}, both ways"):
            return Comparison(what, rounds(self.direct), rounds(self.forebay), rereads)
