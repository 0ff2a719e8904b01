"""What a node keeps of the blocks that other nodes look after, and whom it asks for readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest

from gateway.blocks.cache import BlockCache
from gateway.blocks.fetch_locks import lock_of_place
from gateway.blocks.layout import object_id
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.metadata.catalog import Catalog
from gateway.metadata.listing.index import found_of
from gateway.metadata.listing.pages import ListRequest
from gateway.origin import peer_protocol as peer
from gateway.origin.client import Origin, OriginRequest, OriginResponse, Purpose
from gateway.origin.peer_protocol import COPY
from gateway.policy.slots import Prefix, Slot, Slots
from gateway.s3.list_result import EntryTemplate, ListedEntry, ListedPage
from gateway.s3.origin_habits import NO_HABITS
from tests.cluster.nodes import HOME, Cluster
from tests.support.blocks import BLOCK, BUCKET, KIB, content_of, make_origin, open_cache, stored, take, whole
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse

Kept = Literal["idle", "none", "all"]
KINDS = {"large": 0, "small": BLOCK}


@dataclass
class Others:
    """Other nodes look after the keys that begin with `prefix`."""

    prefix: str = "others/"
    asked: list[tuple[str, int]] = field(default_factory=list)

    def headers(self, key: ObjectKey, number: int, headers: Mapping[str, str], slot: str) -> Mapping[str, str]:
        self.asked.append((key.key, number))
        return {**headers, COPY: "1"} if key.key.startswith(self.prefix) else headers

    def owners(self, key: ObjectKey, number: int) -> tuple[tuple[str, bool], ...]:
        return (("others", False),) if key.key.startswith(self.prefix) else (("me", True),)

    def owns(self, key: ObjectKey, number: int) -> bool:
        return not key.key.startswith(self.prefix)


@dataclass
class Seen:
    """Passes everything on to an origin; notes the keys that are asked of other nodes."""

    origin: MemoryOrigin
    copies: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    async def send(self, request: OriginRequest) -> OriginResponse:
        (self.copies if COPY in request.headers else self.own).append(request.key or "")
        return await self.origin.send(request)

    async def aclose(self) -> None:
        await self.origin.aclose()


def slots(kept: Kept) -> Slots:
    return Slots([Slot(name="data", prefix=Prefix(BUCKET), copies=kept)])


async def read(cache: BlockCache, version: ObjectVersion, *, of_peer: bool = False) -> bytes:
    return await take(await cache.open_range(version, whole(version), slot="data", of_peer=of_peer))


def held(cache: BlockCache, versions: list[ObjectVersion]) -> list[bool]:
    return [cache.holds(version, whole(version), slot="data") for version in versions]


def test_what_other_nodes_look_after_is_fetched_apart() -> None:
    key = ObjectKey(BUCKET, "k")
    assert lock_of_place(object_id(key), 0, {}) != lock_of_place(object_id(key), 0, {COPY: "1"})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peers_reads_ask_no_other_node(tmp_path: Path, kind: str) -> None:
    origin = Seen(make_origin())
    version = stored(origin.origin, "others/k", 2 * BLOCK)
    settings: dict[str, Any] = {"slots": slots("all"), "small_object_bytes_max": KINDS[kind]}
    async with open_cache(tmp_path, origin, roles=Others(), **settings) as cache:
        readers = read(cache, version), read(cache, version, of_peer=True)
        assert list(await asyncio.gather(*readers)) == [content_of(origin.origin, version)] * 2
    assert (set(origin.copies), set(origin.own)) == ({"others/k"}, {"others/k"})


async def test_what_asks_other_nodes_takes_no_turn_of_what_asks_the_bucket(tmp_path: Path) -> None:
    """Else two nodes whose turns are all taken would wait for each other."""
    async with open_cache(tmp_path, make_origin(), roles=Others(), fills_max=2) as cache, AsyncExitStack() as stack:
        for key, headers in (("others/0", {COPY: "1"}), ("others/1", {COPY: "1"}), ("own", {})):
            get = cache.begin_unpinned_get(ObjectKey(BUCKET, key), 0, headers)
            assert get is not None
            stack.enter_context(get)
            async with asyncio.timeout(60):
                await stack.enter_async_context(get.turns)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_slot_that_keeps_no_copies_passes_them_through(tmp_path: Path, kind: str) -> None:
    origin = Seen(make_origin())
    version, own = stored(origin.origin, "others/k", 3 * BLOCK + 10), stored(origin.origin, "own", BLOCK)
    settings: dict[str, Any] = {"slots": slots("none"), "small_object_bytes_max": KINDS[kind]}
    async with open_cache(tmp_path, origin, roles=Others(), **settings) as cache:
        for _ in range(2):
            assert await read(cache, version) == content_of(origin.origin, version)
            assert await read(cache, own) == content_of(origin.origin, own)
        await cache.settle()
        assert held(cache, [version, own]) == [False, True]
    assert (len(origin.copies), len(origin.own)) == (8, 1)


@pytest.mark.parametrize("size_bytes", [40 * KIB, BLOCK])
async def test_a_first_answer_is_passed_through_and_not_asked_for_again(tmp_path: Path, size_bytes: int) -> None:
    origin = Seen(make_origin())
    version = stored(origin.origin, "others/k", size_bytes)
    settings: dict[str, Any] = {"slots": slots("none"), "small_object_bytes_max": BLOCK}
    async with open_cache(tmp_path, origin, roles=Others(), **settings) as cache:
        get = cache.begin_unpinned_get(version.key, 0, {COPY: "1"})
        assert get is not None
        with get:
            response = await origin.send(OriginRequest("GET", BUCKET, "others/k", headers={COPY: "1"}))
            answer = UnpinnedResponse(get, whole(version), response)
            fields: dict[str, Any] = {"slot": "data", "headers": {COPY: "1"}, "answer": answer}
            body = cache.inline_response(version, whole(version), **fields)
            if body is None:
                reader = await cache.open_range(version, whole(version), slot="data", answer=answer)
                body = memoryview(await take(reader))
            assert body == content_of(origin.origin, version)
        await cache.settle()
        assert held(cache, [version]) == [False]
    assert origin.copies == ["others/k"]


async def test_parts_that_are_passed_through_are_asked_for_in_whole_chunks(tmp_path: Path) -> None:
    origin = make_origin()
    version = stored(origin, "others/k", 3 * BLOCK + 10)
    asked = ByteRange(BLOCK - 100, 2 * BLOCK + 70 * KIB)
    async with open_cache(tmp_path, origin, roles=Others(), slots=slots("none")) as cache:
        reader = await cache.open_range(version, asked, slot="data")
        assert await take(reader) == content_of(origin, version, asked)
    ranges = [call.headers["range"] for call in origin.calls]
    expected = [(BLOCK - 64 * KIB, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 128 * KIB)]
    assert ranges == [f"bytes={first}-{stop - 1}" for first, stop in expected]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_idle_copies_take_no_room_that_others_use(tmp_path: Path, kind: str) -> None:
    origin = make_origin()
    room = 16
    own = [stored(origin, f"own/{number}", BLOCK - 8 * KIB) for number in range(room)]
    others = [stored(origin, f"others/{number}", BLOCK - 8 * KIB) for number in range(2 * room)]
    settings: dict[str, Any] = {
        "slots": slots("idle"),
        "small_object_bytes_max": KINDS[kind],
        "capacity_bytes": room * BLOCK,
    }
    async with open_cache(tmp_path, origin, roles=Others(), **settings) as cache:
        for version in own[: room // 2]:
            await read(cache, version)
            await cache.settle()
        for version in others:
            assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
        assert all(held(cache, own[: room // 2]))
        assert sum(held(cache, others)) >= 2
        for _ in range(3):  # used again and again
            for version in others:
                if cache.holds(version, whole(version), slot="data"):
                    await read(cache, version)
        await cache.flush_accesses()
        for version in own[room // 2 :]:
            await read(cache, version)
            await cache.settle()
        assert not any(held(cache, others))
        assert sum(held(cache, own)) >= room - 2


async def test_idle_copies_leave_before_all_else_in_any_slot(tmp_path: Path) -> None:
    """Also before blocks of the slot that has borrowed most."""
    origin, room = make_origin(), 12
    large = [stored(origin, f"large/{number}", BLOCK - 8 * KIB) for number in range(room)]
    others = [stored(origin, f"others/{number}", BLOCK - 8 * KIB) for number in range(3)]
    of_both = Slots([*slots("idle"), Slot(name="large", prefix=Prefix(BUCKET, "large/"))])
    async with open_cache(tmp_path, origin, roles=Others(), slots=of_both, capacity_bytes=room * BLOCK) as cache:

        async def keep(version: ObjectVersion, slot: str) -> None:
            await take(await cache.open_range(version, whole(version), slot=slot))
            await cache.settle()

        for version in large[: room - 4]:
            await keep(version, "large")
        for version in others:
            await keep(version, "data")
        assert all(held(cache, others))
        for version in large[room - 4 :][:3]:
            await keep(version, "large")
        assert [cache.holds(one, whole(one), slot="large") for one in large[: room - 1]] == [True] * (room - 1)


async def test_a_copy_stays_a_copy_after_a_restart(tmp_path: Path) -> None:
    origin = make_origin()
    others = [stored(origin, f"others/{number}", BLOCK - 8 * KIB) for number in range(4)]
    own = [stored(origin, f"own/{number}", BLOCK - 8 * KIB) for number in range(4)]
    settings: dict[str, Any] = {"slots": slots("idle"), "capacity_bytes": 6 * BLOCK}
    async with open_cache(tmp_path, origin, roles=Others(), **settings) as cache:
        for version in others:
            await read(cache, version)
        await cache.settle()
        assert all(held(cache, others))
    async with open_cache(tmp_path, origin, roles=Others(), **settings) as cache:
        for version in own:
            await read(cache, version)
            await cache.settle()
        assert all(held(cache, own))
        assert sum(held(cache, others)) <= 2


async def test_copies_are_kept_like_own_blocks_where_a_slot_says_so(tmp_path: Path) -> None:
    origin = make_origin()
    others = [stored(origin, f"others/{number}", BLOCK - 8 * KIB) for number in range(12)]
    settings: dict[str, Any] = {"slots": slots("all"), "capacity_bytes": 6 * BLOCK}
    async with open_cache(tmp_path, origin, roles=Others(), **settings) as cache:
        for version in others:
            await read(cache, version)
            await cache.settle()
        assert held(cache, others)[-1]
        assert sum(held(cache, others)) >= 5


async def test_what_a_slot_does_not_keep_is_nobodys(tmp_path: Path) -> None:
    origin, roles = Seen(make_origin()), Others()
    version = stored(origin.origin, "others/k", 3 * BLOCK)
    of_slot = Slots([Slot(name="data", prefix=Prefix(BUCKET), kept_object_bytes_max=BLOCK)])
    async with open_cache(tmp_path, origin, roles=roles, slots=of_slot) as cache:
        assert await read(cache, version) == content_of(origin.origin, version)
    assert (origin.copies, roles.asked) == ([], [])


# Two nodes whose views differ: neither ever waits for the other


@dataclass
class Pair:
    """Two nodes, each of which believes that the other looks after all."""

    origin: MemoryOrigin
    caches: list[BlockCache] = field(default_factory=list)


@dataclass
class AsksTheOther:
    """The origin of one of a pair: what is a copy is read through the other node's cache, as its peer port does."""

    pair: Pair
    other: int
    versions: dict[str, ObjectVersion]

    async def send(self, request: OriginRequest) -> OriginResponse:
        if COPY not in request.headers:
            return await self.pair.origin.send(request)
        version = self.versions[request.key or ""]
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        asked = ByteRange(int(first), int(last))
        reader = await self.pair.caches[self.other].open_range(version, asked, slot="data", of_peer=True)
        await take(reader)
        plain = {name: value for name, value in request.headers.items() if name != COPY}
        return await self.pair.origin.send(
            OriginRequest(request.method, request.bucket, request.key, headers=plain, purpose=Purpose.LIVE)
        )

    async def aclose(self) -> None:
        await self.pair.origin.aclose()


