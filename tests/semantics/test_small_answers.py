"""Clauses 2.3, 3.10 and 7.5 of docs/semantics.md, for what is said of buckets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.edge.access import ConfiguredKeyring, Key
from gateway.metadata.bucket_metadata import ANSWER_BYTES_MAX, BucketMetadataCache, BucketQuery
from gateway.metadata.entries import Freshness
from gateway.metadata.opening import ANSWERS
from gateway.policy.slots import DEFAULT_SLOT, EVERYTHING, Grant, Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import ACCESS_KEY_ID, SECRET_ACCESS_KEY, Answer, call
from tests.support.cache_label import cache_label
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, CutBody, Hold, Unreachable, on
from tests.support.memory_origin.faults import Answer as Failure
from tests.support.rest_is_slow import rest_is_slow
from tests.support.slots import Slot

PREFIX = Prefix.parse("s3://bucket/")
PATIENT = Slot("p", PREFIX, "read-write", "ttl", 5.0, stale_if_unreachable_seconds=100.0)
IMPATIENT = Slot("t", PREFIX, "read-write", "ttl", 5.0)
IMMUTABLE = Slot("i", PREFIX, "read-write", "immutable")
PART = Slot("part", Prefix.parse("s3://bucket/part/"), "read-only", "immutable")
STRICT = Slot("s", PREFIX, "read-write", "strict", stale_if_unreachable_seconds=100.0)

ENCRYPTION = (
    b"<ServerSideEncryptionConfiguration><Rule><ApplyServerSideEncryptionByDefault><SSEAlgorithm>AES256</SSEAlgorithm>"
    b"</ApplyServerSideEncryptionByDefault></Rule></ServerSideEncryptionConfiguration>"
)
QUESTIONS = [
    ("HEAD", "/bucket", 200),
    ("GET", "/bucket?location", 200),
    ("GET", "/bucket?versioning", 200),
    ("GET", "/bucket?encryption", 404),
    ("GET", "/bucket?tagging", 404),
    ("GET", "/bucket?object-lock", 404),
]


@asynccontextmanager
async def playing(directory: Path, *slots: Slot, **more: Any) -> AsyncIterator[tuple[GatewayApp, ManualClock]]:
    """A gateway. Requests are unsigned, for their clock is not the test's."""
    clock = ManualClock()
    async with gateway_app(directory, slots=slots, clock=clock, allow_unsigned=True, **more) as gateway:
        yield gateway, clock


async def ask(gateway: GatewayApp, method: str, target: str, headers: dict[str, str] | None = None) -> Answer:
    """One request, and whatever is learned from it kept."""
    answer = await call(gateway.app, method, target, headers, sign=False)
    await gateway.answers.settle()
    return answer


async def told(gateway: GatewayApp, method: str, target: str, headers: dict[str, str] | None = None) -> str:
    """Status, and where the answer came from."""
    answer = await ask(gateway, method, target, headers)
    return f"{answer.status} {cache_label(answer) or None}"


def constant(answer: Answer) -> dict[str, str]:
    named = ("x-amz-request-id", "x-amz-id-2", "x-forebay-cache", "x-forebay-origin-request-id")
    return {name: value for name, value in answer.headers.items() if name not in named}


@pytest.mark.parametrize(("method", "target", "status"), QUESTIONS)
async def test_3_10_answers_about_buckets_are_remembered(tmp_path: Path, method: str, target: str, status: int) -> None:
    """3.10 Within the TTL status, headers and body are the origin's, and it is not asked; then it is."""
    async with playing(tmp_path) as (gateway, clock):
        first = await ask(gateway, method, target)
        await clock.advance(59.9)
        second = await ask(gateway, method, target)
        assert len(gateway.origin.calls) == 1
        assert (first.status, cache_label(first)) == (status, "miss")
        assert (second.status, second.headers["x-forebay-cache"]) == (status, "hit")
        assert (first.body, constant(first)) == (second.body, constant(second))
        assert "x-forebay-origin-request-id" in first.headers
        assert "x-forebay-origin-request-id" not in second.headers
        await clock.advance(0.2)
        assert await told(gateway, method, target) == f"{status} miss"
        assert await told(gateway, method, target) == f"{status} hit"


