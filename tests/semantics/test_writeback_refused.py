"""What the origin refuses for good after it was acknowledged: clause 5.12 of docs/semantics.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.s3.requests import Operation
from gateway.writeback.flushing.flush_task import REFUSED_AGAIN_SECONDS
from gateway.writeback.journal.buckets import FORMS_MAX
from gateway.writeback.journal.records import Priority, Turn
from gateway.writeback.offline_export import export
from tests.support.asgi import Answer as Got
from tests.support.memory_origin.faults import AlterHeaders, Answer, Fault, on
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, TIMES_AS_QUICK, Client, a_client

KEYS = ("back/dir//file", "back/file/below")


class Unwatched:
    """An export that nobody watches."""

    def begin(self, objects: int, size_bytes: int) -> None:
        """It is small."""

    def advance(self, size_bytes: int) -> None:
        """It is small."""

    def damaged(self, name: str, reason: str) -> None:
        raise AssertionError(reason)


def refusing(client: Client, status: int, code: str, name: str, operation: Operation = Operation.PUT_OBJECT) -> Fault:
    return client.origin.inject(on(operation, key=name), Answer(status, code), times=None)


def turn_of(client: Client, name: str) -> Turn:
    pending = client.pending(name)
    assert pending is not None
    turn = client.buffer.look(lambda tx: tx.turns.of(pending.id))
    assert turn is not None
    return turn


def how(answer: Got) -> tuple[str, str | None]:
    return answer.headers["x-forebay-cache"], answer.headers.get("x-forebay-not-absorbed")


async def until_refused(client: Client, name: str) -> Turn:
    async with client.flushing():
        await until(lambda: turn_of(client, name).attempts > 0)
    return turn_of(client, name)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "InvalidArgument"),
        (400, "XMinioParentIsObject"),
        (405, "MethodNotAllowed"),
        (409, "ObjectParentIsFile"),
        (501, "NotImplemented"),
    ],
)
async def test_5_12_it_has_failed_at_once_and_the_next_like_it_is_asked_first(
    tmp_path: Path, status: int, code: str, name: str
) -> None:
    """5.12 Told with the origin's words; tried seldom, or when asked for; absorbed again when the origin takes one."""
    async with a_client(tmp_path) as client:
        await client.learn()
        fault = refusing(client, status, code, name)
        await client.ask("PUT", name, b"kept")
        turn = await until_refused(client, name)
        assert (turn.last_error, turn.priority, turn.attempts) == (f"{code}: injected", Priority.REFUSED, 1)
        assert turn.failing_since is not None
        assert turn.due_at is not None
        assert turn.due_at - turn.failing_since >= REFUSED_AGAIN_SECONDS / 2 / TIMES_AS_QUICK
        assert (await client.ask("GET", name)).body == b"kept"
        asked = client.origin.count(Operation.PUT_OBJECT, key=name)
        async with client.flushing():
            await client.ask("PUT", "back/other", b"x")
            await until(lambda: client.pending("back/other") is None)
        assert client.origin.count(Operation.PUT_OBJECT, key=name) == asked
        like = f"{name}-2"
        refusing(client, status, code, like)
        answer = await client.ask("PUT", like, b"x", status=status)
        assert (answer.headers["x-forebay-not-absorbed"], client.pending(like)) == ("key", None)
        upload = await client.ask("POST", f"{like}?uploads")
        assert upload.headers["x-forebay-not-absorbed"] == "key"
        fault.times = 0
        now = client.gateway.app.services.clock.now()
        await client.buffer.journal.change(lambda tx: tx.turns.try_now("bucket", "back/", now))
        async with client.flushing():
            await until(lambda: client.pending(name) is None)
        assert client.origin.data("bucket", name) == b"kept"
        assert (await client.ask("PUT", f"{name}-3", b"x")).headers["x-forebay-cache"] == "absorbed"


async def test_5_12_so_it_is_with_a_bucket_that_is_gone(tmp_path: Path) -> None:
    """5.12 5.6 The next write is the bucket's; what was acknowledged arrives when the bucket is there again."""
    async with a_client(tmp_path) as client:
        await client.learn()
        fault = refusing(client, 404, "NoSuchBucket", "back/a")
        await client.ask("PUT", "back/a", b"kept")
        turn = await until_refused(client, "back/a")
        assert (turn.last_error, turn.priority) == ("NoSuchBucket: injected", Priority.REFUSED)
        through = await client.ask("PUT", "back/b", b"x")
        assert through.headers["x-forebay-not-absorbed"] == "key"
        assert (await client.ask("PUT", "back/c", b"x")).headers["x-forebay-cache"] == "absorbed"
        fault.times = 0
        async with client.flushing(ahead_seconds=100.0):
            await until(lambda: client.pending("back/a") is None)
        assert client.origin.data("bucket", "back/a") == b"kept"


