"""Clauses 2.1 to 2.3, 3.5, 3.6, 3.8, 3.9 and 9.3 of docs/semantics.md, for LIST."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.edge.asgi import S3App
from gateway.metadata.catalog import Catalog
from gateway.metadata.listing.marks import PAGE_SECONDS_MAX
from gateway.metadata.observer import SilentCatalogObserver
from gateway.operations.list_objects import TRUTHS_MAX
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.origin.memory.faults import AlterBody, Hold, Unreachable, on
from gateway.origin.memory.faults import Answer as Failure
from gateway.policy.prefixes import Prefix
from gateway.policy.slots import Slot
from gateway.s3.requests import Operation
from tests.origin.origins import xml
from tests.semantics.test_consistency import OWN_WRITES, md5_of
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock

PREFIX = Prefix.parse("s3://bucket/")
TTL = Slot("t", PREFIX, "read-write", "ttl", 60.0)
IMMUTABLE = Slot("i", PREFIX, "read-write", "immutable")
PATIENT = Slot("p", PREFIX, "read-write", "ttl", 60.0, stale_if_unreachable_seconds=100.0)
STRICT_PART = Slot("s", Prefix.parse("s3://bucket/strict/"), "read-write", "strict")
SHORT_PART = Slot("short", Prefix.parse("s3://bucket/short/"), "read-write", "ttl", 10.0)
LIST = "/bucket?list-type=2"

Scenario = Callable[[GatewayApp, ManualClock], Awaitable[None]]


def play(directory: Path, scenario: Scenario, *slots: Slot) -> None:
    """Run a scenario with a few keys at the origin. Requests are unsigned, for their clock is not the test's."""

    async def run() -> None:
        clock = ManualClock()
        async with gateway_app(directory, slots=slots, clock=clock, allow_unsigned=True) as gateway:
            for key in ("a/1", "a/2", "b", "c/1"):
                gateway.origin.put("bucket", key, b"old")
            await scenario(gateway, clock)

    asyncio.run(run())


async def ask(
    gateway: GatewayApp, target: str = LIST, headers: dict[str, str] | None = None, *, app: S3App | None = None
) -> Answer:
    """One LIST, and what is learned from it kept."""
    answer = await call(app or gateway.app, "GET", target, headers, sign=False)
    await gateway.catalog.settle()
    return answer


async def keys(gateway: GatewayApp, target: str = LIST, *, app: S3App | None = None) -> list[str]:
    return names(await ask(gateway, target, app=app))


def names(answer: Answer) -> list[str]:
    """Keys and common prefixes as they are listed."""
    assert answer.status == 200, answer.body
    return sorted(
        node.findtext("Key") or node.findtext("Prefix") or "?"
        for node in xml(answer.body)
        if node.tag in ("Contents", "CommonPrefixes")
    )


def source(answer: Answer) -> str:
    return answer.headers["x-forebay-cache"]


def token_of(answer: Answer) -> str:
    token = xml(answer.body).findtext("NextContinuationToken")
    assert token
    return token


async def write(gateway: GatewayApp, method: str, target: str, body: bytes = b"") -> None:
    assert (await call(gateway.app, method, target, body=body, sign=False)).status in (200, 204)


@asynccontextmanager
async def another_worker(gateway: GatewayApp, clock: ManualClock) -> AsyncIterator[S3App]:
    """A second process's application, as far as one process can have one: the same files, queues of its own."""
    catalog = Catalog(gateway.origin, gateway.catalog._opened, clock, SilentCatalogObserver())
    try:
        yield dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, catalog=catalog))
    finally:
        await catalog.settle()
        await catalog.listing.close()


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
def test_3_9_what_was_listed_is_listed_without_the_origin(tmp_path: Path, slot: Slot) -> None:
    """3.9 Whatever part of it is asked for, in either version, with any delimiter."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        assert source(await ask(gateway, "/bucket")) == "miss"
        asked = len(gateway.origin.calls)
        for query in ("list-type=2", "list-type=2&prefix=a/", "delimiter=/", "list-type=2&start-after=b&max-keys=1"):
            answer = await ask(gateway, f"/bucket?{query}")
            assert source(answer) == "hit"
        assert await keys(gateway, "/bucket?delimiter=/") == ["a/", "b", "c/"]
        nothing = await ask(gateway, "/bucket?list-type=2&max-keys=0")
        assert (source(nothing), names(nothing)) == ("hit", [])
        assert xml(nothing.body).findtext("IsTruncated") == "false"
        assert len(gateway.origin.calls) == asked

    play(tmp_path, scenario, slot)


def test_3_9_a_page_of_nothing_teaches_nothing(tmp_path: Path) -> None:
    """3.9 That there are no keys in an answer to `max-keys=0` does not say that there are none."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        assert await keys(gateway, "/bucket?list-type=2&max-keys=0") == []
        assert len(await keys(gateway)) == 4

    play(tmp_path, scenario, IMMUTABLE)


