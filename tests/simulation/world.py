"""One history: clients of a node, others who write to its buckets, and everything that goes wrong, as the dice say."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock
from uuid import UUID

from gateway.edge import receiving
from gateway.operations.writeback import uploads
from gateway.origin.stores import store as stores
from gateway.policy.slots import Prefix
from gateway.writeback import bounds, pending_key_filter
from gateway.writeback.journal import writes
from tests.simulation.clients import PART_BYTES, WORKERS, Clients, Work
from tests.simulation.dialects import DIALECTS
from tests.simulation.disk import SimulatedDisk
from tests.simulation.invariants import Judge, Violation
from tests.simulation.node import BACKGROUND, BodyThreads, Node
from tests.simulation.origins import DENIED, OF_A_CLIENT, Change, SimulatedOrigin, Trouble
from tests.simulation.processes import simulated
from tests.simulation.traffic import LARGE_BYTES, NOTICED_SECONDS, Traffic
from tests.simulation.virtual_time import VirtualClock, VirtualTimeLoop
from tests.support.memory_origin import store as memory_store
from tests.support.slots import Slot, slot_with

BUCKETS = ("bucket", "other")
SLOTS = (Slot("all", Prefix.parse("s3://"), write="back", buffer_bytes=256 * 1024 * 1024),)
SETTLES_SECONDS = 300.0
"""At the end, without faults: by then all is at rest, but for what the origin takes (`Dialect.flush_seconds`)."""

AT_REST_SECONDS = 150.0

ACTIONS: Mapping[str, int] = {
    "put": 14,
    "delete": 5,
    "read": 10,
    "upload": 6,
    "abandon": 1,
    "abort": 1,
    "save": 4,
    "save_run": 2,
    "save_table": 1,
    "conditional": 2,
    "copy": 2,
    "others_write": 4,
    "others_write_pending": 1,
    "others_delete": 2,
    "delete_conflict": 2,
    "trouble": 3,
    "heal": 4,
    "away": 1,
    "delete_away": 1,
    "refuse": 1,
    "denied": 1,
    "full": 1,
    "jump_clock": 1,
    "kill_worker": 2,
    "kill_background": 2,
    "cut_power": 1,
    "pass_time": 8,
    "forget": 1,
    "encrypt": 1,
    "burst": 1,
    "strange": 1,
    "rename": 1,
    "crowd": 1,
    "save_shared": 3,
}

ALWAYS = frozenset({"put", "heal", "pass_time"})
RARE = frozenset({"rename", "crowd", "burst"})
"""They cost as much as hundreds of others."""

DAY_SECONDS = 26 * 3600.0
CROWD = 10
JUMPS_SECONDS = (-3600.0, -600.0, -30.0, 30.0, 600.0, 3600.0)


@dataclass(frozen=True)
class Setting:
    """What a history is like. `often` weighs actions in the place of the dice: those that it does not name never come.

    `skew_seconds`: how far the node's clock is ahead, and stays; None: as the dice say. `lies`: the disk's syncs do.
    `flush`: which checkpoints the slot sends. `consistency` None: as the dice say.
    """

    seed: int
    dialect: str
    steps: int = 100
    only: Iterable[str] = field(default_factory=tuple)
    skew_seconds: float | None = None
    lies: bool = False
    often: Mapping[str, float] | None = None
    flush: str = "all"
    consistency: Literal["strict", "ttl"] | None = None


class World:
    """A history as its setting says."""

    def __init__(self, setting: Setting, directory: Path, loop: VirtualTimeLoop) -> None:
        self._setting = setting
        self.dice = Random(f"{setting.seed} {setting.dialect}")
        self.clock = VirtualClock(loop)
        skewed = self.dice.choice((0.0, 0.0, 0.0, 600.0, -600.0))
        self.node_clock = VirtualClock(loop, skewed if setting.skew_seconds is None else setting.skew_seconds)
        self._jump = loop.jump
        dialect = DIALECTS[setting.dialect].drawn_by(self.dice)
        origin_dice, node_dice = Random(self.dice.getrandbits(32)), Random(self.dice.getrandbits(32))
        traffic = Traffic(lambda rule, text: self.judge.violated(rule, text))
        self.origin = SimulatedOrigin(dialect, self.clock, origin_dice, self._changed, traffic)
        traffic.has_upload = self.origin.has_upload
        self.judge = Judge(self.origin, setting.only)
        etag: Literal["bucket", "local"] = "local" if dialect.local_etags else "bucket"
        consistency = setting.consistency or Random(f"{setting.seed}").choice(("strict", "ttl"))
        slots = [slot_with(slot, flush=setting.flush, etag=etag, consistency=consistency) for slot in SLOTS]
        self.node = Node(
            SimulatedDisk(directory / "writeback", lies=setting.lies), self.origin, slots, self.node_clock, node_dice
        )
        self.judge.kept = self.node.kept
        self.clients = Clients(self.node, self.origin, self.judge, self.clock, self.dice, self.say)
        self.said: list[str] = []
        self.steps = 0
        self._is_ending = False
        self._full_until = 0.0
        for bucket in BUCKETS:
            self.origin.create_bucket(bucket)

    def _changed(self, bucket: str, change: Change) -> None:
        self.judge.changed(bucket, change)

    def say(self, text: str) -> None:
        self.said.append(f"{self.clock.monotonic():10.3f} {text}")

    async def run(self) -> None:
        await self.node.start(WORKERS)
        for bucket in BUCKETS:
            await self.clients.put(bucket, "known", b"known")
        names = list(ACTIONS)
        weights = [self._often(name) for name in names]
        for number in range(1, self._setting.steps + 1):
            self.steps = number
            [name] = self.dice.choices(names, weights)
            self.say(name)
            await getattr(self, f"_do_{name}")()
            await asyncio.sleep(self.dice.random() ** 4 * 0.5)
            await self._look()
        await self._end()

    def _often(self, name: str) -> float:
        """Each history has much of something and nothing of something else: what all do together hides things."""
        if self._setting.often is not None:
            return self._setting.often.get(name, 0.0)
        if name in RARE:
            return ACTIONS[name] * self.dice.choice((0.0, 0.0, 0.0, 0.0, 1.0))
        return ACTIONS[name] * (1.0 if name in ALWAYS else self.dice.choice((0.0, 0.3, 1.0, 4.0)))

    async def _look(self) -> None:
        await self._revive()
        now, trouble = self.clock.monotonic(), self.origin.trouble
        if self.node.disk.is_full:
            self.judge.disk_is_full(now)
            if now >= self._full_until:
                self.node.disk.make_room()
        for bucket in BUCKETS:
            bad = bucket in self.origin.refused or (trouble is not None and bucket in trouble.buckets)
            self.judge.health(bucket, good=not bad and self.node.alive(BACKGROUND), now=now)
        self.judge.check_liveness(now)
        if any(self.judge.is_written_once(key) for _, key in self.judge.keys):
            self.judge.check_sight(await self.node.shown(), now - NOTICED_SECONDS)
        self._raise()

    def _raise(self) -> None:
        if self.judge.violations:
            raise self.judge.violations[0]

    async def _end(self) -> None:
        """Everything heals, clients end, and time passes."""
        self.say("end")
        self._is_ending = True
        self.origin.trouble = None
        self.origin.refused.clear()
        self.node.disk.make_room()
        await self._revive()
        settles_seconds = SETTLES_SECONDS + self.origin.dialect.flush_seconds
        deadline = self.clock.monotonic() + 2 * settles_seconds
        while self.clients.tasks and self.clock.monotonic() < deadline:
            await asyncio.wait(self.clients.tasks, timeout=10.0)
            await self._revive()
        if self.clients.tasks:
            self.judge.violated("requests end", "; ".join(sorted(f"{one}/{key}" for one, key in self.clients.busy)))
        await self.origin.settle()
        at_rest = self.clock.monotonic() + settles_seconds
        while self.clock.monotonic() < at_rest + AT_REST_SECONDS:
            await asyncio.sleep(10.0)
            await self._look()
        for _ in range(60):  # an idle upload may have become due, and found to be over, at this very moment
            if not self.judge.kept().in_doubt:
                break
            await asyncio.sleep(1.0)
        self.judge.check_end()
        self.origin.traffic.check_rest(at_rest)
        self._raise()
        await self._next_day()
        self._raise()

    async def _next_day(self) -> None:
        """Uploads that nobody has touched for a day are gone."""
        self.node.kill_all()
        await self.node.write_tombstone()
        self._jump(DAY_SECONDS)
        await self.node.start(WORKERS)
        await asyncio.sleep(180.0 + self.origin.dialect.flush_seconds)
        self.judge.check_next_day()

    def _place(self) -> tuple[str, str]:
        bucket = "other" if self.dice.random() < 0.25 else "bucket"
        return bucket, f"k{self.dice.randrange(6)}"

    # What clients do

    async def _do_put(self) -> None:
        bucket, key = self._place()
        value = self.clients.value()
        self.clients.begin(bucket, key, lambda: self.clients.put(bucket, key, value))

    async def _do_delete(self) -> None:
        bucket, key = self._place()
        self.clients.begin(bucket, key, lambda: self.clients.delete(bucket, key))

    async def _do_delete_conflict(self) -> None:
        found = sorted(self.node.kept().conflicts)
        if found:
            bucket, key = self.dice.choice(found)
            self.clients.begin(bucket, key, lambda: self.clients.delete(bucket, key))

    async def _do_read(self) -> None:
        bucket, key = self._place()
        self.clients.begin(bucket, key, lambda: self.clients.read(bucket, key))

    async def _do_conditional(self) -> None:
        bucket, key = self._place()
        value = self.clients.value()
        self.clients.begin(bucket, key, lambda: self.clients.put(bucket, key, value, If_None_Match="*"))

    async def _do_upload(self) -> None:
        bucket, key = self._place()
        condition = "*" if self.dice.random() < 0.2 else None
        self.clients.begin(bucket, key, lambda: self.clients.upload(bucket, key, if_none_match=condition))

    async def _do_abandon(self) -> None:
        bucket, key = self._place()
        self.clients.begin(bucket, key, lambda: self.clients.upload(bucket, key, ends=False))

    async def _do_abort(self) -> None:
        bucket, key = self._place()
        self.clients.begin(bucket, key, lambda: self.clients.upload(bucket, key, if_none_match="*", is_aborted=True))

    async def _do_copy(self) -> None:
        bucket, key = self._place()
        source = f"k{self.dice.randrange(6)}"
        if source != key and (bucket, source) not in self.clients.busy:
            self.clients.begin(bucket, key, lambda: self.clients.copy(bucket, source, key))

    async def _do_save(self) -> None:
        directory = f"step-{self.clients.number()}"
        self.clients.begin("bucket", directory, lambda: self.clients.save(directory))

    async def _do_save_shared(self) -> None:
        directory = f"shared-{self.clients.number()}"
        self.clients.begin("bucket", directory, lambda: self.clients.save_shared(directory))

    async def _do_save_run(self) -> None:
        run = f"run-{self.dice.randrange(2)}"
        self.clients.begin("bucket", run, lambda: self.clients.save_run(run))

    async def _do_save_table(self) -> None:
        table = f"table-{self.dice.randrange(2)}"
        self.clients.begin("bucket", table, lambda: self.clients.save_table(table))

    async def _do_burst(self) -> None:
        """More than flush at once, in a bucket that may refuse everything."""
        self.clients.begin("other", "burst", self._burst)

    async def _burst(self) -> None:
        for number in range(80):
            if not self._is_ending:
                await self.clients.put("other", f"burst/{number}", self.clients.value())

    async def _do_denied(self) -> None:
        """What is acknowledged, and refused for ever."""
        key = f"{DENIED}k{self.dice.randrange(3)}"
        value = self.clients.value()
        self.clients.begin("bucket", key, lambda: self.clients.put("bucket", key, value))

    async def _do_strange(self) -> None:
        """Metadata that is no UTF-8, which S3 refuses."""
        key = f"strange{self.dice.randrange(3)}"
        value = self.clients.value()
        self.clients.begin("bucket", key, lambda: self.clients.put("bucket", key, value, x_amz_meta_name="caf\xe9"))

    async def _do_rename(self) -> None:
        number = self.clients.number()
        bucket, _ = self._place()
        self.clients.begin(bucket, f"large/{number}", lambda: self.clients.rename(bucket, number))

    async def _do_crowd(self) -> None:
        number, count = self.clients.number(), self.dice.randint(2, CROWD)
        bucket, _ = self._place()
        self.clients.begin(bucket, f"crowd-{number}", lambda: self.clients.crowd(bucket, number, count))

    # What others do

    async def _do_others_write(self) -> None:
        bucket, key = self._place()
        self._others_write(bucket, key)

    def _others_write(self, bucket: str, key: str) -> None:
        begun_seconds = self.dice.choice((None, None, 10.0, 600.0, 86_400.0))
        self.origin.write_as_others(bucket, key, b"theirs, " + self.clients.value(), begun_seconds)
        self.say(f"    others write {bucket}/{key}")

    async def _do_others_write_pending(self) -> None:
        """Another job has been given the same directory, say."""
        found = sorted(one for one in self.node.kept().pending if not one[1].startswith(DENIED))
        if found:
            self._others_write(*self.dice.choice(found))

    async def _do_others_delete(self) -> None:
        bucket, key = self._place()
        if self.origin.current(bucket, key) is not None:
            self.origin.write_as_others(bucket, key, None)
            self.say(f"    others delete {bucket}/{key}")

    # What happens to the origin

    async def _do_trouble(self) -> None:
        kind = self.dice.choice(self.origin.dialect.outages)
        buckets = frozenset(BUCKETS) if self.dice.random() < 0.7 else frozenset({self.dice.choice(BUCKETS)})
        self.origin.trouble = Trouble(kind, buckets, self.clock.monotonic())
        self.say(f"    {kind}: {', '.join(sorted(buckets))}")

    async def _do_heal(self) -> None:
        self.origin.trouble = None
        if self.dice.random() < 0.2:  # rights are mended more seldom than networks
            self.origin.refused.clear()

    async def _do_away(self) -> None:
        """A key is written here while the origin cannot be asked, and then by others, who reach it."""
        bucket, key = self._place()
        await self._away(bucket, key, [partial(self.clients.put, bucket, key, self.clients.value())])

    async def _do_delete_away(self) -> None:
        """The same of a key that is deleted: the client is told to try again, and does not."""
        bucket, key = self._place()
        put = partial(self.clients.put, bucket, key, self.clients.value())
        await self._away(bucket, key, [put, partial(self.clients.delete, bucket, key)])

    async def _away(self, bucket: str, key: str, works: Sequence[Work]) -> None:
        kind = self.dice.choice(("unreachable", "503", "silent"))
        self.origin.trouble = Trouble(kind, frozenset(BUCKETS), self.clock.monotonic())
        await asyncio.sleep(self.dice.choice((0.0, 10.0)))
        for work in works:
            await self._wait_for(bucket, key, work)
        await self._pass_time(self.dice.choice((1.0, 20.0, 70.0, 300.0)))
        self._others_write(bucket, key)
        await self._pass_time(self.dice.choice((0.0, 5.0, 60.0)))
        self.origin.trouble = None
        self.judge.restarted()

    async def _wait_for(self, bucket: str, key: str, work: Work) -> None:
        self.clients.begin(bucket, key, work)
        if self.clients.tasks:
            await asyncio.wait(self.clients.tasks, timeout=90.0)

    async def _do_refuse(self) -> None:
        self.origin.refused.add("other")

    async def _do_forget(self) -> None:
        if self.origin.dialect.forgets_uploads:
            self.origin.forget_uploads()

    async def _do_encrypt(self) -> None:
        if self.origin.dialect.encrypted_later:
            self.origin.is_opaque = True

    # What happens to the node

    async def _do_full(self) -> None:
        self.node.disk.fill(journal=self.dice.random() < 0.5)
        self._full_until = self.clock.monotonic() + self.dice.choice((0.5, 10.0, 100.0))
        self.judge.disk_is_full(self.clock.monotonic())

    async def _do_jump_clock(self) -> None:
        """Somebody sets it, or NTP does."""
        seconds = self.dice.choice(JUMPS_SECONDS)
        if self._setting.skew_seconds is None:
            self.node_clock.skew_seconds += seconds

    async def _do_kill_worker(self) -> None:
        self.node.dies_in(self.dice.randrange(WORKERS), self.dice.randrange(40))

    async def _do_kill_background(self) -> None:
        self.node.dies_in(BACKGROUND, self.dice.randrange(60))

    async def _do_cut_power(self) -> None:
        self.node.disk.make_room()
        await self.node.cut_power(WORKERS)

    async def _do_pass_time(self) -> None:
        await self._pass_time(self.dice.choice((0.1, 1.0, 5.0, 30.0, 150.0)))

    async def _pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds // 10)):
            await asyncio.sleep(10.0)
            await self._look()
        await asyncio.sleep(seconds % 10)

    async def _revive(self) -> None:
        """The supervisor starts again whoever was killed."""
        await self.node.write_tombstone()
        for number in range(WORKERS):
            if not self.node.alive(number):
                self.say(f"    worker {number} was killed, and starts again")
                await self.node.start_worker(number)
        if not self.node.alive(BACKGROUND):
            self.say("    the background process was killed, and starts again")
            await self.node.start_background()
            self.judge.restarted()


def play(setting: Setting) -> World:
    """One history to its end; its world, whose judge says what was violated."""
    loop = VirtualTimeLoop()
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if Path("/dev/shm").exists() else None))
    try:
        world = World(setting, directory, loop)
        world.node.install(loop)
        with ExitStack() as stack:
            stack.enter_context(simulated(Random(setting.seed), world.node.disk))
            stack.enter_context(mock.patch.object(uploads, "PART_SIZE_BYTES_MIN", PART_BYTES))
            stack.enter_context(mock.patch.object(stores, "PART_SIZE_BYTES_MIN", PART_BYTES))
            stack.enter_context(mock.patch.object(writes, "SMALL_BYTES_MAX", LARGE_BYTES))  # in proportion to the line
            ids = Random(setting.seed)
            numbered = SimpleNamespace(uuid4=lambda: UUID(int=ids.getrandbits(128)))
            stack.enter_context(mock.patch.object(memory_store, "uuid", numbered))
            stack.enter_context(mock.patch.object(uploads, "_created_through", _marked(uploads._created_through)))
            stack.enter_context(mock.patch.object(pending_key_filter, "QUIET_SECONDS", 1.0))
            stack.enter_context(mock.patch.object(bounds, "EXPOSURE_SECONDS", 10.0))
            stack.enter_context(mock.patch.object(receiving, "_shared_threads", BodyThreads))
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(world.run())
            except Violation as violation:
                if violation not in world.judge.violations:
                    world.judge.violations.append(violation)
            finally:
                world.node.kill_all()
                loop.run_until_complete(world.node.write_tombstone())
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(1.0))
        return world
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        shutil.rmtree(directory, ignore_errors=True)


def _marked(create: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A CreateMultipartUpload that is forwarded: the origin knows that the node keeps nothing of it."""

    async def marked(*arguments: Any) -> Any:
        OF_A_CLIENT.set(True)
        return await create(*arguments)

    return marked