@pytest.mark.parametrize("operation", [Operation.UPLOAD_PART, Operation.COMPLETE_MULTIPART_UPLOAD])
async def test_5_12_so_it_is_with_an_upload(tmp_path: Path, operation: Operation) -> None:
    """5.12 Whichever of its requests is refused; a later Complete of such a key is the origin's."""
    async with a_client(tmp_path) as client:
        await client.learn()
        begun = {name: await client.create(name) for name in ("back/d//a", "back/d//b")}
        etags = {name: await client.part(name, upload_id, 1, bytes(PART_BYTES)) for name, upload_id in begun.items()}
        refusing(client, 400, "InvalidArgument", "back/d//a", operation)
        await client.complete("back/d//a", begun["back/d//a"], {1: etags["back/d//a"]})
        turn = await until_refused(client, "back/d//a")
        assert (turn.last_error, turn.priority) == ("InvalidArgument: injected", Priority.REFUSED)
        completed = await client.complete("back/d//b", begun["back/d//b"], {1: etags["back/d//b"]})
        assert completed.headers["x-forebay-not-absorbed"] == "key"


async def test_5_12_a_key_of_many_directories_takes_nothing_from_others(tmp_path: Path) -> None:
    """5.12 What the bucket takes elsewhere says nothing of the directory in which it has refused one."""
    async with a_client(tmp_path) as client:
        await client.learn()
        deep = "back/" + "/".join(map(str, range(2 * FORMS_MAX)))
        for name in ("back/d/a", deep):
            refusing(client, 400, "InvalidArgument", name)
            await client.ask("PUT", name, b"kept")
        for name in ("back/d/a", deep):
            await until_refused(client, name)
        now = client.gateway.app.services.clock.now()
        await client.buffer.journal.change(lambda tx: tx.turns.try_now("bucket", "back/0/", now))
        async with client.flushing():
            await until(lambda: turn_of(client, deep).attempts > 1)  # the last refusal is of this one
        assert how(await client.ask("PUT", "back/other", b"x")) == ("forwarded", "key")
        assert how(await client.ask("PUT", "back/another", b"x")) == ("absorbed", None)
        assert how(await client.ask("PUT", "back/d/b", b"x")) == ("forwarded", "key")
        assert how(await client.ask("PUT", "back/d/c", b"x")) == ("absorbed", None)


@pytest.mark.parametrize(
    ("status", "code"), [(400, "ExpiredToken"), (400, "BadDigest"), (409, "OperationAborted"), (403, "AccessDenied")]
)
async def test_5_12_what_may_pass_is_tried_again_soon(tmp_path: Path, status: int, code: str) -> None:
    """5.12 5.6 It says nothing of the key."""
    async with a_client(tmp_path) as client:
        await client.learn()
        fault = refusing(client, status, code, "back/d//a")
        await client.ask("PUT", "back/d//a", b"kept")
        assert (await until_refused(client, "back/d//a")).priority is Priority.RETRY
        assert (await client.ask("PUT", "back/d//b", b"x")).headers["x-forebay-cache"] == "absorbed"
        fault.times = 0
        await client.flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    "outage",
    [
        Answer(200, body=b"<html>Sorry</html>"),
        Answer(302, headers={"location": "https://sorry/"}, body=b""),
        Answer(408, body=b""),
        *(Answer(status, body=b"<html>Sorry</html>") for status in (400, 403, 404, 405, 409, 412, 501)),
        Answer(404, body=b"<Error><Code>NoSuchBu"),
    ],
    ids=str,
)
async def test_5_12_what_answers_in_the_buckets_stead_decides_nothing(tmp_path: Path, outage: Answer) -> None:
    """5.12 11.2 New or over another: it waits for the bucket, and gets there by itself."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", "back/over", b"old")
        for name in ("back/new", "back/over"):
            await client.ask("PUT", name, b"ours")
        fault = client.origin.inject(lambda _: True, outage, times=None)

        def turns() -> list[Turn | None]:
            return client.buffer.look(lambda tx: [tx.turns.of(one.id) for one in tx.writes.waiting(0, 10)])

        assert len(turns()) == 2
        async with client.flushing():
            await until(lambda: all(turn is not None and turn.attempts > 1 for turn in turns()))
            assert [turn.failing_since for turn in turns() if turn is not None] == [None] * 2
            fault.times = 0
            await until(lambda: not turns())
        assert client.origin.data("bucket", "back/new") == client.origin.data("bucket", "back/over") == b"ours"
        assert (await client.ask("PUT", "back/new2", b"x")).headers["x-forebay-cache"] == "absorbed"


SORRY = b"<html>Sorry</html>"


@pytest.mark.parametrize(
    "outage",
    [
        *(Answer(status, body=SORRY) for status in (200, 204, 302, 401, 404, 405, 407, 408, 409, 411, 412, 416)),
        *(Answer(status, body=b"") for status in (200, 304, 404, 426, 499)),
        Answer(404, body=b"<Error><Code>ResourceNotFound</Code></Error>"),
        Answer(404, headers={"content-type": "text/xml"}, body=b"<Envelope/>"),
        Answer(200, headers={"content-type": "application/json"}, body=b"{}"),
    ],
    ids=str,
)
async def test_5_12_so_it_is_while_a_write_is_acknowledged(tmp_path: Path, outage: Answer) -> None:
    """5.12 4.7 6.2 New, over an older one or over one that the gateway has just put there: nobody need decide."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.put("bucket", "back/over", b"old")
        objects = client.origin.buckets["bucket"].objects
        objects["back/over"] = replace(objects["back/over"], modified=objects["back/over"].modified - 60.0)
        await client.ask("PUT", "back/own", b"first")
        await client.flush()
        names = ("back/new", "back/over", "back/own")
        fault = client.origin.inject(lambda _: True, outage, times=None)
        for name in names:
            assert (await client.ask("PUT", name, b"ours")).headers["x-forebay-cache"] == "absorbed"
        fault.times = 0
        await client.flush()
        assert [client.origin.data("bucket", name) for name in names] == [b"ours"] * 3