def test_3_9_a_listing_with_a_strict_part_is_the_origins_own_answer(tmp_path: Path) -> None:
    """3.9 Forwarded, tokens included; a prefix that has nothing strict in it is not."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        for target in (LIST, f"{LIST}&prefix=str", f"{LIST}&prefix=strict/x", "/bucket?prefix=strict/"):
            for _ in range(2):
                assert source(await ask(gateway, target)) == "forwarded"
        await ask(gateway, f"{LIST}&prefix=a")
        assert source(await ask(gateway, f"{LIST}&prefix=a")) == "hit"

    play(tmp_path, scenario, IMMUTABLE, STRICT_PART)


def test_3_9_no_page_is_older_than_the_strictest_slot_allows(tmp_path: Path) -> None:
    """3.9 What others wrote is listed when metadata_ttl is over, counted from the question; earlier where a part has
    a shorter one.
    """

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        gateway.origin.put("bucket", "new", b"")
        await clock.advance(9.9)
        assert "new" not in await keys(gateway)
        await clock.advance(0.2)
        assert source(await ask(gateway, f"{LIST}&prefix=a")) == "hit"
        assert "new" in await keys(gateway)
        gateway.origin.put("bucket", "a/new", b"")
        await clock.advance(59.9)
        assert "a/new" not in await keys(gateway, f"{LIST}&prefix=a")
        await clock.advance(0.2)
        assert "a/new" in await keys(gateway, f"{LIST}&prefix=a")

    play(tmp_path, scenario, TTL, SHORT_PART)


def test_3_9_what_others_deleted_leaves_the_listing(tmp_path: Path) -> None:
    """3.9 A page of the origin takes keys out of the index that it does not have."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        async with await gateway.origin.send(OriginRequest("DELETE", "bucket", "a/2")) as deleted:
            assert deleted.status == 204
        await clock.advance(61.0)
        for expected in ("miss", "hit"):
            answer = await ask(gateway)
            assert (source(answer), names(answer)) == (expected, ["a/1", "b", "c/1"])

    play(tmp_path, scenario, TTL)


@pytest.mark.parametrize("failure", [Unreachable(), Failure(500), Failure(503, "SlowDown")])
def test_3_5_an_older_page_stands_in_for_an_origin_that_is_down(tmp_path: Path, failure: Unreachable | Failure) -> None:
    """3.5 As long as stale_if_unreachable allows; then its error."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        gateway.origin.inject(on(), failure, times=None)
        await clock.advance(159.0)
        assert await keys(gateway) == ["a/1", "a/2", "b", "c/1"]
        await clock.advance(2.0)
        assert (await ask(gateway)).status in (500, 503)

    play(tmp_path, scenario, PATIENT)


def test_3_5_what_was_written_is_not_left_out_of_an_older_page(tmp_path: Path) -> None:
    """2.1 Rather an error than a listing without an own write."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        await write(gateway, "PUT", "/bucket/new", b"new")
        gateway.origin.inject(on(), Unreachable(), times=None)
        await clock.advance(100.0)
        assert (await ask(gateway)).status == 503
        assert (await ask(gateway, f"{LIST}&prefix=a/")).status == 200

    play(tmp_path, scenario, PATIENT)


