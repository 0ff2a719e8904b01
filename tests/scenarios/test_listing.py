"""LIST through a gateway that keeps an index, against the same origin without one: page by page the same."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, unquote_plus
from xml.etree.ElementTree import Element

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.origin.client import OriginRequest
from gateway.policy.prefixes import Prefix
from gateway.policy.slots import Slot
from gateway.s3.addressing import parse_query
from tests.origin.origins import xml
from tests.scenarios.transparency import listing
from tests.support import listing_model as model
from tests.support.asgi import call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock

EXAMPLES = int(os.environ.get("FOREBAY_LISTING_EXAMPLES", "15"))
"""FOREBAY_LISTING_EXAMPLES lengthens a run; each takes some 40 pages."""

SLOT = Slot("i", Prefix.parse("s3://bucket/"), "read-write", "immutable")
TOKENS = ("ContinuationToken", "NextContinuationToken")


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


QUESTION = st.builds(
    Question,
    st.sampled_from([1, 2]),
    model.TEXT,
    st.one_of(st.just("/"), st.just(""), model.TEXT),
    st.integers(1, 6),
    st.one_of(st.just(""), model.KEY),
    st.booleans(),
)
CLASSES = st.sampled_from(["STANDARD", "STANDARD_IA", "GLACIER_IR"])
WRITE = st.tuples(st.sampled_from(["PUT", "PUT", "DELETE"]), model.KEY, CLASSES)


def described(root: Element) -> Any:
    """A document as data, less what differs by right."""
    return [(node.tag, node.text or "", described(node)) for node in root if node.tag not in TOKENS]


def following(root: Element, question: Question) -> str | None:
    """What the client asks the next page with, as botocore decodes it."""
    if root.findtext("IsTruncated") != "true":
        return None
    if question.version == 2:
        return root.findtext("NextContinuationToken")
    place = root.findtext("NextMarker") or [node.findtext("Key") or "" for node in root.iter("Contents")][-1]
    return unquote_plus(place)


async def at_origin(gateway: GatewayApp, question: Question, place: str | None) -> Element:
    query = tuple(question.query(place).items())
    async with await gateway.origin.send(OriginRequest("GET", "bucket", None, query)) as response:
        assert response.status == 200
        return xml(await response.read(2**24))


async def through(gateway: GatewayApp, question: Question, place: str | None, seen: list[str]) -> Element:
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in question.query(place).items())
    answer = await call(gateway.app, "GET", f"/bucket?{query}", sign=False)
    assert answer.status == 200, answer.body
    seen.append(answer.headers["x-forebay-cache"])
    await gateway.catalog.settle()
    return xml(answer.body)


async def compare(gateway: GatewayApp, question: Question) -> list[str]:
    """All pages from both; gives where the gateway's came from."""
    seen: list[str] = []
    theirs: str | None = None
    ours: str | None = None
    for _ in range(200):
        expected, found = await at_origin(gateway, question, theirs), await through(gateway, question, ours, seen)
        assert sorted(described(found)) == sorted(described(expected))
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


def test_every_way_of_asking_is_answered_as_the_origin_does(tmp_path: Path) -> None:
    """What real clients and S3's own tests ask, with and without percent-encoding, of the origin and of the index."""

    async def run() -> None:
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

    asyncio.run(run())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.dictionaries(model.KEY, CLASSES, max_size=40), st.lists(st.one_of(QUESTION, WRITE), min_size=1, max_size=8))
def test_every_page_is_the_origins(keys: dict[str, str], steps: list[Question | tuple[str, str, str]]) -> None:
    """From index or origin, learned by whatever was asked before, own writes in between: no page differs.

    Listed again from the beginning, a listing that could be learned is the index's.
    """

    async def run(directory: Path) -> None:
        clock = ManualClock()
        async with gateway_app(directory, slots=[SLOT], clock=clock, allow_unsigned=True) as gateway:
            for key, storage_class in keys.items():
                gateway.origin.put("bucket", key, key.encode(), {"x-amz-storage-class": storage_class})
            for step in steps:
                if isinstance(step, Question):
                    await compare(gateway, step)
                    again = await compare(gateway, step)
                    if not step.delimiter and step.prefix > step.after:
                        assert set(again) == {"hit"}
                else:
                    method, key, storage_class = step
                    headers = {"x-amz-storage-class": storage_class} if method == "PUT" else {}
                    answer = await call(gateway.app, method, f"/bucket/{quote(key)}", headers, sign=False)
                    assert answer.status in (200, 204)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))
