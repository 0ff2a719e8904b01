"""A request's body on its way into the buffer: room first, then verified, staged, sealed; errors leave nothing.

Room is reserved before any of the body is read, and before a client is told to go on. A body without room waits a
little for the flush to make some. Then it goes through, or is answered SlowDown, by the slot's setting; one larger than
the buffer, or one that comes while too much is on this node only, goes through either way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.core.errors import BufferUnavailable, S3Error
from gateway.operations.context import RequestContext
from gateway.operations.payload import announced_bytes, check_rate, receive_verified
from gateway.operations.writeback.write_through import goes_through
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.telemetry import metrics
from gateway.writeback.bounds import Bound
from gateway.writeback.journal.records import Part

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


@dataclass(frozen=True, slots=True)
class Staged:
    """A sealed body, as its future part, and the checksum headers of the answer."""

    part: Part
    answer_headers: list[tuple[str, str]]


async def stage_body(context: RequestContext, buffer: WritebackBuffer, slot: str, number: int) -> Staged:
    """Receive the request's body into a durable staged file; after an S3Error nothing is left.

    It has room on the account of `slot`, and loses it if it comes slowly while others wait for room.
    """
    writer, bounds, clock = buffer.stage(), buffer.bounds.of(slot), context.services.clock
    received_bytes, own_seconds, started = 0, 0.0, clock.monotonic()

    def write(data: memoryview) -> None:
        nonlocal received_bytes, own_seconds
        now = clock.monotonic()
        received_bytes += len(data)
        if bounds is not None and bounds.is_awaited:
            check_rate(received_bytes, now - started - own_seconds)
        try:
            writer.write(data)
        except OSError as error:  # the disk's: those of the client's connection come from elsewhere
            raise BufferUnavailable(f"a staged file cannot be written: {error}") from error
        own_seconds += clock.monotonic() - now

    try:
        received = await receive_verified(context, write)
    except BaseException as error:
        await buffer.discard(writer)
        if isinstance(error, BufferUnavailable):
            buffer.bounds.trouble(error)
        raise
    file = await buffer.seal(writer, received.md5)
    checksums = {name.removeprefix(PREFIX): value for name, value in received.checksums.items()}
    part = Part(number, file, clock.now(), checksums)
    return Staged(part, [("etag", file.etag), *received.checksums.items()])


PATIENCE_SECONDS = 20.0
"""Clients give up after some 60 seconds; a 503 before that makes them try again."""

PATIENCE_BEFORE_THROUGH_SECONDS = 1.0
"""The origin takes the body as fast as the flush would make room for it: waiting gains nothing."""


@asynccontextmanager
async def room_for_body(context: RequestContext, buffer: WritebackBuffer, slot: str) -> AsyncIterator[Bound | None]:
    """Hold room for the request's body on a slot's account; yield why it must go through if there is none.

    Leave it when the write is in the journal. S3Error SlowDown if the slot wants that; with `write = "scratch"` nothing
    goes through, and a body larger than the buffer is EntityTooLarge.
    """
    bounds = buffer.bounds.of(slot)
    if bounds is None:
        yield None
        return
    size_bytes = announced_bytes(context)
    is_scratch = bounds.slot.write == "scratch"
    slows_down = bounds.slot.when_buffer_full == "slow-down" or is_scratch
    patience_seconds = PATIENCE_SECONDS if slows_down else PATIENCE_BEFORE_THROUGH_SECONDS
    bound = await bounds.take(context.credential, size_bytes, patience_seconds)
    if bound is None:
        try:
            yield None
        finally:
            bounds.give_back(context.credential, size_bytes)
        return
    if bound is Bound.SIZE and is_scratch:
        raise s3_error("EntityTooLarge", ProposedSize=str(size_bytes), MaxSizeAllowed=str(bounds.slot.buffer_bytes))
    if is_scratch or (bound.passes and slows_down):
        raise slow_down(context, buffer, slot, bound)
    yield bound


def leaves_to_the_origin(context: RequestContext, buffer: WritebackBuffer, *, takes_room: bool) -> bool:
    """Return whether an upload that begins now, or a copy, which takes no room, is left to the origin."""
    bounds = buffer.bounds.of(context.slot.name)
    bound = bounds.now(int(takes_room)) if bounds is not None else None
    if bounds is None or bound is None:
        return False
    bounds.look_at_uploads()
    if bound.passes and (not takes_room or bounds.slot.when_buffer_full == "slow-down"):
        return False
    goes_through(context, bound)
    return True


def slow_down(context: RequestContext, buffer: WritebackBuffer, name: str, bound: Bound) -> S3Error:
    """Return the 503 for a body without room that does not go through, with the time that the flush needs for it."""
    bounds = buffer.bounds.of(name)
    assert bounds is not None  # noqa: S101 - there was a bound
    slot = bounds.slot
    metrics.WRITEBACK_SLOWED_DOWN.add(1, slot.name)
    why = {
        Bound.FULL: f"it holds what it may, {slot.buffer_bytes} bytes",
        Bound.SHARE: "the bodies of this access key that are still arriving take its share of the room",
        Bound.DISK: "the disk under it has no room, or has just failed",
        Bound.SIZE: f"the body is larger than all of it, {slot.buffer_bytes} bytes",
        Bound.EXPOSURE_BYTES: f"more than {slot.unflushed_bytes_max} bytes are on this node only",
        Bound.EXPOSURE_AGE: f"a write of more than {slot.unflushed_age_seconds_max} seconds ago is on this node only",
    }[bound]
    return s3_error(
        "SlowDown",
        f"The write-back buffer of slot {slot.name} does not take this write now: {why}. Please reduce your request "
        "rate, and try again.",
        headers={"retry-after": str(bounds.retry_after_seconds(announced_bytes(context)))},
    )


async def apply_backpressure(context: RequestContext, buffer: WritebackBuffer, slot: str) -> None:
    """Delay the acknowledgement of a write in the journal while the buffer fills faster than it drains."""
    bounds = buffer.bounds.of(slot)
    seconds = bounds.delay_seconds(announced_bytes(context)) if bounds is not None else 0.0
    if seconds > 0:
        metrics.WRITEBACK_PACED_SECONDS.add(seconds, slot)
        await context.services.clock.sleep(seconds)
