"""LIST through a gateway that keeps an index, against the same origin without one: page by page the same.

FOREBAY_LISTING_EXAMPLES lengthens a run; each takes six pages or seven. FOREBAY_LISTING_ORIGIN is what is listed:
`memory`, `strict`, `moto`, or the URL of a server that takes the key pair of the AWS variables and makes buckets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, unquote_plus
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.origin.client import KeyPair, Origin, OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.requests import parse_query
from tests.origin.origins import running, s3_origin, xml
from tests.scenarios.transparency import listing
from tests.support import listing_model as model
from tests.support.asgi import call
from tests.support.cache_label import cache_label
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot, slot_with
from tests.support.strict_origin import ACCESS_KEY_ID
from tests.support.strict_origin import SECRET_ACCESS_KEY as SECRET

EXAMPLES = int(os.environ.get("FOREBAY_LISTING_EXAMPLES", "15"))
ORIGIN = os.environ.get("FOREBAY_LISTING_ORIGIN", "memory")
SLOT = Slot("i", Prefix.parse("s3://bucket/"), "read-write", "immutable")
TOKENS = ("ContinuationToken", "NextContinuationToken")
IS_OURS = ORIGIN in ("memory", "strict")
"""Other servers add to a listing what S3 does not document and leave out what it does: of theirs, the entries count."""

WHAT_COUNTS = ("Contents", "CommonPrefixes", "IsTruncated")


@dataclass(frozen=True)
class Question:
    """What a client asks again and again until it has all pages."""

    version: int
    prefix: str
    delimiter: str
    limit: int
    after: str
    fetch_owner: bool

    def query(self, place: str | None) -> dict[str, str]:
        fields = {"encoding-type": "url", "max-keys": str(self.limit)}
        fields |= {"prefix": self.prefix} if self.prefix else {}
        fields |= {"delimiter": self.delimiter} if self.delimiter else {}
        after = "start-after" if self.version == 2 else "marker"
        fields |= {after: self.after} if self.after else {}
        if self.version == 2:
            fields |= {"list-type": "2"} | ({"fetch-owner": "true"} if self.fetch_owner else {})
        if place is not None:
            fields["continuation-token" if self.version == 2 else "marker"] = place
        return fields


def listable(text: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Other servers write as it is what no XML has, and what clients take for encoded: RGW's NextMarker is."""
    return text if IS_OURS else text.map(lambda found: found.translate({1: "!", ord("+"): "-", ord("%"): "~"}))


def fair(question: Question) -> Question:
    """moto has all keys of a page before all common prefixes, wherever it starts: what has both is asked for whole."""
    if ORIGIN != "moto" or not question.delimiter:
        return question
    return dataclasses.replace(question, limit=1000, after="")


TEXT, KEY = listable(model.TEXT), listable(model.KEY)
QUESTION = st.builds(
    Question,
    st.sampled_from([1, 2]),
    TEXT,
    st.one_of(st.just("/"), st.just(""), TEXT),
    st.integers(1, 6),
    st.one_of(st.just(""), KEY),
    st.booleans(),
).map(fair)
CLASSES = st.sampled_from(["STANDARD", "STANDARD_IA", "GLACIER_IR"] if IS_OURS else ["STANDARD"])
WRITE = st.tuples(st.sampled_from(["PUT", "PUT", "DELETE"]), KEY, CLASSES)


def described(root: Element) -> Any:
    """A document as data, less what differs by right."""
    return [(node.tag, node.text or "", described(node)) for node in root if node.tag not in TOKENS]


def counting(root: Element) -> Any:
    """What of a listing must be the same, in the order in which it is listed."""
    if IS_OURS:
        return sorted(described(root))
    return [[described_by_others(node) for node in root if node.tag == tag] for tag in WHAT_COUNTS]


def described_by_others(node: Element) -> Any:
    """An entry as data: others order its parts in another way, and percent-encode fewer characters, or more."""
    parts = sorted((part.tag, unquote(part.text or ""), described(part)) for part in node)
    return unquote(node.text or ""), parts


def following(root: Element, question: Question) -> str | None:
    """What the client asks the next page with, as botocore decodes it."""
    if root.findtext("IsTruncated") != "true":
        return None
    if question.version == 2:
        return root.findtext("NextContinuationToken")
    place = root.findtext("NextMarker") or [node.findtext("Key") or "" for node in root.iter("Contents")][-1]
    return unquote_plus(place)


@dataclass(frozen=True)
class Sides:
    """A bucket at an origin, and a gateway in front of it."""

    origin: Origin
    gateway: GatewayApp
    bucket: str

    async def at_origin(self, question: Question, place: str | None) -> Element:
        query = tuple(question.query(place).items())
        async with await self.origin.send(OriginRequest("GET", self.bucket, None, query)) as response:
            assert response.status == 200
            return xml(await response.read(2**24))

    async def through(self, question: Question, place: str | None, seen: list[str]) -> Element:
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in question.query(place).items())
        answer = await call(self.gateway.app, "GET", f"/{self.bucket}?{query}", sign=False)
        assert answer.status == 200, answer.body
        seen.append(cache_label(answer))
        await self.gateway.catalog.settle()
        return xml(answer.body)

    async def put(self, key: str, storage_class: str) -> None:
        """Past the gateway."""
        headers = {"x-amz-storage-class": storage_class}
        async with await self.origin.send(OriginRequest("PUT", self.bucket, key, (), headers, key.encode())) as answer:
            assert answer.status == 200, await answer.read(2**16)

    async def write(self, method: str, key: str, storage_class: str) -> None:
        """Through it."""
        headers = {"x-amz-storage-class": storage_class} if method == "PUT" else {}
        answer = await call(self.gateway.app, method, f"/{self.bucket}/{quote(key)}", headers, sign=False)
        assert answer.status in (200, 204)


