"""What is killed: each way in which a write is acknowledged, flushed or recovered.

`before` brings a key into the state that the rest is about, `act` is what is interrupted, `rest` is what a client does
about that afterwards: it tries again. Each run has keys of its own, below `name`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gateway.s3.requests import Operation
from tests.crash.points.client import BUCKET, Client, Interrupted
from tests.support.memory_origin.faults import Delay, Unreachable, on
from tests.support.strict_origin import StrictOrigin

PART_BYTES = 5 * 1024 * 1024
LARGE_BYTES = 400_000
"""Received straight from the socket, and flushed as a stream."""

SLOW_SECONDS = 0.15
CLIENTS, STEPS = 4, 6
IF_ABSENT = {"If-None-Match": "*"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a scenario.

    `flushed` returns when the gateway has nothing left to flush; `fall` kills all of its processes, `rise` starts it.
    """

    client: Client
    origin: StrictOrigin
    dice: random.Random
    name: str
    flushed: Callable[[], None]
    fall: Callable[[], None]
    rise: Callable[[], None]

    @property
    def key(self) -> str:
        return f"{self.name}/ké"

    def bytes(self, size: int) -> bytes:
        return self.dice.randbytes(size)

    def put(self, size: int = 1000) -> None:
        self.client.put(self.key, self.bytes(size))

    def put_and_flush(self) -> None:
        self.put()
        self.flushed()

    def upload(self, *sizes: int) -> None:
        upload_id = self.client.create(self.key)
        for number, size in enumerate(sizes, 1):
            self.client.part(upload_id, number, self.bytes(size))

    @property
    def upload_id(self) -> str:
        """Of the upload of this run that was begun last."""
        return [name for name, one in self.client.ledger.uploads.items() if one.key == self.key][-1]

    def slow(self, operation: Operation) -> None:
        """The origin takes its time for this key."""
        self.origin.model.inject(on(operation, bucket=BUCKET, key=self.key), Delay(SLOW_SECONDS))

    def upload_begun_here(self, *sizes: int) -> None:
        """The origin does not answer to Create: its upload is begun by the flush."""
        self.origin.model.inject(
            on(Operation.CREATE_MULTIPART_UPLOAD, bucket=BUCKET, key=self.key), Unreachable(), times=1
        )
        self.upload(*sizes)


Step = Callable[[Run], None]


def _nothing(_: Run) -> None:
    """There is nothing to be done."""


def _in_turn(*steps: Step) -> Step:
    def all_of_them(run: Run) -> None:
        for step in steps:
            step(run)

    return all_of_them


@dataclass(frozen=True, slots=True)
class Scenario:
    """`role`: whose calls are counted, those of the workers, of the background process or of the supervisor.

    Where they are `within` this directory, if it is given.
    """

    name: str
    role: str
    before: Step
    act: Step
    rest: Step = _nothing
    within: str = ""


def _begun_here(run: Run) -> None:
    run.upload_begun_here(10)


def _complete(run: Run) -> None:
    run.client.complete(run.upload_id)


def _complete_if_absent(run: Run) -> None:
    run.client.complete(run.upload_id, IF_ABSENT)


def _part(run: Run) -> None:
    run.client.part(run.upload_id, 1, run.bytes(LARGE_BYTES))


def _upload_and_complete(run: Run) -> None:
    run.upload(10)
    _complete(run)


def _upload_and_abort(run: Run) -> None:
    run.upload(10)
    _abort(run)


def _abort(run: Run) -> None:
    run.client.abort(run.upload_id)


def _delete(run: Run) -> None:
    run.client.delete(run.key)


def _delete_many(run: Run) -> None:
    run.client.delete_many([run.key, f"{run.name}/other", f"{run.name}/none"])


def _two(run: Run) -> None:
    """One at the origin, one pending."""
    run.put_and_flush()
    run.slow(Operation.PUT_OBJECT)
    run.client.put(f"{run.name}/other", run.bytes(2000))


def _pending_slowly(run: Run) -> None:
    run.slow(Operation.PUT_OBJECT)
    run.put()


def _pending_over_flushed(run: Run) -> None:
    run.put_and_flush()
    _pending_slowly(run)


def _copy(run: Run) -> None:
    run.client.copy(run.key, f"{run.name}/copy")


def _copy_over(run: Run) -> None:
    run.client.put(f"{run.name}/copy", run.bytes(10))
    run.slow(Operation.PUT_OBJECT)
    run.put()


