"""Waiting until the origin has what this node has acknowledged: for requests that only the origin can answer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.errors import BufferUnavailable, S3Error
from gateway.core.model import ObjectKey
from gateway.metadata.listing.pages import END, key_successor, prefix_end
from gateway.operations.context import RequestContext
from gateway.operations.writeback.local_etags import name_by_bucket_etags
from gateway.operations.writeback.write_back_policy import has_conditions
from gateway.origin.client import Purpose
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation
from gateway.writeback.checkpoints.manifests import NamedFiles
from gateway.writeback.flushing.manifest_files import AWAITED_PAUSE_SECONDS, FIRST_PAUSE_SECONDS, Presence
from gateway.writeback.flushing.state import LookedFor, WriteRefused
from gateway.writeback.journal.records import State, Write
from gateway.writeback.order import key_prefix_before

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

PATIENCE_SECONDS = 20.0
"""Clients give up after some 60 seconds; a 503 before that makes them try again."""

LOOK_SECONDS = 0.01
LOOK_SECONDS_MAX = 0.1
"""The shortest and longest pause between looks at the journal. Within these, a tenth of the wait so far: long waits end
a little later, and cost much less."""

_PATIENT_LOOKS = 2
"""Looks after which the wait asks for priority: much must be ahead of it."""

_KEYS_AT_A_LOOK = 100


class FlushWait:
    """One request's wait until the origin has what this node has acknowledged, of PATIENCE_SECONDS in all.

    Each method returns when the origin has what was pending at the call. S3Error ServiceUnavailable (503) when that
    takes too long, OperationAborted (409) when a conflict is in the way.
    """

    def __init__(self, context: RequestContext, buffer: WritebackBuffer) -> None:
        self._context = context
        self._buffer = buffer
        self._clock = context.services.clock
        self._deadline = self._clock.monotonic() + PATIENCE_SECONDS
        self._waited: list[str] = []
        """Prefixes with all earlier writes flushed: slots' own, or a marker's."""

    async def for_keys(self, keys: Iterable[ObjectKey]) -> None:
        """Wait for pending writes of these keys. Then the request's conditions name the origin's versions."""
        pending = [(key, found.sequence) for key in keys if (found := self._buffer.pending(key)) is not None]
        for key, sequence in pending:
            await self.for_write(key, sequence)
        name_by_bucket_etags(self._context, self._buffer)

    def is_needed(self, bucket: str, prefix: str) -> bool:
        start = prefix.encode()
        stop = prefix_end(start) if start else END
        return bool(self._buffer.look(lambda tx: tx.writes.listing(bucket, start, stop, 1)))

    async def for_prefix(self, bucket: str, prefix: str = "", *, past_local: bool = True) -> None:
        """Wait for writes under a prefix but local objects, which without `past_local` raise S3Error NotImplemented."""
        newest = self._buffer.look(lambda tx: tx.writes.newest())
        start = prefix.encode()
        stop = prefix_end(start) if start else END
        while found := self._buffer.look(lambda tx: tx.writes.listing(bucket, start, stop, _KEYS_AT_A_LOOK)):  # noqa: B023
            for one in found:
                if one.state is State.LOCAL and not past_local:
                    raise s3_error(
                        "NotImplemented",
                        "This node keeps objects of the bucket that are never sent to the origin: delete them first.",
                    )
                if one.state is State.LOCAL:  # it never leaves this node
                    continue
                await self.for_write(one.key, min(one.sequence, newest))
            start = key_successor(found[-1].key.key.encode())

    async def for_turn(self, key: ObjectKey) -> None:
        """Wait for writes that must precede one of a key that goes past the buffer (writeback/order.py).

        Those are the key's own, for a marker or conditional write those under its directory, in a strict slot those
        under its prefix.
        """
        slot = self._context.services.slots.find(key.bucket, key.key)
        is_deletion = self._context.request.operation in (Operation.DELETE_OBJECT, Operation.DELETE_OBJECTS)
        if slot.write == "back" and (slot.order == "strict" or not is_deletion):
            prefix = key_prefix_before(key.key, slot, is_conditional=has_conditions(self._context.request.headers))
            if prefix is not None and prefix not in self._waited:
                await self.for_prefix(key.bucket, prefix)
                self._waited.append(prefix)
        await self.for_keys([key])

    async def for_files(self, named: NamedFiles | None) -> None:
        """Wait for everything that a manifest names under the request's key, whichever node writes it; None: unknown.

        If the gateway may not look, as in a bucket whose writes it never absorbs, do not wait.
        """
        if not named:
            return
        presence = Presence(self._context.object_key.bucket, named)
        origin, slot = self._context.services.origin, self._context.slot.name
        pause_seconds, is_first = FIRST_PAUSE_SECONDS, True
        while True:
            found = await presence.look(origin, slot, Purpose.FORWARD, self._clock, lambda _: False, is_first=is_first)
            if isinstance(found, WriteRefused) or (isinstance(found, LookedFor) and not found.missing):
                return
            if self._clock.monotonic() + pause_seconds >= self._deadline:
                raise s3_error(
                    "ServiceUnavailable",
                    "The origin does not have all the files yet that this manifest names: try again.",
                )
            with cancellation.turn():
                await self._clock.sleep(pause_seconds)
            pause_seconds, is_first = min(2 * pause_seconds, AWAITED_PAUSE_SECONDS), False

    async def for_write(self, key: ObjectKey, sequence: int) -> None:
        """Wait for writes of a key up to `sequence`."""
        looks, began = 0, self._clock.monotonic()
        while True:
            first = self._buffer.look(lambda tx: tx.writes.earliest(key))
            if first is None or first.sequence > sequence:
                return
            if first.state is State.CONFLICT:
                raise conflict(self._name(key))
            if first.state is State.LOCAL:
                await self._send_after_all(first)
            if self._clock.monotonic() >= self._deadline:
                raise s3_error("ServiceUnavailable", f"{self._name(key)} is not at the origin yet: try again.")
            if looks == _PATIENT_LOOKS:
                with suppress(BufferUnavailable):  # then it comes in its turn
                    await self._buffer.prioritise(key)
            looks += 1
            await until_next_look(self._clock, began)

    async def _send_after_all(self, local: Write) -> None:
        """Send a local object that is needed at the origin, unless its slot sends none: S3Error NotImplemented."""
        if self._context.services.slots.find(local.key.bucket, local.key.key).write == "scratch":
            raise s3_error(
                "NotImplemented",
                f'{self._name(local.key)} is kept on this node only (write = "scratch"), and only the origin could '
                "answer this request.",
            )
        now = self._clock.now()
        await self._buffer.journal.change(lambda tx: tx.local.send_after_all(local.id, now))

    def _name(self, key: ObjectKey) -> str:
        """Name a key, but hide one that the caller may not touch, and that only comes before (for_turn)."""
        is_covered = self._context.grant.covers(key.bucket, key.key)
        return str(key) if is_covered else "A key that comes before, and is not among yours,"


async def until_next_look(clock: Clock, began: float) -> None:
    """Pause between two looks at the journal of a wait that began at a monotonic time."""
    with cancellation.turn():
        await clock.sleep(min(max(LOOK_SECONDS, (clock.monotonic() - began) / 10), LOOK_SECONDS_MAX))


def conflict(name: str) -> S3Error:
    return s3_error(
        "OperationAborted",
        f"{name} was changed at the origin while a write of this node was on its way: somebody must decide which is to "
        "stay, before the origin can answer for it.",
    )
