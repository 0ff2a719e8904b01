"""The flush overwrites nothing that it does not know, whatever an origin leaves out."""

from __future__ import annotations

from pathlib import Path

from gateway.s3.requests import Operation
from gateway.writeback.journal.records import Base
from tests.support.flushing import Buffer, with_buffer
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import AlterHeaders, Answer, on
from tests.support.memory_origin.store import StoredObject
from tests.support.writeback import key


def test_what_else_an_origin_does_not_know_takes_no_condition_from_others(tmp_path: Path) -> None:
    """A 501 that is about another header leaves the next write under its condition."""

    async def scenario(buffer: Buffer) -> None:
        buffer.origin.inject(on(Operation.PUT_OBJECT, key="a"), Answer(501, "NotImplemented"), times=None)
        await buffer.put(key("a"), b"refused for ever")
        buffer.start()
        await buffer.until(lambda: bool(buffer.observer.failures))
        await buffer.put(key("b"), b"two")
        await buffer.until(lambda: "b" in buffer.bucket.objects)
        [sent] = [call for call in buffer.origin.calls if call.key == "b" and call.method == "PUT"]
        assert sent.headers["if-none-match"] == "*"

    with_buffer(tmp_path, scenario)


def test_what_does_not_say_when_it_was_written_is_somebody_elses(tmp_path: Path) -> None:
    """The origin was away when the write was absorbed: only what is known to be older is overwritten."""

    async def scenario(buffer: Buffer) -> None:
        buffer.bucket.put(StoredObject("k", BytesContent(b"theirs"), '"theirs"', 0.0))
        buffer.origin.inject(on(Operation.HEAD_OBJECT), AlterHeaders({"last-modified": None}), times=None)
        await buffer.put(key("k"), b"ours", base=Base(known=False, asked_at=1e12))
        buffer.start()
        await buffer.until(lambda: bool(buffer.observer.conflicts))
        assert buffer.origin.data("bucket", "k") == b"theirs"

    with_buffer(tmp_path, scenario)
