"""Writes of other nodes, as requests see them: what was answered on one node is seen by what begins later on any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest

from gateway.api.documents import FlushProgress
from gateway.app.node import slots_of
from gateway.cluster.members import Member, View
from gateway.cluster.stores import AskAll, PeerStores
from gateway.cluster.switched_registry import SwitchedRegistry
from gateway.config import ClusterSettings, Settings
from gateway.core.clock import SystemClock
from gateway.core.errors import RegistryAway
from gateway.core.model import Claim, ObjectKey
from gateway.core.prefixes import Prefix
from gateway.operations import peer_writes
from gateway.operations.cluster_writes import ClusterWrites
from gateway.operations.visibility import OriginEvents
from gateway.policy.registry import KnownKeys, StoreQuestion
from gateway.s3.events import ObjectEvent
from gateway.s3.headers import multipart_etag
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.writeback.admin.checkpoint_parts import PartsPage
from tests.support.asgi import Answer
from tests.support.memory_origin.faults import Delay, Hold, Unreachable, on
from tests.support.slots import Slot
from tests.support.waiting import until
from tests.support.writing_nodes import (
    BUCKET,
    DirectPeer,
    MemoryRegistry,
    WritingNodes,
    writing_nodes,
    writing_slot,
)

PART_BYTES = 5 * 1024**2

Test = Callable[[WritingNodes], Coroutine[Any, Any, None]]


def run(tmp_path: Path, test: Test, count: int = 2, slot: Slot | None = None, **options: Any) -> None:
    async def scenario() -> None:
        async with writing_nodes(tmp_path, count, slots=[slot] if slot is not None else (), **options) as nodes:
            if nodes.clients:
                await nodes.learn()
            await test(nodes)

    asyncio.run(scenario())


async def read_by_all(nodes: WritingNodes) -> set[bytes]:
    """What all nodes answer."""
    return {(await nodes.get(number, "key")).body for number in range(len(nodes.nodes))}


async def overwrite(nodes: WritingNodes) -> None:
    """Write through node 0, and read through node 1, which remembers what it reads."""
    await nodes.put(0, "key", b"first")
    await nodes.flush(0)
    assert (await nodes.get(1, "key")).body == b"first"
    await nodes.put(0, "key", b"second")
    assert (await nodes.get(1, "key")).body == b"second"


async def put_that_waits(nodes: WritingNodes, key: str, content: bytes, **how: Any) -> asyncio.Task[Answer]:
    """Begin a write through node 1, which asks node 0 to flush first."""
    writing = asyncio.create_task(nodes.put(1, key, content, **how))
    await until(lambda: (1, 0) in nodes.direct)
    assert not writing.done()
    return writing


READ_ONLY = Slot("data", Prefix.parse(f"s3://{BUCKET}/"), "read-only", "ttl", 3600.0)
THROUGH = [partial(writing_slot, "through", consistency) for consistency in ("ttl", "immutable")]


@pytest.mark.parametrize("slot", THROUGH, ids=["ttl", "immutable"])
def test_a_write_that_goes_through_is_seen_everywhere(tmp_path: Path, slot: Callable[[], Slot]) -> None:
    async def test(nodes: WritingNodes) -> None:
        for turn in range(4):
            for reader in range(3):
                await nodes.get(reader, "key")  # remembered
            content = f"version {turn}".encode() * (turn + 1)
            assert (await nodes.put(turn % 3, "key", content)).status == 200
            for reader in range(3):
                assert (await nodes.get(reader, "key")).body == content
                head = await nodes.ask(reader, "HEAD", f"/{BUCKET}/key")
                assert head.headers["content-length"] == str(len(content))

    run(tmp_path, test, 3, slot(), writeback=False)


def test_a_deletion_is_seen_everywhere(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"x")
        assert (await nodes.get(1, "key")).status == 200
        assert (await nodes.ask(0, "DELETE", f"/{BUCKET}/key")).status == 204
        assert (await nodes.get(1, "key")).status == 404
        await nodes.put(0, "key", b"yy")
        assert (await nodes.get(1, "key")).body == b"yy"

    run(tmp_path, test, 2, writing_slot("through", negative_ttl_seconds=60.0), writeback=False)


def test_what_is_pending_elsewhere_is_read_there(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        assert (await nodes.put(0, "key", b"0123456789")).headers["x-forebay-cache"] == "absorbed"
        assert nodes.is_pending(0, "key")
        answer = await nodes.get(1, "key")
        assert (answer.status, answer.body) == (200, b"0123456789")
        assert answer.headers["x-forebay-origin-request-id"] != answer.headers["x-amz-request-id"]
        part = await nodes.get(1, "key", headers={"Range": "bytes=2-4"})
        assert (part.status, part.body) == (206, b"234")
        assert (await nodes.get(1, "key", headers={"If-None-Match": answer.headers["etag"]})).status == 304
        assert (await nodes.ask(1, "HEAD", f"/{BUCKET}/key")).headers["content-length"] == "10"
        await nodes.flush(0)
        assert (await nodes.get(1, "key")).body == b"0123456789"
        assert not nodes.shared.pending

    run(tmp_path, test)


def test_a_caller_that_does_not_sign_chooses_no_headers_of_what_is_pending_elsewhere(tmp_path: Path) -> None:
    """Nor of what is pending here, or at the bucket."""

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"content")
        for number in range(2):
            chosen = await nodes.get(number, "key?response-content-type=text%2Fhtml")
            assert (chosen.status, chosen.headers["content-type"]) == (200, "text/html")
            answer = await nodes.get(number, "key?response-content-type=text%2Fhtml", sign=False)
            assert (answer.status, text_of(answer.body, "Code")) == (400, "InvalidRequest")
            assert (await nodes.get(number, "key", sign=False)).body == b"content"

    run(tmp_path, test, allow_unsigned=True)


def test_an_overwritten_object_is_not_remembered(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await overwrite(nodes)
        await nodes.flush(0)
        assert (await nodes.get(1, "key")).body == b"second"

    run(tmp_path, test)


async def listed(nodes: WritingNodes, number: int, query: str = "") -> list[str]:
    answer = await nodes.ask(number, "GET", f"/{BUCKET}?list-type=2{query}")
    assert answer.status == 200, answer.body
    return [one.split("</Key>")[0] for one in answer.body.decode().split("<Key>")[1:]]


def test_lists_show_what_is_pending_elsewhere(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        for key in ("a", "c", "d/1", "d/2"):
            await nodes.put(0, key, key.encode())
        await nodes.flush(0)
        others = ["first0", "first1"]
        assert await listed(nodes, 1) == sorted(["a", "c", "d/1", "d/2", *others])
        await nodes.put(0, "b", b"bb")
        await nodes.put(0, "d/3", b"3")
        assert (await nodes.ask(0, "DELETE", f"/{BUCKET}/nothing")).status == 204
        assert await listed(nodes, 1) == sorted(["a", "b", "c", "d/1", "d/2", "d/3", *others])
        assert await listed(nodes, 1, "&prefix=d%2F") == ["d/1", "d/2", "d/3"]
        assert await listed(nodes, 1, "&delimiter=%2F&max-keys=3") == ["a", "b", "c"]
        await nodes.flush(0)
        assert await listed(nodes, 1) == sorted(["a", "b", "c", "d/1", "d/2", "d/3", *others])
        assert (await nodes.ask(0, "DELETE", f"/{BUCKET}/b")).status == 204
        assert await listed(nodes, 1) == sorted(["a", "c", "d/1", "d/2", "d/3", *others])

    run(tmp_path, test)


def test_a_write_waits_for_the_other_nodes_flush(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"first")
        writing = await put_that_waits(nodes, "key", b"second")
        await nodes.flush(0)
        assert (await writing).status == 200
        assert await read_by_all(nodes) == {b"second"}
        await nodes.flush(1)  # it expects what the first has left there
        assert nodes.origin.data(BUCKET, "key") == b"second"

    run(tmp_path, test)


@pytest.mark.slow
def test_a_client_that_writes_through_several_nodes_meets_no_conflict(tmp_path: Path) -> None:
    """6.2 The version that another node has just left in the bucket is no stranger's, however late the bucket tells."""

    async def test(nodes: WritingNodes) -> None:
        nodes.origin.inject(on(Operation.HEAD_OBJECT), Delay(0.05), times=None)
        for turn in range(6):
            writer, content = turn % 2, b"version %d" % turn
            writing = asyncio.create_task(nodes.put(writer, "key", content))
            await nodes.flush(1 - writer)
            assert (await writing).status == 200
            await nodes.flush(writer)  # no conflict
            assert nodes.origin.data(BUCKET, "key") == content

    run(tmp_path, test)


