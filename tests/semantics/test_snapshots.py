"""Clauses 3.13 to 3.16 of docs/semantics.md: slots that are frozen by a snapshot."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core.model import Homes
from gateway.metadata.snapshots.registry import LOOK_SECONDS, SnapshotRegistry
from gateway.metadata.snapshots.store import Snapshot
from gateway.policy.slots import Prefix
from tests.origin.origins import xml
from tests.support import listing_model as model
from tests.support.asgi import Answer, call
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.listing_scenarios import names, source, token_of
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Answer as Failure
from tests.support.memory_origin.faults import Unreachable, on
from tests.support.slots import Slot
from tests.support.snapshots import freeze

OLD = b"o" * (2 * BLOCK_SIZE_BYTES + 17)
NEW = b"n" * (2 * BLOCK_SIZE_BYTES + 17)


def frozen(prefix: str, snapshot: str = "v1", name: str = "f") -> Slot:
    return Slot(name, Prefix.parse(prefix), "read-only", "snapshot", snapshot=snapshot)


ALL = frozen("s3://bucket/")
PART = frozen("s3://bucket/data/")
LIST = "/bucket?list-type=2"
K = "/bucket/data/k"


@asynccontextmanager
async def playing(directory: Path, *slots: Slot, made: bool = True) -> AsyncIterator[GatewayApp]:
    """A gateway with some keys at the origin, which are frozen. Requests are unsigned."""
    clock = ManualClock()
    async with gateway_app(directory, slots=slots, clock=clock, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "data/k", OLD, {"content-type": "image/jpeg", "x-amz-meta-label": "cat"})
        for key in ("a", "data/1", "data/2", "data/sub/3", "z"):
            gateway.origin.put("bucket", key, b"old")
        if made:
            await freeze(gateway, "v1", "s3://bucket/data/" if PART in slots else "s3://bucket/")
        gateway.origin.calls.clear()
        yield gateway


async def ask(gateway: GatewayApp, method: str, target: str = K, **more: Any) -> Answer:
    answer = await call(gateway.app, method, target, more.pop("headers", None), sign=False, **more)
    await gateway.catalog.settle()
    await gateway.blocks.settle()
    return answer


def code(answer: Answer) -> str:
    return xml(answer.body).findtext("Code") or ""


def remove(origin: MemoryOrigin, key: str) -> None:
    """Somebody else deletes an object."""
    origin.buckets["bucket"].remove(key)


def change_all(origin: MemoryOrigin) -> None:
    """Everything changes at the origin, something goes, something comes."""
    origin.put("bucket", "data/k", NEW, {"content-type": "text/plain"})
    origin.put("bucket", "data/1", b"changed")
    remove(origin, "data/2")
    origin.put("bucket", "data/new", b"new")


async def test_3_13_what_is_listed_is_what_was_frozen(tmp_path: Path) -> None:
    """3.13 Whatever becomes of the bucket, LIST gives what was there, without a question to the origin."""
    async with playing(tmp_path, ALL) as gateway:
        change_all(gateway.origin)
        gateway.origin.inject(on(), Unreachable(), times=None)
        listed = await ask(gateway, "GET", LIST)
        assert names(listed) == ["a", "data/1", "data/2", "data/k", "data/sub/3", "z"]
        assert source(listed) == "hit"
        etags = {node.findtext("Key"): node.findtext("ETag") for node in xml(listed.body).iter("Contents")}
        assert etags["data/k"] == f'"{hashlib.md5(OLD).hexdigest()}"'
        assert names(await ask(gateway, "GET", "/bucket?prefix=data/&delimiter=/")) == [
            "data/1",
            "data/2",
            "data/k",
            "data/sub/",
        ]
        assert names(await ask(gateway, "GET", f"{LIST}&prefix=nothing")) == []
        assert names(await ask(gateway, "GET", f"{LIST}&max-keys=0")) == []
        assert gateway.origin.calls == []


async def test_3_13_what_is_read_is_what_was_frozen(tmp_path: Path) -> None:
    """3.13 Bytes and head of the frozen version, once cached, though the origin has another, or none, or is down."""
    async with playing(tmp_path, PART) as gateway:
        first, head = await ask(gateway, "GET"), await ask(gateway, "HEAD")
        assert (first.body, first.headers["content-type"], first.headers["x-amz-meta-label"]) == (
            OLD,
            "image/jpeg",
            "cat",
        )
        asked = len(gateway.origin.calls)
        for becomes in (
            lambda: change_all(gateway.origin),
            lambda: remove(gateway.origin, "data/k"),
            lambda: gateway.origin.inject(on(), Unreachable(), times=None),
        ):
            becomes()
            again, part = await ask(gateway, "GET"), await ask(gateway, "GET", headers={"range": "bytes=5-9"})
            assert (again.body, again.headers["etag"], again.headers["x-amz-meta-label"]) == (
                OLD,
                first.headers["etag"],
                "cat",
            )
            assert (part.status, part.body) == (206, OLD[5:10])
            same = await ask(gateway, "HEAD")
            assert (same.status, same.headers["content-type"], same.headers["x-forebay-cache"]) == (
                200,
                "image/jpeg",
                "hit",
            )
            assert same.headers["content-length"] == head.headers["content-length"] == str(len(OLD))
            fresh = {"cache-control": "no-cache"}
            assert (await ask(gateway, "GET", headers=fresh)).body == OLD
            unchanged = await ask(gateway, "GET", headers={"if-none-match": first.headers["etag"]})
            assert unchanged.status == 304
            other = await ask(gateway, "GET", headers={"if-match": '"other"'})
            assert (other.status, code(other)) == (412, "PreconditionFailed")
        assert len(gateway.origin.calls) == asked


async def test_3_13_a_cold_object_takes_one_question(tmp_path: Path) -> None:
    """3.13 Head and bytes come with one GET that is pinned to the frozen ETag."""
    async with playing(tmp_path, PART) as gateway:
        assert (await ask(gateway, "GET", "/bucket/data/1")).body == b"old"
        (asked,) = gateway.origin.calls
        assert (asked.method, asked.headers["if-match"]) == ("GET", f'"{hashlib.md5(b"old").hexdigest()}"')
        assert (await ask(gateway, "HEAD", "/bucket/data/1")).headers["x-forebay-cache"] == "hit"
        assert len(gateway.origin.calls) == 1


async def test_3_13_what_was_not_there_is_not_there(tmp_path: Path) -> None:
    """3.13 404 NoSuchKey, and the origin is not asked."""
    async with playing(tmp_path, PART) as gateway:
        change_all(gateway.origin)
        gateway.origin.calls.clear()
        for target in ("/bucket/data/new", "/bucket/data/", "/bucket/data/k%00", "/bucket/data/" + "x" * 1000):
            assert ((answer := await ask(gateway, "GET", target)).status, code(answer)) == (404, "NoSuchKey")
            assert (await ask(gateway, "HEAD", target)).status == 404
        assert gateway.origin.calls == []


@pytest.mark.parametrize("gone", [False, True])
async def test_3_14_what_is_lost_is_said_to_be(tmp_path: Path, *, gone: bool) -> None:
    """3.14 412, which no client tries again, with both ETags; another version's bytes never."""
    async with playing(tmp_path, PART) as gateway:
        if gone:
            remove(gateway.origin, "data/k")
        else:
            gateway.origin.put("bucket", "data/k", NEW)
        for headers in ({}, {"range": "bytes=0-3"}, {"x-amz-checksum-mode": "ENABLED"}, {"range": "bytes=0-1,4-5"}):
            answer = await ask(gateway, "GET", headers=headers)
            said = xml(answer.body).findtext("Message") or ""
            assert (answer.status, code(answer)) == (412, "PreconditionFailed")
            assert hashlib.md5(OLD).hexdigest() in said
            assert ("no such object" if gone else hashlib.md5(NEW).hexdigest()) in said
            assert "'v1'" in said
        assert (await ask(gateway, "HEAD")).status == 412
        assert (await ask(gateway, "HEAD", headers={"range": "bytes=0-3"})).status == 412
        assert (await ask(gateway, "GET", f"{K}?partNumber=1")).status == 412
        gateway.origin.put("bucket", "data/k", OLD)  # somebody has put it right
        assert (await ask(gateway, "GET")).body == OLD


