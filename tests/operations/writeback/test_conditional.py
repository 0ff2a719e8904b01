"""A Complete with a condition is the origin's to judge; the parts come from here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.core.clock import SystemClock
from gateway.core.steps import at_once
from gateway.operations.writeback import uploads
from gateway.origin.client import OriginRequest
from gateway.s3.requests import Operation
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document, etag_of_result
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Answer, Hold, Unreachable, on
from tests.support.slots import slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, with_a_client, with_client
from tests.support.writeback import key

IF_ABSENT = {"If-None-Match": "*"}


async def uploaded(client: Client, name: str = "back/m") -> tuple[str, dict[int, str], bytes]:
    """An upload whose parts are here: its id, their ETags, and its bytes."""
    upload_id = await client.create(name)
    bodies = {1: os.urandom(PART_BYTES), 2: b"end"}
    etags = {number: await client.part(name, upload_id, number, body) for number, body in bodies.items()}
    return upload_id, etags, bodies[1] + bodies[2]


@with_a_client()
async def test_the_200_is_the_origins(client: Client) -> None:
    """When it is sent, the object is there, nothing is pending, and nothing is left here."""
    upload_id, etags, content = await uploaded(client)
    answer = await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
    assert answer.headers["x-forebay-cache"] == "forwarded"
    assert client.origin.data("bucket", "back/m") == content
    assert client.pending("back/m") is None
    assert list(client.buffer.staging.names()) == []
    assert not client.origin.buckets["bucket"].uploads
    again = await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
    assert again.body == answer.body


@with_a_client()
async def test_a_condition_that_does_not_hold_leaves_the_upload_open(client: Client) -> None:
    """412 of the origin's; a Complete without it, later, is absorbed."""
    upload_id, etags, content = await uploaded(client)
    client.origin.put("bucket", "back/m", b"theirs")
    answer = await client.complete("back/m", upload_id, etags, 412, headers=IF_ABSENT)
    assert b"<Code>PreconditionFailed</Code>" in answer.body
    assert client.origin.data("bucket", "back/m") == b"theirs"
    client.origin.buckets["bucket"].remove("back/m")
    await client.complete("back/m", upload_id, etags)
    await client.flush()
    assert client.origin.data("bucket", "back/m") == content
    assert client.origin.count(Operation.UPLOAD_PART, key="back/m") == 2


@with_a_client()
async def test_own_pending_writes_count(client: Client) -> None:
    """What was acknowledged before, and does not fail the condition, is at the origin when that is judged."""
    upload_id, etags, content = await uploaded(client)
    pending = (await client.ask("PUT", "back/m", b"pending")).headers["etag"]
    async with client.flushing():
        await client.complete("back/m", upload_id, etags, headers={"If-Match": pending})
    assert client.origin.data("bucket", "back/m") == content


@pytest.mark.parametrize("effect", [Unreachable(late=True), Answer(500, late=True)], ids=str)
@with_a_client()
async def test_a_lost_answer_is_decided_by_the_etag(client: Client, effect: Unreachable | Answer) -> None:
    """The origin has done it: 200, though nobody said so."""
    upload_id, etags, content = await uploaded(client)
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), effect)
    await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
    assert client.origin.data("bucket", "back/m") == content


@pytest.mark.parametrize("operation", [Operation.UPLOAD_PART, Operation.COMPLETE_MULTIPART_UPLOAD])
@with_a_client()
async def test_a_failure_can_be_tried_again(client: Client, operation: Operation) -> None:
    """503 with the origin away, and what the origin has by then is not sent twice."""
    upload_id, etags, content = await uploaded(client)
    client.origin.inject(on(operation), Unreachable())
    await client.complete("back/m", upload_id, etags, 503, headers=IF_ABSENT)
    await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
    assert client.origin.data("bucket", "back/m") == content


def is_asked_for(client: Client, upload_id: str) -> bool:
    """Whether the journal says that the origin may be carrying out its Complete."""
    upload = client.buffer.look(lambda tx: tx.uploads.upload(upload_id))
    return upload is not None and upload.is_completed_at_origin


@with_a_client()
async def test_the_parts_are_those_that_complete_names(client: Client) -> None:
    """While they are on their way nothing takes the place of one; another may come, and this one when it is over."""
    upload_id, etags, content = await uploaded(client)
    reached, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.UPLOAD_PART), Hold(resume, reached))
    under_way = asyncio.create_task(client.complete("back/m", upload_id, etags, headers=IF_ABSENT))
    await reached.wait()
    again = f"back/m?partNumber=1&uploadId={upload_id}"
    refused = await client.ask("PUT", again, b"other bytes", status=503)
    assert b"is being completed" in refused.body
    copied = {"x-amz-copy-source": "bucket/there"}
    await client.ask("PUT", "there", b"source")
    await client.ask("PUT", again, headers=copied, status=503)
    await client.part("back/m", upload_id, 99, b"another")
    resume.set()
    answer = await under_way
    assert client.origin.data("bucket", "back/m") == content
    assert etag_of_result(answer.body) == client.origin.buckets["bucket"].object("back/m").etag