def test_3_6_no_cache_asks_the_origin_and_refreshes(tmp_path: Path) -> None:
    """3.6 Signed, `Cache-Control: no-cache` sees the present, and so does everybody afterwards."""

    async def run() -> None:
        async with gateway_app(tmp_path, slots=[IMMUTABLE]) as gateway:
            for key, no_cache, expected in (("a", False, ["a"]), ("b", False, ["a"]), ("c", True, ["a", "b", "c"])):
                gateway.origin.put("bucket", key, b"")
                headers = {"Cache-Control": "no-cache"} if no_cache else {}
                assert names(await call(gateway.app, "GET", LIST, headers)) == expected
                await gateway.catalog.settle()
            after = await call(gateway.app, "GET", LIST)
            assert (source(after), names(after)) == ("hit", ["a", "b", "c"])

    asyncio.run(run())


def test_3_7_a_version_that_is_found_to_be_gone_leaves_the_listing(tmp_path: Path) -> None:
    """3.7 What a GET finds out, LIST knows too."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        await call(gateway.app, "HEAD", "/bucket/b", sign=False)
        await gateway.catalog.settle()
        etag = gateway.origin.put("bucket", "b", b"another version")
        assert etag.strip('"').encode() not in (await ask(gateway)).body
        assert (await call(gateway.app, "GET", "/bucket/b", sign=False)).body == b"another version"
        assert etag.strip('"').encode() in (await ask(gateway)).body

    play(tmp_path, scenario, IMMUTABLE)


@pytest.mark.parametrize(
    "headers", [{"x-amz-request-payer": "requester"}, {"x-amz-expected-bucket-owner": "1"}, {"origin": "https://a.b"}]
)
def test_3_8_what_the_origin_must_judge_it_is_asked_each_time(tmp_path: Path, headers: dict[str, str]) -> None:
    """3.8 Forwarded, whatever is known."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        for _ in range(2):
            assert source(await ask(gateway, LIST, headers)) == "forwarded"

    play(tmp_path, scenario, IMMUTABLE)


def test_8_3_without_the_directory_listings_go_on(tmp_path: Path) -> None:
    """8.3, 9.3 Every page is the origin's, tokens that were given before are good, and own writes are there."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        first = await ask(gateway, f"{LIST}&max-keys=2")
        closed = Catalog.forgetful(gateway.origin, clock, SilentCatalogObserver())
        app = dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, catalog=closed))
        for _ in range(2):
            rest = await ask(gateway, f"{LIST}&max-keys=2&continuation-token={token_of(first)}", app=app)
            assert (source(rest), names(first) + names(rest)) == ("miss", ["a/1", "a/2", "b", "c/1"])
        assert (await call(app, "PUT", "/bucket/new", body=b"", sign=False)).status == 200
        assert "new" in await keys(gateway, app=app)
        await closed.close()

    play(tmp_path, scenario, IMMUTABLE)


def test_7_2_errors_of_the_origin_reach_the_client(tmp_path: Path) -> None:
    """7.2 With status, code and message; and nothing is learned from them."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        for _ in range(2):
            answer = await ask(gateway, "/nobucket?list-type=2")
            assert answer.status == 404
            assert b"<Code>NoSuchBucket</Code>" in answer.body
        gateway.origin.inject(on(), Failure(403, "AccessDenied"))
        assert (await ask(gateway)).status == 403
        assert source(await ask(gateway)) == "miss"

    play(tmp_path, scenario, IMMUTABLE, Slot("n", Prefix.parse("s3://nobucket/"), "read-write", "immutable"))


def test_3_9_all_who_ask_the_same_at_once_are_one_question(tmp_path: Path) -> None:
    """3.9 Ranks of a job list the same prefix when it starts: the origin is asked once, also by one that leaves."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(), Hold(held, reached), times=None)
        listings = [asyncio.create_task(call(gateway.app, "GET", LIST, sign=False)) for _ in range(20)]
        other = asyncio.create_task(call(gateway.app, "GET", f"{LIST}&prefix=a", sign=False))
        await reached.wait()
        listings[0].cancel()
        held.set()
        for listing in listings[1:]:
            assert names(await listing) == ["a/1", "a/2", "b", "c/1"]
        assert names(await other) == ["a/1", "a/2"]
        assert len(gateway.origin.calls) == 2
        await gateway.catalog.settle()
        assert source(await ask(gateway)) == "hit"

    play(tmp_path, scenario, IMMUTABLE)


@pytest.mark.parametrize("change", ["a write begins", "a write ends", "the bucket changes", "time passes"])
def test_2_1_a_question_from_before_answers_nobody_after(tmp_path: Path, change: str) -> None:
    """2.1, 3.9 Before a write, or before metadata_ttl: who comes later asks for himself."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        late = Late(gateway)
        app = dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, origin=late))
        index = gateway.catalog.listing
        if change == "a write ends":
            await index.begin_write("bucket", ["new"])
        first = asyncio.create_task(call(app, "GET", LIST, sign=False))
        await late.reached.wait()
        gateway.origin.put("bucket", "new", b"")
        if change == "a write begins":
            await index.begin_write("bucket", ["new"])
        elif change == "a write ends":
            await index.end_write("bucket", ["new"])
        elif change == "the bucket changes":
            gateway.catalog.forget_bucket("bucket")
        else:
            await clock.advance(60.0)
        second = asyncio.create_task(call(app, "GET", LIST, sign=False))
        late.held.set()
        assert "new" not in names(await first)
        assert "new" in names(await second)
        await gateway.catalog.settle()

    play(tmp_path, scenario, TTL)