async def test_3_14_a_part_that_is_cached_is_served(tmp_path: Path) -> None:
    """3.14 What is asked for counts: what is cached of a lost object is served, and no answer is begun that breaks off
    once that was found out.
    """
    async with playing(tmp_path, PART) as gateway:
        first = {"range": f"bytes=0-{BLOCK_SIZE_BYTES - 1}"}
        assert (await ask(gateway, "GET", headers=first)).status == 206
        gateway.origin.put("bucket", "data/k", NEW)
        assert (await ask(gateway, "GET", headers=first)).body == OLD[:BLOCK_SIZE_BYTES]
        broken = await ask(gateway, "GET")
        assert broken.status == 412 or not broken.complete
        assert (await ask(gateway, "GET")).status == 412
        assert (await ask(gateway, "GET", headers=first)).body == OLD[:BLOCK_SIZE_BYTES]


async def test_3_14_an_origin_that_ignores_conditions_is_not_believed(tmp_path: Path) -> None:
    """3.14 What comes with another ETag than asked for is refused, whatever the status."""
    async with playing(tmp_path, PART) as gateway:
        gateway.origin.put("bucket", "data/k", NEW)
        _ignore_conditions(gateway.origin)
        for headers in ({}, {"range": "bytes=0-3"}, {"range": "bytes=0-1,4-5"}):
            assert (await ask(gateway, "GET", headers=headers)).status == 412
            assert (await ask(gateway, "HEAD", headers=headers)).status == 412
        copied = await ask(gateway, "PUT", "/bucket/copy", headers={"x-amz-copy-source": "bucket/data/k"})
        assert (copied.status, code(copied)) == (412, "PreconditionFailed")
        assert "copy" not in gateway.origin.buckets["bucket"].objects


