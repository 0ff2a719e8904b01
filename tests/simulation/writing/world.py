"""One history of nodes that write: their clients, and everything that goes wrong between them, as the dice say."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import math
import random
import re
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock
from uuid import UUID

from gateway.cluster import redis_link
from gateway.edge import receiving
from gateway.metadata import store
from gateway.operations.writeback import uploads
from gateway.origin.stores import store as stores
from gateway.policy.slots import Prefix
from gateway.s3.headers import md5s_etag
from gateway.writeback import bounds, pending_key_filter
from gateway.writeback.admin import checkpoint_retention, checkpoints, monitor
from gateway.writeback.journal import writes
from tests.simulation.clients import PART_BYTES
from tests.simulation.cluster.node import NodeClock
from tests.simulation.cluster.wires import Kind, Wires
from tests.simulation.dialects import DIALECTS
from tests.simulation.disk import SimulatedDisk
from tests.simulation.histories import Value
from tests.simulation.invariants import Violation
from tests.simulation.node import BACKGROUND, NOTHING_KEPT, BodyThreads, Kept
from tests.simulation.origins import Change, SimulatedOrigin, Trouble
from tests.simulation.processes import Process, simulated
from tests.simulation.traffic import LARGE_BYTES, Traffic
from tests.simulation.virtual_time import VirtualClock, VirtualFuture, VirtualTimeLoop, begin_anew
from tests.simulation.world import Setting
from tests.simulation.writing.judge import WAITS_SECONDS_MAX, Try, WritingJudge
from tests.simulation.writing.node import ProcessDiskThread, ProcessThreads, WritingNode
from tests.simulation.writing.servers import Servers, connected
from tests.support.asgi import Answer
from tests.support.memory_origin import store as memory_store
from tests.support.slots import Slot

BUCKET = "bucket"
NODES = 3
CLIENTS_MAX = 10
SETTLES_SECONDS = 150.0
CALM_SECONDS = 60.0
"""So long after the last trouble everybody believes the registry again, and nobody is left out."""

ACTIONS: Mapping[str, int] = {
    "put": 14,
    "race": 4,
    "delete": 4,
    "read": 16,
    "look_around": 4,
    "list": 3,
    "upload": 3,
    "rename": 2,
    "create": 2,
    "delete_many": 2,
    "save": 2,
    "others_write": 2,
    "others_delete": 1,
    "link": 3,
    "cut_node": 2,
    "cut_redis": 3,
    "cut_bucket": 2,
    "slow_disk": 2,
    "trouble": 1,
    "heal": 6,
    "kill_worker": 2,
    "kill_background": 2,
    "kill_node": 3,
    "restart_redis": 1,
    "fail_over": 2,
    "freeze_redis": 1,
    "jump_clock": 1,
    "pass_time": 6,
}
ALWAYS = frozenset({"put", "read", "heal", "pass_time"})
KINDS: tuple[Kind, ...] = ("slow", "hangs", "deaf", "resets", "refuses", "replays", "repeats")
"""What harms bytes is not among them: answers about pending objects carry no checksums."""

SLOTS = (
    Slot("back", Prefix.parse(f"s3://{BUCKET}/back/"), consistency="ttl", write="back", buffer_bytes=1 << 28),
    Slot("strict", Prefix.parse(f"s3://{BUCKET}/strict/"), consistency="strict", write="back", buffer_bytes=1 << 28),
    Slot("through", Prefix.parse(f"s3://{BUCKET}/through/"), consistency="ttl", write="through"),
    Slot("fixed", Prefix.parse(f"s3://{BUCKET}/fixed/"), consistency="immutable", write="through"),
)
KEYS_OF_SLOT = 3

_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_LISTED = re.compile(r"<Contents>.*?<Key>([^<]+)</Key>.*?<ETag>([^<]+)</ETag>.*?</Contents>", re.DOTALL)
_DELETED = re.compile(rb"<Deleted>.*?<Key>([^<]+)</Key>.*?</Deleted>", re.DOTALL)


class WritingWorld:
    """A history as its setting says."""

    def __init__(self, setting: Setting, directory: Path, loop: VirtualTimeLoop) -> None:
        self._setting = setting
        self.seed = setting.seed
        self.dice = Random(f"{setting.seed} writing")
        self.clock = VirtualClock(loop)
        self.said: list[str] = []
        self.steps = 0
        self.answered: Counter[str] = Counter()
        """How many answers there were, by what was asked and the status."""

        traffic = Traffic(lambda rule, text: self.judge.violated(rule, text))
        self.origin = SimulatedOrigin(
            DIALECTS["aws"], self.clock, Random(self.dice.getrandbits(32)), self._changed, traffic
        )
        traffic.has_upload = self.origin.has_upload
        self.judge = WritingJudge(self.origin, setting.only)
        self.judge.kept = self.kept
        self.judge.store_of = lambda node: self.nodes[node].store
        self.judge.questions_of = lambda node: self.nodes[node].questions
        self.servers = Servers(self.clock, Random(self.dice.getrandbits(32)))
        self.disk = SimulatedDisk(directory / "nodes")
        self.wires = Wires(Random(self.dice.getrandbits(32)), self.judge.violated, lambda _: True, self.clock.monotonic)
        self.tasks: dict[Process, set[asyncio.Task[Any]]] = {}
        self.doubted_at: dict[str, float] = {}
        """When each node did not believe the registry, or reach the bucket, the last time."""

        self.nodes = {one: self._node(one, loop) for one in (f"10.0.0.{n}:9002" for n in range(1, NODES + 1))}
        self.origin.create_bucket(BUCKET)
        self.values: dict[tuple[str, str], Value] = {}
        """What has an ETag under a key."""

        self._numbers = 0
        self._down: dict[str, float] = {}
        self._clients: set[asyncio.Task[None]] = set()
        self._calm_at = math.inf

    def _node(self, address: str, loop: VirtualTimeLoop) -> WritingNode:
        clock = NodeClock(loop, self.dice.choice((0.0, 0.0, 5.0, -20.0)), self.dice.random() * 1e6)
        node = WritingNode(
            address, self.disk.root / address, self.disk, self.origin, SLOTS, clock,
            Random(self.dice.getrandbits(32)), self.wires, self.dice.choice((1, 1, 2)), self._believes,
        )  # fmt: skip
        node.tasks = self.tasks
        return node

    def _changed(self, bucket: str, change: Change) -> None:
        made = change.after.content.read(0, 24) if change.after is not None else None
        self.say(f"    {change.by}: the bucket has {made!r} under {change.key}")
        self.judge.changed(bucket, change)

    def kept(self) -> Kept:
        found = [one.kept() for one in self.nodes.values() if one.is_up()]
        if not found:
            return NOTHING_KEPT
        return Kept(
            frozenset().union(*(one.pending for one in found)),
            frozenset().union(*(one.conflicts for one in found)),
            sum(one.open_uploads for one in found),
            sum(one.in_doubt for one in found),
            sum(one.perhaps_others for one in found),
            sum(one.files for one in found),
            frozenset().union(*(one.known for one in found)),
            frozenset().union(*(one.local for one in found)),
        )

    def say(self, text: str) -> None:
        self.said.append(f"{self.clock.monotonic():10.3f} {text}")

    # What nodes believe

    def _believes(self, node: WritingNode) -> None:
        if not node.believes():
            self.doubted_at[node.address] = self.clock.monotonic()
        else:
            self._check_belief(node)

    def _check_belief(self, node: WritingNode) -> None:
        run = node.belief().run
        for server in self.servers.all():
            if server.model.run == run:
                self.judge.check_belief(node.address, run, server.model.content)

    # The history

    async def run(self) -> None:
        for node in self.nodes.values():
            await node.boot()
        await asyncio.sleep(15.0)
        for node in self.nodes.values():
            await self._put(node, "back/known", self.value())
        await asyncio.sleep(5.0)
        self._calm_at = self.clock.monotonic()
        often = self._setting.often
        names = list(ACTIONS)
        weights = [self._often(one) if often is None else often.get(one, 0.0) for one in names]
        for number in range(1, self._setting.steps + 1):
            self.steps = number
            [name] = self.dice.choices(names, weights)
            self.say(name)
            await getattr(self, f"_do_{name}")()
            await asyncio.sleep(self.dice.random() ** 4 * 1.0)
            await self._look()
        await self._end()

    def _often(self, name: str) -> float:
        return ACTIONS[name] * (1.0 if name in ALWAYS else self.dice.choice((0.0, 0.3, 1.0, 4.0)))

    async def _look(self) -> None:
        """The supervisors start again who was killed, and nodes come back; what is believed is looked at."""
        now = self.clock.monotonic()
        for address, node in self.nodes.items():
            if address in self._down:
                if now < self._down[address]:
                    continue
                del self._down[address]
                self.say(f"    {address} starts again")
                await node.boot()
            await node.write_tombstone()
            for number in range(node.workers):
                if not node.alive(number):
                    self.say(f"    worker {number} of {address} starts again")
                    await node.start_worker(number)
            if not node.alive(BACKGROUND):
                self.say(f"    the background process of {address} starts again")
                await node.start_background()
            if node.believes():
                self._check_belief(node)
        self._raise()

    def _raise(self) -> None:
        if self.judge.violations:
            raise self.judge.violations[0]

    async def _end(self) -> None:
        """Everything heals, clients end, and time passes."""
        self.say("end")
        await self._do_heal(everything=True)
        deadline = self.clock.monotonic() + 2 * SETTLES_SECONDS
        while self._clients and self.clock.monotonic() < deadline:
            await asyncio.wait(self._clients, timeout=10.0)
            await self._look()
        if self._clients:
            self.judge.violated("nobody waits for long", "a request never ends")
        await self.origin.settle()
        at_rest = self.clock.monotonic() + SETTLES_SECONDS
        while self.clock.monotonic() < at_rest:
            await asyncio.sleep(15.0)
            await self._look()
        keys = [f"{slot.name}/{key}" for slot in SLOTS for key in self._names()]
        for node, key in itertools.product(self.nodes.values(), keys):
            await self._read(node, "HEAD", key)
        for node, slot in itertools.product(self.nodes.values(), SLOTS):
            await self._list(node, slot.name)
        self._raise()
        self.judge.check_end()
        self._raise()
        self._check_registry()
        self._raise()

    def _check_registry(self) -> None:
        kept = self.kept()
        left = {
            key.decode()
            for store, names in self.servers.primary.model.content.pending.items()
            for bucket, key in names
            if (bucket.decode(), key.decode()) not in kept.pending
        }
        if left:
            self.judge.violated("nothing is left", f"in the registry: {sorted(left)}")
        for node in self.nodes.values():
            if not node.believes():
                why = node.beats.problem if node.beats is not None else ""
                self.judge.violated("all is well in quiet", f"{node.address} does not believe the registry: {why}")

    # Nodes, keys, values

    def _up(self) -> list[WritingNode]:
        return [one for one in self.nodes.values() if one.is_up()]

    def _some(self) -> WritingNode | None:
        up = self._up()
        return self.dice.choice(up) if up else None

    def _names(self) -> list[str]:
        return [*(f"k{number}" for number in range(KEYS_OF_SLOT)), "o0"]

    def _slot(self) -> str:
        return self.dice.choice(("back", "back", "strict", "through", "fixed"))

    def _key(self) -> str:
        return f"{self._slot()}/{self.dice.choice(self._names())}"

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def value(self) -> bytes:
        """Never seen before."""
        return b"%d, %d" % (self.number(), self.dice.getrandbits(20))

    def _etag(self, key: str, value: bytes, etag: str | None = None) -> None:
        md5 = hashlib.md5(value, usedforsecurity=False).hexdigest()
        self.values[key, etag or f'"{md5}"'] = value

    # Requests

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        if len(self._clients) > CLIENTS_MAX:
            work.close()
            return

        async def do() -> None:
            try:
                await work
            except Violation as violation:
                self.judge.violations.append(violation)
            except Exception as error:
                self.judge.violations.append(Violation("clients", repr(error)))

        task = asyncio.get_running_loop().create_task(do())
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def ask(
        self, node: WritingNode, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer | None:
        """None: the worker was killed over it, or none is there."""
        alive = [one for one in range(node.workers) if node.alive(one)]
        if not alive:
            return None
        number, begun = self.dice.choice(alive), self.clock.monotonic()
        answer = await node.ask(number, method, f"/{BUCKET}{target}", body, headers)
        now = self.clock.monotonic()
        status = "killed" if answer is None else str(answer.status)
        self.say(f"    {method} {target} at {node.address} → {status}, after {now - begun:.3f} s")
        self.answered[f"{method} {status}"] += 1
        if answer is not None:
            self.judge.answered(f"{method} {target} at {node.address}", answer.status, begun)
        if answer is not None and now - begun > WAITS_SECONDS_MAX:
            self.judge.violated("nobody waits for long", f"{method} {target} at {node.address}: {now - begun:.0f} s")
        is_quiet = begun > self._calm_at + CALM_SECONDS
        if answer is not None and answer.status >= 500 and is_quiet and not self._waits_for_a_person(target, answer):
            said = f"{method} {target} at {node.address}: {answer.status} {answer.body[:300]!r}"
            self.judge.violated("all is well in quiet", said)
        return answer

    def _waits_for_a_person(self, target: str, answer: Answer) -> bool:
        """Whether the key is in conflict, or another one that the answer names."""
        own = target.partition("?")[0].removeprefix("/")
        conflicts = self.kept().conflicts
        return any(key == own or f"s3://{bucket}/{key} ".encode() in answer.body for bucket, key in conflicts)

    def _try(self, node: WritingNode, key: str, value: Value) -> Try:
        one = Try(value, self.clock.monotonic(), node=node.address, is_blind=self._is_blind(node))
        self.judge.of(BUCKET, key).attempts.append(one)
        return one

    def _is_blind(self, node: WritingNode) -> bool:
        return not node.believes() or node.is_cut_from_bucket or self.origin.trouble is not None

    def _ended(self, key: str, one: Try, answer: Answer | None) -> bool:
        one.ended = now = self.clock.monotonic()
        node = self.nodes[one.node]
        one.is_blind |= self._is_blind(node) or self.doubted_at.get(one.node, -1.0) >= one.begun
        if answer is None:
            return False
        is_in_doubt = answer.status == 424 or (answer.status == 409 and one.value is None)  # it may be the conflict
        if 400 <= answer.status < 500 and not is_in_doubt:
            self.judge.of(BUCKET, key).attempts.remove(one)
            return False
        if answer.status >= 300 or b"<Error>" in answer.body or not answer.complete:
            return False
        one.acknowledged, one.ended = True, now
        cache = answer.headers.get("x-forebay-cache")
        one.absorbed = cache == "absorbed" or (cache == "peer" and (BUCKET, key) in node.kept().pending)
        self.judge.answered_write(BUCKET, key, one)
        return True

    async def _put(self, node: WritingNode, key: str, value: bytes, **headers: str) -> bool:
        self._etag(key, value)
        one = self._try(node, key, value)
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return self._ended(key, one, await self.ask(node, "PUT", f"/{key}", value, named))

    async def _delete(self, node: WritingNode, key: str) -> bool:
        one = self._try(node, key, None)
        return self._ended(key, one, await self.ask(node, "DELETE", f"/{key}"))

    async def _read(self, node: WritingNode, method: str, key: str) -> None:
        begun = self.clock.monotonic()
        answer = await self.ask(node, method, f"/{key}")
        if answer is None or answer.status not in (200, 404) or not answer.complete:
            return
        if answer.status == 404:
            value: Value = None
        else:
            etag = answer.headers.get("etag", "")
            if (key, etag) not in self.values:
                self.judge.violated("answered writes are read", f"{method} {key} at {node.address}: {etag}")
                return
            value = self.values[key, etag]
            if method == "GET" and answer.body != value:
                self.judge.violated("answered writes are read", f"GET {key} at {node.address}: other bytes than {etag}")
        self.judge.shown(BUCKET, key, value, node.address, begun, method)

    async def _list(self, node: WritingNode, slot: str) -> None:
        begun = self.clock.monotonic()
        answer = await self.ask(node, "GET", f"?list-type=2&prefix={slot}%2F")
        if answer is None or answer.status != 200 or not answer.complete:
            return
        found = {key: etag.replace("&quot;", '"') for key, etag in _LISTED.findall(answer.body.decode())}
        for name in self._names():
            key = f"{slot}/{name}"
            value = self.values.get((key, found[key])) if key in found else None
            if key in found and value is None:
                self.judge.violated("answered writes are read", f"LIST at {node.address}: {key} is {found[key]}")
            else:
                self.judge.shown(BUCKET, key, value, node.address, begun, "LIST")

    # What clients do

    async def _do_put(self) -> None:
        if node := self._some():
            self._begin(self._put(node, self._key(), self.value()))

    async def _do_race(self) -> None:
        """Several nodes write one key, and others read it."""
        key = self._key()
        for node in self._up():
            kind = self.dice.random()
            if kind < 0.6:
                self._begin(self._put(node, key, self.value()))
            elif kind < 0.7:
                self._begin(self._delete(node, key))
            await asyncio.sleep(self.dice.random() ** 3 * 0.3)
            for reader in self._up():
                self._begin(self._read(reader, self.dice.choice(("GET", "HEAD")), key))

    async def _do_delete(self) -> None:
        if node := self._some():
            self._begin(self._delete(node, self._key()))

    async def _do_read(self) -> None:
        if node := self._some():
            self._begin(self._read(node, self.dice.choice(("GET", "HEAD")), self._key()))

    async def _do_look_around(self) -> None:
        """A reader goes from node to node."""
        self._begin(self._around(self._key()))

    async def _around(self, key: str) -> None:
        for node in self.dice.sample(list(self.nodes.values()), NODES):
            await self._read(node, "HEAD", key)

    async def _do_list(self) -> None:
        if node := self._some():
            self._begin(self._list(node, self._slot()))

    async def _do_upload(self) -> None:
        self._begin(self._upload(self._key()))

    async def _upload(self, key: str) -> None:
        """Each request of it goes to another node."""
        node = self._some()
        created = await self.ask(node, "POST", f"/{key}?uploads") if node else None
        found = _UPLOAD_ID.search(created.body) if created is not None and created.status == 200 else None
        if found is None:
            return
        upload_id, parts = found[1].decode(), list[tuple[str, bytes]]()
        for number in range(1, self.dice.randint(1, 3) + 1):
            body = self.value().ljust(PART_BYTES)
            node = self._some()
            target = f"/{key}?partNumber={number}&uploadId={upload_id}"
            stored = await self.ask(node, "PUT", target, body) if node else None
            if stored is None or stored.status != 200:
                return
            parts.append((stored.headers["etag"], body))
        if node := self._some():
            await self._complete(node, key, upload_id, parts)

    async def _complete(self, node: WritingNode, key: str, upload_id: str, parts: Sequence[tuple[str, bytes]]) -> None:
        """The node that has the upload makes the object, whichever is asked."""
        listed = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{e}</ETag></Part>" for n, (e, _) in enumerate(parts, 1)
        )
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        value = b"".join(body for _, body in parts)
        self._etag(key, value, md5s_etag([bytes.fromhex(etag.strip('"')) for etag, _ in parts]))
        store = upload_id.partition("-")[0]
        one = self._try(next((one for one in self.nodes.values() if one.store == store), node), key, value)
        self._ended(key, one, await self.ask(node, "POST", f"/{key}?uploadId={upload_id}", document))

    async def _do_rename(self) -> None:
        """As a mounted file system does, with each step through another node."""
        self._begin(self._rename(self._slot(), self._key()))

    async def _rename(self, slot: str, key: str) -> None:
        passing, value = f"{slot}/passing-{self.number()}", self.value()
        if not (node := self._some()) or not await self._put(node, passing, value) or not (node := self._some()):
            return
        self._etag(key, value)
        one = self._try(node, key, value)
        answer = await self.ask(node, "PUT", f"/{key}", headers={"x-amz-copy-source": f"/{BUCKET}/{passing}"})
        if answer is not None and answer.status == 404:
            self.judge.violated("answered writes are read", f"a copy at {node.address} does not find {passing}")
        if self._ended(key, one, answer) and (node := self._some()):
            await self._delete(node, passing)

    async def _do_create(self) -> None:
        """All nodes make an object under a new name if there is none."""
        key = f"{self._slot()}/new-{self.number()}"
        self._begin(self._create(key))

    async def _create(self, key: str) -> None:
        puts = [self._put(node, key, self.value(), If_None_Match="*") for node in self._up()]
        done = await asyncio.gather(*puts)
        if sum(done) > 1:
            self.judge.violated("created once", f"{key} was created by {sum(done)} clients")

    async def _do_delete_many(self) -> None:
        slot = self._slot()
        names = self.dice.sample(self._names(), 2)
        if node := self._some():
            self._begin(self._delete_many(node, [f"{slot}/{name}" for name in names]))

    async def _delete_many(self, node: WritingNode, keys: list[str]) -> None:
        named = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
        body = f"<Delete>{named}</Delete>".encode()
        md5 = hashlib.md5(body, usedforsecurity=False).digest()
        tries = {key: self._try(node, key, None) for key in keys}
        headers = {"content-md5": base64.b64encode(md5).decode()}
        answer = await self.ask(node, "POST", "?delete", body, headers)
        found = {one.decode() for one in _DELETED.findall(answer.body)} if answer and answer.status == 200 else set()
        for key, one in tries.items():
            is_done = key in found
            self._ended(key, one, answer if is_done else None)

    async def _do_save(self) -> None:
        """A checkpoint, whose ranks write through one node or several."""
        self._begin(self._save(f"{self.dice.choice(('back', 'strict'))}/step-{self.number()}"))

    async def _save(self, directory: str) -> None:
        own, is_alone = self._some(), self.dice.random() < 0.6
        for rank in range(self.dice.randint(1, 3)):
            node = own if is_alone else self._some()
            if node is None or not await self._put(node, f"{directory}/__{rank}_0.distcp", self.value()):
                return
        if node := own if is_alone else self._some():
            await self._put(node, f"{directory}/.metadata", self.value())

    # What others do

    async def _do_others_write(self) -> None:
        key, value = f"{self._slot()}/o0", b"theirs, " + self.value()
        self._etag(key, value)
        self.origin.write_as_others(BUCKET, key, value)
        self.say(f"    others write {key}")

    async def _do_others_delete(self) -> None:
        key = f"{self._slot()}/o0"
        if self.origin.current(BUCKET, key) is not None:
            self.origin.write_as_others(BUCKET, key, None)
            self.say(f"    others delete {key}")

    # What goes wrong

    def _trouble(self) -> None:
        self._calm_at = math.inf

    async def _do_link(self) -> None:
        self._trouble()
        for way in self.dice.sample(list(itertools.permutations(self.nodes, 2)), self.dice.randint(1, 3)):
            kind = self.dice.choice(KINDS)
            self.wires.link(*way).become(kind)
            self.say(f"    {' to '.join(way)} {kind}")

    async def _do_cut_node(self) -> None:
        """From the others, or from everything."""
        self._trouble()
        node, kind = self.dice.choice(list(self.nodes)), self.dice.choice(KINDS)
        for other in self.nodes:
            if other != node:
                self.wires.link(other, node).become(kind)
                self.wires.link(node, other).become(kind)
        if self.dice.random() < 0.3:
            self.servers.cut.add(node)
        self.say(f"    {node} {kind}{', and Redis' * (node in self.servers.cut)}")

    async def _do_cut_redis(self) -> None:
        self._trouble()
        self.servers.cut |= set(self.dice.sample(list(self.nodes), self.dice.choice((1, 1, 2, 3))))
        self.say(f"    {', '.join(sorted(self.servers.cut))}")

    async def _do_cut_bucket(self) -> None:
        self._trouble()
        node = self.dice.choice(list(self.nodes.values()))
        node.is_cut_from_bucket = True
        self.say(f"    {node.address}")

    async def _do_slow_disk(self) -> None:
        """Between claims and commits of a node much may happen."""
        self._trouble()
        node, seconds = self.dice.choice(list(self.nodes.values())), self.dice.choice((0.5, 3.0, 8.0))
        node.commit_seconds_max = seconds
        self.say(f"    {node.address}, {seconds} s")

    async def _do_trouble(self) -> None:
        self._trouble()
        kind = self.dice.choice(self.origin.dialect.outages)
        self.origin.trouble = Trouble(kind, frozenset({BUCKET}), self.clock.monotonic())
        self.say(f"    {kind}")

    async def _do_heal(self, *, everything: bool = False) -> None:
        def heals() -> bool:
            return everything or self.dice.random() < 0.7

        self.doubted_at |= {node.address: self.clock.monotonic() for node in self._up() if self._is_blind(node)}
        for link in self.wires.links.values():
            if heals():
                link.become("sound")
        if heals():
            self.servers.heal()
        if heals():
            self.origin.trouble = None
        for node in self.nodes.values():
            node.spare()
            if heals():
                node.is_cut_from_bucket, node.commit_seconds_max = False, 0.0
                node.clock.skew_seconds = self.dice.choice((0.0, 5.0, -5.0))
                self._down.pop(node.address, None) if node.is_up() else self._down.update({node.address: 0.0})
        await self._look()
        is_sound = all(one.kind == "sound" for one in self.wires.links.values()) and self.origin.trouble is None
        is_sound &= not self.servers.cut and self.servers.left is None and self.servers.primary.thaws.is_set()
        nodes = self.nodes.values()
        is_sound &= all(one.is_up() and not (one.is_cut_from_bucket or one.commit_seconds_max) for one in nodes)
        is_sound &= all(abs(one.clock.skew_seconds) < 25 for one in nodes)
        self._calm_at = self.clock.monotonic() if is_sound else math.inf

    async def _do_kill_worker(self) -> None:
        if node := self._some():
            self._trouble()
            number = self.dice.randrange(node.workers)
            if node.alive(number):
                node.dies_in(number, self.dice.randrange(40))

    async def _do_kill_background(self) -> None:
        if (node := self._some()) and node.alive(BACKGROUND):
            self._trouble()
            node.dies_in(BACKGROUND, self.dice.randrange(60))

    async def _do_kill_node(self) -> None:
        """It may come back soon, or much later."""
        if node := self._some():
            self._trouble()
            seconds = self.dice.choice((0.0, 0.0, 3.0, 10.0, 60.0, 200.0))
            self.say(f"    {node.address} for {seconds} s")
            await node.kill_node()
            self._down[node.address] = self.clock.monotonic() + seconds

    async def _do_restart_redis(self) -> None:
        self._trouble()
        how = self.dice.choice(("empty", "emptied", "whole", "behind"))
        if how == "behind":
            await self._lag()
        self.say(f"    {how}")
        self.servers.restart(how)

    async def _do_fail_over(self) -> None:
        """Some of the nodes may reach the primary of before for a while."""
        self._trouble()
        await self._lag()
        left = [one for one in self.nodes if self.dice.random() < 0.5] if self.dice.random() < 0.4 else []
        self.say(f"    {', '.join(left)} stay")
        self.servers.fail_over(frozenset(left))

    async def _lag(self) -> None:
        """What is written from here on, the replica has not."""
        self.servers.replicate()
        await asyncio.sleep(self.dice.choice((0.0, 0.01, 0.3, 1.0, 3.0)))

    async def _do_freeze_redis(self) -> None:
        self._trouble()
        self.servers.primary.thaws.clear()
        seconds = self.dice.choice((0.5, 1.5, 5.0, 20.0))
        self.say(f"    for {seconds} s")
        server = self.servers.primary
        asyncio.get_running_loop().call_later(seconds, server.thaws.set)

    async def _do_jump_clock(self) -> None:
        self._trouble()
        seconds = self.dice.choice((-3600.0, -70.0, -20.0, 20.0, 70.0, 3600.0))
        if self.dice.random() < 0.3:
            self.servers.primary.model.skew_ms += int(1000 * seconds)
        else:
            self.dice.choice(list(self.nodes.values())).clock.skew_seconds += seconds

    async def _do_pass_time(self) -> None:
        left = self.dice.choice((0.1, 0.1, 1.0, 1.0, 5.0, 5.0, 20.0, 60.0, 100.0))
        while left > 0.0:
            await asyncio.sleep(min(left, 10.0))
            left -= 10.0
            await self._look()


def play_writing(setting: Setting) -> WritingWorld:
    """One history to its end; its world, whose judge says what was violated."""
    loop = VirtualTimeLoop()
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if Path("/dev/shm").exists() else None))
    try:
        world = WritingWorld(setting, directory, loop)
        next(iter(world.nodes.values())).install(loop)
        with ExitStack() as stack:
            stack.enter_context(simulated(Random(setting.seed), world.disk))
            _virtual(stack, Random(setting.seed), world.servers)
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


async def _end(world: WritingWorld) -> None:
    for node in world.nodes.values():
        await node.kill_node()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(1.0)


def _virtual(stack: ExitStack, dice: Random, servers: Servers) -> None:
    """Threads are turns of the loop, dice and secrets are as the seed says, and Redis is what is simulated."""
    begin_anew(dice)
    replaced: dict[Any, Any] = {ThreadPoolExecutor: ProcessThreads, Future: VirtualFuture}
    replaced[store.DiskThread] = ProcessDiskThread
    numbers = SimpleNamespace(token_hex=lambda count=16: dice.randbytes(count).hex(), token_bytes=dice.randbytes)
    replaced[random], replaced[secrets] = dice, numbers

    def replace(module: Any, name: str, made: Any) -> None:
        stack.enter_context(mock.patch.object(module, name, made))

    for name, module in sorted(sys.modules.items()):
        if name.startswith(SEEN_FROM):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, (type, ModuleType)) and value in replaced:
                    replace(module, attribute, replaced[value])
    replace(redis_link, "connected", lambda place, _: connected(servers, place))
    replace(uploads, "PART_SIZE_BYTES_MIN", PART_BYTES)
    replace(stores, "PART_SIZE_BYTES_MIN", PART_BYTES)
    replace(writes, "SMALL_BYTES_MAX", LARGE_BYTES)
    ids = Random(dice.getrandbits(32))
    replace(memory_store, "uuid", SimpleNamespace(uuid4=lambda: UUID(int=ids.getrandbits(128))))
    replace(pending_key_filter, "QUIET_SECONDS", 1.0)
    replace(bounds, "EXPOSURE_SECONDS", 10.0)
    replace(monitor, "LOOK_SECONDS", 60.0)
    replace(checkpoints, "LOOK_SECONDS", 60.0)
    replace(checkpoint_retention, "LOOK_SECONDS", 10.0)
    replace(receiving, "_shared_threads", BodyThreads)


SEEN_FROM = ("gateway.metadata", "gateway.cluster", "gateway.origin.peer_protocol")
