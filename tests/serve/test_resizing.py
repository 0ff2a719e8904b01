"""Slots that are resized up and down at random under load: no error, no loss, accounts that are exact against the disk.

Slots come, change and go, over the admin port and by SIGHUP, one within another too, while clients read what is warm
and what is cold, write, overwrite, delete and list, and workers are killed. The schedule comes from a seed, which a
failure prints; FOREBAY_RESIZE_SEED and FOREBAY_RESIZES repeat or lengthen a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from gateway.blocks.layout import blocks_of
from gateway.blocks.store import ScannedFile
from gateway.config.overlay import load_with_overlay
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.policy.slots import DEFAULT_SLOT, Prefix, Slots
from tests.support.blocks import KIB, MIB, block_files, make_origin, open_cache
from tests.support.changing_slots import BUCKET, Admin, an_origin, client_of, config_of
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.content import GeneratedContent
from tests.support.slots import Slot
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

RESIZES = int(os.environ.get("FOREBAY_RESIZES", "15"))
SEED = int(os.environ.get("FOREBAY_RESIZE_SEED", random.SystemRandom().randrange(2**32)))
SECONDS_MAX = 240 + RESIZES * 5

CLIENTS = 4
BLOCK_BYTES = 64 * KIB
WARM, COLD = 20, 300
"""Objects of a group: those that are read all the time, and those that are read once in a while."""

PATIENCE_SECONDS = 60.0
PREFIXES: Mapping[str, Sequence[str]] = {
    **{f"port-{group}": [f"{group}/"] for group in "abc"},
    "port-moving": ["a/deep/", "b/deep/", "d/deep/"],
    **{f"file-{group}": [f"{group}/"] for group in "de"},
    "file-moving": ["c/deep/", "e/deep/"],
}
"""Those that begin with `port` are set over the admin port, the others are the file's."""

GROUPS = ["a", "b", "c", "d", "e", "a/deep", "b/deep", "c/deep", "d/deep", "e/deep"]
REMOVED, BY_FILE, KILLED = 0.25, 0.3, 0.06
"""How often a slot that is there is removed, the file is read anew, and a worker is killed before a change."""

T = TypeVar("T")


def object_bytes(key: str) -> bytes:
    """Of an object that the origin has had from the beginning."""
    dice = random.Random(key)
    return GeneratedContent(dice.choice([3_000, 60_000, 150_000, 400_000]), seed=dice.randrange(1000)).read(0, 400_000)


KEYS = {
    "warm": [f"{group}/warm/{number}" for group in GROUPS for number in range(WARM)],
    "cold": [f"{group}/cold/{number}" for group in GROUPS for number in range(COLD)],
}


@dataclass(slots=True)
class World:
    """What the clients do, and what they found."""

    gateway: GatewayProcess
    kills: int = 0
    """Twice as many as there were, and one more while a worker is just being killed."""

    over: bool = False
    failures: list[str] = field(default_factory=list)
    versions: set[tuple[str, str, int]] = field(default_factory=set)
    """Key, ETag, size of all objects that ever were, so that blocks are known by their names."""

    done: Counter[str] = field(default_factory=Counter)


class Client:
    """One that reads, lists and writes; its own keys nobody else changes."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        self.expected: dict[str, bytes | None] = {}
        """By key of its own, what was acknowledged last; None: it was deleted."""

        self._world = world
        self._number = number
        self._dice = random.Random(seed)
        self._client = client_of(world.gateway.s3_url)
        self._kills = 0
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        steps = [self._read_warm, self._read_warm, self._read_cold, self._write, self._write, self._delete, self._list]
        while not self._world.over and not self._world.failures:
            step = self._dice.choice(steps)
            try:
                step()
            except Exception as error:
                self._world.failures.append(
                    f"{step.__name__}: {type(error).__name__}: {error} ({self._world.kills} kills)"
                )
            self._world.done[step.__name__] += 1

    def _surely(self, call: Callable[[], T]) -> T:
        """Again, where a killed worker took it away: the connection is lost then, and nothing else is wrong."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            kills = self._world.kills
            try:
                answer = call()
            except ClientError:
                raise
            except (BotoCoreError, OSError):
                kills = self._world.kills
                if (kills == self._kills and kills % 2 == 0) or time.monotonic() > deadline:
                    raise
                continue
            self._kills = kills
            return answer

    def _read(self, key: str) -> bytes:
        def get() -> bytes:
            body: bytes = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            return body

        return self._surely(get)

    def _judge(self, key: str, found: bytes, expected: bytes) -> None:
        if found != expected:
            self._world.failures.append(f"{key}: {len(found)} bytes are not the {len(expected)} that it has")

    def _read_warm(self) -> None:
        key = self._dice.choice(KEYS["warm"])
        self._judge(key, self._read(key), object_bytes(key))

    def _read_cold(self) -> None:
        key = self._dice.choice(KEYS["cold"])
        self._judge(key, self._read(key), object_bytes(key))

    def _own(self) -> str:
        group, number = self._dice.choice(GROUPS), self._dice.randrange(40)
        return f"{group}/written/{self._number}-{number}"

    def _write(self) -> None:
        key, content = self._own(), self._dice.randbytes(self._dice.choice([1, 5_000, 70_000, 200_000]))
        etag = f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
        self._world.versions.add((key, etag, len(content)))
        self._surely(partial(self._client.put_object, Bucket=BUCKET, Key=key, Body=content))
        self.expected[key] = content
        self._judge(key, self._read(key), content)

    def _delete(self) -> None:
        there = [key for key, content in self.expected.items() if content is not None]
        if there:
            key = self._dice.choice(there)
            self._surely(partial(self._client.delete_object, Bucket=BUCKET, Key=key))
            self.expected[key] = None

    def _list(self) -> None:
        group = self._dice.choice(GROUPS)
        prefix = f"{group}/written/{self._number}-"
        answer = self._surely(partial(self._client.list_objects_v2, Bucket=BUCKET, Prefix=prefix))
        found = sorted(one["Key"] for one in answer.get("Contents", []))
        there = sorted(key for key, content in self.expected.items() if content is not None and key.startswith(prefix))
        if found != there:
            self._world.failures.append(f"LIST of {prefix} has {found}, and not {there}")


