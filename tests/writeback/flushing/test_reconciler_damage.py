"""What lies here and is not what was acknowledged is told of, left where it is, never sent, and stops nothing but what
it is about. The next process looks at it again."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.origin.client import OriginRequest
from gateway.writeback.flushing import state
from gateway.writeback.flushing.reconciler import AGAIN_SECONDS
from gateway.writeback.journal.records import CreateAttempt, ExpectedVersion, Part, Turn, Write, WriteSpec
from gateway.writeback.journal.uploads import CARRIED_OUT_SECONDS
from gateway.writeback.opening import recover
from gateway.writeback.pending_reader import IN_MEMORY_BYTES_MAX
from tests.support.flushing import HEADERS, Buffer, with_buffer
from tests.support.writeback import key

AT = key("k")


async def damage(buffer: Buffer, write_id: int) -> bytes:
    """Another record than was written lies there; the one that was."""

    def change(tx: object) -> bytes:
        rows = tx._rows  # type: ignore[attr-defined]
        [record] = rows.execute("SELECT record FROM writes WHERE id = ?", (write_id,)).fetchone()
        rows.execute("UPDATE writes SET record = X'0000' WHERE id = ?", (write_id,))
        return bytes(record)

    return await buffer.journal.change(change)


async def begin_at_origin(buffer: Buffer) -> str:
    async with await buffer.origin.send(OriginRequest("POST", AT.bucket, AT.key, [("uploads", None)])):
        return next(reversed(buffer.bucket.uploads))


def turn_of(buffer: Buffer, write_id: int) -> Turn | None:
    return buffer.journal.read(lambda tx: tx.turns.of(write_id))


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("size", [100, IN_MEMORY_BYTES_MAX + 70_000])
async def test_damaged_bytes_never_leave(buffer: Buffer, how: str, size: int) -> None:
    """A flipped bit, a cut file, a missing one: told once, kept, and nothing of it at the origin. When the bytes are
    what they were, the next process sends them."""
    await buffer.learn()
    stored = await buffer.put(key("damaged"), os.urandom(size))
    path = buffer.staging.path(stored.parts[0].file)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[size - 50] ^= 1
    path.write_bytes(whole[: size // 2] if how == "cut" else changed)
    if how == "missing":
        path.unlink()
    await buffer.put(key("whole"), b"fine")
    buffer.start()
    await buffer.until(lambda: len(buffer.left()) == 1 and bool(buffer.observer.damages))
    await buffer.passes(2 * AGAIN_SECONDS, step=5.0)
    assert buffer.observer.damages == ["damaged"]
    assert list(buffer.bucket.objects) == ["whole"]
    turn = turn_of(buffer, stored.id)
    assert turn is not None
    assert turn.damaged
    assert turn.last_error
    await buffer.kill()
    buffer.start()
    await buffer.until(lambda: len(buffer.observer.damages) == 2)
    await buffer.kill()
    path.write_bytes(whole)
    buffer.start()
    await buffer.flushed()
    assert buffer.bucket.object("damaged").etag == stored.etag
    assert not buffer.observer.conflicts


async def test_a_damaged_part_stops_no_other_upload(buffer: Buffer) -> None:
    """Of an open upload: the client may still send it again."""
    opened = []
    for name in ("1", "2"):
        upload = Write(
            WriteSpec(key(name), HEADERS, "slot"), ExpectedVersion(absent=True), buffer.clock.now(), upload_id=name
        )
        opened.append(await buffer.journal.change(lambda tx: tx.uploads.begin(upload)))  # noqa: B023
        part = Part(1, buffer.stage(name.encode()), 1.0)
        await buffer.journal.change(lambda tx: tx.uploads.put_part(name, part, Moment(buffer.clock.now())))  # noqa: B023
        if name == "1":
            buffer.staging.path(part.file).unlink()
    buffer.start()
    await buffer.until(lambda: buffer.observer.damages == ["1"])
    await buffer.until(lambda: not buffer.journal.read(lambda tx: tx.parts.unsent(opened[1].id, 9)))
    again = Part(1, buffer.stage(b"again"), 2.0)
    await buffer.journal.change(lambda tx: tx.uploads.put_part("1", again, Moment(buffer.clock.now())))
    await buffer.until(lambda: not buffer.journal.read(lambda tx: tx.parts.unsent(opened[0].id, 9)))


def test_several_damaged_parts_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are read side by side, and nothing complains of those behind the first."""

    async def scenario(buffer: Buffer) -> None:
        stored = await buffer.upload(key("model"), [10, 10, 10, 10], await begin_at_origin(buffer))
        for part in stored.parts:
            buffer.staging.path(part.file).unlink()
        buffer.start()
        await buffer.until(lambda: buffer.observer.damages == ["model"])
        await buffer.still()

    with_buffer(tmp_path, scenario)
    gc.collect()
    assert not caplog.records


async def test_a_damaged_row_stops_nothing_else(buffer: Buffer) -> None:
    """It is told, kept, and never believed; what was acknowledged before and after it is flushed. The next process
    looks at it again."""
    stored = [await buffer.put(key(name), b"x") for name in ("before", "damaged", "after")]
    record = await damage(buffer, stored[1].id)
    buffer.start()
    await buffer.until(lambda: set(buffer.bucket.objects) == {"before", "after"})
    await buffer.until(lambda: buffer.observer.damages == ["damaged"])
    await buffer.passes(2 * AGAIN_SECONDS, step=5.0)
    assert buffer.observer.damages == ["damaged"]
    assert buffer.journal.read(lambda tx: tx.turns.living([stored[1].id]))
    assert len(list(buffer.staging.names())) == 1
    await buffer.kill()

    def mend(tx: object) -> None:
        rows = tx._rows  # type: ignore[attr-defined]
        rows.execute("UPDATE writes SET record = ? WHERE id = ?", (record, stored[1].id))

    await buffer.journal.change(mend)
    buffer.start()
    await buffer.flushed()
    assert "damaged" in buffer.bucket.objects