@with_a_client()
async def test_what_the_origin_may_have_done_is_written_down(client: Client) -> None:
    """Before it is asked; until its answer is known."""
    upload_id, etags, _ = await uploaded(client)
    assert not is_asked_for(client, upload_id)
    reached, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Hold(resume, reached))
    under_way = asyncio.create_task(client.complete("back/m", upload_id, etags, headers=IF_ABSENT))
    await reached.wait()
    assert is_asked_for(client, upload_id)
    resume.set()
    await under_way
    assert not is_asked_for(client, upload_id)


@with_a_client()
async def test_a_refusal_says_that_nothing_was_done(client: Client) -> None:
    """Nobody need find out; nor where an answer before was lost, when the origin has the upload still."""
    client.origin.put("bucket", "back/m", b"theirs")
    upload_id, etags, _ = await uploaded(client)
    await client.complete("back/m", upload_id, etags, 412, headers=IF_ABSENT)
    assert not is_asked_for(client, upload_id)
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable())
    await client.complete("back/m", upload_id, etags, 503, headers=IF_ABSENT)
    assert is_asked_for(client, upload_id)
    await client.complete("back/m", upload_id, etags, 412, headers=IF_ABSENT)
    assert not is_asked_for(client, upload_id)
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
    await client.flush()
    assert client.origin.data("bucket", "back/m") == b"theirs"
    assert not client.origin.buckets["bucket"].uploads


@with_a_client()
async def test_a_question_that_was_lost_ends_with_the_upload(client: Client) -> None:
    """The client may abort what nobody knows the outcome of."""
    upload_id, etags, _ = await uploaded(client)
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable())
    await client.complete("back/m", upload_id, etags, 503, headers=IF_ABSENT)
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
    assert not is_asked_for(client, upload_id)
    await client.flush()
    assert "back/m" not in client.origin.buckets["bucket"].objects
    assert not client.origin.buckets["bucket"].uploads


@pytest.mark.parametrize("holds", [True, False], ids=["holds", "does not hold"])
@with_a_client()
async def test_an_abort_waits_for_a_complete_that_is_under_way(client: Client, *, holds: bool) -> None:
    """The origin has it in hand: who is told that the upload is aborted has no object, and who has one was told so."""
    if not holds:
        client.origin.put("bucket", "back/m", b"theirs")
    upload_id, etags, content = await uploaded(client)
    reached, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Hold(resume, reached))
    under_way = asyncio.create_task(completed(client, upload_id, etags))
    await reached.wait()
    aborting = asyncio.create_task(call(client.gateway.app, "DELETE", f"/bucket/back/m?uploadId={upload_id}"))
    await asyncio.wait([aborting], timeout=0.2)
    assert is_asked_for(client, upload_id)
    resume.set()
    assert (await aborting).status == (404 if holds else 204)
    assert (await under_way).status in ({200} if holds else {404, 412})  # whoever hears of it first
    await client.flush()
    assert client.origin.data("bucket", "back/m") == (content if holds else b"theirs")
    assert not client.origin.buckets["bucket"].uploads


@with_a_client()
async def test_an_abort_of_what_takes_too_long_is_to_be_tried_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503; and the Complete has the answer that it would have had."""
    monkeypatch.setattr(uploads, "PATIENCE_SECONDS", 0.1)
    upload_id, etags, _ = await uploaded(client)
    reached, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Hold(resume, reached))
    under_way = asyncio.create_task(client.complete("back/m", upload_id, etags, headers=IF_ABSENT))
    await reached.wait()
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=503)
    resume.set()
    await under_way


@with_a_client()
async def test_an_abort_of_what_nobody_knows_the_outcome_of_says_nothing_of_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has not been told yet is told that nobody knows; and what the origin has by that is this node's doing."""
    ended = asyncio.Event()

    async def until_it_has_ended(*_: object) -> None:
        await ended.wait()

    monkeypatch.setattr(uploads, "until_next_look", until_it_has_ended)
    upload_id, etags, _ = await uploaded(client)
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(late=True))
    client.origin.inject(on(Operation.HEAD_OBJECT), Unreachable())
    asked = asyncio.create_task(client.complete("back/m", upload_id, etags, 424, headers=IF_ABSENT))

    def is_unclear(tx: JournalTransaction) -> bool:
        upload = tx.uploads.upload(upload_id)
        return upload is not None and upload.answer is not None

    await until(lambda: client.buffer.look(is_unclear))
    await client.ask("DELETE", f"back/m?uploadId={upload_id}", status=204)
    ended.set()
    await asked
    own = client.buffer.look(lambda tx: tx.buckets.last_own_write(key("back/m")))
    assert own is not None
    assert not own.known


