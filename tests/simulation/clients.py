"""Clients of a node: what they ask, and what they are told, which the judge hears."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from tests.simulation.histories import Attempt, KeyHistory, Value
from tests.simulation.invariants import Judge, Violation
from tests.simulation.markers import index_of, metadata_of
from tests.simulation.node import Node
from tests.simulation.origins import SimulatedOrigin, Trouble
from tests.simulation.virtual_time import VirtualClock
from tests.support.asgi import Answer

WORKERS = 2
PART_BYTES = 64
LARGE_PART_BYTES = 300_000
CLIENTS_MAX = 8
OF_OTHERS = "_9.distcp"
"""Files that other nodes write end so."""

_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_ETAG = re.compile(rb"<ETag>([^<]+)</ETag>")

Work = Callable[[], Coroutine[Any, Any, Any]]


class Clients:
    """Of one node. Each is about one key, about which no other is at the same time."""

    def __init__(
        self,
        node: Node,
        origin: SimulatedOrigin,
        judge: Judge,
        clock: VirtualClock,
        dice: Random,
        say: Callable[[str], None],
    ) -> None:
        self._node = node
        self._origin = origin
        self._judge = judge
        self._clock = clock
        self._dice = dice
        self._say = say
        self._numbers = 0
        self.busy: set[tuple[str, str]] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, bucket: str, key: str, work: Work) -> None:
        """Have somebody do something with a key, unless another one is about it."""
        if (bucket, key) in self.busy or len(self.tasks) > CLIENTS_MAX:
            return
        self.busy.add((bucket, key))

        async def do() -> None:
            try:
                await work()
            finally:
                self.busy.discard((bucket, key))

        task = asyncio.get_running_loop().create_task(do())
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        if isinstance(error, Violation):
            self._judge.violations.append(error)
        else:
            self._judge.violated("clients", repr(error))

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def value(self) -> bytes:
        """Never seen before."""
        return b"%d, %d" % (self.number(), self._dice.getrandbits(20))

    # One request

    async def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Answer | None:
        """None: the worker was killed over it, or none is there."""
        number = self._dice.choice([one for one in range(WORKERS) if self._node.alive(one)] or [0])
        if not self._node.alive(number):
            return None
        named, begun = {name.replace("_", "-"): value for name, value in headers.items()}, self._clock.monotonic()
        answer = await self._node.ask(number, method, f"/{target}", body, named)
        self._say(f"    {method} {target} → {answer.status if answer else 'killed'}")
        if answer is not None:
            self._judge.answered(f"{method} {target}", answer.status, begun)
        return answer

    async def read(self, bucket: str, key: str) -> None:
        history: KeyHistory = self._judge.of(bucket, key)
        possible, begun = history.may_be(), self._clock.monotonic()
        answer = await self.ask("GET", f"{bucket}/{key}")
        if answer is None or answer.status not in (200, 404) or not answer.complete:
            return
        value: Value = answer.body if answer.status == 200 else None
        self._judge.read(bucket, key, value, possible | history.may_have_been(begun))

    async def put(self, bucket: str, key: str, value: bytes, **headers: str) -> bool:
        attempt = self._judge.of(bucket, key).begin(value, self._clock.monotonic())
        return self._ended(bucket, key, attempt, await self.ask("PUT", f"{bucket}/{key}", value, **headers))

    async def delete(self, bucket: str, key: str) -> bool:
        was_conflict = (bucket, key) in self._judge.kept().conflicts
        attempt = self._judge.of(bucket, key).begin(None, self._clock.monotonic())
        answer = await self.ask("DELETE", f"{bucket}/{key}")
        is_conflict = answer is not None and (bucket, key) in self._judge.kept().conflicts
        if answer is not None and was_conflict and is_conflict:
            self._judge.deleted_conflict(bucket, key, answer.status)
        if answer is not None and is_conflict and answer.status == 409:
            await self._still_there(bucket, key)
            attempt.ended = self._clock.monotonic()
            return False  # if it was deleted all the same, the judge has been told
        return self._ended(bucket, key, attempt, answer)

    async def _still_there(self, bucket: str, key: str) -> None:
        history = self._judge.of(bucket, key)
        before = history.last_acknowledged() if None not in history.may_be() else None
        answer = await self.ask("GET", f"{bucket}/{key}")
        is_conflict = (bucket, key) in self._judge.kept().conflicts
        if answer is not None and is_conflict and before is not None and before.value is not None:
            self._judge.conflict_read(bucket, key, answer.status)

    def _ended(self, bucket: str, key: str, attempt: Attempt, answer: Answer | None) -> bool:
        attempt.ended = self._clock.monotonic()
        if answer is None:
            return False
        if 400 <= answer.status < 500 and answer.status != 424:  # which says that nobody knows
            self._judge.of(bucket, key).attempts.remove(attempt)
            return False
        if answer.status >= 300 or b"<Error>" in answer.body:
            return False
        attempt.acknowledged = True
        attempt.etag = _etag_of(answer)
        attempt.absorbed = answer.headers.get("x-forebay-cache") == "absorbed"
        self._judge.acknowledged(bucket, key, attempt)
        return True

    async def copy(self, bucket: str, source: str, key: str) -> bool:
        """Of a key whose value may be one of several."""
        of_source, history = self._judge.of(bucket, source), self._judge.of(bucket, key)
        possible = of_source.may_be()
        begun = self._clock.monotonic()
        attempts = [history.begin(value, begun) for value in _objects(possible)]
        under_way = history.begin(b"what the source has by then", begun)
        answer = await self.ask("PUT", f"{bucket}/{key}", x_amz_copy_source=f"/{bucket}/{source}")
        history.attempts.remove(under_way)
        later = of_source.may_have_been(begun) - possible
        attempts += [history.begin(one, begun) for one in _objects(later)]
        for attempt in attempts:
            attempt.ended = self._clock.monotonic()
        if answer is None or answer.status >= 500:
            return False
        if answer.status >= 300 or b"<Error>" in answer.body:
            history.attempts[:] = [one for one in history.attempts if one not in attempts]
            return False
        if len(attempts) == 1:
            attempts[0].acknowledged = True
        return True

    # Uploads

    async def upload(
        self,
        bucket: str,
        key: str,
        *,
        ends: bool = True,
        is_aborted: bool = False,
        if_none_match: str | None = None,
        part_bytes: int = PART_BYTES,
        parts: int | None = None,
    ) -> bool:
        """`is_aborted`: somebody does that while it is being completed."""
        trouble, history = self._origin.trouble, self._judge.of(bucket, key)
        is_known = bucket in self._judge.kept().known
        history.open_uploads += 1
        created = await self.ask("POST", f"{bucket}/{key}?uploads")
        if created is not None and is_known:
            self._took(bucket, "Create", created, trouble)
        if created is None or created.status != 200:
            return False
        found = _UPLOAD_ID.search(created.body)
        upload_id = found[1].decode() if found else ""
        self._judge.told_upload_ids.add(upload_id)
        bodies = [self.value().ljust(part_bytes) for _ in range(parts or self._dice.randint(1, 3))]
        etags = []
        for number, body in enumerate(bodies, 1):
            stored = await self.ask("PUT", f"{bucket}/{key}?partNumber={number}&uploadId={upload_id}", body)
            if stored is None or stored.status != 200:
                return False
            etags.append(stored.headers["etag"])
        if self._dice.random() < 0.2 and not self._judge.is_written_once(key):  # as after a time-out
            again = self._dice.randrange(len(bodies))
            bodies[again] = self.value().ljust(part_bytes)
            stored = await self.ask("PUT", f"{bucket}/{key}?partNumber={again + 1}&uploadId={upload_id}", bodies[again])
            if stored is None or stored.status != 200:
                return False
            etags[again] = stored.headers["etag"]
        if not ends:
            return False
        listed = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>" for n, etag in enumerate(etags, 1)
        )
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        attempt = history.begin(b"".join(bodies), self._clock.monotonic())
        conditions = {"If_None_Match": if_none_match} if if_none_match else {}
        completing = self.ask("POST", f"{bucket}/{key}?uploadId={upload_id}", document, **conditions)
        done, _ = await asyncio.gather(completing, self._abort(bucket, key, upload_id) if is_aborted else _nothing())
        is_done = self._ended(bucket, key, attempt, done)
        history.open_uploads -= is_done
        return is_done

    async def _abort(self, bucket: str, key: str, upload_id: str) -> None:
        await asyncio.sleep(self._dice.random() ** 2 * 0.3)
        await self.ask("DELETE", f"{bucket}/{key}?uploadId={upload_id}")

    async def upload_large(self, bucket: str, key: str) -> bool:
        return await self.upload(bucket, key, part_bytes=LARGE_PART_BYTES, parts=8)

    def _took(self, bucket: str, what: str, answer: Answer, trouble: Trouble | None) -> None:
        is_same = trouble is self._origin.trouble and trouble is not None and bucket in trouble.buckets
        self._judge.taken(bucket, what, answer.status, trouble.kind if is_same and trouble is not None else None)

    # Several requests that belong together

    async def save(self, directory: str) -> None:
        """A checkpoint as PyTorch's DCP saves it: shards, then the manifest under a name that it is renamed from."""
        if not await self._put_all([f"{directory}/__{rank}_0.distcp" for rank in range(self._dice.randint(1, 4))]):
            return
        value = self.value()
        temporary, manifest = f"{directory}/.metadata.tmp", f"{directory}/.metadata"
        if not await self.put("bucket", temporary, value):
            return
        attempt = self._judge.of("bucket", manifest).begin(value, self._clock.monotonic())
        answer = await self.ask("PUT", f"bucket/{manifest}", x_amz_copy_source=f"/bucket/{temporary}")
        if self._ended("bucket", manifest, attempt, answer):
            await self.delete("bucket", temporary)
        if self._dice.random() < 0.3:  # somebody saves a shard once more
            await self.put("bucket", f"{directory}/__0_0.distcp", self.value())

    async def save_shared(self, directory: str) -> None:
        """A checkpoint of which other nodes write some ranks: their clients have had their answers before the manifest
        is written here, and the origin has their files when their gateways come to it."""
        mine = [f"__{rank}_0.distcp" for rank in range(self._dice.randint(0, 2))]
        theirs = [f"__{rank}{OF_OTHERS}" for rank in range(2, 2 + self._dice.randint(1, 3))]
        await asyncio.gather(
            *(self._flushed_by_others(f"{directory}/{name}") for name in theirs), self._saved(directory, mine, theirs)
        )

    async def _flushed_by_others(self, key: str) -> None:
        value = self.value()
        await asyncio.sleep(self._dice.choice((0.0, 1.0, 10.0, 60.0)))
        self._origin.write_as_others("bucket", key, value)
        self._say(f"    another node writes {key}")

    async def _saved(self, directory: str, mine: list[str], theirs: list[str]) -> None:
        if not await self._put_all([f"{directory}/{name}" for name in mine]):
            return
        form, name = self._dice.choice(((metadata_of, ".metadata"), (index_of, "model.safetensors.index.json")))
        value, manifest = form([*mine, *theirs], self.number()), f"{directory}/{name}"
        self._judge.named[value] = [f"{directory}/{one}" for one in (*mine, *theirs)]
        if self._dice.random() < 0.5:
            await self.put("bucket", manifest, value)
            return
        if await self.put("bucket", f"{manifest}.tmp", value):
            attempt = self._judge.of("bucket", manifest).begin(value, self._clock.monotonic())
            answer = await self.ask("PUT", f"bucket/{manifest}", x_amz_copy_source=f"/bucket/{manifest}.tmp")
            if self._ended("bucket", manifest, attempt, answer):
                await self.delete("bucket", f"{manifest}.tmp")

    async def save_run(self, run: str) -> None:
        """A step of a run: files in directories, the index over them, and a file that says which step is the last."""
        step = f"{run}/step-{self.number()}"
        files = [f"{step}/rank{rank}/model-{rank}.safetensors" for rank in range(self._dice.randint(1, 3))]
        if await self._put_all(files) and await self._put_all([f"{step}/model.safetensors.index.json"]):
            await self._put_all([f"{run}/latest"])

    async def save_table(self, table: str) -> None:
        """As Spark does, or Delta Lake, whose log has a new entry under a condition."""
        if not await self._put_all([f"{table}/day={day}/part-0000" for day in range(self._dice.randint(1, 3))]):
            return
        if self._dice.random() < 0.5:
            await self._put_all([f"{table}/_SUCCESS"])
        else:
            await self.put("bucket", f"{table}/_delta_log/{self.number()}.json", self.value(), If_None_Match="*")

    async def _put_all(self, keys: list[str]) -> bool:
        done = [await self.put("bucket", key, self.value()) for key in keys]
        return all(done)

    async def rename(self, bucket: str, number: int) -> None:
        """As a mounted file system does: written under a passing name, copied, deleted."""
        passing, key = f"large/passing-{number}", f"large/{number}"
        if not await self.upload_large(bucket, passing):
            return
        if await self.copy(bucket, passing, key):
            await self.delete(bucket, passing)

    async def crowd(self, bucket: str, number: int, count: int) -> None:
        """Large ones side by side, and something small right behind."""
        await asyncio.gather(*(self.upload_large(bucket, f"crowd-{number}/{one}") for one in range(count)))
        await self.put(bucket, f"crowd-{number}/small", b"ok %d" % number)


async def _nothing() -> None:
    return


def _objects(values: set[Value]) -> list[bytes]:
    return sorted(one for one in values if one is not None)


def _etag_of(answer: Answer) -> str | None:
    if "etag" in answer.headers:
        return answer.headers["etag"]
    found = _ETAG.search(answer.body)
    return found[1].decode().replace("&quot;", '"') if found else None