async def test_3_10_they_are_told_as_the_origin_tells_them(tmp_path: Path) -> None:
    """3.10 With its headers, such as the bucket's region, and with its document."""
    async with playing(tmp_path) as (gateway, _clock):
        gateway.origin.region = "eu-west-1"
        for _ in range(2):
            assert (await ask(gateway, "HEAD", "/bucket")).headers["x-amz-bucket-region"] == "eu-west-1"
            located = await ask(gateway, "GET", "/bucket/?location=")
            assert b">eu-west-1</LocationConstraint>" in located.body
            assert located.headers["content-length"] == str(len(located.body))
        assert len(gateway.origin.calls) == 2


async def test_3_10_a_ttl_of_nothing_asks_each_time(tmp_path: Path) -> None:
    """3.10 bucket_metadata_ttl = "0s" forwards them like everything else."""
    async with playing(tmp_path, bucket_metadata_ttl_seconds=0.0) as (gateway, _clock):
        for method, target, status in QUESTIONS * 2:
            assert await told(gateway, method, target) == f"{status} forwarded"


ODD = [
    ("/bucket?versioning", {"x-amz-expected-bucket-owner": "111122223333"}),
    ("/bucket?versioning", {"x-amz-request-payer": "requester"}),
    ("/bucket?versioning", {"x-goog-user-project": "mine"}),
    ("/bucket?versioning", {"origin": "http://web.example"}),
    ("/bucket?versioning", {"if-none-match": '"x"'}),
    ("/bucket?versioning", {"range": "bytes=0-1"}),
    ("/bucket?versioning=1", {}),
    ("/bucket?versioning&somethingNew", {}),
    ("/bucket?versioning&location", {}),
]


@pytest.mark.parametrize(("target", "headers"), ODD)
async def test_3_10_what_the_origin_must_judge_it_is_asked_each_time(
    tmp_path: Path, target: str, headers: dict[str, str]
) -> None:
    """3.10 Such questions are never answered from memory, nor is what was answered to them told to others."""
    async with playing(tmp_path) as (gateway, _clock):
        assert (await told(gateway, "GET", target, headers)).endswith(" forwarded")
        assert await told(gateway, "GET", "/bucket?versioning") == "200 miss"
        assert await told(gateway, "GET", "/bucket?versioning") == "200 hit"
        assert (await told(gateway, "GET", target, headers)).endswith(" forwarded")


REFUSALS = [Failure(403, "AccessDenied"), Failure(404, "NoSuchBucket"), Failure(503, "SlowDown")]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("target", ["/bucket?location", "/bucket?encryption"])
async def test_3_10_errors_are_not_remembered(tmp_path: Path, target: str, refusal: Failure) -> None:
    """3.10 A bucket that is made, or a right that is given, is seen at once."""
    async with playing(tmp_path) as (gateway, _clock):
        gateway.origin.inject(on(), refusal)
        assert await told(gateway, "GET", target) == f"{refusal.status} forwarded"
        assert (await told(gateway, "GET", target)).endswith(" miss")


async def test_3_10_a_bucket_that_others_make_is_seen_at_once(tmp_path: Path) -> None:
    """3.10 That there is none is not remembered."""
    async with playing(tmp_path) as (gateway, _clock):
        assert await told(gateway, "HEAD", "/later") == "404 forwarded"
        gateway.origin.create_bucket("later")
        assert await told(gateway, "HEAD", "/later") == "200 miss"


@pytest.mark.parametrize("name", ["set-cookie", "content-encoding"])
async def test_3_10_answers_made_for_one_client_are_not_remembered(tmp_path: Path, name: str) -> None:
    """3.10 They reach the one who asked, and nobody else."""
    async with playing(tmp_path) as (gateway, _clock):
        gateway.origin.inject(on(), AlterHeaders({name: "gzip"}))
        mine = await ask(gateway, "GET", "/bucket?location")
        assert mine.headers[name] == "gzip"
        yours = await ask(gateway, "GET", "/bucket?location")
        assert name not in yours.headers


