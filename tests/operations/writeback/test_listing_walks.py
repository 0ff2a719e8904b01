"""Listings with what is pending in them, from their first page to their last, through the gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from urllib.parse import quote, unquote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.model import ObjectKey
from gateway.edge.asgi import S3App
from gateway.metadata.listing.pages import ListRequest
from gateway.policy.slots import Prefix
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.buckets import BucketCapabilities
from gateway.writeback.journal.records import ExpectedVersion, Write, WriteSpec
from tests.origin.origins import xml
from tests.support import listing_model as model
from tests.support.asgi import Answer, call
from tests.support.gateway_app import gateway_app
from tests.support.listing_scenarios import token_of
from tests.support.slots import Slot
from tests.support.write_back_gateway import Client

STRICT = Slot("back", Prefix(""), write="back")
TTL = Slot("back", Prefix(""), "read-write", "ttl", 3600.0, write="back")
IMMUTABLE = Slot("back", Prefix(""), "read-write", "immutable", write="back")

NAMES = st.lists(st.sampled_from(["a", "b", "/", "é", "-"]), min_size=1, max_size=4).map("".join)
TEXT = st.lists(st.sampled_from(["a", "b", "/", "é"]), max_size=2).map("".join)


def etag_of(content: str) -> str:
    return f'"{hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()}"'


@dataclasses.dataclass(frozen=True)
class Walk:
    """A listing from its first page to its last."""

    prefix: str
    delimiter: str
    limit: int
    after: str
    is_v2: bool

    @property
    def wanted(self) -> ListRequest:
        return ListRequest(self.prefix.encode(), self.delimiter.encode(), self.limit, self.after.encode())

    def target(self, bucket: str, following: str | None) -> str:
        said = {"prefix": self.prefix, "delimiter": self.delimiter, "max-keys": str(self.limit), "encoding-type": "url"}
        said |= {"list-type": "2", "start-after": self.after} if self.is_v2 else {"marker": self.after}
        if following is not None:
            said["continuation-token" if self.is_v2 else "marker"] = following
        return f"/{bucket}?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in said.items())


WALKS = st.builds(Walk, TEXT, st.sampled_from(["", "/", "a", "é/"]), st.integers(1, 5), TEXT, st.booleans())


@dataclasses.dataclass
class Bucket:
    """One of a gateway's buckets, what it will hold when everything is flushed, and two workers that answer for it."""

    client: Client
    apps: Sequence[S3App]
    name: str
    holds: dict[str, str]
    """Key → content."""

    async def fill(self, writes: dict[str, bool]) -> None:
        """Have something pending: objects, and tombstones for the False ones."""
        buffer, now = self.client.buffer, self.client.gateway.app.services.clock.now()
        await buffer.journal.change(lambda tx: tx.buckets.learn(self.name, BucketCapabilities(True, True, now)))
        await asyncio.gather(*(self._put(name) for name, is_put in writes.items() if is_put))
        await asyncio.gather(*(self._delete(name, now) for name, is_put in writes.items() if not is_put))

    async def _put(self, name: str) -> None:
        answer = await call(self.apps[0], "PUT", f"/{self.name}/{quote(name)}", body=b"new" + name.encode())
        assert (answer.status, answer.headers["x-forebay-cache"]) == (200, "absorbed")
        self.holds[name] = "new" + name

    async def _delete(self, name: str, now: float) -> None:
        there = self.holds.get(name)
        spec, expected = (
            WriteSpec(ObjectKey(self.name, name), {}, "back"),
            ExpectedVersion.exactly(there and etag_of(there)),
        )
        tombstone = Write(spec, expected, now, deleted=True, acknowledged_at=now)
        await self.client.buffer.journal.change(lambda tx: tx.writes.acknowledge(tombstone))
        self.holds.pop(name, None)

    async def walk(self, walk: Walk, flushes: dict[str, int]) -> None:
        """Every page is the model's. `flushes`: which key is flushed behind which page."""
        wanted, following = walk.wanted, None
        keys = {name.encode() for name in self.holds}
        for number in count():
            answer = await call(self.apps[number % 2], "GET", walk.target(self.name, following))
            listed, prefixes, is_truncated = self._said(answer)
            assert (listed, prefixes, is_truncated) == model.page(keys, wanted)
            for name in [name for name, page in flushes.items() if page == number]:
                await self.client.flush_one(ObjectKey(self.name, name))
            if not is_truncated:
                return
            last = max([*listed, *prefixes])
            wanted = dataclasses.replace(wanted, after=last, skip=walk.is_v2 and last in prefixes)
            following = token_of(answer) if walk.is_v2 else last.decode()

    def _said(self, answer: Answer) -> tuple[list[bytes], list[bytes], bool]:
        root = xml(answer.body)
        listed: list[bytes] = []
        for node in root.iter("Contents"):
            name = unquote_plus(node.findtext("Key") or "")
            content = self.holds[name]
            assert (node.findtext("ETag"), node.findtext("Size")) == (etag_of(content), str(len(content.encode())))
            listed.append(name.encode())
        prefixes = [unquote_plus(node.findtext("Prefix") or "").encode() for node in root.iter("CommonPrefixes")]
        return listed, prefixes, root.findtext("IsTruncated") == "true"


@asynccontextmanager
async def two_workers(directory: Path, slot: Slot) -> AsyncIterator[tuple[Client, list[S3App]]]:
    async with gateway_app(directory, slots=[slot], writeback=True) as gateway:
        other = await WritebackBuffer.open(directory / "writeback", 1)
        try:
            services = dataclasses.replace(gateway.app.services, writeback=other)
            client = Client(gateway)
            async with client.running():
                yield client, [gateway.app, dataclasses.replace(gateway.app, services=services)]
        finally:
            await other.close()


@pytest.mark.slow
@pytest.mark.parametrize("slot", [STRICT, TTL, IMMUTABLE], ids=["strict", "ttl", "immutable"])
def test_every_page_lists_what_was_written(tmp_path: Path, slot: Slot) -> None:
    """Whatever is flushed between two pages, whichever worker answers, and whatever the index knew before."""
    numbers = count()
    with asyncio.Runner() as runner:
        serving = two_workers(tmp_path, slot)
        client, apps = runner.run(serving.__aenter__())

        async def example(
            origin: set[str], writes: dict[str, bool], walks: list[Walk], flushes: list[int], knows: bool
        ) -> None:
            name = f"bucket-{next(numbers)}"
            client.origin.create_bucket(name)
            for one in origin:
                client.origin.put(name, one, b"old" + one.encode())
            bucket = Bucket(client, apps, name, {one: "old" + one for one in origin})
            if knows:
                await bucket.walk(Walk("", "", 1000, "", is_v2=True), {})
                await client.gateway.catalog.settle()
            await bucket.fill(writes)
            for walk in walks:
                await bucket.walk(walk, dict(zip(writes, flushes, strict=False)))
            for one in writes:
                await client.flush_one(ObjectKey(name, one))
            await bucket.walk(Walk("", "/", 3, "", is_v2=True), {})

        @settings(max_examples=8, deadline=None)
        @given(
            st.sets(NAMES, max_size=15),
            st.dictionaries(NAMES, st.booleans(), max_size=8),
            st.lists(WALKS, min_size=1, max_size=3),
            st.lists(st.integers(0, 3), max_size=8),
            st.booleans(),
        )
        def run(origin: set[str], writes: dict[str, bool], walks: list[Walk], flushes: list[int], knows: bool) -> None:
            runner.run(example(origin, writes, walks, flushes, knows))

        try:
            run()
        finally:
            runner.run(serving.__aexit__(None, None, None))