def test_what_it_has_done_while_nobody_listened_is_found_out(tmp_path: Path) -> None:
    """The client has gone, and so has the gateway, then; the next one ends the upload, and nothing of it is left."""
    origin = MemoryOrigin(SystemClock())
    origin.create_bucket("bucket")
    upload_id, etags, content = "", dict[int, str](), b""

    async def before(client: Client) -> None:
        nonlocal upload_id, etags, content
        upload_id, etags, content = await uploaded(client)
        reached, resume = asyncio.Event(), asyncio.Event()
        client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(late=True))
        client.origin.inject(on(Operation.HEAD_OBJECT), Hold(resume, reached))
        under_way = asyncio.create_task(client.complete("back/m", upload_id, etags, headers=IF_ABSENT))
        await reached.wait()
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
        assert (client.origin.data("bucket", "back/m"), len(list(client.buffer.staging.names()))) == (content, 2)

    async def after(client: Client) -> None:
        await client.find_lost_completions()
        assert client.buffer.look(lambda tx: tx.counts()) == (0, 0)
        assert list(client.buffer.staging.names()) == []
        assert (await client.ask("GET", "back/m")).body == content
        again = await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
        assert (again.headers["x-forebay-cache"], etag_of_result(again.body)) == (
            "absorbed",
            client.origin.buckets["bucket"].object("back/m").etag,
        )
        await client.complete("back/m", upload_id, {1: etags[1]}, 404, headers=IF_ABSENT)

    with_client(tmp_path, before, origin=origin)
    with_client(tmp_path, after, origin=origin)


def test_what_is_found_out_is_seen_at_once(tmp_path: Path) -> None:
    """The origin carries out later what nobody heard of. Whatever was remembered of the key is not believed any more
    when the Complete is answered from the journal."""
    slots = [slot_with(SLOTS[0], consistency="ttl", negative_ttl_seconds=60.0)]

    async def scenario(client: Client) -> None:
        upload_id, etags, content = await uploaded(client)
        client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable())
        await client.complete("back/m", upload_id, etags, 503, headers=IF_ABSENT)
        await client.ask("HEAD", "back/m", status=404)
        await client.gateway.catalog.settle()
        [origin_upload_id] = client.origin.buckets["bucket"].uploads
        document = at_once(
            complete_multipart_upload_document([CompletedPart(number, etag, {}) for number, etag in etags.items()])
        )
        request = OriginRequest("POST", "bucket", "back/m", [("uploadId", origin_upload_id)], {}, document)
        async with await client.origin.send(request) as response:
            assert response.status == 200
        await client.ask("HEAD", "back/m", status=404)
        await client.find_lost_completions()
        await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
        assert (await client.ask("HEAD", "back/m")).headers["content-length"] == str(len(content))

    with_client(tmp_path, scenario, slots)


@pytest.mark.parametrize("late", [False, True], ids=["in time", "its answer is lost"])
@pytest.mark.slow
@with_a_client()
async def test_a_complete_is_answered_with_what_the_origin_has_made(client: Client, *, late: bool) -> None:
    """Of two at once, of other parts each: nobody is told that it has made what it has not."""
    upload_id, etags, _ = await uploaded(client)
    reached, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Hold(resume, reached))
    if late:
        client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(late=True))
    first = asyncio.create_task(completed(client, upload_id, {1: etags[1]}))
    await reached.wait()
    second = asyncio.create_task(completed(client, upload_id, etags))
    await asyncio.wait([first], timeout=5.0)  # it is told that another has asked, or waits
    resume.set()
    answers = await asyncio.gather(first, second)
    stored = client.origin.buckets["bucket"].object("back/m").etag
    assert {etag_of_result(answer.body) for answer in answers if etag_of_result(answer.body)} <= {stored}


async def completed(client: Client, upload_id: str, etags: dict[int, str]) -> Got:
    document = at_once(
        complete_multipart_upload_document([CompletedPart(number, etag, {}) for number, etag in etags.items()])
    )
    target = f"/bucket/back/m?uploadId={upload_id}"
    return await call(client.gateway.app, "POST", target, IF_ABSENT, document)


@with_a_client()
async def test_an_upload_that_is_given_a_part_since_stays_open(client: Client) -> None:
    """The origin has completed it, and nobody heard: its client has more in mind, and may go on."""
    upload_id, etags, content = await uploaded(client)
    client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(late=True))
    client.origin.inject(on(Operation.HEAD_OBJECT), Unreachable())
    await client.complete("back/m", upload_id, etags, 503, headers=IF_ABSENT)
    more = {1: etags[1], 3: await client.part("back/m", upload_id, 3, b"more")}
    await client.find_lost_completions()
    assert client.origin.data("bucket", "back/m") == content
    await client.complete("back/m", upload_id, more)
    await client.flush()
    assert client.origin.data("bucket", "back/m") == content[:PART_BYTES] + b"more"
    assert not client.origin.buckets["bucket"].uploads


@with_a_client()
async def test_an_upload_begun_with_the_origin_away_is_begun_there(client: Client) -> None:
    """Its parts follow."""
    await client.learn()
    away = client.origin.inject(lambda _: True, Unreachable(), times=None)
    upload_id, etags, content = await uploaded(client)
    away.times = 0
    await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
    assert client.origin.data("bucket", "back/m") == content
    assert (await call(client.gateway.app, "GET", "/bucket/back/m")).body == content