def test_7_2_an_error_is_told_to_all_who_wait_for_the_answer(tmp_path: Path) -> None:
    """7.2 And the next one asks again."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(), Hold(held, reached))
        gateway.origin.inject(on(), Failure(403, "AccessDenied"))
        listings = [asyncio.create_task(ask(gateway)) for _ in range(3)]
        await reached.wait()
        held.set()
        for listing in listings:
            answer = await listing
            assert (answer.status, b"<Code>AccessDenied</Code>" in answer.body) == (403, True)
        assert (await ask(gateway)).status == 200

    play(tmp_path, scenario, IMMUTABLE)


@pytest.mark.parametrize(
    "query", ["max-keys=-1", "max-keys=a", "max-keys=1.5", "max-keys=3000000000", "encoding-type=b"]
)
def test_9_3_what_cannot_be_meant_is_refused(tmp_path: Path, query: str) -> None:
    """With InvalidArgument, in both versions."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        for target in (f"/bucket?{query}", f"{LIST}&{query}"):
            answer = await ask(gateway, target)
            assert (answer.status, b"<Code>InvalidArgument</Code>" in answer.body) == (400, True)

    play(tmp_path, scenario, IMMUTABLE)


def test_9_3_tokens_survive_a_restart_a_change_of_worker_and_a_change_of_source(tmp_path: Path) -> None:
    """9.3 Every page is asked of another gateway or worker; some answer from the index, some ask the origin."""

    async def pages(gateway: GatewayApp, clock: ManualClock, token: str | None, seen: list[str]) -> str | None:
        async with another_worker(gateway, clock) as other:
            for app in (gateway.app, other):
                more = "" if token is None else f"&continuation-token={token}"
                answer = await ask(gateway, f"{LIST}&max-keys=1&delimiter=/{more}", app=app)
                seen += names(answer)
                if xml(answer.body).findtext("IsTruncated") == "false":
                    return None
                token = token_of(answer)
            return token

    async def run() -> None:
        clock, seen, token = ManualClock(), list[str](), None
        async with gateway_app(tmp_path, slots=[TTL], clock=clock, allow_unsigned=True) as gateway:
            origin = gateway.origin
            for key in ("a/1", "a/2", "b", "c/1", "d/1", "e"):
                origin.put("bucket", key, b"")
            await ask(gateway, f"{LIST}&prefix=b")
            token = await pages(gateway, clock, None, seen)
        for _ in range(3):
            async with gateway_app(tmp_path, origin=origin, slots=[TTL], clock=clock, allow_unsigned=True) as gateway:
                if token is not None:
                    token = await pages(gateway, clock, token, seen)
        assert (token, seen) == (None, ["a/", "b", "c/", "d/", "e"])

    asyncio.run(run())