@pytest.mark.parametrize("headers", [{}, {"range": f"bytes=3-{BLOCK_SIZE_BYTES - 1}"}])
async def test_3_14_what_is_cached_outlives_what_was_learned(tmp_path: Path, headers: dict[str, str]) -> None:
    """3.14 With the catalog lost and the origin changed, cached bytes are served with what the listing said of them."""
    async with playing(tmp_path, PART) as gateway:
        before = await ask(gateway, "GET", headers=headers)
        change_all(gateway.origin)
        gateway.app.services.catalog.of_version = lambda version, *, with_checksums: None  # type: ignore[method-assign]
        shelf = SnapshotRegistry(gateway.snapshots, [PART], ManualClock())
        object.__setattr__(gateway.app.services, "snapshots", shelf)
        answer = await ask(gateway, "GET", headers=headers)
        assert (answer.status, answer.body) == (before.status, before.body)
        assert answer.headers["content-type"] == "binary/octet-stream"
        assert "last-modified" in answer.headers
        assert (await ask(gateway, "HEAD")).status == 412
        await shelf.close()


async def test_3_14_other_troubles_of_the_origin_stay_what_they_are(tmp_path: Path) -> None:
    """3.14 A refusal is passed on as it is, a failure is tried again by clients."""
    async with playing(tmp_path, PART) as gateway:
        gateway.origin.inject(on(key="data/1"), Failure(403, "AccessDenied"), times=None)
        gateway.origin.inject(on(key="data/2"), Unreachable(), times=None)
        assert (await ask(gateway, "GET", "/bucket/data/1")).status == 403
        assert (await ask(gateway, "HEAD", "/bucket/data/1")).status == 403
        assert (await ask(gateway, "GET", "/bucket/data/2")).status == 503
        assert (await ask(gateway, "HEAD", "/bucket/data/2")).status == 503


async def test_3_14_what_nobody_pins_is_refused(tmp_path: Path) -> None:
    """3.14 Questions about the present state of something frozen: 501, which no client tries again."""
    async with playing(tmp_path, PART) as gateway:
        for method, target in (
            ("GET", f"{K}?tagging"),
            ("GET", f"{K}?attributes"),
            ("GET", f"{K}?acl"),
            ("POST", f"{K}?select&select-type=2"),
            ("GET", "/bucket?versions&prefix=data/"),
            ("GET", "/bucket?versions"),
        ):
            answer = await ask(gateway, method, target)
            assert ((answer.status, code(answer))) == (501, "NotImplemented"), target
        listed = await ask(gateway, "GET", f"{LIST}&prefix=data/", headers={"x-amz-expected-bucket-owner": "1"})
        assert listed.status == 501
        payer = {"x-amz-request-payer": "requester"}
        assert (await ask(gateway, "GET", f"{LIST}&prefix=data/", headers=payer)).status == 200
        assert gateway.origin.calls == []


