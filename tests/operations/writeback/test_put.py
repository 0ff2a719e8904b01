"""PutObject in a slot that writes back: what is learned of its bucket, and that nothing stays of what fails."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BufferUnavailable, S3Error
from gateway.operations.payload import BUFFERED_SIZE_BYTES_MAX
from gateway.operations.writeback.write_back_policy import check_stored, created_headers, fixed_headers
from gateway.s3.headers import sendable
from gateway.s3.requests import Operation
from gateway.writeback.journal.buckets import BucketCapabilities
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.writes import Writes
from tests.support.asgi import call, signed_headers
from tests.support.memory_origin.faults import AlterHeaders, Answer, Effect, Hold, Unreachable, on
from tests.support.waiting import until
from tests.support.write_back_gateway import Client, with_a_client, with_client


@with_a_client()
async def test_a_journal_that_cannot_be_read_leaves_no_file(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body has come and is synced when it is asked what this gateway has done to the key meanwhile."""
    await client.learn()

    async def fails(*_: object) -> None:
        raise BufferUnavailable("disk I/O error")

    monkeypatch.setattr("gateway.operations.writeback.put_object.expected_version", fails)
    assert (await call(client.gateway.app, "PUT", "/bucket/back/k", None, b"body")).status == 503
    assert list(client.buffer.staging.names()) == []
    assert client.pending("back/k") is None