def test_a_key_is_copied_onto_itself(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        headers = {"x-amz-copy-source": f"/{BUCKET}/key", "x-amz-metadata-directive": "REPLACE"}
        assert (await nodes.put(0, "key", b"", headers=headers)).status == 404
        await nodes.put(0, "key", b"content")
        assert (await nodes.put(0, "key", b"", headers={**headers, "x-amz-meta-a": "b"})).status == 200
        assert (await nodes.get(1, "key")).headers["x-amz-meta-a"] == "b"

    run(tmp_path, test)


def test_without_a_registry_nodes_are_asked_that_only_others_know(tmp_path: Path) -> None:
    """12.11 A node that is cut off from Redis knows nothing of one that has joined since, nor if its view changes."""

    async def test(nodes: WritingNodes) -> None:
        writes: Any = nodes.nodes[0].gateway.app.services.cluster_writes
        stores, question = writes.stores, StoreQuestion(verb="entries", bucket=BUCKET, keys=("key",))
        others = {node.gateway.buffer.node_id for node in nodes.nodes[1:] if node.gateway.buffer is not None}

        def two() -> View:
            return View([Member(f"n{number}", f"n{number}:9002") for number in range(2)], "n0:9002", "", SystemClock())

        views = [two(), two()]
        stores.view = lambda: views[0]
        asking = asyncio.create_task(stores.ask_all(question))
        await asyncio.sleep(0)
        assert not asking.done()
        del views[0]
        assert {answer.store for answer in await asking} == others
        view = two()
        stores.view = lambda: view
        each = await stores.ask_each(lambda _: question)  # as a flush of all nodes does
        assert [member.address for member, _ in each] == ["n1:9002", "n2:9002"]
        assert {answer.store for _, answer in each} == others
        for reader in range(3):
            await nodes.put(2, "key", b"first")
            assert (await nodes.get(reader, "key")).body == b"first"
        await nodes.put(0, "key", b"second")
        assert (await nodes.get(2, "key")).body == b"second"

    run(tmp_path, test, 3, asks_all=True)


def test_a_rename_waits_for_what_other_nodes_have_pending(tmp_path: Path) -> None:
    """12.10 Only the bucket can carry it out. Its source may be pending on another node."""

    async def test(nodes: WritingNodes) -> None:
        assert (await nodes.put(1, "source", b"x")).headers["x-forebay-cache"] == "absorbed"
        headers = {"x-amz-rename-source": f"/{BUCKET}/source"}
        async with nodes.clients[1].flushing():
            answer = await nodes.put(0, "target?renameObject", b"", headers=headers)
        assert answer.status == 200, answer.body
        assert await nodes_have(nodes, "target") == [200, 200]
        assert await nodes_have(nodes, "source") == [404, 404]

    run(tmp_path, test)


async def nodes_have(nodes: WritingNodes, key: str) -> list[int]:
    return [(await nodes.get(number, key)).status for number in range(len(nodes.nodes))]


def test_a_node_that_keeps_no_writes_has_nothing_pending(tmp_path: Path) -> None:
    """12.10 A flush of all nodes, and their checkpoints, are told so."""

    async def test(nodes: WritingNodes) -> None:
        writes: Any = nodes.nodes[0].gateway.app.services.cluster_writes
        questions = (("flush", FlushProgress), ("checkpoints", PartsPage))
        for verb, kind in questions:
            question = StoreQuestion(verb=cast("Any", verb), bucket=BUCKET, keys=(f"s3://{BUCKET}/", ""))
            [(_, answer)] = await writes.stores.ask_each(lambda _: question)  # noqa: B023
            found: Any = kind.model_validate_json(answer.document)
            assert not (found.objects if verb == "flush" else found.parts)

    run(tmp_path, test, slot=writing_slot("through"), writeback=False)


@pytest.mark.slow
def test_an_upload_may_be_continued_anywhere(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        begun = await nodes.ask(0, "POST", f"/{BUCKET}/key?uploads")
        upload_id = text_of(begun.body, "UploadId") or ""
        assert upload_id.startswith(nodes.clients[0].buffer.node_id)
        bodies, etags = [bytes([number]) * PART_BYTES for number in range(3)], list[str]()
        for number, body in enumerate(bodies):
            target = f"key?partNumber={number + 1}&uploadId={upload_id}"
            answer = await nodes.put(number, target, body)
            assert answer.status == 200, answer.body
            etags.append(answer.headers["etag"])
        listed_parts = await nodes.ask(1, "GET", f"/{BUCKET}/key?uploadId={upload_id}")
        assert listed_parts.body.count(b"<Part>") == 3
        uploads = await nodes.ask(1, "GET", f"/{BUCKET}?uploads")
        assert uploads.body.count(b"<Upload>") == 1, uploads.body
        assert text_of(uploads.body, "UploadId") == upload_id
        parts = "".join(f"<Part><PartNumber>{n + 1}</PartNumber><ETag>{e}</ETag></Part>" for n, e in enumerate(etags))
        document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        done = await nodes.ask(2, "POST", f"/{BUCKET}/key?uploadId={upload_id}", body=document)
        assert done.status == 200, done.body
        assert text_of(done.body, "ETag") == multipart_etag(etags)
        assert await read_by_all(nodes) == {b"".join(bodies)}
        again = await nodes.ask(1, "DELETE", f"/{BUCKET}/key?uploadId={upload_id}")
        assert again.status == 404

    run(tmp_path, test, 3)


@pytest.mark.slow
def test_uploads_of_all_nodes_are_listed_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, whichever node gives a page, and whatever marker a client names: its own ids, too."""

    async def begin(nodes: WritingNodes, number: int, key: str) -> str:
        return text_of((await nodes.ask(number, "POST", f"/{BUCKET}/{key}?uploads")).body, "UploadId") or ""

    def listed_in(document: bytes) -> list[str]:
        return [one.split("</UploadId>")[0] for one in document.decode().split("<UploadId>")[1:]]

    async def test(nodes: WritingNodes) -> None:
        expected = [await begin(nodes, turn % 3, f"up/{turn // 4}") for turn in range(12)]
        for told_at_once in (1, 3, 1000):
            monkeypatch.setattr(peer_writes, "UPLOADS_TOLD_MAX", told_at_once)
            seen, marker, turn = list[str](), "", 0
            while True:
                target = f"/{BUCKET}?uploads&prefix=up%2F&max-uploads=2{marker}"
                page = (await nodes.ask(turn % 3, "GET", target)).body
                seen += listed_in(page)
                if text_of(page, "IsTruncated") != "true":
                    break
                key, place = (text_of(page, f"Next{name}Marker") for name in ("Key", "UploadId"))
                marker, turn = f"&key-marker={quote(key or '', '')}&upload-id-marker={quote(place or '', '')}", turn + 1
            assert seen == expected
        for asked in range(3):
            target = f"/{BUCKET}?uploads&prefix=up%2F&key-marker=up%2F1&upload-id-marker={expected[5]}"
            assert listed_in((await nodes.ask(asked, "GET", target)).body) == expected[6:]

    run(tmp_path, test, 3)


def test_uploads_that_are_behind_other_nodes_writes_are_not_listed(tmp_path: Path) -> None:
    """Nor after their clients have completed them, while the bucket has some of their parts."""

    async def test(nodes: WritingNodes) -> None:
        client = nodes.clients[0]
        upload_id = await client.create("key")
        etag = await client.part("key", upload_id, 1, bytes(PART_BYTES))
        async with client.flushing():
            await until(lambda: bool(nodes.origin.buckets[BUCKET].uploads))
        for completed in (False, True):
            if completed:
                await client.complete("key", upload_id, {1: etag})
            listing = await nodes.ask(1, "GET", f"/{BUCKET}?uploads")
            assert listing.body.count(b"<Upload>") == (0 if completed else 1), listing.body
        await nodes.flush(0)

    run(tmp_path, test)


def test_a_copy_waits_for_its_source(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "source", b"content")
        copying = await put_that_waits(nodes, "target", b"", headers={"x-amz-copy-source": f"/{BUCKET}/source"})
        await nodes.flush(0)
        assert (await copying).status == 200
        assert (await nodes.get(0, "target")).body == b"content"

    run(tmp_path, test)


async def begun_upload(nodes: WritingNodes, *, is_known_to_bucket: bool = True) -> str:
    """The id of an upload that node 0 has. It copies itself what the bucket cannot copy to it."""
    if not is_known_to_bucket:
        nodes.origin.inject(on(Operation.CREATE_MULTIPART_UPLOAD), Unreachable(), times=None)
    begun = await nodes.ask(0, "POST", f"/{BUCKET}/target?uploads")
    upload_id = text_of(begun.body, "UploadId") or ""
    assert upload_id.startswith(nodes.clients[0].buffer.node_id)
    return upload_id


async def etag_of_copied(nodes: WritingNodes, number: int, upload_id: str) -> str | None:
    headers = {"x-amz-copy-source": f"/{BUCKET}/key"}
    answer = await nodes.put(number, f"target?partNumber=1&uploadId={upload_id}", b"", headers=headers)
    assert answer.status == 200, answer.body
    return text_of(answer.body, "ETag")


@pytest.mark.parametrize(("asked", "has_source"), [(0, 1), (1, 1), (2, 1)], ids=["upload's", "source's", "third"])
def test_a_copied_part_has_what_another_node_has_pending(tmp_path: Path, asked: int, has_source: int) -> None:
    """12.4 Whichever node the client asks: the one that has the upload, the one that has the source, or another one."""

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(has_source, "key", b"first")
        await nodes.flush(has_source)
        upload_id = await begun_upload(nodes)
        second = await nodes.put(has_source, "key", b"second")
        assert nodes.is_pending(has_source, "key")
        copying = asyncio.create_task(etag_of_copied(nodes, asked, upload_id))
        await until(lambda: (0, has_source) in nodes.direct or copying.done())
        await nodes.flush(has_source)
        assert await copying == second.headers["etag"]

    run(tmp_path, test, 3)


async def written_past_an_upload(nodes: WritingNodes) -> tuple[str, str]:
    """Have node 0 remember a version of the source, and node 1 write another one through: the upload, and its ETag."""
    await nodes.put(1, "key", b"first")
    await nodes.flush(1)
    upload_id = await begun_upload(nodes, is_known_to_bucket=False)
    assert (await nodes.get(0, "key")).body == b"first"
    second = await nodes.put(1, "key", b"second", headers={"if-match": "*"})
    assert second.headers["x-forebay-cache"] != "absorbed"
    return upload_id, second.headers["etag"]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_copied_part_has_what_went_through_another_node(tmp_path: Path, asked: int) -> None:
    """12.4 The node that has the upload remembers the version before."""

    async def test(nodes: WritingNodes) -> None:
        upload_id, etag = await written_past_an_upload(nodes)
        assert await etag_of_copied(nodes, asked, upload_id) == etag

    run(tmp_path, test)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_node_that_believes_no_registry_copies_nothing_that_it_remembers(tmp_path: Path, asked: int) -> None:
    """12.11 The node that changed the source told only the registry, which this one does not believe now."""

    async def test(nodes: WritingNodes) -> None:
        upload_id, etag = await written_past_an_upload(nodes)
        writes = nodes.nodes[0].gateway.app.services.cluster_writes
        assert writes is not None
        writes.registry = AskAll(cast("PeerStores", writes.stores), writes.asks)
        assert await etag_of_copied(nodes, asked, upload_id) == etag

    run(tmp_path, test)


def test_a_node_that_does_not_answer_is_never_replaced_by_an_older_version(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await overwrite(nodes)
        nodes.direct[1, 0].is_down = True
        assert (await nodes.get(1, "key")).status == 503
        nodes.direct[1, 0].is_down = False
        assert (await nodes.get(1, "key")).body == b"second"

    run(tmp_path, test)


def test_a_claim_without_a_commit_hides_nothing(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"first")
        await nodes.flush(0)
        writes = nodes.nodes[0].gateway.app.services.cluster_writes
        assert writes is not None
        await writes.claim(Claim(ObjectKey(BUCKET, "key"), "token"))
        assert (await nodes.get(1, "key")).body == b"first"

    run(tmp_path, test)


def test_a_write_that_was_flushed_before_it_is_claimed_again_leaves_no_claim(tmp_path: Path) -> None:
    """Between commit and answer Redis was not believed for a while."""

    async def test(nodes: WritingNodes) -> None:
        writes = nodes.nodes[0].gateway.app.services.cluster_writes
        assert writes is not None
        registry, pauses = cast("Any", writes.registry), [False, True]

        async def confirm(claim: Claim, *_: object) -> bool:
            if pauses.pop():
                await nodes.flush(0)
            await registry.claim(claim)
            return True

        registry.confirm = confirm
        await nodes.put(0, "key", b"flushed")
        assert nodes.shared.pending == {}
        await nodes.put(0, "key", b"pending")
        assert list(nodes.shared.pending) == [ObjectKey(BUCKET, "key")]

    run(tmp_path, test)


def test_a_write_that_is_refused_hides_nothing(tmp_path: Path) -> None:
    """12.4 What is pending under its key, here in conflict, is found by the other nodes as before."""

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"pending")
        nodes.origin.put(BUCKET, "key", b"theirs")
        await nodes.clients[0].flush_until_conflict("key")
        assert (await nodes.ask(0, "DELETE", f"/{BUCKET}/key")).status == 409
        for reader in range(2):
            assert (await nodes.get(reader, "key")).body == b"pending"

    run(tmp_path, test)


def test_without_a_registry_all_nodes_are_asked(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"first")
        assert not nodes.is_pending(0, "key")  # nothing can be claimed
        assert await read_by_all(nodes) == {b"first"}
        await nodes.put(1, "key", b"second")
        assert await read_by_all(nodes) == {b"second"}

    run(tmp_path, test, 3, asks_all=True)


def test_what_is_remembered_of_a_bucket_is_forgotten_on_all_nodes(tmp_path: Path) -> None:
    """12.4 Also where nobody asks about objects: slots that are strict and write through."""

    async def test(nodes: WritingNodes) -> None:
        tags = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
        assert (await nodes.ask(1, "GET", f"/{BUCKET}?tagging")).status == 404
        assert (await nodes.ask(1, "GET", f"/{BUCKET}?tagging")).status == 404
        assert (await nodes.ask(0, "PUT", f"/{BUCKET}?tagging", body=tags)).status in (200, 204)
        assert b"<Key>a</Key>" in (await nodes.ask(1, "GET", f"/{BUCKET}?tagging")).body

    run(tmp_path, test, slot=writing_slot("through", "strict"), writeback=False)


def test_a_node_that_believes_no_registry_reads_what_is_pending_elsewhere(tmp_path: Path) -> None:
    """The node that has it acknowledged it by a registry that this one does not believe now."""

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"first")
        await nodes.flush(0)
        nodes.origin.inject(on(Operation.PUT_OBJECT), Hold(asyncio.Event()), times=None)
        await nodes.put(0, "key", b"second")
        assert nodes.is_pending(0, "key")
        writes = nodes.nodes[1].gateway.app.services.cluster_writes
        assert writes is not None
        writes.registry = AskAll(cast("PeerStores", writes.stores), writes.asks)
        assert (await nodes.get(1, "key")).body == b"second"
        assert await listed(nodes, 1) == ["first0", "first1", "key"]

    run(tmp_path, test)


@pytest.mark.parametrize("consistency", ["ttl", "immutable"])
def test_a_node_that_believes_no_registry_lists_nothing_that_it_remembers(tmp_path: Path, consistency: str) -> None:
    """12.11 The bucket is asked, and if it does not answer, no older page stands in for it."""

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "a", b"x")
        assert await remembered(nodes) == ["a"]
        writes = nodes.nodes[1].gateway.app.services.cluster_writes
        assert writes is not None
        writes.registry = AskAll(cast("PeerStores", writes.stores), writes.asks)
        await nodes.put(0, "b", b"x")  # node 1 hears nothing of it
        nodes.origin.inject(on(Operation.LIST_OBJECTS_V2), Unreachable())
        assert (await nodes.ask(1, "GET", f"/{BUCKET}?list-type=2")).status == 503
        assert await listed(nodes, 1) == ["a", "b"]

    slot = writing_slot("through", consistency, stale_if_unreachable_seconds=3600.0)
    run(tmp_path, test, slot=slot, writeback=False)


@pytest.mark.parametrize("consistency", ["ttl", "immutable"])
def test_a_registry_that_goes_away_in_the_middle_of_a_list_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consistency: str
) -> None:
    """12.11 Other nodes say what is pending there, and not what they have changed: the bucket is asked."""

    async def away(*_: Any) -> KnownKeys:
        raise RegistryAway("between two questions of one LIST")

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "a", b"x")
        assert await remembered(nodes) == ["a"]
        await nodes.put(0, "b", b"x")
        writes = nodes.nodes[1].gateway.app.services.cluster_writes
        assert writes is not None
        ask_all = AskAll(cast("PeerStores", writes.stores), writes.asks)
        writes.registry = SwitchedRegistry(writes.registry, ask_all)
        monkeypatch.setattr(MemoryRegistry, "rows", away)
        assert await listed(nodes, 1) == ["a", "b"]

    run(tmp_path, test, slot=writing_slot("through", consistency), writeback=False)


async def remembered(nodes: WritingNodes) -> list[str]:
    """List through node 1, which has the page in its index then."""
    found = await listed(nodes, 1)
    await nodes.nodes[1].gateway.catalog.settle()
    return found


@pytest.mark.filterwarnings("error")
def test_a_write_that_others_cannot_be_told_of_is_not_begun(tmp_path: Path) -> None:
    """12.11 And nothing of it is left that nobody awaits."""

    async def test(nodes: WritingNodes) -> None:
        nodes.shared.is_away = True
        assert (await nodes.put(0, "key", b"x")).status == 503
        assert (await nodes.ask(0, "DELETE", f"/{BUCKET}/key")).status == 503
        assert not nodes.origin.buckets[BUCKET].objects

    run(tmp_path, test, 2, writing_slot("through"), writeback=False)


def test_a_node_whose_buffer_is_out_of_reach_does_not_say_that_it_has_nothing(tmp_path: Path) -> None:
    """Its disk may have what was acknowledged last."""

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "key", b"first")
        services = nodes.nodes[0].gateway.app.services
        buffer, services.writeback, services.buffer_closed = services.writeback, None, True
        assert (await nodes.get(1, "key")).status == 503
        services.writeback, services.buffer_closed = buffer, False
        assert (await nodes.get(1, "key")).body == b"first"

    run(tmp_path, test, asks_all=True)


def test_a_node_whose_buffer_is_out_of_reach_lists_the_uploads_of_others(tmp_path: Path) -> None:
    """12.4 By the ids that their clients have, and not by those of the bucket, which are behind them."""

    async def test(nodes: WritingNodes) -> None:
        upload_id = await nodes.clients[0].create("key")
        await until(lambda: bool(nodes.origin.buckets[BUCKET].uploads))
        services = nodes.nodes[1].gateway.app.services
        buffer, services.writeback, services.buffer_closed = services.writeback, None, True
        listing = await nodes.ask(1, "GET", f"/{BUCKET}?uploads")
        services.writeback, services.buffer_closed = buffer, False
        assert listing.body.count(b"<Upload>") == 1
        assert text_of(listing.body, "UploadId") == upload_id

    run(tmp_path, test)


@pytest.mark.parametrize("kind", ["put", "copy", "upload"])
def test_a_write_that_cannot_be_claimed_goes_through(tmp_path: Path, kind: str) -> None:
    """12.11 Redis has just gone away, and this node does not know it yet."""

    async def test(nodes: WritingNodes) -> None:
        await nodes.put(0, "source", b"content")
        upload_id = await nodes.clients[0].create("key")
        etag = await nodes.clients[0].part("key", upload_id, 1, b"content")
        services = nodes.nodes[0].gateway.app.services
        before: Any = services.cluster_writes
        switched = SwitchedRegistry(before.registry, AskAll(before.stores, before.asks))
        services.cluster_writes = ClusterWrites(
            switched, before.stores, services.catalog, services.slots, SystemClock()
        )
        nodes.shared.is_away = True
        assert switched.can_claim
        if kind == "put":
            answer = await nodes.put(0, "key", b"content")
        elif kind == "copy":
            copying = {"x-amz-copy-source": f"/{BUCKET}/source"}
            async with nodes.clients[0].flushing():
                answer = await nodes.put(0, "key", b"", headers=copying)
        else:
            part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
            document = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
            async with nodes.clients[0].flushing():
                answer = await nodes.ask(0, "POST", f"/{BUCKET}/key?uploadId={upload_id}", body=document)
        nodes.shared.is_away = False
        assert answer.status == 200, answer.body
        assert answer.headers["x-forebay-not-absorbed"] == "registry"
        assert await read_by_all(nodes) == {b"content"}

    run(tmp_path, test)


def test_no_cache_reaches_all_nodes(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        nodes.origin.put(BUCKET, "key", b"first")
        assert await read_by_all(nodes) == {b"first"}
        nodes.origin.put(BUCKET, "key", b"second")
        assert (await nodes.get(0, "key")).body == b"first"  # within its bound
        assert (await nodes.get(1, "key", headers={"Cache-Control": "no-cache"})).body == b"second"
        assert await read_by_all(nodes) == {b"second"}

    run(tmp_path, test, 3, READ_ONLY, writeback=False)


def test_events_reach_all_nodes(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        nodes.origin.put(BUCKET, "key", b"first")
        assert await read_by_all(nodes) == {b"first"}
        nodes.origin.put(BUCKET, "key", b"second")
        gateway = nodes.nodes[2].gateway
        services = gateway.app.services
        assert services.cluster_writes is not None
        nodes.direct[2, 0] = DirectPeer(lambda: nodes.nodes[0].app)
        nodes.direct[2, 0].is_down = True  # it keeps to its bound
        events = OriginEvents(gateway.catalog, gateway.blocks, services.slots, services.cluster_writes.stores)
        assert await events.apply([ObjectEvent("Records[0]", "ObjectCreated:Put", BUCKET, "key", None)]) == [None]
        found = [(await nodes.get(reader, "key")).body for reader in range(3)]
        assert found == [b"first", b"second", b"second"]

    run(tmp_path, test, 3, READ_ONLY, writeback=False)


def test_a_slot_that_asks_believes_nothing_for_longer_than_stamps_are_kept() -> None:
    """12.14 Whatever its slot says: ten minutes, and no longer while the bucket is away."""
    redis = ClusterSettings.model_construct(redis="redis://127.0.0.1:6379")
    asking = [
        writing_slot("through", "immutable"),
        writing_slot("back", "ttl", metadata_ttl_seconds=30.0, stale_if_unreachable_seconds=86_400.0),
        writing_slot("through", "ttl", metadata_ttl_seconds=3600.0),
    ]
    strict = writing_slot("back", "strict")
    assert slots_of(Settings.model_construct(cluster=redis, slots=[strict])) == [strict]
    alone = [READ_ONLY, writing_slot("through", "immutable", own_writes="node"), writing_slot("through", "strict")]
    settings = Settings.model_construct(cluster=redis, slots=[*asking, *alone])
    found = slots_of(settings)
    bounds = [(one.consistency, one.metadata_ttl_seconds, one.stale_if_unreachable_seconds) for one in found[:3]]
    assert bounds == [("ttl", 600.0, 0.0), ("ttl", 30.0, 570.0), ("ttl", 600.0, 0.0)]
    assert [one.write for one in found[:3]] == ["through", "back", "through"]
    assert found[3:] == alone
    assert slots_of(settings.model_copy(update={"cluster": None})) == settings.slots


def test_a_deletion_of_what_is_pending_is_seen_everywhere(tmp_path: Path) -> None:
    async def test(nodes: WritingNodes) -> None:
        await overwrite(nodes)
        deleting = asyncio.create_task(nodes.ask(0, "DELETE", f"/{BUCKET}/key"))
        await nodes.flush(0)
        assert (await deleting).status == 204
        for reader in range(2):
            assert (await nodes.get(reader, "key")).status == 404
            assert "key" not in await listed(nodes, reader)

    run(tmp_path, test)
