"""One history: clients of a node, others who write to its buckets, and everything that goes wrong, as the dice say."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from gateway.edge import asgi
from gateway.operations.absorbing import completion
from gateway.policy.slots import Prefix, Slot
from gateway.writeback import news
from gateway.writeback.journal.records import State
from tests.simulation.invariants import Attempt, Judge, KeyHistory, Value, Violation
from tests.simulation.node import BACKGROUND, BodyThreads, Node
from tests.simulation.origins import DIALECTS, Change, SimulatedOrigin, Trouble
from tests.simulation.processes import simulated
from tests.simulation.virtual_time import VirtualClock, VirtualTimeLoop
from tests.support.asgi import Answer
from tests.support.memory_origin import multipart

WORKERS = 2
BUCKETS = ("bucket", "other")
SLOTS = (Slot("all", Prefix.parse("s3://"), write="back", buffer_bytes=64 * 1024 * 1024),)
QUIET_SECONDS = 600.0
"""At the end, without faults: by then all is at rest."""

PART_BYTES = 64

_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")

ACTIONS: dict[str, int] = {
    "put": 14,
    "delete": 5,
    "read": 10,
    "upload": 6,
    "abandon": 1,
    "save": 4,
    "conditional": 2,
    "copy": 2,
    "others_write": 4,
    "others_delete": 2,
    "trouble": 3,
    "heal": 4,
    "refuse": 1,
    "kill_worker": 2,
    "kill_background": 2,
    "cut_power": 1,
    "pass_time": 8,
    "forget": 1,
    "burst": 1,
    "strange": 1,
    "large": 1,
}

ALWAYS = frozenset({"put", "heal", "pass_time"})
DAY_SECONDS = 26 * 3600.0
LARGE_PART_BYTES = 300_000


class World:
    """A history of `steps` steps, decided by `seed`."""

    def __init__(
        self,
        seed: int,
        dialect: str,
        directory: Path,
        loop: VirtualTimeLoop,
        only: Iterable[str] = (),
        skew_seconds: float | None = None,
    ) -> None:
        self.seed = seed
        self.dice = Random(f"{seed} {dialect}")
        self.clock = VirtualClock(loop)
        skewed = self.dice.choice((0.0, 0.0, 0.0, 600.0, -600.0))
        self.node_clock = VirtualClock(loop, skewed if skew_seconds is None else skew_seconds)
        self._jump = loop.jump
        self._kills = 0
        self._written_bytes = 0
        self.origin = SimulatedOrigin(DIALECTS[dialect], self.clock, Random(self.dice.getrandbits(32)), self._changed)
        self.judge = Judge(self.origin, only)
        self.judge.conflicts = self._conflicts
        self.node = Node(directory, self.origin, SLOTS, self.node_clock, Random(self.dice.getrandbits(32)))
        self.said: list[str] = []
        self.steps = 0
        self._numbers = 0
        self._busy: set[tuple[str, str]] = set()
        self._clients: set[asyncio.Task[None]] = set()
        self._is_ending = False
        for bucket in BUCKETS:
            self.origin.create_bucket(bucket)

    def _changed(self, bucket: str, change: Change) -> None:
        self.judge.changed(bucket, change)

    def say(self, text: str) -> None:
        self.said.append(f"{self.clock.monotonic():10.3f} {text}")

    async def run(self, steps: int) -> None:
        await self.node.start(WORKERS)
        for bucket in BUCKETS:
            await self._put(bucket, "known", b"known")
        names = list(ACTIONS)
        weights = [self._often(name) for name in names]
        for self.steps in range(1, steps + 1):
            [name] = self.dice.choices(names, weights)
            self.say(name)
            await getattr(self, f"_do_{name}")()
            await asyncio.sleep(self.dice.random() ** 4 * 0.5)
            await self._revive()
            self._look()
            if self.judge.violations:
                raise self.judge.violations[0]
        await self._end()

    def _often(self, name: str) -> float:
        """Each history has much of something and nothing of something else: what all do together hides things."""
        return ACTIONS[name] * (1.0 if name in ALWAYS else self.dice.choice((0.0, 0.3, 1.0, 4.0)))

    def _look(self) -> None:
        now, trouble = self.clock.monotonic(), self.origin.trouble
        for bucket in BUCKETS:
            bad = bucket in self.origin.refused or (trouble is not None and bucket in trouble.buckets)
            self.judge.health(bucket, good=not bad and self.node.alive(BACKGROUND), now=now)
        self.judge.check_liveness(now)

    async def _end(self) -> None:
        """Everything heals, clients end, and time passes."""
        self.say("end")
        self._is_ending = True
        self.origin.trouble = None
        self.origin.refused.clear()
        await self._revive()
        deadline = self.clock.monotonic() + QUIET_SECONDS
        while self._clients and self.clock.monotonic() < deadline:
            await asyncio.wait(self._clients, timeout=10.0)
            await self._revive()
        if self._clients:
            self.judge.violated("requests end", "; ".join(sorted(f"{bucket}/{key}" for bucket, key in self._busy)))
        await self.origin.settle()
        at_rest, tries = self.clock.monotonic() + QUIET_SECONDS / 2, 0
        deadline = at_rest + QUIET_SECONDS / 2
        while self.clock.monotonic() < deadline:
            await asyncio.sleep(10.0)
            if self.clock.monotonic() < at_rest:
                tries = self.origin.tries
            self._look()
            if self.judge.violations:
                raise self.judge.violations[0]
        self.judge.check_end()
        self.judge.check_tries(self.origin.tries - tries)
        self.judge.check_sent(self.origin.sent_bytes, self._written_bytes, self._kills)
        self.judge.check_rest(self._left())
        await self._next_day()
        if self.judge.violations:
            raise self.judge.violations[0]

    async def _next_day(self) -> None:
        """Uploads that nobody has touched for a day are gone."""
        self.node.kill_all()
        await self.node.bury()
        self._jump(DAY_SECONDS)
        await self.node.start(WORKERS)
        await asyncio.sleep(180.0)
        left = self.node.look(lambda book: book.counts()[1])
        self.judge.check_rest({"open uploads": left, "uploads at the origin": self.origin.open_uploads()})

    def _conflicts(self) -> set[tuple[str, str]]:
        waiting = self.node.look(lambda book: list(book.waiting(0, 10_000)))
        return {(one.key.bucket, one.key.key) for one in waiting if one.state is State.CONFLICT}

    def _left(self) -> dict[str, int]:
        """Of what is over: conflicts stay, and uploads that nobody has ended, for a day."""
        waiting = self.node.look(lambda book: list(book.waiting(0, 10_000)))
        conflicts = {(one.key.bucket, one.key.key) for one in waiting if one.state is State.CONFLICT}
        behind = [one for one in waiting if (one.key.bucket, one.key.key) not in conflicts]
        orphans = self.node.look(lambda book: len(book.orphan_ids(100)) + len(book.suspected("", 100)))
        open_uploads = self.node.look(lambda book: book.counts()[1])
        files = 0 if conflicts or open_uploads else self.node.staged_files()
        return {"pending": len(behind), "in doubt": orphans, "files": files}

    # Clients

    def _client(self, bucket: str, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does something with a key, unless another one is about it."""
        if (bucket, key) in self._busy or len(self._clients) > 8:
            return
        self._busy.add((bucket, key))

        async def do() -> None:
            try:
                await work()
            finally:
                self._busy.discard((bucket, key))

        task = asyncio.get_running_loop().create_task(do())
        self._clients.add(task)
        task.add_done_callback(self._client_done)

    def _client_done(self, task: asyncio.Task[None]) -> None:
        self._clients.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.judge.violations.append(error if isinstance(error, Violation) else Violation("clients", repr(error)))

    async def _ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Answer | None:
        number = self.dice.choice([one for one in range(WORKERS) if self.node.alive(one)] or [0])
        if not self.node.alive(number):
            return None
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.node.ask(number, method, f"/{target}", body, named)
        self.say(f"    {method} {target} → {answer.status if answer else 'killed'}")
        return answer

    def _value(self) -> bytes:
        self._numbers += 1
        return b"%d of %d" % (self._numbers, self.seed)

    def _place(self) -> tuple[str, str]:
        bucket = "other" if self.dice.random() < 0.25 else "bucket"
        return bucket, f"k{self.dice.randrange(6)}"

    async def _put(self, bucket: str, key: str, value: bytes, **headers: str) -> bool:
        attempt = self.judge.of(bucket, key).begin(value, self.clock.monotonic())
        self._written_bytes += len(value)
        answer = await self._ask("PUT", f"{bucket}/{key}", value, **headers)
        return self._ended(bucket, key, attempt, answer)

    async def _delete(self, bucket: str, key: str) -> bool:
        attempt = self.judge.of(bucket, key).begin(None, self.clock.monotonic())
        return self._ended(bucket, key, attempt, await self._ask("DELETE", f"{bucket}/{key}"))

    def _ended(self, bucket: str, key: str, attempt: Attempt, answer: Answer | None) -> bool:
        attempt.ended = self.clock.monotonic()
        if answer is None:
            return False
        if 400 <= answer.status < 500:
            self.judge.of(bucket, key).attempts.remove(attempt)
            return False
        if answer.status >= 300 or b"<Error>" in answer.body:
            return False
        attempt.acknowledged = True
        attempt.etag = _etag_of(answer)
        attempt.absorbed = answer.headers.get("x-forebay-cache") == "absorbed"
        self.judge.acknowledged(bucket, key, attempt)
        return True

    def _took(self, bucket: str, what: str, answer: Answer, trouble: Trouble | None) -> None:
        is_same = trouble is self.origin.trouble and trouble is not None and bucket in trouble.buckets
        self.judge.taken(bucket, what, answer.status, trouble.kind if is_same and trouble is not None else None)

    async def _upload_of(
        self,
        bucket: str,
        key: str,
        *,
        ends: bool = True,
        if_none_match: str | None = None,
        part_bytes: int = PART_BYTES,
        parts: int | None = None,
    ) -> None:
        trouble = self.origin.trouble
        created = await self._ask("POST", f"{bucket}/{key}?uploads")
        if created is not None:
            self._took(bucket, "Create", created, trouble)
        if created is None or created.status != 200:
            return
        found = _UPLOAD_ID.search(created.body)
        upload_id = found[1].decode() if found else ""
        bodies = [self._value().ljust(part_bytes) for _ in range(parts or self.dice.randint(1, 3))]
        self._written_bytes += sum(map(len, bodies))
        etags = []
        for number, body in enumerate(bodies, 1):
            stored = await self._ask("PUT", f"{bucket}/{key}?partNumber={number}&uploadId={upload_id}", body)
            if stored is None or stored.status != 200:
                return
            etags.append(stored.headers["etag"])
        if not ends:
            return
        listed = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>" for n, etag in enumerate(etags, 1)
        )
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        attempt = self.judge.of(bucket, key).begin(b"".join(bodies), self.clock.monotonic())
        conditions = {"If_None_Match": if_none_match} if if_none_match else {}
        done = await self._ask("POST", f"{bucket}/{key}?uploadId={upload_id}", document, **conditions)
        self._ended(bucket, key, attempt, done)

    # What happens

    async def _do_put(self) -> None:
        bucket, key = self._place()
        value = self._value()
        self._client(bucket, key, lambda: _nothing(self._put(bucket, key, value)))

    async def _do_delete(self) -> None:
        bucket, key = self._place()
        self._client(bucket, key, lambda: _nothing(self._delete(bucket, key)))

    async def _do_conditional(self) -> None:
        bucket, key = self._place()
        value = self._value()
        self._client(bucket, key, lambda: _nothing(self._put(bucket, key, value, If_None_Match="*")))

    async def _do_upload(self) -> None:
        bucket, key = self._place()
        condition = "*" if self.dice.random() < 0.2 else None
        self._client(bucket, key, lambda: self._upload_of(bucket, key, if_none_match=condition))

    async def _do_abandon(self) -> None:
        bucket, key = self._place()
        self._client(bucket, key, lambda: self._upload_of(bucket, key, ends=False))

    async def _do_copy(self) -> None:
        bucket, key = self._place()
        source = f"k{self.dice.randrange(6)}"
        if source == key or (bucket, source) in self._busy:
            return
        self._client(bucket, key, lambda: self._copy(bucket, source, key))

    async def _copy(self, bucket: str, source: str, key: str) -> None:
        possible = self.judge.of(bucket, source).may_be()
        attempts = [
            self.judge.of(bucket, key).begin(value, self.clock.monotonic()) for value in possible if value is not None
        ]
        answer = await self._ask("PUT", f"{bucket}/{key}", x_amz_copy_source=f"/{bucket}/{source}")
        possible |= self.judge.of(bucket, source).may_be()
        for attempt in attempts:
            attempt.ended = self.clock.monotonic()
        if answer is None or answer.status >= 500:
            return
        history = self.judge.of(bucket, key)
        if answer.status >= 300 or b"<Error>" in answer.body:
            history.attempts[:] = [one for one in history.attempts if one not in attempts]
        elif len(attempts) == 1 and len(possible - {None}) == 1:
            attempts[0].acknowledged = True

    async def _do_save(self) -> None:
        """A checkpoint as PyTorch's DCP saves it: shards, then the manifest under a name that it is renamed from."""
        self._numbers += 1
        directory = f"step-{self._numbers}"
        self._client("bucket", directory, lambda: self._save(directory))

    async def _save(self, directory: str) -> None:
        shards = [f"{directory}/__{rank}_0.distcp" for rank in range(self.dice.randint(1, 4))]
        for shard in shards:
            if not await self._put("bucket", shard, self._value()):
                return
        value = self._value()
        temporary, manifest = f"{directory}/.metadata.tmp", f"{directory}/.metadata"
        if not await self._put("bucket", temporary, value):
            return
        attempt = self.judge.of("bucket", manifest).begin(value, self.clock.monotonic())
        answer = await self._ask("PUT", f"bucket/{manifest}", x_amz_copy_source=f"/bucket/{temporary}")
        if self._ended("bucket", manifest, attempt, answer):
            await self._delete("bucket", temporary)

    async def _do_read(self) -> None:
        bucket, key = self._place()
        self._client(bucket, key, lambda: self._read(bucket, key))

    async def _read(self, bucket: str, key: str) -> None:
        history: KeyHistory = self.judge.of(bucket, key)
        possible = history.may_be()
        answer = await self._ask("GET", f"{bucket}/{key}")
        if answer is None or answer.status not in (200, 404) or not answer.complete:
            return
        value: Value = answer.body if answer.status == 200 else None
        self.judge.read(bucket, key, value, possible)

    async def _do_others_write(self) -> None:
        bucket, key = self._place()
        self.origin.write_as_others(bucket, key, b"theirs, " + self._value())
        self.say(f"    others write {bucket}/{key}")

    async def _do_others_delete(self) -> None:
        bucket, key = self._place()
        if self.origin.current(bucket, key) is not None:
            self.origin.write_as_others(bucket, key, None)
            self.say(f"    others delete {bucket}/{key}")

    async def _do_trouble(self) -> None:
        kind = self.dice.choice(self.origin.dialect.outages)
        buckets = frozenset(BUCKETS) if self.dice.random() < 0.7 else frozenset({self.dice.choice(BUCKETS)})
        self.origin.trouble = Trouble(kind, buckets, self.clock.monotonic())
        self.say(f"    {kind}: {', '.join(sorted(buckets))}")

    async def _do_heal(self) -> None:
        self.origin.trouble = None
        if self.dice.random() < 0.2:  # rights are mended more seldom than networks
            self.origin.refused.clear()

    async def _do_refuse(self) -> None:
        self.origin.refused.add("other")

    async def _do_forget(self) -> None:
        if self.origin.dialect.forgets_uploads:
            self.origin.forget_uploads()

    async def _do_burst(self) -> None:
        """More than flush at once, in a bucket that may refuse everything."""
        self._client("other", "burst", self._burst)

    async def _burst(self) -> None:
        for number in range(80):
            if not self._is_ending:
                await self._put("other", f"burst/{number}", self._value())

    async def _do_strange(self) -> None:
        """Metadata that is no UTF-8, which S3 refuses."""
        key = f"strange{self.dice.randrange(3)}"
        value = self._value()
        self._client("bucket", key, lambda: _nothing(self._put("bucket", key, value, x_amz_meta_name="caf\xe9")))

    async def _do_large(self) -> None:
        bucket, key = self._place()
        self._client(
            bucket,
            f"large/{key}",
            lambda: self._upload_of(bucket, f"large/{key}", part_bytes=LARGE_PART_BYTES, parts=8),
        )

    async def _do_kill_worker(self) -> None:
        self._kills += 1
        self.node.dies_in(self.dice.randrange(WORKERS), self.dice.randrange(40))

    async def _do_kill_background(self) -> None:
        self._kills += 1
        self.node.dies_in(BACKGROUND, self.dice.randrange(60))

    async def _do_cut_power(self) -> None:
        self._kills += 1
        await self.node.cut_power(WORKERS)

    async def _do_pass_time(self) -> None:
        seconds = self.dice.choice((0.1, 1.0, 5.0, 30.0, 150.0))
        for _ in range(int(seconds // 10)):
            await asyncio.sleep(10.0)
            await self._revive()
            self._look()
        await asyncio.sleep(seconds % 10)

    async def _revive(self) -> None:
        """The supervisor starts again whoever was killed."""
        await self.node.bury()
        for number in range(WORKERS):
            if not self.node.alive(number):
                self.say(f"    worker {number} was killed, and starts again")
                await self.node.start_worker(number)
        if not self.node.alive(BACKGROUND):
            self.say("    the background process was killed, and starts again")
            await self.node.start_background()
            self.judge.restarted()


async def _nothing(work: Coroutine[Any, Any, Any]) -> None:
    await work


def _etag_of(answer: Answer) -> str | None:
    if "etag" in answer.headers:
        return answer.headers["etag"]
    found = re.search(rb"<ETag>([^<]+)</ETag>", answer.body)
    return found[1].decode().replace("&quot;", '"') if found else None


def play(seed: int, dialect: str, steps: int, only: Iterable[str] = (), skew_seconds: float | None = None) -> World:
    """One history to its end; its world, whose judge says what was violated."""
    loop = VirtualTimeLoop()
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if Path("/dev/shm").exists() else None))
    try:
        world = World(seed, dialect, directory, loop, only, skew_seconds)
        world.node.install(loop)
        with ExitStack() as stack:
            stack.enter_context(simulated(Random(seed), world.node.disk))
            stack.enter_context(mock.patch.object(completion, "PART_SIZE_BYTES_MIN", PART_BYTES))
            stack.enter_context(mock.patch.object(multipart, "PART_SIZE_BYTES_MIN", PART_BYTES))
            stack.enter_context(mock.patch.object(news, "QUIET_SECONDS", 1.0))
            stack.enter_context(mock.patch.object(asgi, "_shared_threads", BodyThreads))
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(world.run(steps))
            except Violation as violation:
                if violation not in world.judge.violations:
                    world.judge.violations.append(violation)
            finally:
                world.node.kill_all()
                loop.run_until_complete(world.node.bury())
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(1.0))
        return world
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        shutil.rmtree(directory, ignore_errors=True)