class Resizer:
    """Who changes slots, and kills workers."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.changes: Counter[str] = Counter()
        self._world = world
        self._gateway = world.gateway
        self._admin = Admin(world.gateway)
        self._dice = dice
        self._on_port: dict[str, dict[str, Any]] = {}
        self._in_file: dict[str, dict[str, Any]] = {}

    def change(self) -> None:
        """One change, drawn."""
        if self._dice.random() < KILLED:
            self._kill()
        if self._dice.random() < BY_FILE:
            self._by_file()
        else:
            self._over_the_port()

    def _kill(self) -> None:
        number = self._dice.randrange(2)
        pid = self._gateway.worker_pids()[number]
        assert pid is not None
        self._world.kills += 1
        assert self._gateway.kill_worker(number) == pid
        self._world.kills += 1
        if self._dice.random() < 0.5:  # else the change finds one that is just starting
            self._gateway.wait_for_worker(number, other_than=pid)

    def _over_the_port(self) -> None:
        name = self._dice.choice([name for name in PREFIXES if name.startswith("port")])
        if name in self._on_port and self._dice.random() < REMOVED:
            how, slot, answer = "removed over the port", None, self._admin.delete(name)
        else:
            slot = drawn(self._dice, name)
            how, answer = "set over the port", self._admin.put(name, slot)
        if answer.status_code == 409:
            assert "origin does not have" in answer.text, answer.text
            self.changes["refused"] += 1
            return
        in_force = [200, 202] if self._world.kills else [200]
        assert answer.status_code in in_force, answer.text
        self.changes[how] += 1
        if slot is None:
            del self._on_port[name]
        else:
            self._on_port[name] = slot

    def _by_file(self) -> None:
        before = dict(self._in_file)
        for name in PREFIXES:
            if name.startswith("file") and self._dice.random() < 0.6:
                if self._dice.random() < REMOVED:
                    self._in_file.pop(name, None)
                else:
                    self._in_file[name] = {"name": name, **drawn(self._dice, name)}
        link = {f"{way}_bandwidth": f"{self._dice.randrange(100, 400)}MiB/s" for way in ("read", "write")}
        if (problem := self._reload(link)) is not None:
            assert "origin does not have" in problem, problem
            self.changes["refused"] += 1
            self._in_file = before
            assert self._reload(link) is None
        self.changes["by the file"] += 1

    def _reload(self, link: Mapping[str, str]) -> str | None:
        """What is wrong with it."""
        self._admin.reload({"slots": list(self._in_file.values()), "origin": link}, self._gateway)
        problem: str | None = self._admin.gateway["settings_problem"]
        return problem


def drawn(dice: random.Random, name: str) -> dict[str, Any]:
    """A slot. All capacities together are within the cache's, and all guarantees within the link."""
    slot: dict[str, Any] = {"prefix": f"s3://{BUCKET}/{dice.choice(PREFIXES[name])}", "weight": dice.randrange(1, 9)}
    if dice.random() < 0.5:
        slot["capacity"] = f"{dice.randrange(1, 8)}MiB"
    if dice.random() < 0.5:
        slot["capacity_limit"] = f"{dice.randrange(8, 30)}MiB"
    for way in ("read", "write"):
        if dice.random() < 0.3:
            slot[f"{way}_bandwidth"] = f"{dice.randrange(20, 200)}MiB/s"
        if dice.random() < 0.3:
            slot[f"{way}_guarantee"] = f"{dice.randrange(1, 10)}MiB/s"
    if dice.random() < 0.5:
        slot |= {"write": "back", "buffer": f"{dice.randrange(8, 32)}MiB", "order": dice.choice(["markers", "strict"])}
    else:
        slot["consistency"] = dice.choice(["strict", "ttl", "immutable"])
    if dice.random() < 0.3:
        slot["eviction"] = "lru"
    if dice.random() < 0.2:
        slot["max_cached_object_size"] = "100KiB"
    return slot


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_slots_are_resized_at_random_under_load(tmp_path: Path) -> None:
    """10.8 Every answer is right, what was acknowledged is at the origin, and the index has each file that lies on the
    disk, with its size, on the account of the slot of its key.
    """
    print(f"replay with FOREBAY_RESIZE_SEED={SEED} FOREBAY_RESIZES={RESIZES}")
    dice = random.Random(SEED)
    link = {"read_bandwidth": "200MiB/s", "write_bandwidth": "200MiB/s"}
    with an_origin() as origin:
        config = config_of(origin)
        config["origin"] |= link
        versions = {(key, origin.model.put(BUCKET, key, object_bytes(key))) for keys in KEYS.values() for key in keys}
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            world = World(gateway, versions={(key, etag, len(object_bytes(key))) for key, etag in versions})
            clients = [Client(world, number, dice.randrange(2**32)) for number in range(CLIENTS)]
            resizer = Resizer(world, dice)
            for one in clients:
                one.thread.start()
            try:
                for _ in range(RESIZES):
                    resizer.change()
                    assert world.failures == []
            finally:
                world.over = True
                for one in clients:
                    one.thread.join()
            print(dict(resizer.changes), "kills:", world.kills // 2, dict(world.done))
            assert world.failures == []
            admin = Admin(gateway)
            eventually(partial(is_flushed, admin), "the origin does not get what was acknowledged")
            eventually(partial(has_all, gateway, world.kills // 2), "a killed worker is not there again")
            check_origin(origin, clients)
            for client in clients:
                for key, content in client.expected.items():
                    if content is not None:
                        assert client._read(key) == content
            gateway.terminate()
            settings = load_with_overlay(gateway.config_file, {}).settings
            slots = Slots(
                [
                    Slot(one.name, Prefix.parse(str(one.prefix)), capacity_bytes=one.capacity_bytes or 0)
                    for one in settings.slots
                ]
            )
        asyncio.run(check_accounts(tmp_path / "cache" / "blocks", slots, world.versions))


def is_flushed(admin: Admin) -> bool:
    """Slots that are gone by now may have had something, too."""
    return bool(admin.get("/api/v1/writeback")["objects"] == 0)


def has_all(gateway: GatewayProcess, kills: int) -> bool:
    """All processes are there, and none was started again that nobody has killed."""
    processes = gateway.status()["gateway"]["processes"]
    assert sum(one["restarts"] for one in processes) <= kills
    return all(one["ready"] for one in processes)


def check_origin(origin: StrictOrigin, clients: Sequence[Client]) -> None:
    """It has what was acknowledged, and nothing that was deleted."""
    there = origin.model.buckets[BUCKET].objects
    for client in clients:
        for key, content in client.expected.items():
            assert (key in there) == (content is not None), key
            assert content is None or origin.model.data(BUCKET, key) == content, key


def due_slots(file: ScannedFile | None, slots: Slots) -> set[str]:
    """The slot of the first key in it. A file without a header, of an own write, stays on the account on which it is,
    as long as there is that slot (docs/on-disk-format.md)."""
    assert file is not None
    if not file.blocks:
        return {DEFAULT_SLOT.name, *(slot.name for slot in slots)}
    key = file.blocks[0][0].version.key
    return {slots.find(key.bucket, key.key).name}


async def check_accounts(directory: Path, slots: Slots, versions: set[tuple[str, str, int]]) -> None:
    """By the keys that the files on the disk tell; and there is no block but of the objects that ever were."""
    known = {
        block.id
        for key, etag, size_bytes in versions
        for block in blocks_of(
            ObjectVersion(ObjectKey(BUCKET, key), etag, size_bytes), ByteRange(0, size_bytes - 1), BLOCK_BYTES
        )
    }
    async with open_cache(
        directory, make_origin(), capacity_bytes=64 * MIB, block_size_bytes=BLOCK_BYTES, slots=slots
    ) as cache:
        tools = cache._dependencies.directory
        files = {file.file: file for file in tools.index.files()}
        on_disk = {path.name: path.stat().st_blocks * 512 for path in block_files(directory)}
        assert {name: file.disk_bytes for name, file in files.items()} == on_disk
        names = tools.index.slot_names()
        assert {block.block_id for block in tools.index.blocks()} <= known
        wrong = [
            (name, names[file.slot], due)
            for name, file in files.items()
            if names[file.slot] not in (due := due_slots(tools.store.describe(name), slots))
        ]
        assert wrong == []
        by_slot = Counter[str]()
        for file in files.values():
            by_slot[names[file.slot]] += file.disk_bytes
        usage = cache.usage()
        assert {name: one.used_bytes for name, one in usage.slots.items() if one.used_bytes} == dict(by_slot)
        assert usage.used_bytes == sum(on_disk.values())
        assert not any(one.reserved_bytes for one in usage.slots.values())