def test_what_a_failed_commit_leaves_goes_when_the_journal_takes_changes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file stays as long as the write may have happened. Others go through meanwhile, and are told why."""

    async def scenario(client: Client) -> None:
        await client.learn()
        journal, transaction, acknowledge = client.buffer.journal, Journal._transaction, Writes.acknowledge
        acknowledged = list[Write]()

        def acknowledges(writes: Writes, write: Write) -> Write:
            acknowledged.append(write)
            return acknowledge(writes, write)

        @contextmanager
        def fails_with_the_write(journal: Journal) -> Iterator[JournalTransaction]:
            with transaction(journal) as tx:
                yield tx
                if acknowledged:  # the flush, which runs beside, may commit until then
                    _fails_in_the_disk()

        with monkeypatch.context() as patched:
            patched.setattr(Writes, "acknowledge", acknowledges)
            patched.setattr(Journal, "_transaction", fails_with_the_write)
            patched.setattr(Journal, "_reopen", lambda *_: False)
            assert (await call(client.gateway.app, "PUT", "/bucket/back/k", None, b"body")).status == 503
            assert len(list(client.buffer.staging.names())) == 1
            for _ in range(3):
                through = await client.ask("PUT", "back/k", b"body")
                assert through.headers["x-forebay-cache"] == "forwarded"
                assert through.headers["x-forebay-not-absorbed"] == "disk"
        await until(lambda: not journal.has_failed)
        await until(lambda: not list(client.buffer.staging.names()))
        assert client.pending("back/k") is None

    monkeypatch.setattr("gateway.writeback.journal.journal.PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("gateway.writeback.bounds.TROUBLE_SECONDS", 0.0)
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_BEFORE_THROUGH_SECONDS", 0.03)
    with_client(tmp_path, scenario)


def _fails_in_the_disk(*_: object) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    raise error


@with_a_client()
async def test_a_connection_that_fails_is_no_trouble_of_the_disk(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other clients send is absorbed on; nothing stays of the body."""
    await client.learn()

    async def fails(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    with monkeypatch.context() as patched:
        patched.setattr("gateway.operations.writeback.parts.receive_verified", fails)
        assert (await call(client.gateway.app, "PUT", "/bucket/back/k", None, b"body")).status >= 500
    assert (await client.ask("PUT", "back/k", b"body")).headers["x-forebay-cache"] == "absorbed"
    assert len(list(client.buffer.staging.names())) == 1


@pytest.mark.parametrize("effect", [Answer(503, "SlowDown"), Unreachable()], ids=str)
@with_a_client()
async def test_a_look_that_fails_tells_nothing_of_the_bucket(client: Client, effect: Effect) -> None:
    """The next write asks again: nothing is learned for good from an origin that was busy."""
    client.origin.inject(on(Operation.HEAD_OBJECT), effect)
    for how in ("forwarded", "forwarded", "absorbed"):
        assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == how


@with_a_client()
async def test_a_bucket_that_is_not_absorbed_is_looked_at_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after the gateway was given the right to look, its writes are."""
    refused = client.origin.inject(on(Operation.HEAD_OBJECT), Answer(403, "AccessDenied"), times=None)
    await client.learn()
    refused.times = 0
    assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == "forwarded"
    monkeypatch.setattr("gateway.operations.writeback.put_object.UNREADABLE_AGAIN_SECONDS", 0.0)
    for how in ("forwarded", "absorbed"):
        assert (await client.ask("PUT", "back/k", b"x")).headers["x-forebay-cache"] == how


@pytest.mark.parametrize("size_bytes", [1, BUFFERED_SIZE_BYTES_MAX + 1], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_md5", [True, False])
@with_a_client()
async def test_what_an_etag_is_the_first_write_tells(client: Client, size_bytes: int, is_md5: bool) -> None:
    """Not what the bucket says of its encryption: others than S3 say nothing of it, and make other ETags."""
    if not is_md5:
        client.origin.inject(on(Operation.PUT_OBJECT), AlterHeaders({"etag": f'"{"0" * 32}"'}))
    for how in ("forwarded", "absorbed" if is_md5 else "forwarded"):
        answer = await client.ask("PUT", "back/k", b"x" * size_bytes)
        assert answer.headers["x-forebay-cache"] == how


@with_a_client()
async def test_what_is_pending_is_flushed_before_a_bucket_is_looked_at_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.7 Or its flush would meet what was acknowledged after it, and take it for somebody else's, or its place."""
    monkeypatch.setattr("gateway.operations.writeback.put_object.LEARNED_AGAIN_SECONDS", 0.0)
    await client.learn()
    await client.ask("PUT", "back/k", b"first")
    unknown = BucketCapabilities(md5_etags=False, may_look=True, learned_at=0.0)
    await client.buffer.journal.change(lambda tx: tx.buckets.learn("bucket", unknown))
    async with client.flushing():
        assert (await client.ask("PUT", "back/k", b"second")).headers["x-forebay-cache"] == "forwarded"
    await client.flush()
    assert client.origin.data("bucket", "back/k") == b"second"


@pytest.mark.parametrize("name", ["content-type", "expires", "cache-control"])
@pytest.mark.parametrize("value", ["\xff", "a\xc3", "\xc3\x28"], ids=["latin-1", "cut", "overlong"])
@pytest.mark.parametrize(("method", "query"), [("PUT", ""), ("POST", "?uploads")], ids=["PUT", "Create"])
@with_a_client()
async def test_what_could_never_be_sent_is_not_acknowledged(
    client: Client, name: str, value: str, method: str, query: str
) -> None:
    """4.6 The flush would be refused for ever by this gateway's own client: S3 takes header values in UTF-8 only."""
    await client.learn()
    target = f"/bucket/back/k{query}"
    headers = signed_headers(method, target, {}, b"") | {name: value}
    refused = await call(client.gateway.app, method, target, headers, sign=False)
    assert (refused.status, b"<Code>InvalidArgument</Code>" in refused.body) == (400, True)
    assert client.pending("back/k") is None
    assert list(client.buffer.staging.names()) == []


@pytest.mark.parametrize("how", ["PUT", "copy"])
@with_a_client()
async def test_no_acknowledgement_waits_for_a_slow_bucket(
    client: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """4.1 What lies under the key is unknown then: what others write there afterwards is a conflict."""
    await client.learn()
    held = asyncio.Event()
    await client.ask("PUT", "back/source", b"y")
    monkeypatch.setattr("gateway.operations.writeback.put_object.ANSWER_SECONDS_MAX", 0.05)
    client.origin.inject(on(Operation.HEAD_OBJECT, key="back/k"), Hold(held), times=None)
    headers = {"x-amz-copy-source": "/bucket/back/source"} if how == "copy" else {}
    answer = await client.ask("PUT", "back/k", b"" if how == "copy" else b"x", headers)
    assert answer.headers["x-forebay-cache"] == "absorbed"
    client.origin.put("bucket", "back/k", b"theirs")
    held.set()
    await client.flush_until_conflict("back/k")
    assert client.origin.data("bucket", "back/k") == b"theirs"


_VALUES = st.text("aé\xff\xc3\xa9\t\x7f ")


@given(st.dictionaries(st.sampled_from(["content-type", "x-amz-meta-a", "x-amz-acl"]), _VALUES))
def test_what_is_acknowledged_can_be_sent(headers: dict[str, str]) -> None:
    """What is looked at before is what is sent later."""
    try:
        check_stored(headers)
    except S3Error:
        return
    assert set(sendable(fixed_headers(headers))) <= set(sendable(created_headers(headers)))