@pytest.mark.parametrize("size_bytes", [ANSWER_BYTES_MAX, ANSWER_BYTES_MAX + 1, 5 * ANSWER_BYTES_MAX])
async def test_3_10_long_answers_pass_whole(tmp_path: Path, size_bytes: int) -> None:
    """3.10 They are not remembered, and arrive as the origin sends them."""
    async with playing(tmp_path) as (gateway, _clock):
        gateway.origin.inject(on(), AlterBody(lambda body: b"x" * size_bytes), times=None)
        for _ in range(2):
            answer = await ask(gateway, "GET", "/bucket?location")
            assert (answer.status, answer.body, answer.complete) == (200, b"x" * size_bytes, True)
            assert answer.headers["content-length"] == str(size_bytes)
        assert len(gateway.origin.calls) == 2


async def test_3_10_an_answer_that_breaks_off_is_not_remembered(tmp_path: Path) -> None:
    """3.10 Nor does it reach the client as a complete one."""
    async with playing(tmp_path) as (gateway, _clock):
        gateway.origin.inject(on(), CutBody(10))
        assert (await ask(gateway, "GET", "/bucket?location")).status >= 500
        assert await told(gateway, "GET", "/bucket?location") == "200 miss"


OF_A_PROXY = [
    b"<html><body>sorry</body></html>",
    b"<html><Code>NoSuchTagSet</Code><Code>ServerSideEncryptionConfigurationNotFoundError</Code></html>",
    b"<Error><Code>NoSuchBucket</Code></Error>",
    b"not now",
    b"<ListBucketResult/>",
    b"",
]


@pytest.mark.parametrize("body", OF_A_PROXY)
@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("target", rest_is_slow([target for _, target, _ in QUESTIONS[1:]], QUESTIONS[1][1]))
async def test_3_10_what_is_no_answer_of_s3_is_not_remembered(
    tmp_path: Path, target: str, status: int, body: bytes
) -> None:
    """3.10 A page of a proxy, with any status: the client gets it, and the next one gets the origin's answer."""
    async with playing(tmp_path) as (gateway, _clock):
        gateway.origin.inject(on(), Failure(status, body=body))
        answer = await ask(gateway, "GET", target)
        assert (answer.status, answer.body, cache_label(answer)) == (status, body, "forwarded")
        assert (await told(gateway, "GET", target)).endswith(" miss")
        assert (await told(gateway, "GET", target)).endswith(" hit")


@pytest.mark.parametrize(
    ("headers", "is_remembered"),
    [
        ({"content-type": "text/html", "content-length": "31"}, False),
        ({"content-type": "application/xhtml+xml", "content-length": "31"}, False),
        ({"content-type": None, "content-length": "31"}, False),
        ({"content-type": "text/html", "content-length": "0"}, True),
        ({"content-type": "application/xml", "content-length": "226"}, True),
    ],
)
async def test_3_10_a_bucket_is_not_there_because_a_proxy_has_a_page(
    tmp_path: Path, headers: dict[str, str | None], is_remembered: bool
) -> None:
    """3.10 HeadBucket: some stores announce the length of a listing."""
    async with playing(tmp_path) as (gateway, _clock):
        gateway.origin.inject(on(), AlterHeaders(headers))
        first, second = [await told(gateway, "HEAD", "/bucket") for _ in range(2)]
        assert (first, second) == (("200 miss", "200 hit") if is_remembered else ("200 forwarded", "200 miss"))


DOWN = [Unreachable(), Failure(503, "ServiceUnavailable")]