def several_at_once(run: Run) -> None:
    """Clients that do not wait for each other, each with keys of its own."""
    runs = [replace(run, name=f"{run.name}/{n}", dice=random.Random(run.dice.random())) for n in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as threads:
        working = [threads.submit(_work, one) for one in runs]
    errors = [error for one in working if (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda one: isinstance(one, Interrupted)):
        raise error


def _work(run: Run) -> None:
    steps: list[Step] = [Run.put, Run.put, _delete, _upload_and_complete, _upload_and_abort]
    for _ in range(STEPS):
        run.dice.choice(steps)(run)


def _fall_with_all_kinds_of_things(run: Run) -> None:
    """Written while the origin was away, then everything is killed, in the middle of a body."""
    with run.origin.refused():
        run.put()
        run.client.put(f"{run.name}/large", run.bytes(LARGE_BYTES))
        run.client.copy(run.key, f"{run.name}/copy")
        run.client.part(run.client.create(f"{run.name}/open"), 1, run.bytes(10))
        upload_id = run.client.create(f"{run.name}/whole")
        run.client.part(upload_id, 1, run.bytes(10))
        run.client.complete(upload_id)
        with run.client.half_put(f"{run.name}/torn", run.bytes(LARGE_BYTES)):
            run.fall()


def _start(name: str) -> Scenario:
    return Scenario(f"start-{name}", name, _fall_with_all_kinds_of_things, lambda run: run.rise(), within="writeback")


def _flush(name: str, act: Step, before: Step = _nothing, rest: Step = _nothing) -> Scenario:
    return Scenario(f"flush-{name}", "background", before, _in_turn(act, lambda run: run.flushed()), rest)


SCENARIOS: Sequence[Scenario] = (
    Scenario("put", "worker", _nothing, Run.put, Run.put),
    Scenario("put-large", "worker", _nothing, lambda run: run.put(LARGE_BYTES), Run.put),
    Scenario("put-empty", "worker", _nothing, lambda run: run.put(0)),
    Scenario("put-over-pending", "worker", _pending_slowly, Run.put, Run.put),
    Scenario("put-over-flushed", "worker", Run.put_and_flush, Run.put, Run.put),
    Scenario("put-if-absent", "worker", _nothing, lambda run: run.client.put(run.key, run.bytes(10), IF_ABSENT)),
    Scenario("create", "worker", _nothing, lambda run: run.upload(), _upload_and_complete),
    Scenario("part", "worker", lambda run: run.upload(10), _part, _in_turn(_part, _complete)),
    Scenario("part-new", "worker", lambda run: run.upload(), _part, _in_turn(_part, _complete)),
    Scenario("complete", "worker", lambda run: run.upload(LARGE_BYTES), _complete, _complete),
    Scenario("complete-over-pending", "worker", _in_turn(lambda run: run.upload(10), _pending_slowly), _complete),
    Scenario("complete-here", "worker", _begun_here, _complete, _complete),
    Scenario(
        "complete-if-absent", "worker", lambda run: run.upload_begun_here(10), _complete_if_absent, _complete_if_absent
    ),
    Scenario("abort", "worker", lambda run: run.upload(LARGE_BYTES, 10), _abort, _abort),
    Scenario("delete-pending", "worker", _pending_slowly, _delete, _delete),
    Scenario("delete-pending-over-flushed", "worker", _pending_over_flushed, _delete, Run.put),
    Scenario("delete-flushed", "worker", Run.put_and_flush, _delete, Run.put),
    Scenario("delete-many", "worker", _two, _delete_many, _delete_many),
    Scenario("copy", "worker", _pending_slowly, _copy),
    Scenario("copy-over", "worker", _copy_over, _copy),
    _flush("put", Run.put, rest=Run.put),
    _flush("put-large", lambda run: run.put(LARGE_BYTES)),
    _flush("over-flushed", Run.put, Run.put_and_flush),
    _flush("overwrites", _in_turn(*[_pending_slowly] * 3)),
    _flush("parts", _complete, lambda run: run.upload(PART_BYTES, 10)),
    _flush("parts-begun-here", _in_turn(_begun_here, _complete)),
    _flush("abort", _upload_and_abort),
    _flush("delete", _in_turn(_pending_slowly, _delete), rest=_delete),
    _flush("copy", _copy, _pending_slowly),
    _flush("several-at-once", several_at_once),
    Scenario("several-at-once", "worker", _nothing, several_at_once),
    _start("supervisor"),
    _start("worker"),
    _start("background"),
)
