"""The bounds of the buffer, as clients meet them: room before bytes, then slower, then through or SlowDown."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.operations import payload
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from gateway.writeback import bounds as writeback_bounds
from gateway.writeback.bounds import Bound
from gateway.writeback.journal.files import Usage
from tests.support.asgi import call, signed_headers
from tests.support.counting import by_label, counted
from tests.support.memory_origin.faults import Unreachable
from tests.support.slots import Slot, slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, with_a_client, with_client

KIB = 1024


def through() -> dict[str, float]:
    """The writes that went through, by reason, without the first write to the bucket, which makes it known."""
    found = by_label(metrics.WRITEBACK_THROUGH, "reason")
    found.pop("bucket-unknown", None)
    return found


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for room that nobody makes."""
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_BEFORE_THROUGH_SECONDS", 0.03)


def slot(buffer_bytes: int | None = 100 * KIB, **changed: Any) -> list[Slot]:
    return [slot_with(SLOTS[0], buffer_bytes=buffer_bytes, **changed)]


async def put(client: Client, name: str, size_bytes: int, status: int = 200) -> str:
    """How a PUT of so many bytes was answered: absorbed, forwarded, or nothing for an error."""
    answer = await client.ask("PUT", f"back/{name}", os.urandom(size_bytes), status=status)
    how = answer.headers.get("x-forebay-cache", "")
    assert (answer.headers.get("x-forebay-not-absorbed") in set(Bound)) == (how == "forwarded")
    return how


def used(client: Client) -> int:
    bounds = client.buffer.bounds.of("back")
    assert bounds is not None
    return bounds.used_bytes()


@with_a_client(slot())
async def test_what_does_not_fit_goes_through(client: Client) -> None:
    """`when_buffer_full = "through"`: absorbed while there is room, else by the origin, then absorbed again."""
    await client.learn()
    assert [await put(client, f"k{n}", 40 * KIB) for n in range(3)] == ["absorbed", "absorbed", "forwarded"]
    assert through() == {"full": 1}
    assert len(client.origin.data("bucket", "back/k2")) == 40 * KIB
    assert used(client) == 80 * KIB
    await client.flush()
    assert used(client) == 0
    assert await put(client, "k3", 40 * KIB) == "absorbed"


@with_a_client(slot())
async def test_a_key_that_is_pending_is_flushed_before_its_next_write_goes_through(client: Client) -> None:
    """So the origin has them in the order in which they were acknowledged."""
    await client.learn()
    assert await put(client, "k", 90 * KIB) == "absorbed"
    async with client.flushing():
        assert await put(client, "k", 120 * KIB) == "forwarded"
    assert len(client.origin.data("bucket", "back/k")) == 120 * KIB
    assert client.pending("back/k") is None
    assert through() == {"size": 1}


@with_a_client(slot(when_buffer_full="slow-down"))
async def test_what_does_not_fit_is_slowed_down(client: Client) -> None:
    """`when_buffer_full = "slow-down"`: 503 SlowDown, with the time to try again; nothing was read or stored."""
    await client.learn()
    assert await put(client, "k1", 80 * KIB) == "absorbed"
    refused = await client.ask("PUT", "back/k2", bytes(40 * KIB), status=503)
    assert b"<Code>SlowDown</Code>" in refused.body
    assert 1 <= int(refused.headers["retry-after"]) <= writeback_bounds.RETRY_SECONDS_MAX
    assert client.pending("back/k2") is None
    assert client.origin.count(Operation.PUT_OBJECT) == 1
    assert metrics.WRITEBACK_SLOWED_DOWN.value("back") == 1
    await client.flush()
    assert await put(client, "k2", 40 * KIB) == "absorbed"
    assert through() == {}


@with_a_client(slot(when_buffer_full="slow-down"))
async def test_what_can_never_fit_goes_through_where_others_are_slowed_down(client: Client) -> None:
    """A client that is told to try again must have a chance."""
    await client.learn()
    assert await put(client, "k", 101 * KIB) == "forwarded"
    assert through() == {"size": 1}


