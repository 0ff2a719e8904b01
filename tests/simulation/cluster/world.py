"""One history of a cluster: readers of its nodes, others who write, and everything that goes wrong, as the dice say."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import secrets
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from gateway.cluster.cluster_origin import BUSY_SECONDS_MAX
from gateway.cluster.members import SETTLED_SECONDS
from gateway.core.model import ByteRange, ObjectKey
from gateway.edge import receiving
from gateway.metadata import store
from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix, Slots
from gateway.s3.headers import first_and_last, parse_content_range
from tests.simulation.cluster.judge import CALM_SECONDS, Asked, ClusterJudge, Made
from tests.simulation.cluster.node import ClusterNode, NodeClock, NodeThreads, VirtualDiskThread, install
from tests.simulation.cluster.wires import KINDS, Wires
from tests.simulation.invariants import Violation
from tests.simulation.node import BodyThreads
from tests.simulation.origins import OTHERS, SENDER, _WatchedBucket
from tests.simulation.virtual_time import VirtualClock, VirtualFuture, VirtualTimeLoop, begin_anew
from tests.simulation.world import Setting
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import StoredObject
from tests.support.slots import Slot, slot_with

BUCKET = "bucket"
TTL_SECONDS, NEGATIVE_SECONDS = 20.0, 10.0
SETTLES_SECONDS = 75.0
KEYS_OF_SLOT = 5
CHUNK = 64 * 1024

ACTIONS: Mapping[str, int] = {
    "read": 40,
    "rush": 4,
    "abandon": 1,
    "change": 5,
    "delete": 2,
    "put": 4,
    "link": 8,
    "cut_node": 4,
    "heal": 4,
    "kill": 2,
    "stop": 2,
    "busy": 2,
    "leave": 1,
    "join": 2,
    "members": 1,
    "evict": 10,
    "close_disk": 1,
    "jump_clock": 1,
    "cut_bucket": 1,
    "pass_time": 8,
}
ALWAYS = frozenset({"read", "heal", "pass_time"})

SLOTS: Mapping[str, tuple[str, str]] = {
    "strict": ("read-only", "strict"),
    "strict-rw": ("read-write", "strict"),
    "ttl": ("read-only", "ttl"),
    "ttl-rw": ("read-write", "ttl"),
    "immutable": ("read-only", "immutable"),
}


class ClusterWorld:
    """A history as its setting says."""

    def __init__(self, setting: Setting, directory: Path, loop: VirtualTimeLoop) -> None:
        self._setting = setting
        self.seed = setting.seed
        self.dice = Random(f"{setting.seed} cluster")
        self.clock = VirtualClock(loop)
        self.judge = ClusterJudge(frozenset(setting.only))
        self.said: list[str] = []
        self.steps = 0
        self.inner = MemoryOrigin(self.clock)
        bucket = _WatchedBucket(BUCKET, self.clock.now())
        bucket.on_change, bucket.made = self._changed, lambda stored: stored
        self.inner.buckets[BUCKET] = bucket
        self.wires = Wires(Random(self.dice.getrandbits(32)), self.judge.violated, self._may_tell, self.clock.monotonic)
        only = setting.consistency
        self.slots = {name: self._slot(name, *kind) for name, kind in SLOTS.items() if only in (None, kind[1])}
        self.block_bytes = self.dice.choice((CHUNK, 2 * CHUNK, 8 * CHUNK))
        self.addresses = [f"10.0.0.{number}:9002" for number in range(1, self.dice.randint(2, 4) + 1)]
        self._later = self.addresses[2:][-1:] if self.dice.random() < 0.5 else []
        """Who joins while all is going on."""

        self.nodes = {one: self._node(one, directory / one, loop) for one in self.addresses}
        self._loop = loop
        self._requests: set[asyncio.Task[None]] = set()
        self._waking: set[asyncio.Task[None]] = set()
        self._written: dict[tuple[str, str], float] = {}

    def _slot(self, name: str, mode: str, consistency: str) -> Slot:
        copies = self.dice.choice(("none", "none", "idle", "all"))
        of = Slot(name, Prefix.parse(f"s3://{BUCKET}/{name}/"), mode, consistency, TTL_SECONDS, NEGATIVE_SECONDS)
        of.__dict__["copies"] = copies
        return of

    def _may_tell(self, path: str) -> bool:
        slot = self.slots[path.removeprefix(f"/{BUCKET}/").partition("/")[0]]
        return slot.mode == "read-only" and slot.consistency != "strict"

    def _node(self, address: str, directory: Path, loop: VirtualTimeLoop) -> ClusterNode:
        clock = NodeClock(loop, self.dice.choice((0.0, 0.0, 5.0, -20.0)), self.dice.random() * 1e6)
        dice = Random(self.dice.getrandbits(32))
        times = self.dice.choice((1.0, 1.0, 0.5, 2.0))
        slots = [
            slot_with(
                one,
                metadata_ttl_seconds=times * one.metadata_ttl_seconds,
                negative_ttl_seconds=times * one.negative_ttl_seconds,
            )
            for one in self.slots.values()
        ]
        return ClusterNode(
            address, directory, Slots(slots), clock, self.wires, self.inner, dice, self._bucket_answered,
            [one for one in self.addresses if one not in self._later], self.block_bytes,
        )  # fmt: skip

    def say(self, text: str) -> None:
        self.said.append(f"{self.clock.monotonic():10.3f} {text}")

    # What the bucket tells

    def _changed(self, key: str, _: StoredObject | None, after: StoredObject | None) -> None:
        data = None if after is None else after.content.read(0, after.size_bytes)
        self.judge.made[key].append(Made(self.clock.monotonic(), data, SENDER.get() or OTHERS))

    def _bucket_answered(
        self, node: ClusterNode, request: OriginRequest, response: MemoryResponse, begun: float
    ) -> None:
        key, now = request.key or "", self.clock.monotonic()
        slot = node.slots.find(BUCKET, key)
        is_question = "if-match" not in request.headers and request.method in ("GET", "HEAD")
        if is_question:
            if not self._may_tell(f"/{BUCKET}/{key}"):
                return  # the first bytes come with the answer about the object
            size_bytes = len(self.judge.made[key][-1].data or b"")
            first, _ = first_and_last(request.headers.get("range")) or (0, None)
            if node.alive() and node.has_directory and first < size_bytes:  # else it is asked each time
                seconds = min(one.slots.find(BUCKET, key).metadata_ttl_seconds for one in self.nodes.values())
                self.judge.bucket_told(
                    node.address, key, begun, now, math.inf if slot.consistency == "immutable" else seconds
                )
        if request.method != "GET" or response.status not in (200, 206):
            return
        told = response.headers.get("content-range")
        sent = parse_content_range(told)[0] if told else ByteRange(0, int(response.headers["content-length"]) - 1)
        self.said.append(f"{now:10.3f}     the bucket sends {node.address} {key} {sent}")
        self.judge.bucket_sent(key, response.headers["etag"], sent, now)

    # A history

    async def run(self) -> None:
        for name in self.slots:
            for number in range(KEYS_OF_SLOT):
                if self.dice.random() < 0.8:
                    self._write(f"{name}/k{number}")
        seconds = self.dice.choice((0.0, 5000.0, 5000.0))
        for node in self.nodes.values():
            if node.address not in self._later:
                await node.start(seconds)
        self._trouble()
        await asyncio.sleep(10.0)
        often = self._setting.often
        names = list(ACTIONS)
        weights = [self._often(one) if often is None else often.get(one, 0.0) for one in names]
        for number in range(1, self._setting.steps + 1):
            self.steps = number
            [name] = self.dice.choices(names, weights)
            self.say(name)
            await getattr(self, f"_do_{name}")()
            await asyncio.sleep(self.dice.random() ** 4 * 2.0)
            self._raise()
        await self._end()

    def _often(self, name: str) -> float:
        dice = Random(f"{self._setting.seed} {name}")
        return ACTIONS[name] * (1.0 if name in ALWAYS else dice.choice((0.0, 0.3, 1.0, 3.0)))

    def _raise(self) -> None:
        if self.judge.violations:
            raise self.judge.violations[0]

    async def _end(self) -> None:
        self.say("end")
        await self._do_heal(everything=True)
        if self._requests:
            await asyncio.wait(self._requests, timeout=SETTLES_SECONDS)
        if self._requests:
            self.judge.violated("nobody waits for long", "a request never ends")
        self._raise()
        await asyncio.sleep(SETTLES_SECONDS)
        names = [f"{name}/k{number}" for name in self.slots for number in range(KEYS_OF_SLOT)]
        for node, key in itertools.product(self._alive(), names):
            await self._read(node, "GET", key, None, None)
        self._raise()
        await asyncio.sleep(SETTLES_SECONDS)
        for node in self._alive():
            if found := node.held():
                self.judge.violated("nothing is held in quiet", f"{node.address}: {'; '.join(found)}")
            if left := node.names_of_tasks() - REST:
                self.judge.violated("nothing is held in quiet", f"{node.address} still does {', '.join(sorted(left))}")
        self._raise()

    def _alive(self) -> list[ClusterNode]:
        return [one for one in self.nodes.values() if one.alive()]

    def _trouble(self, *nodes: ClusterNode) -> None:
        """It lasts until everything is sound again, and CALM_SECONDS more."""
        now = self.clock.monotonic()
        for node in nodes:
            node.troubled_at = now
        until = max(now, *(node.busy_until for node in self._nodes()))
        self.judge.trouble(until + CALM_SECONDS if self._is_sound() else math.inf)

    def _moved(self, *, are_known: bool) -> None:
        """The members have changed. Nothing is lost where all is well, and the members before are known as such."""
        is_first = math.isinf(self.judge.period_ends_at) and math.isfinite(self.judge.calm_at)
        if not is_first or not self._is_sound() or not are_known:
            self._trouble()
        else:
            self.wires.seen["nodes come and go in quiet"] += 1
            self.judge.moved(self.clock.monotonic() + CALM_SECONDS)

    def _are_old(self) -> bool:
        return all(one.alive() and one.member_for_seconds() > SETTLED_SECONDS for one in self._nodes())

    def _nodes(self) -> list[ClusterNode]:
        """Those that have been started."""
        return [one for one in self.nodes.values() if one.address not in self._later]

    def _is_sound(self) -> bool:
        nodes = self._nodes()
        is_sound = all(link.kind == "sound" for link in self.wires.links.values())
        is_sound &= all(one.alive() and one.clock.runs.is_set() and one.has_directory for one in nodes)
        is_sound &= not any(one.bucket.is_cut for one in nodes)
        is_sound &= len({tuple(sorted(one.listed)) for one in nodes}) == 1
        return is_sound and all(abs(one.clock.skew_seconds) < 25 for one in nodes)

    def _some(self) -> ClusterNode:
        return self.dice.choice(self._nodes())

    def _key(self, slots: tuple[str, ...] = tuple(SLOTS)) -> str:
        names = [one for one in slots if one in self.slots]
        return f"{self.dice.choice(names)}/k{self.dice.randrange(KEYS_OF_SLOT)}"

    # Clients

    async def _do_read(self) -> None:
        self._begin_read(self._some(), self._key())

    async def _do_rush(self) -> None:
        key = self._key()
        for node in self._nodes() * 2:
            self._begin_read(node, key)

    async def _do_abandon(self) -> None:
        """A client leaves before its answer comes."""
        if self._requests:
            self.dice.choice(sorted(self._requests, key=hash)).cancel()
            self._trouble()

    def _begin_read(self, node: ClusterNode, key: str) -> None:
        first = last = None
        if self.dice.random() < 0.4:
            first = self.dice.choice((0, self.dice.randrange(CHUNK), self.dice.randrange(8 * CHUNK)))
            last = self.dice.choice((None, first, first + self.dice.randrange(4 * CHUNK)))
        method = "HEAD" if self.dice.random() < 0.2 else "GET"
        if node.alive():
            self._begin(self._read(node, method, key, first, last))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _read(self, node: ClusterNode, method: str, key: str, first: int | None, last: int | None) -> None:
        headers = {} if first is None else {"range": f"bytes={first}-{'' if last is None else last}"}
        begun, app = self.clock.monotonic(), node.app
        own = self._written.get((node.address, key), -float("inf"))
        asked = Asked(node.address, method, key, node.slots.find(BUCKET, key), first, last, begun, own)
        answer = await node.request(method, f"/{BUCKET}/{key}", headers)
        if answer is None or node.app is not app:
            return
        is_excused = node.troubled_at >= begun - 2.0 or node.bucket.is_cut or not node.clock.runs.is_set()
        self.judge.judge(asked, answer, self.clock.monotonic(), is_excused=is_excused)

    async def _do_put(self) -> None:
        node, key = self._some(), self._key(("strict-rw", "ttl-rw"))
        if node.alive():
            self._begin(self._put(node, key, self._data()))

    async def _put(self, node: ClusterNode, key: str, data: bytes) -> None:
        self.say(f"    {key} through {node.address}")
        answer = await node.request("PUT", f"/{BUCKET}/{key}", {}, data)
        if answer is not None and answer.status == 200:
            [*_, reached] = [one.at for one in self.judge.made[key] if one.data == data]
            before = self._written.get((node.address, key), reached)
            self._written[node.address, key] = max(before, reached)

    # Others

    def _data(self) -> bytes:
        size = self.dice.choice((0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, self.dice.randrange(1, 20 * CHUNK)))
        return self.dice.randbytes(size)

    def _write(self, key: str) -> None:
        self.inner.put(BUCKET, key, self._data())

    async def _do_change(self) -> None:
        self._write(self._key(("strict", "strict-rw", "ttl", "ttl-rw")))

    async def _do_delete(self) -> None:
        self.inner.buckets[BUCKET].remove(self._key(("strict", "strict-rw", "ttl", "ttl-rw")))

    # What goes wrong

    async def _do_link(self) -> None:
        pairs = list(itertools.permutations(self.addresses, 2))
        for way in self.dice.sample(pairs, self.dice.randint(1, len(pairs))):
            kind = self.dice.choice(KINDS)
            self.wires.link(*way).become(kind)
            self.say(f"    {' to '.join(way)} {kind}")
        self._trouble()
        await self._provoke()

    async def _do_cut_node(self) -> None:
        node, kind = self._some(), self.dice.choice(KINDS)
        for other in self.addresses:
            if other != node.address:
                self.wires.link(other, node.address).become(kind)
        self.say(f"    {node.address} {kind}")
        self._trouble()
        await self._provoke()

    async def _provoke(self) -> None:
        """Have nodes ask each other."""
        for key in dict.fromkeys(self._key() for _ in range(3)):
            for node in self._alive():
                await node.evict(ObjectKey(BUCKET, key))
                self._begin_read(node, key)

    async def _do_heal(self, *, everything: bool = False) -> None:
        for link in self.wires.links.values():
            if everything or self.dice.random() < 0.7:
                link.become("sound")
        for node in self._nodes():
            if everything or self.dice.random() < 0.7:
                node.clock.runs.set()
                node.busy_until = -1.0
                node.bucket.is_cut = False
                node.clock.skew_seconds = self.dice.choice((0.0, 5.0, -5.0))
                node.listed = [one.address for one in self._nodes()]
                if node.alive() and not node.has_directory:
                    await node.kill()
                if not node.alive():
                    node.has_directory = True
                    await node.start()
                node.troubled_at = self.clock.monotonic()
        self._trouble()

    async def _do_kill(self) -> None:
        node = self._some()
        if node.alive():
            self.say(f"    {node.address}")
            await node.kill()
            if self.dice.random() < 0.5:
                await node.start()
            self._trouble(node)

    async def _do_stop(self) -> None:
        node = self._some()
        seconds = self.dice.choice((0.5, 3.0, 20.0, 90.0))
        self.say(f"    {node.address} for {seconds} s")
        node.clock.runs.clear()
        self._trouble(node)
        waking = asyncio.create_task(self._wake(node, seconds))
        self._waking.add(waking)
        waking.add_done_callback(self._waking.discard)

    async def _wake(self, node: ClusterNode, seconds: float) -> None:
        await asyncio.sleep(seconds)
        node.clock.runs.set()
        self._trouble(node)

    async def _do_leave(self) -> None:
        """All are told that a node is no member, or is one again."""
        gone, were_old = self._some().address, self._are_old()
        self.say(f"    {gone}")
        for node in self._nodes():
            node.listed = [one.address for one in self._nodes() if one.address != gone]
        self._moved(are_known=were_old)

    async def _do_join(self) -> None:
        """A node comes that was never there."""
        were_old, [*later] = self._are_old(), self._later
        self._later = []
        for address in later:
            self.say(f"    {address}")
            await self.nodes[address].start()
            for node in self.nodes.values():
                node.listed = list(self.addresses)
            self._moved(are_known=were_old)

    async def _do_busy(self) -> None:
        """A node asks all others to come again: for so short that they do, or for longer."""
        node, seconds = self._some(), self.dice.choice((0.5, 3.0, 5.0, 60.0))
        self.say(f"    {node.address} for {seconds} s")
        node.busy_until = self.clock.monotonic() + seconds
        if seconds > BUSY_SECONDS_MAX:
            self._trouble()
            await self._provoke()

    async def _do_members(self) -> None:
        """Some are told other members than others."""
        node = self._some()
        addresses = [one.address for one in self._nodes()]
        node.listed = sorted(self.dice.sample(addresses, self.dice.randint(1, len(addresses))))
        self.say(f"    {node.address} knows {node.listed}")
        self._trouble()

    async def _do_evict(self) -> None:
        key, nodes = self._key(), self._alive()
        for node in nodes if self.dice.random() < 0.5 else nodes[:1]:
            self.say(f"    {key} at {node.address}")
            await node.evict(ObjectKey(BUCKET, key))
            self._trouble()

    async def _do_close_disk(self) -> None:
        node = self._some()
        if node.alive() and node.has_directory:
            self.say(f"    {node.address}")
            await node.kill()
            node.has_directory = False
            await node.start()
            self._trouble(node)

    async def _do_jump_clock(self) -> None:
        node = self._some()
        node.clock.skew_seconds += self.dice.choice((-3600.0, -70.0, -20.0, 20.0, 70.0, 3600.0))
        self._trouble()

    async def _do_cut_bucket(self) -> None:
        node = self._some()
        node.bucket.is_cut = True
        self.say(f"    {node.address}")
        self._trouble(node)

    async def _do_pass_time(self) -> None:
        await asyncio.sleep(self.dice.choice((0.1, 1.0, 5.0, 30.0, 60.0, 60.0, 700.0)))


REST = frozenset({"block cache maintenance", "heartbeat", "members of the cluster", "hellos"})
"""What a node does when nobody asks."""


def play_cluster(setting: Setting) -> ClusterWorld:
    """One history to its end; its world, whose judge says what was violated."""
    loop = VirtualTimeLoop()
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if Path("/dev/shm").exists() else None))
    try:
        world = ClusterWorld(setting, directory, loop)
        install(loop)
        with ExitStack() as stack:
            _virtual(stack, Random(setting.seed))
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(world.run())
            except Violation as violation:
                if violation not in world.judge.violations:
                    world.judge.violations.append(violation)
            finally:
                loop.run_until_complete(_end(world))
        return world
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        shutil.rmtree(directory, ignore_errors=True)


async def _end(world: ClusterWorld) -> None:
    for node in world.nodes.values():
        if node.alive():
            await node.kill()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(1.0)


def _virtual(stack: ExitStack, dice: Random) -> None:
    """Threads are turns of the loop, and dice and secrets are as the seed says."""
    begin_anew(dice)
    replaced: dict[Any, Any] = {ThreadPoolExecutor: NodeThreads, Future: VirtualFuture}
    replaced[store.DiskThread] = VirtualDiskThread
    numbers = SimpleNamespace(token_hex=lambda count=16: dice.randbytes(count).hex(), token_bytes=dice.randbytes)
    replaced[random], replaced[secrets] = dice, numbers
    for name, module in sorted(sys.modules.items()):
        if name.startswith(SEEN_FROM):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, (type, ModuleType)) and value in replaced:
                    stack.enter_context(mock.patch.object(module, attribute, replaced[value]))
    stack.enter_context(mock.patch.object(receiving, "_shared_threads", BodyThreads))


SEEN_FROM = ("gateway.blocks", "gateway.metadata", "gateway.cluster", "gateway.origin.peer_protocol")