async def test_what_waits_behind_a_damaged_row_waits(buffer: Buffer) -> None:
    """What it was nobody knows: nothing overtakes it."""
    shard = await buffer.put(key("step/1"), b"x")
    await buffer.put(key("step/manifest.json"), b"{}", behind="step/")
    await damage(buffer, shard.id)
    buffer.start()
    await buffer.until(lambda: buffer.observer.damages == ["1"])
    await buffer.passes(2 * AGAIN_SECONDS, step=5.0)
    assert not buffer.bucket.objects


async def test_an_upload_that_cannot_be_read_keeps_no_other_from_being_sent(buffer: Buffer) -> None:
    """Its parts rest; those of others go, whichever comes first."""
    opened = {}
    for name in ("1", "2", "3"):
        origin_upload_id = await begin_at_origin(buffer)
        upload = Write(
            WriteSpec(AT, HEADERS, "slot"),
            ExpectedVersion(absent=True),
            buffer.clock.now(),
            upload_id=name,
            origin_upload_id=origin_upload_id,
        )
        opened[name] = await buffer.journal.change(lambda tx: tx.uploads.begin(upload))  # noqa: B023
        part = Part(1, buffer.stage(name.encode()), 1.0)
        await buffer.journal.change(lambda tx: tx.uploads.put_part(name, part, Moment(buffer.clock.now())))  # noqa: B023
    await damage(buffer, opened["2"].id)
    buffer.start()

    def unsent() -> set[str]:
        return {name for name, one in opened.items() if _unsent(buffer, one.id)}

    await buffer.until(lambda: unsent() == {"2"} and buffer.observer.damages == ["k"])


def _unsent(buffer: Buffer, write_id: int) -> bool:
    return bool(buffer.journal.read(lambda tx: tx.parts.unsent(write_id, 9)))


async def test_one_to_be_aborted_that_cannot_be_read_keeps_no_other_from_it(buffer: Buffer) -> None:
    """Nor anything from being flushed."""
    upload_id, now = await begin_at_origin(buffer), buffer.clock.now()
    await buffer.journal.change(lambda tx: tx.writes.abort_at_origin(AT, "slot", "0", now))
    await buffer.journal.change(lambda tx: tx.writes.abort_at_origin(AT, "slot", upload_id, now))
    first, _ = buffer.journal.read(lambda tx: tx.uploads.aborting())
    await damage(buffer, first.id)
    await buffer.put(key("object"), b"bytes")
    buffer.start()
    await buffer.until(lambda: not buffer.bucket.uploads and not buffer.left())
    await buffer.passes(AGAIN_SECONDS, step=5.0)
    assert buffer.observer.damages == ["k"]
    assert buffer.journal.read(lambda tx: tx.turns.living([first.id])) == {first.id}


@pytest.mark.slow
async def test_a_question_that_cannot_be_read_keeps_no_other_from_being_found_out(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only of its own key nothing can be decided."""
    monkeypatch.setattr(state, "UNUSED_SECONDS", 3 * CARRIED_OUT_SECONDS)
    await begin_at_origin(buffer)
    asked = CreateAttempt(0, Moment.of(buffer.clock))
    ids = [
        await buffer.journal.change(lambda tx, at=at: tx.uploads.ask(at, "slot", asked))  # type: ignore[misc]
        for at in (key("other"), AT)
    ]
    await damage(buffer, ids[0])
    await buffer.journal.change(lambda tx: tx.uploads.mark_all_in_doubt(Moment.of(buffer.clock)))
    buffer.start()
    seen, last = buffer.journal.read, 2 * CARRIED_OUT_SECONDS
    assert await buffer.passes(last, lambda: seen(lambda tx: tx.turns.living(ids)) == {ids[0]})
    await buffer.clock.advance(state.UNUSED_SECONDS)
    assert await buffer.passes(2 * CARRIED_OUT_SECONDS, lambda: not buffer.bucket.uploads)
    assert buffer.observer.damages == ["other"]


def test_the_gateway_starts_with_such_rows(tmp_path: Path) -> None:
    """They are kept."""
    left: set[int] = set()

    async def scenario(buffer: Buffer) -> None:
        await buffer.journal.change(lambda tx: tx.writes.abort_at_origin(AT, "slot", "0", 1.0))
        [aborting] = buffer.journal.read(lambda tx: tx.uploads.aborting())
        asked = await buffer.journal.change(lambda tx: tx.uploads.ask(AT, "slot", CreateAttempt(1, Moment(1.0))))
        put = await buffer.put(key("object"), b"bytes")
        left.update((aborting.id, asked, put.id))
        for write_id in left:
            await damage(buffer, write_id)

    async def again(buffer: Buffer) -> None:
        buffer.start()
        await buffer.until(lambda: len(buffer.observer.damages) == 3)
        assert buffer.journal.read(lambda tx: tx.turns.living(list(left))) == left

    (tmp_path / "FORMAT").write_bytes(b"forebay writeback 1\n")
    with_buffer(tmp_path, scenario)
    recover(tmp_path, Moment(7.0))
    with_buffer(tmp_path, again)