@pytest.mark.parametrize("failure", DOWN)
@pytest.mark.parametrize(("slot", "ages"), [(PATIENT, (60.0, 159.0)), (IMMUTABLE, (60.0, 9999.0))])
async def test_3_10_older_answers_only_where_the_slot_allows_them(
    tmp_path: Path, slot: Slot, ages: tuple[float, float], failure: Unreachable | Failure
) -> None:
    """3.5, 3.10 With the origin down, as objects: `ttl` goes on for stale_if_unreachable, `immutable` for good."""
    async with playing(tmp_path, slot) as (gateway, clock):
        await ask(gateway, "GET", "/bucket?location")
        gateway.origin.inject(on(), failure, times=None)
        for age in ages:
            await clock.advance(age - clock.monotonic())
            assert await told(gateway, "GET", "/bucket?location") == "200 hit"
        await clock.advance(2.0)
        assert (await told(gateway, "GET", "/bucket?location"))[:3] == ("503" if slot is PATIENT else "200")
        assert (await told(gateway, "HEAD", "/bucket"))[:3] == "503"


@pytest.mark.parametrize("failure", DOWN)
@pytest.mark.parametrize("slot", [STRICT, IMPATIENT, PART])
async def test_3_10_elsewhere_what_has_run_out_is_gone(
    tmp_path: Path, slot: Slot, failure: Unreachable | Failure
) -> None:
    """3.10 `strict` slots, slots without stale_if_unreachable, and buckets of which only a part is in a slot."""
    async with playing(tmp_path, slot) as (gateway, clock):
        await ask(gateway, "HEAD", "/bucket")
        gateway.origin.inject(on(), failure, times=None)
        assert await told(gateway, "HEAD", "/bucket") == "200 hit"
        await clock.advance(60.0)
        assert (await told(gateway, "HEAD", "/bucket"))[:3] == "503"


async def test_3_10_no_cache_asks_the_origin_and_refreshes(tmp_path: Path) -> None:
    """3.6, 3.10 Of a caller that signs; and everybody is told what it was told."""
    async with gateway_app(tmp_path, allow_unsigned=True) as gateway:
        await ask(gateway, "HEAD", "/bucket")
        gateway.origin.region = "eu-west-1"
        plain = await ask(gateway, "HEAD", "/bucket", {"Cache-Control": "no-cache"})
        assert plain.headers["x-amz-bucket-region"] == "us-east-1"
        signed = await call(gateway.app, "HEAD", "/bucket", {"Cache-Control": "no-cache"})
        assert signed.headers["x-amz-bucket-region"] == "eu-west-1"
        await gateway.answers.settle()
        again = await ask(gateway, "HEAD", "/bucket")
        assert (again.headers["x-amz-bucket-region"], again.headers["x-forebay-cache"]) == ("eu-west-1", "hit")


OWN_CHANGES = [
    ("PUT", "/bucket?encryption", ENCRYPTION),
    ("DELETE", "/bucket?encryption", b""),
    ("PUT", "/bucket?versioning", b"<VersioningConfiguration/>"),
    ("PUT", "/bucket?acl", b""),
    ("DELETE", "/bucket", b""),
    ("PUT", "/bucket?somethingNew", b"x"),
]


async def is_fresh(answers: BucketMetadataCache, bucket: str) -> bool:
    found = await answers.recall(BucketQuery("HeadBucket", bucket), DEFAULT_SLOT)
    return found is not None and found.freshness is Freshness.FRESH


@pytest.mark.parametrize(("method", "target", "body"), OWN_CHANGES)
async def test_2_3_own_changes_of_a_bucket_are_seen_at_once_on_every_worker(
    tmp_path: Path, method: str, target: str, body: bytes
) -> None:
    """2.3, 3.10 Whatever was remembered of the bucket is void before the answer, whatever the answer is."""
    async with playing(tmp_path) as (gateway, _clock):
        other = BucketMetadataCache(
            tmp_path / "catalog" / ANSWERS,
            gateway.catalog.listing.moment,
            ttl_seconds=60.0,
        )
        gateway.origin.create_bucket("another")
        for asked in ("/bucket", "/another"):
            await ask(gateway, "HEAD", asked)
            assert await is_fresh(other, asked[1:])
        await call(gateway.app, method, target, body=body, sign=False)
        assert not await is_fresh(other, "bucket")
        assert await is_fresh(other, "another")
        gone = (method, target) == ("DELETE", "/bucket")
        assert await told(gateway, "HEAD", "/bucket") == ("404 forwarded" if gone else "200 miss")
        await other.close()