async def test_3_14_a_copy_takes_the_frozen_version(tmp_path: Path) -> None:
    """3.14 Or nothing: 412 where the origin has another, 404 where there was none."""
    async with playing(tmp_path, PART) as gateway:
        change_all(gateway.origin)

        async def copy(key: str, **headers: str) -> Answer:
            given = {"x-amz-copy-source": f"bucket/{key}"} | {
                name.replace("_", "-"): value for name, value in headers.items()
            }
            return await ask(gateway, "PUT", "/bucket/copy", headers=given)

        assert (await copy("data/sub/3")).status == 200
        assert (await ask(gateway, "GET", "/bucket/copy")).body == b"old"
        assert (await copy("data/k")).status == 412
        assert (await copy("data/new")).status == 404
        assert (await copy("data/sub/3", x_amz_copy_source_if_match='"other"')).status == 412


async def test_3_15_writes_are_refused(tmp_path: Path) -> None:
    """3.15 Every one, with 403; the origin hears of none."""
    async with playing(tmp_path, PART) as gateway:
        for method, target in (("PUT", K), ("DELETE", K), ("POST", f"{K}?uploads"), ("PUT", f"{K}?tagging")):
            assert (await ask(gateway, method, target, body=b"x" if method == "PUT" else b"")).status == 403
        body = b"<Delete><Object><Key>data/k</Key></Object></Delete>"
        given = {"content-md5": _md5(body)}
        deleted = await ask(gateway, "POST", "/bucket?delete", body=body, headers=given)
        assert b"AccessDenied" in deleted.body
        assert gateway.origin.calls == []


async def test_3_15_without_its_snapshot_a_slot_answers_nothing(tmp_path: Path) -> None:
    """3.15 409 that says which snapshot, and how to make it; the others are answered; it is used once it is there."""
    async with playing(tmp_path, PART, made=False) as gateway:
        for target in (K, f"{LIST}&prefix=data/", LIST, "/bucket/data/nothing"):
            answer = await ask(gateway, "GET", target)
            assert (answer.status, code(answer)) == (409, "NoSuchSnapshot")
            assert "forebay snapshot create v1 s3://bucket/data/" in (xml(answer.body).findtext("Message") or "")
        assert (await ask(gateway, "HEAD")).status == 409
        assert (await ask(gateway, "GET", "/bucket/z")).status == 200
        await freeze(gateway, "v1", "s3://bucket/data/")
        assert (await ask(gateway, "GET")).body == OLD
        gateway.snapshots.delete("v1")
        assert (await ask(gateway, "GET")).status == 409
        gateway.origin.put("bucket", "data/k", NEW)
        await freeze(gateway, "v1", "s3://bucket/data/")
        assert (await ask(gateway, "GET")).body == NEW


async def test_3_15_a_snapshot_of_something_else_freezes_nothing(tmp_path: Path) -> None:
    """3.15 It must cover the whole slot; one that covers more is as good."""
    async with playing(tmp_path, PART, made=False) as gateway:
        await freeze(gateway, "v1", "s3://bucket/data/sub/")
        answer = await ask(gateway, "GET")
        assert (answer.status, code(answer)) == (409, "SnapshotUnusable")
        gateway.snapshots.delete("v1")
        await freeze(gateway, "v1", "s3://bucket/")
        assert (await ask(gateway, "GET")).body == OLD
        assert names(await ask(gateway, "GET", f"{LIST}&prefix=data/s")) == ["data/sub/3"]


async def test_8_7_a_snapshot_of_the_bucket_at_another_home_freezes_nothing(tmp_path: Path) -> None:
    """8.7 One ETag may stand for other bytes there, and other keys be there."""
    async with playing(tmp_path, PART) as gateway:
        for home, expected in (("http://elsewhere", 409), ("memory", 200)):
            registry = SnapshotRegistry(gateway.snapshots, [PART], ManualClock(), Homes("m", {"bucket": home}))
            object.__setattr__(gateway.app.services, "snapshots", registry)
            for method, target in (("GET", K), ("HEAD", K), ("GET", f"{LIST}&prefix=data/")):
                assert (await ask(gateway, method, target)).status == expected, (home, method, target)
        await registry.close()