@asynccontextmanager
async def connected(url: str | None) -> AsyncIterator[Origin]:
    """A client of the origin; of one in this process where there is no URL."""
    if url is None:
        yield MemoryOrigin(ManualClock())
        return
    pair = KeyPair(os.environ.get("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID), os.environ.get("AWS_SECRET_ACCESS_KEY", SECRET))
    origin = s3_origin(url, pair)
    try:
        yield origin
    finally:
        await origin.aclose()


@asynccontextmanager
async def sides(directory: Path, url: str | None) -> AsyncIterator[Sides]:
    """A new bucket, and a gateway that knows nothing of it."""
    bucket = f"listing-{uuid.uuid4().hex}"
    slot = slot_with(SLOT, prefix=Prefix.parse(f"s3://{bucket}/"))
    async with connected(url) as origin:
        async with await origin.send(OriginRequest("PUT", bucket)) as answer:
            assert answer.status == 200
        gateway = gateway_app(directory, through=origin, slots=[slot], clock=ManualClock(), allow_unsigned=True)
        async with gateway as running_gateway:
            yield Sides(origin, running_gateway, bucket)
        if url is not None:
            await remove(origin, bucket)


async def remove(origin: Origin, bucket: str) -> None:
    """A server that stays behind has no room for a bucket per example."""
    query = (("list-type", "2"), ("encoding-type", "url"))
    while True:
        async with await origin.send(OriginRequest("GET", bucket, None, query)) as response:
            root = xml(await response.read(2**24))
        keys = [unquote(node.findtext("Key") or "") for node in root.iter("Contents")]
        whole_bucket: list[str | None] = [None]
        for key in keys or whole_bucket:
            async with await origin.send(OriginRequest("DELETE", bucket, key)) as answer:
                assert answer.status == 204
        if not keys:
            return


async def compare(both: Sides, question: Question) -> list[str]:
    """All pages from both; gives where the gateway's came from."""
    seen: list[str] = []
    theirs: str | None = None
    ours: str | None = None
    for _ in range(200):
        expected, found = await both.at_origin(question, theirs), await both.through(question, ours, seen)
        assert counting(found) == counting(expected)
        theirs, ours = following(expected, question), following(found, question)
        assert (theirs is None) == (ours is None)
        if theirs is None:
            return seen
    raise AssertionError("the listing does not end")


AS_CLIENTS_ASK = [
    f"{version}{query}"
    for version, more in (("", listing._V1), ("list-type=2&", listing._V2))
    for query in (*listing._QUERIES, *more)
    if query not in ("max-keys=", "encoding-type=base64") and "%01" not in query  # no XML has that character
]


async def test_every_way_of_asking_is_answered_as_the_origin_does(tmp_path: Path) -> None:
    """What real clients and S3's own tests ask, with and without percent-encoding, of the origin and of the index."""
    async with gateway_app(tmp_path, slots=[SLOT], clock=ManualClock(), allow_unsigned=True) as gateway:
        for key in listing._KEYS:
            gateway.origin.put("bucket", unquote(key), b"1")
        for query in AS_CLIENTS_ASK * 2:
            pairs = parse_query(query.encode())
            async with await gateway.origin.send(OriginRequest("GET", "bucket", None, pairs)) as response:
                expected = response.status, xml(await response.read(2**20))
            answer = await call(gateway.app, "GET", f"/bucket?{query}", sign=False)
            await gateway.catalog.settle()
            assert answer.status == expected[0] == 200, query
            assert sorted(described(xml(answer.body))) == sorted(described(expected[1])), query


@pytest.fixture(scope="module")
def listed_origin() -> Iterator[str | None]:
    """The URL of the origin that is listed."""
    if "://" in ORIGIN:
        yield ORIGIN
        return
    with running(ORIGIN) as origin:
        yield origin.endpoint_url


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    keys=st.dictionaries(KEY, CLASSES, max_size=40),
    steps=st.lists(st.one_of(QUESTION, WRITE), min_size=1, max_size=8),
)
def test_every_page_is_the_origins(
    listed_origin: str | None, keys: dict[str, str], steps: list[Question | tuple[str, str, str]]
) -> None:
    """From index or origin, learned by whatever was asked before, own writes in between: no page differs.

    Listed again from the beginning, a listing that could be learned is the index's.
    """

    async def run(directory: Path, url: str | None) -> None:
        async with sides(directory, url) as both:
            for key, storage_class in keys.items():
                await both.put(key, storage_class)
            for step in steps:
                if isinstance(step, Question):
                    await compare(both, step)
                    again = await compare(both, step)
                    if not step.delimiter and step.prefix > step.after:
                        assert set(again) == {"hit"}
                else:
                    await both.write(*step)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory), listed_origin))