@pytest.mark.slow
@with_a_client(slot(when_buffer_full="slow-down"))
async def test_who_waits_gets_the_room_that_the_flush_makes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slow-down nobody is refused where the flush keeps up within the patience."""
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_SECONDS", 20.0)
    await client.learn()
    async with client.flushing():
        answers = await asyncio.gather(*(put(client, f"k{n}", 30 * KIB) for n in range(12)))
    assert answers == ["absorbed"] * 12
    assert metrics.WRITEBACK_SLOWED_DOWN.value("back") == 0


@with_a_client(slot(when_buffer_full="slow-down"))
async def test_a_slow_body_loses_its_room_to_those_who_wait(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """And to nobody else: where there is room for all, a body may be slow."""
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_SECONDS", 20.0)
    await client.learn()
    monkeypatch.setattr(payload, "BUFFERED_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(payload, "BUFFERED_RATE_BYTES_PER_SECOND_MIN", 2**60)
    assert await put(client, "alone", 10 * KIB) == "absorbed"
    bounds, waiting = client.buffer.bounds.of("back"), list[asyncio.Task[str]]()
    assert bounds is not None
    pieces = [bytes(40 * KIB)] * 2

    async def have_another_wait() -> None:
        if not waiting:
            waiting.append(asyncio.create_task(put(client, "fast", 40 * KIB)))
            await until(lambda: bounds.is_awaited)

    slow = await call(client.gateway.app, "PUT", "/bucket/back/slow", None, pieces, before_piece=have_another_wait)
    assert (slow.status, b"<Code>RequestTimeout</Code>" in slow.body) == (400, True)
    monkeypatch.undo()
    assert await waiting[0] == "absorbed"


@with_a_client(slot())
async def test_many_bodies_at_once_never_exceed_the_size(client: Client) -> None:
    """Room is taken before bytes are: twenty bodies that begin together get what three can have."""
    await client.learn()
    answers = await asyncio.gather(*(put(client, f"k{n}", 30 * KIB) for n in range(20)))
    assert sorted(answers) == ["absorbed"] * 3 + ["forwarded"] * 17
    assert client.buffer.look(lambda tx: tx.files.usage("back")) == Usage(90 * KIB, 3)


@with_a_client(slot(when_buffer_full="slow-down"))
async def test_no_byte_is_asked_for_before_there_is_room(client: Client) -> None:
    """So `Expect: 100-continue` is not granted to what is then refused."""
    await client.learn()
    await put(client, "k1", 80 * KIB)
    body = bytes(40 * KIB)
    headers = signed_headers("PUT", "/bucket/back/k2", {}, body) | {
        "Content-Length": str(len(body)),
        "Expect": "100-continue",
    }
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was asked for")

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "PUT",
        "scheme": "http",
        "path": "/bucket/back/k2",
        "raw_path": b"/bucket/back/k2",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 9000),
        "extensions": {},
    }
    await client.gateway.app(scope, receive, send)
    assert statuses[0] == 503


@pytest.mark.parametrize("refusal", [{"Content-MD5": "MTIzNDU2Nzg5MDEyMzQ1Ng=="}, {"x-amz-checksum-crc32": "AAAAAA=="}])
@with_a_client(slot())
async def test_a_body_that_is_refused_gives_its_room_back(client: Client, refusal: dict[str, str]) -> None:
    """Whatever ends it: what is reserved is what is on its way."""
    await client.learn()
    for _ in range(3):
        await client.ask("PUT", "back/k", bytes(range(1, 200)) * 400, refusal, status=400)
    assert used(client) == 0


@with_a_client(slot())
async def test_acknowledgements_slow_down_before_the_buffer_is_full(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From three quarters on, and no earlier; for no longer than a client bears."""
    monkeypatch.setattr(writeback_bounds, "DELAY_SECONDS_MAX", 0.2)
    await client.learn()
    await put(client, "k1", 70 * KIB)
    assert counted(metrics.WRITEBACK_PACED_SECONDS) == 0
    await asyncio.sleep(0.05)
    await put(client, "k2", 20 * KIB)
    assert 0 < counted(metrics.WRITEBACK_PACED_SECONDS) <= 0.2


@with_a_client(slot(unflushed_bytes_max=50 * KIB, when_buffer_full="slow-down"))
async def test_beyond_the_exposure_writes_go_through(client: Client) -> None:
    """What only this node has stays below `max_unflushed_bytes`, also with slow-down; nobody waits for it."""
    await client.learn()
    assert await put(client, "k1", 30 * KIB) == "absorbed"
    assert await put(client, "k2", 30 * KIB) == "forwarded"
    assert await put(client, "k3", 10 * KIB) == "absorbed"
    assert through() == {"exposure-bytes": 1}
    upload_id = await client.create("back/m")
    assert upload_id not in client.origin.buckets["bucket"].uploads
    etag = await client.part("back/m", upload_id, 1, bytes(20 * KIB))
    assert used(client) == 40 * KIB
    await client.complete("back/m", upload_id, {1: etag})
    assert client.origin.data("bucket", "back/m") == bytes(20 * KIB)