async def test_3_15_what_cannot_be_opened_is_looked_for_now_and_then(tmp_path: Path) -> None:
    """3.15 409, and no look at the disk for every request."""
    async with playing(tmp_path, PART) as gateway:
        store, clock = gateway.snapshots, ManualClock()
        (data,) = (store.root / "v1").glob("*.data")
        whole = data.read_bytes()
        data.write_bytes(whole[:-1])
        opened: list[str] = []
        store_open = store.open

        def noted_open(name: str) -> Snapshot:
            opened.append(name)
            return store_open(name)

        store.open = noted_open  # type: ignore[method-assign]
        registry = SnapshotRegistry(store, [PART], clock)
        object.__setattr__(gateway.app.services, "snapshots", registry)
        for _ in range(3):
            assert code(await ask(gateway, "GET")) == "SnapshotUnusable"
        assert len(opened) == 1
        (store.root / "v1").rename(tmp_path / "aside")
        store.changes.tell()
        for count in (2, 2, 3):
            assert code(await ask(gateway, "GET")) == "NoSuchSnapshot"
            assert len(opened) == count
            if count == 2:
                await clock.advance(LOOK_SECONDS / 2)
        data = tmp_path / "aside" / data.name
        data.write_bytes(whole)
        (tmp_path / "aside").rename(store.root / "v1")
        await clock.advance(LOOK_SECONDS)
        assert (await ask(gateway, "GET")).body == OLD
        await registry.close()


@pytest.mark.parametrize("harm", ["flipped", "cut"])
async def test_3_15_a_damaged_part_is_never_believed(tmp_path: Path, harm: str) -> None:
    """3.15 409 from whatever reads it, GET, HEAD and LIST, though the snapshot was open before; not a wrong answer."""
    async with playing(tmp_path, PART) as gateway:
        store = gateway.snapshots
        (data,) = (store.root / "v1").glob("*.data")
        content = bytearray(data.read_bytes())
        content[len(b"forebay objects\n") + 20] ^= 1
        opened = await gateway.app.services.snapshots.opened(PART)
        data.write_bytes(content if harm == "flipped" else content[:32])
        opened.snapshot.data._last_leaf = None
        for method, target in (("GET", K), ("HEAD", K), ("GET", f"{LIST}&prefix=data/")):
            answer = await ask(gateway, method, target)
            assert answer.status == 409
            assert method == "HEAD" or code(answer) == "SnapshotUnusable"


async def test_3_15_a_disk_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.15 503: it may pass. A mapped file would have ended the worker."""
    async with playing(tmp_path, PART) as gateway:
        opened = await gateway.app.services.snapshots.opened(PART)
        opened.snapshot.data._last_leaf = None

        def fails(*_: object) -> bytes:
            raise OSError(errno.EIO, "no disk")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fails)
            for method, target in (("GET", K), ("HEAD", K), ("GET", f"{LIST}&prefix=data/")):
                assert (await ask(gateway, method, target)).status == 503
        assert (await ask(gateway, "GET")).body == OLD


async def test_3_15_without_a_cache_directory_nothing_frozen_is_answered(tmp_path: Path) -> None:
    """3.15 503: never the origin's present state in its place."""
    async with playing(tmp_path, PART) as gateway:
        object.__setattr__(gateway.app.services, "snapshots", SnapshotRegistry.switched_off())
        for target in (K, f"{LIST}&prefix=data/", LIST):
            assert (await ask(gateway, "GET", target)).status == 503
        assert (await ask(gateway, "GET", "/bucket/z")).status == 200


async def test_3_16_above_a_frozen_slot_both_are_listed(tmp_path: Path) -> None:
    """3.16 What lies in the slot as it was frozen, the rest as the origin has it, page by page."""
    async with playing(tmp_path, PART) as gateway:
        change_all(gateway.origin)
        gateway.origin.put("bucket", "b", b"new")
        expected = ["a", "b", "data/1", "data/2", "data/k", "data/sub/3", "z"]
        listed = await ask(gateway, "GET", LIST)
        assert names(listed) == expected
        assert source(listed) == "partial"
        etags = {node.findtext("Key"): node.findtext("ETag") for node in xml(listed.body).iter("Contents")}
        assert etags["data/1"] == f'"{hashlib.md5(b"old").hexdigest()}"'
        seen, target = [], f"{LIST}&max-keys=2"
        while True:
            page = await ask(gateway, "GET", target)
            seen += names(page)
            if xml(page.body).findtext("IsTruncated") == "false":
                break
            target = f"{LIST}&max-keys=2&continuation-token={quote(token_of(page))}"
        assert seen == expected
        remove(gateway.origin, "data/sub/3")
        assert names(await ask(gateway, "GET", "/bucket?delimiter=/")) == ["a", "b", "data/", "z"]
        for key in ("data/1", "data/k", "data/new"):
            remove(gateway.origin, key)
        assert names(await ask(gateway, "GET", "/bucket?delimiter=/")) == ["a", "b", "data/", "z"]