async def test_5_12_nor_does_it_let_the_flush_overwrite_what_is_newer(tmp_path: Path) -> None:
    """5.12 6.2 A proxy has said that nothing is there: who writes it after that is another."""
    async with a_client(tmp_path) as client:
        await client.learn()
        client.origin.inject(on(Operation.HEAD_OBJECT, key="back/k"), Answer(404, body=SORRY))
        await client.ask("PUT", "back/k", b"ours")
        client.origin.put("bucket", "back/k", b"theirs")
        await client.flush_until_conflict("back/k")
        assert client.origin.data("bucket", "back/k") == b"theirs"


async def test_5_12_a_healthy_bucket_without_request_ids_costs_no_request_more(tmp_path: Path) -> None:
    """5.12 4.5 A new object is one HEAD and one PutObject, and the first write tells what the bucket is."""
    async with a_client(tmp_path) as client:
        client.origin.inject(lambda _: True, AlterHeaders({"x-amz-request-id": ""}), times=None)
        await client.learn()
        assert (await client.ask("PUT", "back/k", b"ours")).headers["x-forebay-cache"] == "absorbed"
        await client.flush()
        sent = [one.operation for one in client.origin.calls if one.key == "back/k"]
        assert sent == [Operation.HEAD_OBJECT, Operation.PUT_OBJECT]


@pytest.mark.slow
@pytest.mark.parametrize("code", ["NoSuchUpload", "InvalidPart"])
async def test_5_12_a_bucket_that_has_no_use_for_an_upload_has_refused_it(tmp_path: Path, code: str) -> None:
    """5.12 Begun anew three times, and then told as what it is; it gets there when the bucket takes it."""
    async with a_client(tmp_path) as client:
        await client.learn()
        fault = refusing(client, 404, code, "back/a", Operation.COMPLETE_MULTIPART_UPLOAD)
        upload_id = await client.create("back/a")
        etag = await client.part("back/a", upload_id, 1, bytes(PART_BYTES))
        await client.complete("back/a", upload_id, {1: etag})
        async with client.flushing():
            await until(lambda: turn_of(client, "back/a").priority is Priority.REFUSED)
        turn = turn_of(client, "back/a")
        assert (turn.last_error, turn.failing_since is None) == (f"{code}: injected", False)
        assert turn.attempts == client.origin.count(Operation.COMPLETE_MULTIPART_UPLOAD) == 4
        fault.times = 0
        async with client.flushing(ahead_seconds=700.0):
            await until(lambda: client.pending("back/a") is None)
        assert client.origin.data("bucket", "back/a") == bytes(PART_BYTES)


async def test_5_12_it_can_be_exported_and_discarded(tmp_path: Path) -> None:
    """5.12 6.5 Like whatever else the origin never takes."""
    async with a_client(tmp_path) as client:
        await client.learn()
        refusing(client, 400, "InvalidArgument", "back/d//a")
        await client.ask("PUT", "back/d//a", b"kept")
        await until_refused(client, "back/d//a")
        found = export(tmp_path / "writeback", tmp_path / "rescue", Unwatched(), running=True)
        assert found.objects == 1
        assert [one.read_bytes() for one in (tmp_path / "rescue" / "objects").iterdir()] == [b"kept"]
        pending = client.pending("back/d//a")
        assert pending is not None
        now = Moment.of(client.gateway.app.services.clock)
        assert await client.buffer.journal.change(lambda tx: tx.writes.discard(pending.id, now, only_conflict=False))
        assert client.pending("back/d//a") is None
