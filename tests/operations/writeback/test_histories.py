"""Random histories of writes, reads, flushes, restarts, failures of the origin and writes of others, against a model.

Every answer is of what was acknowledged last; in the end the origin has exactly that, and nothing is left here or
there. What others have written to the origin is overwritten by nothing that was written here before: it is a conflict,
or it is what is read. FOREBAY_ABSORB_EXAMPLES lengthens a run; a failure prints the history,
and with FOREBAY_ABSORB_STEPS_MIN=1 the shortest that fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from hashlib import md5
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core.clock import Moment, SystemClock
from gateway.core.model import ObjectKey
from gateway.core.steps import at_once
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document, text_of
from gateway.writeback.flushing import state
from gateway.writeback.journal.records import State
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.gateway_app import gateway_app
from tests.support.memory_origin.faults import Answer, Fault, Unreachable
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.slots import Slot, slot_with
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client

EXAMPLES = int(os.environ.get("FOREBAY_ABSORB_EXAMPLES", "8"))
STEPS_MIN, STEPS_MAX = int(os.environ.get("FOREBAY_ABSORB_STEPS_MIN", "15")), 40
KEYS = ("back/a", "back/b", "back/a/b", "through")
LARGE = random.Random(7).randbytes(PART_BYTES)

Value = bytes | None

WHAT = [
    "put",
    "put",
    "delete",
    "read",
    "read",
    "head",
    "range",
    "copy",
    "upload",
    "abort",
    "flush",
    "some",
    "fail",
    "restart",
    "outside",
    "copy_part",
    "put_if_absent",
]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(WHAT),
        st.sampled_from(KEYS),
        st.sampled_from(KEYS),
        st.integers(0, 2**16),
    ),
    min_size=STEPS_MIN,
    max_size=STEPS_MAX,
)


class HurriedClock(SystemClock):
    """Fifty times as fast: nobody waits for pauses and patience."""

    def __init__(self) -> None:
        self._began_at = super().now()

    def now(self) -> float:
        return self._began_at + 50 * (super().now() - self._began_at)

    def monotonic(self) -> float:
        return 50 * super().monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 50)


class History:
    """A gateway that comes and goes over one origin and one directory, and what its keys may hold."""

    def __init__(self, directory: Path, slots: Sequence[Slot]) -> None:
        self.directory = directory
        self.slots = slots
        self.clock = HurriedClock()
        self.origin = MemoryOrigin(self.clock)
        self.origin.create_bucket("bucket")
        self.may_be: dict[str, set[Value]] = {key: {None} for key in KEYS}
        self.numbers = count()
        self.disturbed: set[str] = set()
        """Keys of which this gateway cannot always tell what others have done."""
        self.theirs: dict[str, Value] = {}
        """What others have put there last, where nothing was written here since."""
        self.faults: list[Fault] = []
        self.steps: list[tuple[str, str, str, int]] = []

    async def play(self, steps: list[tuple[str, str, str, int]]) -> None:
        self.steps = list(reversed(steps))
        while self.steps:
            async with self._gateway() as client:
                await self._until_restart(client)
        async with self._gateway() as client:
            await self._check_end(client)

    @asynccontextmanager
    async def _gateway(self) -> AsyncIterator[Client]:
        async with gateway_app(
            self.directory, origin=self.origin, slots=self.slots, writeback=True, clock=self.clock
        ) as gateway:
            client = Client(gateway)
            async with client.running():
                yield client

    async def _until_restart(self, client: Client) -> None:
        while self.steps:
            what, key, other, number = self.steps.pop()
            if what == "restart":
                return
            await getattr(self, f"_{what}")(client, key, other, number)
            self._check_theirs()

    async def _ask(self, client: Client, method: str, target: str, body: bytes = b"", **headers: str) -> Got:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await call(client.gateway.app, method, f"/bucket/{target}", named, body)

    def _wrote(self, key: str, value: Value, answer: Got) -> None:
        """An acknowledged write is the only state; one that failed may have happened."""
        self.theirs.pop(key, None)
        if answer.status < 300 and b"<Error>" not in answer.body:
            self.may_be[key] = {value}
        else:
            assert answer.status >= 500 or answer.status == 200 or _is_conflict(answer)
            self.may_be[key] = self.may_be[key] | {value}
            self.disturbed.add(key)

    async def _outside(self, client: Client, at: str, _: str, number: int) -> None:
        """Somebody else writes, or deletes, past the gateway: seen at once where nothing is pending.

        Never the same twice: by its ETag nobody could tell that anything has happened.
        """
        value = None if number % 3 == 0 else b"theirs %d" % next(self.numbers)
        if value is None:
            self.origin.buckets["bucket"].objects.pop(at, None)
        else:
            self.origin.put("bucket", at, value)
        self.theirs[at] = value
        self.disturbed.add(at)
        first = client.buffer.look(lambda tx: tx.writes.earliest(ObjectKey("bucket", at)))
        if first is None:
            self.may_be[at] = {value}
        else:
            self.may_be[at] = self.may_be[at] | {value}
            if value is None and (first.expected.absent or not first.expected.known):
                del self.theirs[at]  # as if nothing had ever been there

    def _check_theirs(self) -> None:
        """What others have put there is there, as long as nothing was written here after it."""
        stored = self.origin.buckets["bucket"].objects
        for key, value in self.theirs.items():
            now = self.origin.data("bucket", key) if key in stored else None
            assert now == value, f"{str(value)[:40]}, which others have written to {key}, is {str(now)[:40]} now"

    async def _put(self, client: Client, key: str, _: str, number: int) -> None:
        body = b"%d" % number
        async with client.flushing(conflicts=True):
            self._wrote(key, body, await self._ask(client, "PUT", key, body))

    async def _delete(self, client: Client, key: str, _: str, __: int) -> None:
        async with client.flushing(conflicts=True):
            self._wrote(key, None, await self._ask(client, "DELETE", key))

    async def _copy(self, client: Client, key: str, other: str, _: int) -> None:
        if key == other:
            return
        async with client.flushing(conflicts=True):
            answer = await self._ask(client, "PUT", other, x_amz_copy_source=f"/bucket/{key}")
        if answer.status == 404:
            assert None in self.may_be[key]
            self.may_be[key] = {None}
        elif answer.status == 200:
            self.theirs.pop(other, None)
            self.may_be[other] = set(self.may_be[key]) - {None}
            if answer.headers["x-forebay-cache"] == "forwarded":  # what exactly lies there is not known here
                self.disturbed.add(other)
        else:
            assert answer.status >= 500 or _is_conflict(answer)
            self.theirs.pop(other, None)
            self.may_be[other] |= self.may_be[key]
            self.disturbed.add(other)

    async def _copy_part(self, client: Client, key: str, other: str, _: int) -> None:
        """An object of one part, which is a copy of another."""
        begun = await self._ask(client, "POST", f"{other}?uploads")
        if begun.status != 200:
            assert begun.status >= 500
            return
        upload_id = text_of(begun.body, "UploadId")
        async with client.flushing(conflicts=True):
            target = f"{other}?partNumber=1&uploadId={upload_id}"
            copied = await self._ask(client, "PUT", target, x_amz_copy_source=f"/bucket/{key}")
        etag = text_of(copied.body, "ETag")
        if copied.status == 404:
            self._saw(key, None)
        if copied.status != 200 or etag is None:
            assert copied.status in (200, 404) or copied.status >= 500 or _is_conflict(copied)
            return
        known = {f'"{md5(value).hexdigest()}"': value for value in self.may_be[key] if value is not None}
        value = known[etag]
        self._saw(key, value)
        document = at_once(complete_multipart_upload_document([CompletedPart(1, etag, {})]))
        async with client.flushing(conflicts=True):
            done = await self._ask(client, "POST", f"{other}?uploadId={upload_id}", document)
        self._wrote(other, value, done)
        if done.headers.get("x-forebay-cache") == "forwarded":
            self.disturbed.add(other)

    async def _put_if_absent(self, client: Client, key: str, _: str, number: int) -> None:
        body = b"%d" % number
        async with client.flushing(conflicts=True):
            answer = await self._ask(client, "PUT", key, body, If_None_Match="*")
        if answer.status == 412:
            assert self.may_be[key] != {None}
        elif answer.status == 424:  # nobody knows, and it is not asked again
            self.theirs.pop(key, None)
            self.may_be[key] |= {body}
            self.disturbed.add(key)
        else:
            self._wrote(key, body, answer)

    async def _upload(self, client: Client, key: str, _: str, number: int) -> None:
        answer = await self._ask(client, "POST", f"{key}?uploads")
        if answer.status != 200:
            assert answer.status >= 500
            return
        upload_id = answer.body.partition(b"<UploadId>")[2].partition(b"</UploadId>")[0].decode()
        bodies = {1: LARGE, 2: b"%d" % number} if number % 2 else {3: b"%d" % number}
        etags = {}
        for part, body in bodies.items():
            stored = await self._ask(client, "PUT", f"{key}?partNumber={part}&uploadId={upload_id}", body)
            if stored.status != 200:
                assert stored.status >= 500
                return
            etags[part] = stored.headers["etag"]
        listed = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>" for n, etag in etags.items())
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        async with client.flushing(conflicts=True) if number % 3 else nullcontext():
            done = await self._ask(client, "POST", f"{key}?uploadId={upload_id}", document)
        self._wrote(key, b"".join(bodies.values()), done)
        if done.headers.get("x-forebay-cache") == "forwarded":
            self.disturbed.add(key)

    async def _abort(self, client: Client, key: str, _: str, __: int) -> None:
        answer = await self._ask(client, "POST", f"{key}?uploads")
        if answer.status == 200:
            upload_id = answer.body.partition(b"<UploadId>")[2].partition(b"</UploadId>")[0].decode()
            ended = await self._ask(client, "DELETE", f"{key}?uploadId={upload_id}")
            assert ended.status == 204 or ended.status >= 500

    async def _read(self, client: Client, key: str, _: str, __: int) -> None:
        answer = await self._ask(client, "GET", key)
        if answer.status < 500:
            value = answer.body if answer.status == 200 else None
            assert answer.status in (200, 404)
            self._saw(key, value)

    async def _head(self, client: Client, key: str, _: str, __: int) -> None:
        answer = await self._ask(client, "HEAD", key)
        if answer.status == 200:
            sizes = {len(value) for value in self.may_be[key] if value is not None}
            assert int(answer.headers["content-length"]) in sizes
        elif answer.status < 500:
            self._saw(key, None)

    async def _range(self, client: Client, key: str, _: str, number: int) -> None:
        answer = await self._ask(client, "GET", key, Range="bytes=1-3")
        if answer.status == 206:
            assert answer.body in {value[1:4] for value in self.may_be[key] if value is not None}

    def _saw(self, key: str, value: Value) -> None:
        assert value in self.may_be[key], f"{key} reads {str(value)[:40]}, not one of {len(self.may_be[key])}"
        # What others have put there since may lie behind ours, and be read once ours is known to have got there.
        self.may_be[key] = {value} | ({self.theirs[key]} if key in self.theirs else set())

    async def _some(self, client: Client, _: str, __: str, number: int) -> None:
        """The flush gets so far, and is killed."""
        async with client.flushing(conflicts=True):
            for _turn in range(number % 50):
                await asyncio.sleep(0)

    async def _flush(self, client: Client, _: str, __: str, ___: int) -> None:
        self._heal()
        await client.flush_startable()

    async def _fail(self, _: Client, __: str, ___: str, number: int) -> None:
        effects = (Unreachable(), Unreachable(late=True), Answer(500, "InternalError"), Answer(503, late=True))
        self.faults.append(self.origin.inject(lambda _: True, effects[number % 4], times=1 + number % 3))

    def _heal(self) -> None:
        for fault in self.faults:
            fault.times = 0
        self.faults.clear()

    async def _check_end(self, client: Client) -> None:
        self._heal()
        await client.flush_startable()
        self._check_theirs()
        await self._give_up_conflicts(client)
        stored = self.origin.buckets["bucket"].objects
        for key, values in self.may_be.items():
            value = self.origin.data("bucket", key) if key in stored else None
            assert value in values, f"{key} is {str(value)[:40]} at the origin"
        for upload in client.buffer.look(lambda tx: list(tx.uploads.under("bucket"))):
            await self._ask(client, "DELETE", f"{upload.spec.key.key}?uploadId={upload.upload_id}")
        await client.flush()

    async def _give_up_conflicts(self, client: Client) -> None:
        """Ours is what was acknowledged last, theirs what is at the origin: somebody decides for theirs."""
        stored = self.origin.buckets["bucket"].objects
        while left := client.buffer.look(lambda tx: tx.writes.waiting(0, 1)):
            [one] = left
            assert one.state is State.CONFLICT
            assert one.key.key in self.disturbed
            name = one.key.key
            self.may_be[name] |= {self.origin.data("bucket", name) if name in stored else None}
            discarded = partial(_discard, write_id=one.id, now=Moment(self.clock.now()))
            await client.buffer.journal.change(discarded)
            await client.flush_startable()
            self._check_theirs()


def _is_conflict(answer: Got) -> bool:
    return answer.status == 409 and b"OperationAborted" in answer.body


def bounded(buffer_bytes: int, **changed: Any) -> list[Slot]:
    return [slot_with(SLOTS[0], buffer_bytes=buffer_bytes, **changed)]


BOUNDS = st.sampled_from(
    [
        SLOTS,
        bounded(12),
        bounded(PART_BYTES + 4),
        bounded(PART_BYTES + 4, when_buffer_full="slow-down"),
        bounded(2 * PART_BYTES, unflushed_bytes_max=PART_BYTES + 2),
        bounded(2 * PART_BYTES, unflushed_age_seconds_max=1.0),
    ]
)


@pytest.mark.slow
def test_every_answer_is_of_what_was_acknowledged_last(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever happens between, and whatever the bounds. There is one clock: where nobody else writes, nothing may be
    taken for a conflict."""
    played = Counter[str]()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS, slots=BOUNDS)
    def play(steps: list[tuple[str, str, str, int]], slots: Sequence[Slot]) -> None:
        directory = tmp_path_factory.mktemp("history")
        asyncio.run(History(directory, slots).play(steps))
        shutil.rmtree(directory)  # thousands of them, of some MiB each, are kept otherwise
        played.update(histories=1, steps=len(steps))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "CLOCKS_APART_SECONDS", 1.0)  # what Last-Modified is cut to
        patch.setattr(state, "TOLD_APART_SECONDS", 1.0)
        play()
    print(f"{played['steps']:,} steps in {played['histories']:,} histories, without a difference")


def _discard(tx: JournalTransaction, write_id: int, now: Moment) -> bool:
    return tx.writes.discard(write_id, now, only_conflict=True)