async def test_3_16_two_snapshots_in_one_listing(tmp_path: Path) -> None:
    """3.16 Each part from its own; the origin is not asked where nothing lies between them."""
    inner = frozen("s3://bucket/data/sub/", "v2", "g")
    async with playing(tmp_path, PART, inner) as gateway:
        gateway.origin.put("bucket", "data/sub/4", b"later")
        await freeze(gateway, "v2", "s3://bucket/data/sub/")
        change_all(gateway.origin)
        gateway.origin.calls.clear()
        listed = await ask(gateway, "GET", f"{LIST}&prefix=data/")
        assert names(listed) == ["data/1", "data/2", "data/k", "data/sub/3", "data/sub/4"]
        assert source(listed) == "hit"
        assert gateway.origin.calls == []
        assert (await ask(gateway, "GET", "/bucket/data/sub/4")).body == b"later"


QUERIES = st.fixed_dictionaries(
    {"encoding-type": st.just("url")},
    optional={
        "prefix": model.TEXT,
        "delimiter": model.TEXT,
        "max-keys": st.sampled_from(["0", "1", "3", "1000"]),
        "start-after": model.TEXT,
        "marker": model.TEXT,
        "fetch-owner": st.sampled_from(["true", "false"]),
        "list-type": st.just("2"),
    },
)


async def test_3_13_a_listing_from_behind_its_prefix_is_empty(tmp_path: Path) -> None:
    """3.13 The origin is not asked, wherever it begins."""
    async with playing(tmp_path, ALL) as gateway:
        before = len(gateway.origin.calls)
        answer = await call(gateway.app, "GET", f"{LIST}&prefix=a&start-after=b", sign=False)
        assert (answer.status, answer.headers["x-forebay-cache"]) == (200, "hit")
        assert b"<KeyCount>0</KeyCount>" in answer.body
        assert len(gateway.origin.calls) == before


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model.KEYS, st.lists(QUERIES, min_size=1, max_size=6))
def test_3_13_every_answer_to_list_is_the_origins_of_then(
    tmp_path_factory: pytest.TempPathFactory, keys: set[str], queries: list[dict[str, str]]
) -> None:
    """3.13 To the letter, but for the tokens: keys, dates, ETags, sizes, classes, owners, order, encoding."""

    async def run() -> None:
        origin = MemoryOrigin(ManualClock())
        origin.create_bucket("bucket")
        for key in keys:
            origin.put("bucket", key, key.encode())
        directory = tmp_path_factory.mktemp("listings")
        targets = ["/bucket?" + "&".join(f"{name}={quote(value)}" for name, value in one.items()) for one in queries]
        async with gateway_app(directory / "plain", origin=origin, allow_unsigned=True) as plain:
            then = [await call(plain.app, "GET", target, sign=False) for target in targets]
        async with gateway_app(directory / "frozen", origin=origin, slots=[ALL], allow_unsigned=True) as gateway:
            await freeze(gateway, "v1")
            for key in keys:
                origin.put("bucket", key, b"changed")
            for target, before in zip(targets, then, strict=True):
                now = await call(gateway.app, "GET", target, sign=False)
                assert now.status == before.status
                if now.status == 200:
                    assert _comparable(now) == _comparable(before), target

    asyncio.run(run())


_SAID = frozenset({"Contents", "CommonPrefixes", "IsTruncated", "Name", "MaxKeys", "KeyCount", "EncodingType"})


def _comparable(answer: Answer) -> list[tuple[str, str | None]]:
    """All that is said of what is listed, in order; servers differ in how they repeat the question."""
    fields = sorted((top for top in xml(answer.body) if top.tag in _SAID), key=lambda top: top.tag)
    return [(node.tag, node.text) for top in fields for node in top.iter()]


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body).digest()).decode()


def _ignore_conditions(origin: MemoryOrigin) -> None:
    """As some servers do."""
    send = origin.send

    async def without(request: Any) -> Any:
        headers = {name: value for name, value in request.headers.items() if not name.endswith("if-match")}
        return await send(dataclasses.replace(request, headers=headers))

    origin.send = without  # type: ignore[method-assign]
