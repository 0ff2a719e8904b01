"""A gateway is killed with -9, or loses its power, while checkpoints are saved and flushed, and a reader looks at the
bucket throughout.

It never finds a manifest whose files are not all there, also those of another node (docs/semantics.md, 6.7); and every
checkpoint that was acknowledged gets there. The schedule comes from a seed, which a failure prints; FOREBAY_KILL_SEED,
FOREBAY_CHECKPOINT_KILLS and FOREBAY_CHECKPOINT_POWER_CUTS repeat or lengthen a run.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.disks import RemountedDisk, kill_disk
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.store import StoredObject
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

KILLS = int(os.environ.get("FOREBAY_CHECKPOINT_KILLS", "3"))
CUTS = int(os.environ.get("FOREBAY_CHECKPOINT_POWER_CUTS", "3"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
PATIENCE_SECONDS = 90.0
BUCKET = "bucket"
DISK_BYTES = 512 * 1024**2
INDEX = "model.safetensors.index.json"
FILE_BYTES = 300_000
ORIGIN_BYTES_PER_SECOND = 3e6
"""Per connection: a file takes a tenth of a second."""


@dataclass
class Reader:
    """Looks at all of the bucket, again and again, at one moment each time."""

    origin: StrictOrigin
    broken: list[str] = field(default_factory=list)
    looks: int = 0
    manifests: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    """Directories that were seen with files and without their manifest."""

    def look(self) -> None:
        there = self.origin.run_inside(lambda: dict(self.origin.model.buckets[BUCKET].objects))
        directories = {key.rpartition("/")[0] for key in there if key.endswith(".safetensors")}
        self.incomplete |= {one for one in directories if f"{one}/{INDEX}" not in there}
        for key, stored in there.items():
            if not key.endswith(INDEX):
                continue
            self.manifests.add(key)
            named = json.loads(stored.content.read(0, stored.size_bytes))["weight_map"].values()
            directory = key.rpartition("/")[0]
            self.broken += [f"{key} names {one}" for one in named if f"{directory}/{one}" not in there]
        self.looks += 1

    @contextmanager
    def looking(self) -> Iterator[None]:
        over = threading.Event()

        def run() -> None:
            while not over.wait(0.002):
                self.look()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class Jobs:
    """One job that saves through the gateway, and one whose files another gateway flushes when it comes to it."""

    def __init__(self, origin: StrictOrigin, gateway: GatewayProcess, dice: random.Random) -> None:
        self.saved: list[str] = []
        """Manifests that were acknowledged."""

        self.power_is_off = False
        """What is answered meanwhile nobody hears: no machine without power answers."""

        self._origin = origin
        self._gateway = gateway
        self._dice = dice
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        saving = threading.Thread(target=self._save_all)
        saving.start()
        try:
            yield
        finally:
            self._over.set()
            saving.join()
            for one in self._threads:
                one.join()

    def _save_all(self) -> None:
        step = 0
        while not self._over.is_set():
            step += 1
            names = [f"model-{rank}.safetensors" for rank in range(4)]
            later = threading.Timer(self._dice.uniform(0.0, 2.0), self._flush_others, (f"back/step-{step}", names[2:]))
            later.start()
            self._threads.append(later)
            try:
                self._save(f"back/step-{step}", names)
            except httpx.HTTPError:
                time.sleep(0.05)  # it was killed: the next one is another checkpoint

    def _save(self, directory: str, names: list[str]) -> None:
        for name in names[:2]:
            self._put(f"{directory}/{name}", name.encode() * (FILE_BYTES // len(name)))
        manifest = f"{directory}/{INDEX}"
        self._put(manifest, json.dumps({"weight_map": {name: name for name in names}}).encode())
        self.saved.append(manifest)

    def _put(self, key: str, content: bytes) -> None:
        with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
            client.put(f"{self._gateway.s3_url}/{BUCKET}/{key}", content=content).raise_for_status()
        if self.power_is_off:
            raise httpx.ReadError("the power is off")

    def _flush_others(self, directory: str, names: list[str]) -> None:
        for name in names:
            stored = StoredObject(f"{directory}/{name}", BytesContent(b"theirs"), '"theirs"', time.time())
            self._origin.run_inside(lambda: self._origin.model.buckets[BUCKET].put(stored))  # noqa: B023


def apply_settings(directory: Path, count: int, fall: Callable[[GatewayProcess, StrictOrigin, Jobs], None]) -> None:
    """Save and flush, falling so many times, and look at the bucket all the time."""
    print(f"FOREBAY_KILL_SEED={SEED}")
    dice = random.Random(SEED)
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        origin.bytes_per_second = ORIGIN_BYTES_PER_SECOND
        config: dict[str, Any] = {
            "server": {"workers": 2, "allow_unsigned": True},
            "origin": origin.settings,
            "cache": {"persistent": True},
            "slots": [{"name": "back", "prefix": f"s3://{BUCKET}/back/", "write": "back"}],
        }
        reader = Reader(origin)
        with GatewayProcess(config, directory=directory) as gateway, reader.looking():
            jobs = Jobs(origin, gateway, dice)
            with jobs.running():
                for _ in range(count):
                    time.sleep(dice.uniform(0.2, 2.5))
                    fall(gateway, origin, jobs)
                    gateway.start()
                time.sleep(1.0)
            eventually(lambda: reader.manifests >= set(jobs.saved))
    assert not reader.broken, reader.broken[:10]
    assert jobs.saved
    assert reader.incomplete, "the reader has seen nothing of any save"
    print(f"{len(jobs.saved)} checkpoints, {reader.looks} looks")


@pytest.mark.slow
@pytest.mark.timeout(240 + 30 * KILLS)
def test_no_kill_shows_a_manifest_without_its_files(tmp_path: Path) -> None:
    """While the job saves, while the gateway flushes, and while the other node's files come."""
    apply_settings(tmp_path / "cache", KILLS, lambda gateway, _origin, _jobs: gateway.kill())


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240 + 30 * CUTS)
def test_no_power_cut_shows_a_manifest_without_its_files(tmp_path: Path) -> None:
    """Nor loses a checkpoint that was acknowledged: what was not synced is gone, and the origin heard nothing since."""
    disk = RemountedDisk(tmp_path / "disk", tmp_path / "image", DISK_BYTES)

    def cut(gateway: GatewayProcess, origin: StrictOrigin, jobs: Jobs) -> None:
        jobs.power_is_off = origin.is_out_of_reach = True
        kill_disk(disk.mount_point)
        gateway.kill()
        disk.mount_anew()
        jobs.power_is_off = origin.is_out_of_reach = False

    with disk.mounted():
        apply_settings(disk.mount_point / "cache", CUTS, cut)