def orders() -> Iterator[tuple[int, ...]]:
    """Which node reads first, for four reads."""
    return product((0, 1), repeat=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_two_nodes_that_ask_each_other_for_all_never_wait_for_ever(tmp_path: Path, kind: str) -> None:
    pair = Pair(make_origin())
    versions = {f"others/{number}": stored(pair.origin, f"others/{number}", 3 * BLOCK) for number in range(4)}
    settings: dict[str, Any] = {
        "slots": slots("all"),
        "small_object_bytes_max": KINDS[kind],
        "fills_max": 2,
        "readahead_bytes": 0,
    }
    for order in orders():
        async with AsyncExitStack() as stack:
            pair.caches.clear()
            for number in (0, 1):
                origin: Origin = AsksTheOther(pair, 1 - number, versions)
                directory = tmp_path / "".join(map(str, order)) / str(number)
                pair.caches.append(
                    await stack.enter_async_context(open_cache(directory, origin, roles=Others(), **settings))
                )
            async with asyncio.timeout(60):
                reads = [
                    read(pair.caches[node], version)
                    for node, version in zip(order, versions.values(), strict=True)
                    for node in (node, 1 - node)
                ]
                contents = await asyncio.gather(*reads)
            assert contents == [content_of(pair.origin, version) for version in versions.values() for _ in (0, 1)]


# Questions about objects


TTL: dict[str, Any] = {"mode": "read-only", "stated_consistency": "ttl", "metadata_ttl_seconds": 60}


async def catalog_of(tmp_path: Path, cluster: Cluster) -> Catalog:
    return await Catalog.open(
        tmp_path, cluster.origin, homes=HOME, clock=cluster.clock, slots=cluster.slots, roles=cluster.roles
    )


async def test_what_a_peer_remembers_is_as_old_here_as_there(tmp_path: Path) -> None:
    [slot] = cluster_slots = Slots([Slot(name="data", prefix=Prefix(BUCKET), **TTL)])
    cluster = Cluster(slots=cluster_slots)
    version = cluster.store("k", BLOCK)
    node = cluster.nodes["one"]
    node.age_seconds = 40.0
    catalog = await catalog_of(tmp_path, cluster)
    try:
        head = await catalog.current(version.key, slot, headers={})
        assert head.version == version
        assert not [name for name in head.headers if name.startswith("x-forebay")]
        await catalog.settle()
        cluster.clock.time += 19
        assert (await catalog.current(version.key, slot, headers={})).remembered
        cluster.clock.time += 2
        assert not (await catalog.current(version.key, slot, headers={})).remembered
        assert (cluster.asked(), cluster.from_bucket()) == ({"one": 2}, 0)
        await catalog.current(version.key, slot, headers={}, look=True)
        await catalog.current(ObjectKey(BUCKET, "k"), slot, headers={"x-amz-request-payer": "requester"})
        assert (cluster.asked(), cluster.from_bucket()) == ({"one": 2}, 2)
        cluster.clock.time += 100
        await catalog.current(version.key, slot, headers={}, of_peer=True)
        assert (cluster.asked(), cluster.from_bucket()) == ({"one": 2}, 3)
    finally:
        await catalog.close()


def listed(version: ObjectVersion) -> ListedEntry:
    modified = "2026-01-01T00:00:00.000Z"
    return ListedEntry(
        version.key.key.encode(), modified, version.etag, version.size_bytes, EntryTemplate("", None, "")
    )


FORGET: Mapping[str, Callable[[Catalog, ObjectVersion, Slot], None]] = {
    "an event": lambda catalog, version, slot: catalog.forget(version.key),
    "an event of the bucket": lambda catalog, version, slot: catalog.forget_bucket(version.key.bucket),
    "an answer past the cache": lambda catalog, version, slot: catalog.shown(version.key, version.etag),
    "a listing": lambda catalog, version, slot: catalog.listed(BUCKET, [listed(version)], [slot]),
}


@pytest.mark.parametrize(("how", "is_known"), [*product(FORGET, (True, False))][:-1])
async def test_12_3_no_peer_takes_back_what_this_node_has_shown_or_forgotten(
    tmp_path: Path, how: str, is_known: bool
) -> None:
    """Whether this node remembers a version or not. What a peer has asked for since then counts."""
    [slot] = slots = Slots([Slot(name="data", prefix=Prefix(BUCKET), mode="read-only", stated_consistency="immutable")])
    cluster = Cluster(slots=slots)
    old = cluster.store("k", BLOCK)
    node = cluster.nodes["one"]
    node.age_seconds = cluster.nodes["two"].age_seconds = 11.0
    catalog = await catalog_of(tmp_path, cluster)
    try:
        if is_known:
            await catalog.current(old.key, slot, headers={})
            await catalog.settle()
        new = stored(cluster.bucket, "k", 2 * BLOCK)
        FORGET[how](catalog, new, slot)
        cluster.clock.time += 10
        assert (await catalog.current(old.key, slot, headers={})).version == new
        assert 9.9 < float(node.headers()[peer.MAX_AGE]) <= 10
        catalog.forget(old.key)
        cluster.clock.time += 10
        node.age_seconds = 9.0
        assert (await catalog.current(old.key, slot, headers={})).version == old
    finally:
        await catalog.close()


async def test_12_3_no_peer_says_otherwise_than_a_listing_since(tmp_path: Path) -> None:
    [slot] = slots = Slots([Slot(name="data", prefix=Prefix(BUCKET), mode="read-only", stated_consistency="immutable")])
    cluster = Cluster(slots=slots)
    old, key = cluster.store("k", BLOCK), ObjectKey(BUCKET, "k")
    catalog = await catalog_of(tmp_path, cluster)
    try:
        new = stored(cluster.bucket, "k", 2 * BLOCK)
        page, asked = found_of(ListedPage([listed(new)], [], None)), catalog.listing.asked(BUCKET)
        catalog.listing.learn(BUCKET, ListRequest(), page, asked, merge_seconds=0.0)
        await catalog.settle()
        cluster.clock.time += 10
        ages = catalog.ages(key, slot)
        for version in (old, new):
            told = {"etag": version.etag, "content-length": str(version.size_bytes)}
            assert [ages.allow(200, told, age_seconds) for age_seconds in (9, 11)] == [True, version == new]
        assert not ages.allow(200, {"etag": new.etag, "content-length": "1"}, 11)
        assert not ages.allow(412, {}, 11)
    finally:
        await catalog.close()


async def test_12_3_no_peer_says_that_there_is_no_object_which_was_shown_since(tmp_path: Path) -> None:
    [slot] = Slots([Slot(name="data", prefix=Prefix(BUCKET), negative_ttl_seconds=3600, **TTL)])
    cluster = Cluster()
    key = ObjectKey(BUCKET, "k")
    catalog = await catalog_of(tmp_path, cluster)
    try:
        assert catalog.ages(key, slot).allow(404, {}, 3000)
        catalog.answered(OriginRequest("GET", *key, query=(("tagging", None),)), 200, slot)
        cluster.clock.time += 10
        assert [catalog.ages(key, slot).allow(404, {}, age_seconds) for age_seconds in (9, 11)] == [True, False]
        catalog.forget(key)
        cluster.clock.time += 5
        assert [catalog.ages(key, slot).allow(404, {}, age_seconds) for age_seconds in (4, 6)] == [True, False]
    finally:
        await catalog.close()


async def test_one_odd_answer_of_a_peer_is_no_habit_of_the_bucket(tmp_path: Path) -> None:
    [slot] = slots = Slots([Slot(name="data", prefix=Prefix(BUCKET), **TTL)])
    cluster = Cluster(slots=slots)
    cluster.nodes["one"].replies = [MemoryResponse(200, {"etag": 'W/"k"', "content-length": "10", peer.AGE: "0"})]
    catalog = await catalog_of(tmp_path, cluster)
    try:
        head = await catalog.current(ObjectKey(BUCKET, "k"), slot, headers={})
        assert head.of_peer
        catalog.learned(head, slot, catalog.now(head.version.key), headers={}, with_checksums=False)
        assert catalog.habits(BUCKET) == NO_HABITS
    finally:
        await catalog.close()


@pytest.mark.parametrize("changed", [{"mode": "read-write"}, {"stated_consistency": "strict"}])
async def test_questions_go_to_the_bucket_where_somebody_may_write(tmp_path: Path, changed: dict[str, Any]) -> None:
    [slot] = cluster_slots = Slots([Slot(name="data", prefix=Prefix(BUCKET), **TTL | changed)])
    cluster = Cluster(slots=cluster_slots)
    version = cluster.store("k", BLOCK)
    catalog = await catalog_of(tmp_path, cluster)
    try:
        assert (await catalog.current(version.key, slot, headers={})).version == version
        assert cluster.asked() == {}
    finally:
        await catalog.close()
