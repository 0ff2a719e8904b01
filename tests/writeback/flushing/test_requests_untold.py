"""What answers in the bucket's stead, a proxy or a load balancer, decides nothing: the write waits, and gets there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gateway.writeback.flushing.requests import Requests
from gateway.writeback.flushing.state import Delete, Event, Finish, Lost, PartFailed, SendPart, WriteRefused
from gateway.writeback.journal.buckets import Conditions, Honoured
from gateway.writeback.journal.records import ExpectedVersion, State, Turn, Write, WriteSpec
from tests.support.flushing import PART_BYTES, Buffer
from tests.support.memory_origin.faults import Answer
from tests.support.writeback import key

HTML = b"<html><head><title>Sorry</title></head><body>We are <b>down</b></body></html>"
BODIES = {
    "empty": b"",
    "HTML": HTML,
    "HTML that is no XML": b"<!DOCTYPE html><html><meta charset=utf-8><p>Sorry",
    "JSON": b'{"Error": {"Code": "AccessDenied"}}',
    "truncated": b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Mess',
    "another root": b"<Fault><Code>NoSuchKey</Code><Message>gone</Message></Fault>",
    "no code": b"<Error><Message>gone</Message></Error>",
}
STATUSES = (
    *(200, 201, 202, 203, 204, 206, 207, 300, 301, 302, 303, 304, 307, 308),
    *(400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 415, 416, 417, 418, 421, 422, 423),
    *(424, 425, 426, 428, 429, 431, 451, 460, 463, 464, 499),
    *(500, 501, 502, 503, 504, 505, 507, 508, 511, 520, 521, 522, 524, 525, 526, 530, 561, 599),
)
SAID = ((204, "delete"), (204, "abort"), (200, "put"))
"""Done; and what has come of a PUT that is answered without an ETag is looked at (state.py)."""

Ask = Callable[[Requests, Write], Awaitable[Event | str]]


async def _open_uploads(requests: Requests, write: Write) -> Event | str:
    found = await requests.open_uploads(write.key)
    return found if isinstance(found, WriteRefused | Lost) else "found"


ASKED: dict[str, Ask] = {
    "head": lambda requests, write: requests.head(write),
    "begin": lambda requests, write: requests.begin(write),
    "part": lambda requests, write: requests.send_part(write, SendPart("o", write.parts[0])),
    "complete": lambda requests, write: requests.finish(write, Finish(None)),
    "complete for a client": lambda requests, write: requests.complete(write),
    "put": lambda requests, write: requests.finish(replace(write, multipart=False), Finish(None)),
    "delete": lambda requests, write: requests.delete(write, Delete('"old"')),
    "compare": lambda requests, write: requests.compare(write, '"old"'),
    "find": lambda requests, write: requests.find(write),
    "abort": lambda requests, write: requests.abort(write),
    "open uploads": _open_uploads,
}


@pytest.mark.parametrize("asked", ASKED)
async def test_what_is_not_said_by_s3_is_no_answer(buffer: Buffer, asked: str) -> None:
    """Of any status, with any body, to any request; it is told with its status."""
    write = await buffer.upload(key("k"), [3], origin_upload_id="o")
    write = replace(write, expected=ExpectedVersion(('"old"',)), state=State.PUBLISHING)
    fault = buffer.origin.inject(lambda _: True, Answer(500), times=None)
    requests = Requests(buffer.origin, buffer.staging, buffer.threads, buffer.clock)
    for status in STATUSES:
        for name, body in BODIES.items():
            if (status, asked) in SAID:
                continue
            fault.effect = Answer(status, body=body)
            event = await ASKED[asked](requests, write)
            if isinstance(event, PartFailed):
                event = event.failure
            assert isinstance(event, Lost), (status, name, event)
            assert event.kind in ("origin-error", "slow-down", "unreachable")
            assert f"HTTP {status} without " in event.reason or event.kind == "unreachable"


OUTAGES = [
    *(Answer(200, body=body) for body in BODIES.values()),
    *(Answer(status, body=HTML) for status in (302, 307, 400, 401, 403, 404, 405, 408, 409, 412, 413, 429, 501, 503)),
    *(Answer(404, body=BODIES[name]) for name in ("empty", "JSON", "truncated", "another root")),
    Answer(200, body=HTML, late=True),
    Answer(404, body=HTML, late=True),
    Answer(408, body=b"", late=True),
]


def turns(buffer: Buffer) -> list[Turn]:
    found = [buffer.journal.read(lambda tx, one=write.id: tx.turns.of(one)) for write in buffer.left()]  # type: ignore[misc]
    return [turn for turn in found if turn is not None]


@pytest.mark.slow
@pytest.mark.parametrize("is_probed", [True, False])
@pytest.mark.parametrize("outage", OUTAGES, ids=lambda one: f"{one.status} {one.body[:12]!r} {one.late}")
async def test_an_outage_that_answers_is_waited_out(buffer: Buffer, outage: Answer, is_probed: bool) -> None:
    """Everything waits for the bucket, nothing is a conflict or has failed; then all gets there, without a person."""
    await buffer.learn()
    if not is_probed:
        await buffer.journal.change(lambda tx: tx.buckets.amend("bucket", conditions=Conditions()))
    old = {name: buffer.origin.put("bucket", name, b"old") for name in ("over", "gone")}
    await buffer.put(key("new"), b"new")
    await buffer.put(key("over"), b"over", expected=ExpectedVersion((old["over"],)))
    await buffer.upload(key("model"), [PART_BYTES, 3])
    gone = ExpectedVersion((old["gone"],))
    tombstone = Write(WriteSpec(key("gone"), {}, "slot"), gone, 1.0, deleted=True, acknowledged_at=1.0)
    await buffer.journal.change(lambda tx: tx.writes.acknowledge(tombstone))
    fault = buffer.origin.inject(lambda _: True, outage, times=None)
    buffer.start()
    await buffer.passes(20.0, step=1.0)
    if outage.late:  # what was carried out may be found out
        assert all(turn.failing_since is None for turn in turns(buffer))
    else:
        assert all(turn.attempts and turn.failing_since is None for turn in turns(buffer))
        assert len(buffer.left()) == 4
    fault.times = 0
    assert await buffer.passes(200.0, lambda: not buffer.left(), step=2.0)
    assert not buffer.observer.conflicts
    assert not buffer.observer.mishaps
    known = buffer.journal.read(lambda tx: tx.buckets.capabilities("bucket"))
    assert known is not None
    assert {known.conditions.put, known.conditions.complete, known.conditions.delete} == {Honoured.YES}
    assert sorted(name for name in buffer.bucket.objects if ".forebay" not in name) == ["model", "new", "over"]
    assert [buffer.origin.data("bucket", name) for name in ("new", "over")] == [b"new", b"over"]