async def test_2_3_writes_of_objects_void_nothing_that_is_said_of_their_bucket(tmp_path: Path) -> None:
    """3.10 A training job that saves checkpoints does not ask for its bucket's location again and again."""
    async with playing(tmp_path) as (gateway, _clock):
        await ask(gateway, "HEAD", "/bucket")
        assert (await call(gateway.app, "PUT", "/bucket/k", body=b"x", sign=False)).status == 200
        assert await told(gateway, "HEAD", "/bucket") == "200 hit"


async def test_2_3_an_answer_asked_before_an_own_change_is_not_believed_after_it(tmp_path: Path) -> None:
    """2.3 It was on its way while the change was made: who asked gets it, and nobody after the change."""
    async with playing(tmp_path) as (gateway, _clock):
        released, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.GET_BUCKET_ENCRYPTION), Hold(released, reached))
        slow = asyncio.ensure_future(call(gateway.app, "GET", "/bucket?encryption", sign=False))
        await reached.wait()
        put = await call(gateway.app, "PUT", "/bucket?encryption", body=ENCRYPTION, sign=False)
        assert put.status == 200
        del gateway.origin.buckets["bucket"].settings["encryption"]  # so that the slow one sees the state before
        released.set()
        assert (await slow).status == 404
        gateway.origin.buckets["bucket"].settings["encryption"] = ENCRYPTION
        await gateway.answers.settle()
        after = await ask(gateway, "GET", "/bucket?encryption")
        assert (after.status, after.body) == (200, ENCRYPTION)


async def test_2_3_a_question_during_an_own_change_is_not_believed_after_it(tmp_path: Path) -> None:
    """2.3 It may have been answered before the origin made the change."""
    async with playing(tmp_path) as (gateway, _clock):
        released, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(lambda one: one.method == "PUT", Hold(released, reached))
        change = asyncio.ensure_future(call(gateway.app, "PUT", "/bucket?encryption", body=ENCRYPTION, sign=False))
        await reached.wait()
        assert await told(gateway, "GET", "/bucket?encryption") == "404 miss"
        released.set()
        assert (await change).status == 200
        assert await told(gateway, "GET", "/bucket?encryption") == "200 miss"


async def test_7_5_what_is_remembered_is_told_only_to_those_who_may_ask(tmp_path: Path) -> None:
    """7.4, 7.5 A credential that does not cover the whole bucket is refused, though another has just been told."""
    keyring = ConfiguredKeyring(
        [
            Key(ACCESS_KEY_ID, SECRET_ACCESS_KEY, None, EVERYTHING),
            Key("JOB", "job-secret", None, Grant((Prefix.parse("s3://bucket/job/"),))),
            Key("OTHER", "other-secret", None, Grant((Prefix.parse("s3://another/"),))),
        ]
    )
    async with gateway_app(tmp_path, keyring=keyring) as gateway:
        for method, target, status in QUESTIONS:
            for outcome in ("miss", "hit"):
                answer = await call(gateway.app, method, target)
                assert (answer.status, cache_label(answer)) == (status, outcome)
                await gateway.answers.settle()
            for key, secret in (("JOB", "job-secret"), ("OTHER", "other-secret"), (ACCESS_KEY_ID, "wrong")):
                refused = await call(gateway.app, method, target, access_key_id=key, secret_access_key=secret)
                assert refused.status == 403
            assert (await call(gateway.app, method, target, sign=False)).status == 403


async def test_8_2_without_the_disk_the_origin_answers(tmp_path: Path) -> None:
    """8.2 A directory that cannot be used costs a question, not an answer."""
    async with playing(tmp_path) as (gateway, _clock):
        (tmp_path / "catalog" / ANSWERS).write_bytes(b"in the way")
        for method, target, status in QUESTIONS * 2:
            assert await told(gateway, method, target) == f"{status} miss"