@pytest.mark.parametrize("token", ["nonsense", "1AAAAA", "YS8x", "%00"])
def test_9_3_a_token_that_is_none_is_refused(tmp_path: Path, token: str) -> None:
    """9.3 InvalidArgument, 400; an empty one is none at all, and echoed."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        answer = await ask(gateway, f"{LIST}&continuation-token={token}")
        assert (answer.status, b"<Code>InvalidArgument</Code>" in answer.body) == (400, True)
        empty = await ask(gateway, f"{LIST}&continuation-token=")
        assert names(empty) == ["a/1", "a/2", "b", "c/1"]
        assert xml(empty.body).findtext("ContinuationToken") == ""

    play(tmp_path, scenario, IMMUTABLE)


# --- own writes -------------------------------------------------------------------------------------------------------


async def check(gateway: GatewayApp, *apps: S3App, targets: Sequence[str] = (LIST, "/bucket?delimiter=/")) -> None:
    """Every application lists what the origin lists."""
    for target in targets:
        query = [tuple(pair.split("=")) for pair in target.partition("?")[2].split("&")]
        async with await gateway.origin.send(OriginRequest("GET", "bucket", None, query)) as response:  # type: ignore[arg-type]
            expected = xml(await response.read(2**20))
        for app in apps:
            found = xml((await ask(gateway, target, app=app)).body)
            for tag in ("Contents", "CommonPrefixes"):
                assert [texts(node) for node in found.iter(tag)] == [texts(node) for node in expected.iter(tag)]


def texts(node: object) -> list[str]:
    return [one.text or "" for one in node.iter()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("method", "target", "headers", "body"), OWN_WRITES)
def test_2_1_own_writes_are_listed_at_once_on_every_worker(
    tmp_path: Path, method: str, target: str, headers: dict[str, str], body: bytes
) -> None:
    """2.1, 2.2 Created, changed, deleted: the next LIST has it, from whichever worker, as the origin would say it."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        gateway.origin.put("bucket", "source", b"source")
        gateway.origin.put("bucket", "k", b"old")
        if "delete" in target:
            headers["content-md5"] = md5_of(body)
        async with another_worker(gateway, clock) as other:
            await check(gateway, gateway.app, other)
            await clock.advance(5.0)
            answer = await call(gateway.app, method, target, headers, body, sign=False)
            assert answer.status in (200, 204)
            await check(gateway, other, gateway.app)
            before = gateway.origin.count()
            await ask(gateway)
            assert gateway.origin.count() == before, "the write is settled: the index knows"

    play(tmp_path, scenario, IMMUTABLE)


def test_2_1_a_write_in_flight_is_neither_guessed_nor_forgotten(tmp_path: Path) -> None:
    """While the origin works, LIST says what the origin says; and what it then learns does not outlive the write."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.PUT_OBJECT), Hold(held, reached))
        writing = asyncio.create_task(call(gateway.app, "PUT", "/bucket/new", body=b"new", sign=False))
        await reached.wait()
        for _ in range(2):
            answer = await ask(gateway)
            assert (source(answer), "new" in names(answer)) == ("partial", False)
        held.set()
        assert (await writing).status == 200
        assert "new" in await keys(gateway)

    play(tmp_path, scenario, IMMUTABLE)


@pytest.mark.parametrize("expired", [False, True])
def test_2_3_a_page_asked_for_before_an_own_write_does_not_undo_it(tmp_path: Path, expired: bool) -> None:
    """2.3 A page of the origin that arrives behind own writes, even settled ones, says nothing about their keys."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        await clock.advance(61.0)
        async with another_worker(gateway, clock) as other:
            late = Late(gateway)
            slow = dataclasses.replace(other, services=dataclasses.replace(other.services, origin=late))
            listing = asyncio.create_task(call(slow, "GET", LIST, sign=False))
            await late.reached.wait()
            await write(gateway, "PUT", "/bucket/a/1", b"newer")
            await write(gateway, "DELETE", "/bucket/b")
            await write(gateway, "PUT", "/bucket/new", b"new")
            await check(gateway, gateway.app)
            if expired:
                await clock.advance(PAGE_SECONDS_MAX + 1)
                await write(gateway, "PUT", "/bucket/another", b"")
                await check(gateway, gateway.app)
            late.held.set()
            assert names(await listing) == ["a/1", "a/2", "b", "c/1"]
            await other.services.catalog.settle()
            await check(gateway, gateway.app, other)

    play(tmp_path, scenario, TTL)


class Late:
    """An origin whose first answer is held on its way."""

    def __init__(self, gateway: GatewayApp) -> None:
        self.gateway, self.held, self.reached = gateway, asyncio.Event(), asyncio.Event()

    async def send(self, request: OriginRequest) -> OriginResponse:
        response = await self.gateway.origin.send(request)
        self.reached.set()
        await self.held.wait()
        return response

    async def aclose(self) -> None:
        return