@with_a_client(slot(unflushed_age_seconds_max=0.25))
async def test_while_something_old_is_only_here_writes_go_through(client: Client) -> None:
    """`max_unflushed_age`: until the flush has caught up. Uploads are begun at the origin alone then, copies too."""
    await client.learn()
    assert await put(client, "k1", 10) == "absorbed"
    await asyncio.sleep(0.3)
    assert await put(client, "k2", 10) == "forwarded"
    upload_id = await client.create("back/m")
    assert upload_id in client.origin.buckets["bucket"].uploads
    async with client.flushing():
        copied = await client.ask("PUT", "back/copy", headers={"x-amz-copy-source": "bucket/back/k1"})
    assert copied.headers["x-forebay-cache"] == "forwarded"
    assert await put(client, "k3", 10) == "absorbed"
    assert set(through()) == {"exposure-age"}


async def upload(client: Client, name: str, sizes: list[int]) -> tuple[str, dict[int, str], dict[int, bytes]]:
    upload_id = await client.create(name)
    bodies = {number: os.urandom(size) for number, size in enumerate(sizes, 1)}
    etags = {number: await client.part(name, upload_id, number, body) for number, body in bodies.items()}
    return upload_id, etags, bodies


@pytest.mark.slow
@with_a_client(slot(PART_BYTES + 100))
async def test_an_upload_larger_than_the_buffer_succeeds(client: Client) -> None:
    """Its parts go where there is room: here, or to the origin's upload. The 200 of Complete is the origin's then."""
    upload_id, etags, bodies = await upload(client, "back/m", [PART_BYTES] * 3 + [17])
    assert through() == {"full": 2}
    assert client.origin.count(Operation.UPLOAD_PART) == 2
    listed = await client.ask("GET", f"back/m?uploadId={upload_id}")
    assert listed.body.count(b"<Part>") == 4
    assert all(etag.strip('"').encode() in listed.body for etag in etags.values())
    done = await client.complete("back/m", upload_id, etags)
    again = await client.complete("back/m", upload_id, etags)
    assert (done.headers["x-forebay-cache"], done.body) == ("forwarded", again.body)
    assert client.origin.data("bucket", "back/m") == b"".join(bodies.values())
    stored = client.origin.buckets["bucket"].object("back/m")
    assert stored.etag.encode().strip(b'"') in done.body
    assert (await call(client.gateway.app, "GET", "/bucket/back/m")).body == b"".join(bodies.values())
    assert client.pending("back/m") is None
    assert used(client) == 0
    assert list(client.buffer.staging.names()) == []
    assert not client.origin.buckets["bucket"].uploads


@with_a_client(slot())
async def test_complete_checks_parts_at_the_origin_as_others(client: Client) -> None:
    """Wrong ETags, small parts, unknown parts, checksums that are missing; and what was not chosen is nobody's."""
    upload_id, etags, bodies = await upload(client, "back/m", [50 * KIB, 60 * KIB, 70 * KIB])
    assert client.origin.count(Operation.UPLOAD_PART) == 2
    too_small = await client.complete("back/m", upload_id, etags, 400)
    wrong = await client.complete("back/m", upload_id, {2: etags[1]}, 400)
    unknown = await client.complete("back/m", upload_id, {4: etags[1]}, 400)
    codes = [answer.body.partition(b"<Code>")[2].partition(b"<")[0] for answer in (too_small, wrong, unknown)]
    assert codes == [b"EntityTooSmall", b"InvalidPart", b"InvalidPart"]
    await client.complete("back/m", upload_id, {1: etags[1]})
    assert client.pending("back/m") is not None
    await client.flush()
    assert client.origin.data("bucket", "back/m") == bodies[1]


@pytest.mark.slow
@with_a_client(slot(PART_BYTES))
async def test_parts_replace_each_other_wherever_they_are(client: Client) -> None:
    """The last one acknowledged is the part, and room that is given back is room."""
    upload_id, etags, bodies = await upload(client, "back/m", [PART_BYTES, PART_BYTES, 10])
    for number in (2, 3, 2):
        bodies[number] = os.urandom(PART_BYTES)
        etags[number] = await client.part("back/m", upload_id, number, bodies[number])
    assert used(client) == PART_BYTES
    await client.complete("back/m", upload_id, etags)
    assert client.origin.data("bucket", "back/m") == b"".join(bodies.values())