def test_2_3_a_page_asked_for_before_the_bucket_changed_is_not_learned(tmp_path: Path) -> None:
    """2.3 Nor is what was known before believed, when a forwarded change names no key."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        late = Late(gateway)
        slow = dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, origin=late))
        listing = asyncio.create_task(call(slow, "GET", LIST, sign=False))
        await late.reached.wait()
        await ask(gateway, f"{LIST}&prefix=a")
        form = {"content-type": "multipart/form-data; boundary=b"}
        await call(gateway.app, "POST", "/bucket", form, b"x", sign=False)
        gateway.origin.put("bucket", "a/new", b"stored by the form, for all the gateway knows")
        late.held.set()
        assert "a/new" not in names(await listing)
        await gateway.catalog.settle()
        assert source(await ask(gateway)) == "miss"
        assert "a/new" in await keys(gateway, f"{LIST}&prefix=a")

    play(tmp_path, scenario, IMMUTABLE)


def test_2_1_many_writes_are_settled_by_one_page_of_the_origin(tmp_path: Path) -> None:
    """2.1 A page in which more keys were written than are asked about one by one is asked for."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        for number in range(TRUTHS_MAX + 5):
            await write(gateway, "PUT", f"/bucket/many/{number:02}", b"")
        before = len(gateway.origin.calls)
        assert len(await keys(gateway)) == TRUTHS_MAX + 9
        assert len(gateway.origin.calls) == before + 1
        answer = await ask(gateway)
        assert (source(answer), len(names(answer))) == ("hit", TRUTHS_MAX + 9)

    play(tmp_path, scenario, IMMUTABLE)


def test_2_1_writes_under_a_common_prefix_that_is_there_anyway_cost_nothing(tmp_path: Path) -> None:
    """A directory that has another object is listed without asking about those just written."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        catalog = gateway.catalog.listing
        many = [f"a/1{number:03}" for number in range(1000)]
        await catalog.begin_write("bucket", many)  # as DeleteObjects does
        await catalog.end_write("bucket", many)
        for number in range(5):
            await write(gateway, "PUT", f"/bucket/a/0{number}", b"")
        answer = await ask(gateway, "/bucket?list-type=2&delimiter=/")
        assert (source(answer), names(answer)) == ("hit", ["a/", "b", "c/"])

    play(tmp_path, scenario, IMMUTABLE)


def test_2_1_a_write_whose_answer_is_lost_is_looked_for(tmp_path: Path) -> None:
    """2.1 The origin may have carried it out."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        await ask(gateway)
        gateway.origin.inject(on(Operation.PUT_OBJECT), Unreachable(late=True))
        assert (await call(gateway.app, "PUT", "/bucket/new", body=b"new", sign=False)).status == 503
        assert "new" in await keys(gateway)

    play(tmp_path, scenario, IMMUTABLE)


def test_9_3_an_origin_that_does_not_list_in_order_is_not_believed(tmp_path: Path) -> None:
    """9.3 A place in its listing would mean nothing."""

    async def scenario(gateway: GatewayApp, clock: ManualClock) -> None:
        swap = AlterBody(lambda body: body.replace(b"<Key>b<", b"<Key>zzz<"))
        gateway.origin.inject(on(), swap, times=None)
        assert (await ask(gateway)).status == 503

    play(tmp_path, scenario, IMMUTABLE)


def test_3_9_what_becomes_strict_is_forgotten(tmp_path: Path) -> None:
    """3.9 Own writes in strict slots leave no mark, so that nothing known of them may come back later."""

    async def run() -> None:
        clock = ManualClock()
        async with gateway_app(tmp_path, slots=[IMMUTABLE], clock=clock, allow_unsigned=True) as gateway:
            origin = gateway.origin
            origin.put("bucket", "strict/a", b"")
            await ask(gateway)
        later = IMMUTABLE, STRICT_PART
        async with gateway_app(tmp_path, origin=origin, slots=later, clock=clock, allow_unsigned=True) as gateway:
            await write(gateway, "PUT", "/bucket/strict/b", b"")
        async with gateway_app(tmp_path, origin=origin, slots=[IMMUTABLE], clock=clock, allow_unsigned=True) as gateway:
            assert await keys(gateway) == ["strict/a", "strict/b"]

    asyncio.run(run())