@with_a_client(slot())
async def test_a_part_that_may_be_on_its_way_is_not_overtaken(client: Client) -> None:
    """Nobody could say which of two the origin got last: SlowDown, until the first is there."""
    upload_id, etags, _ = await upload(client, "back/m", [80 * KIB])
    target = f"back/m?partNumber=1&uploadId={upload_id}"
    refused = await client.ask("PUT", target, bytes(90 * KIB), status=503)
    assert b"SlowDown" in refused.body
    await client.complete("back/m", upload_id, etags)
    await client.flush()
    assert len(client.origin.data("bucket", "back/m")) == 80 * KIB


@with_a_client(slot())
async def test_an_aborted_upload_leaves_nothing_at_the_origin(client: Client) -> None:
    """Its parts there go with the origin's upload."""
    upload_id, _, _ = await upload(client, "back/m", [80 * KIB, 80 * KIB])
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
    await client.flush()
    assert not client.origin.buckets["bucket"].uploads


@with_a_client(slot())
async def test_with_the_origin_away_a_full_buffer_slows_down(client: Client) -> None:
    """Nothing could go through: parts, with an upload at the origin or none, are told to come again."""
    upload_id = await client.create("back/begun")
    away = client.origin.inject(lambda _: True, Unreachable(), times=None)
    here = await client.create("back/here")
    await client.part("back/here", here, 1, bytes(80 * KIB))
    for name, one in (("back/begun", upload_id), ("back/here", here)):
        target = f"{name}?partNumber=2&uploadId={one}"
        assert b"SlowDown" in (await client.ask("PUT", target, bytes(80 * KIB), status=503)).body
    assert metrics.WRITEBACK_SLOWED_DOWN.value("back") == 2
    away.times = 0
    etag = await client.part("back/begun", upload_id, 2, bytes(80 * KIB))
    await client.complete("back/begun", upload_id, {2: etag})
    assert client.origin.data("bucket", "back/begun") == bytes(80 * KIB)


@with_a_client(slot())
async def test_checksums_of_parts_at_the_origin_are_known(client: Client) -> None:
    """Complete needs them to make the object's."""
    headers = {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"}
    upload_id = await client.create("back/m", headers)
    bodies = [os.urandom(PART_BYTES), os.urandom(90 * KIB)]
    etags = {}
    for number, body in enumerate(bodies, 1):
        etags[number] = await client.part("back/m", upload_id, number, body, x_amz_checksum_crc32=crc32_of(body))
    done = await client.complete("back/m", upload_id, etags)
    assert f"<ChecksumCRC32>{crc32_of(b''.join(bodies))}</ChecksumCRC32>".encode() in done.body
    stored = client.origin.buckets["bucket"].object("back/m")
    assert stored.checksums["x-amz-checksum-crc32"] == crc32_of(b"".join(bodies))


def crc32_of(content: bytes) -> str:
    import base64
    import zlib

    return base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()


@pytest.mark.slow
def test_parts_at_the_origin_are_remembered_by_the_next_process(tmp_path: Path) -> None:
    """The journal says where each part is."""
    found: list[Any] = []

    async def first(client: Client) -> None:
        found.extend([client.origin, await upload(client, "back/m", [PART_BYTES, PART_BYTES, 10])])

    async def second(client: Client) -> None:
        upload_id, etags, bodies = found[1]
        assert used(client) == PART_BYTES
        await client.complete("back/m", upload_id, etags)
        assert client.origin.data("bucket", "back/m") == b"".join(bodies.values())

    with_client(tmp_path, first, slot(PART_BYTES + 5))
    with_client(tmp_path, second, slot(PART_BYTES + 5), origin=found[0])


@with_a_client(slot())
async def test_a_disk_that_has_just_failed_is_left_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 for the write that met it, nothing of it acknowledged; those after it go through; then it is tried again."""
    monkeypatch.setattr("gateway.writeback.bounds.TROUBLE_SECONDS", 0.5)

    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    await client.learn()
    with monkeypatch.context() as patch:
        patch.setattr("gateway.writeback.staged_file.os.fsync", refuse)
        refused = await client.ask("PUT", "back/k1", b"x", status=503)
    assert b"cannot be synced" in refused.body
    assert client.pending("back/k1") is None
    assert list(client.buffer.staging.names()) == []
    assert await put(client, "k2", 10) == "forwarded"
    assert through() == {"disk": 1}
    await asyncio.sleep(0.5)
    assert await put(client, "k3", 10) == "absorbed"
