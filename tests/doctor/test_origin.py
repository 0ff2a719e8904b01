"""What `forebay doctor` asks of an origin: nothing is written unasked, and nothing that was written is left."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from gateway.config import OriginSettings, Settings, SlotSettings
from gateway.doctor import Finding, Level
from gateway.doctor.origin import origin
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.memory_origin.faults import AlterHeaders, Answer, Call, Effect, Fault, on
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

WHERE = Prefix("b", "doctor/")


def settings(url: str, key: str = ACCESS_KEY_ID, mode: str = "read-only", **of_origin: str) -> Settings:
    main = {
        **of_origin,
        "endpoint_url": url,
        "region": "us-east-1",
        "access_key_id": key,
        "secret_access_key": SECRET_ACCESS_KEY,
    }
    slot = SlotSettings.model_validate({"name": "data", "prefix": "s3://b/data/", "mode": mode})
    return Settings(origin=OriginSettings.model_validate(main), slots=[slot])


def found(settings: Settings, tested: Prefix | None = None) -> list[Finding]:
    async def run() -> list[Finding]:
        return [one async for one in origin(settings, {}, tested)]

    return asyncio.run(run())


def lines(findings: list[Finding], area: str) -> list[str]:
    return [f"{one.level.value}: {one.found}" for one in findings if one.area == area]


@pytest.fixture
def home() -> StrictOrigin:
    """Not started yet, with an object under the slot's prefix."""
    made = StrictOrigin()
    made.model.create_bucket("b")
    made.model.put("b", "data/first & <best>", b"0123")
    return made


def test_reading_is_tried_and_nothing_else(home: StrictOrigin) -> None:
    """The key, the answer's time, the clock; list, head and get of the first object's first byte."""
    with home:
        findings = found(settings(home.endpoint_url))
        assert {one.level for one in findings} == {Level.OK}, findings
        assert lines(findings, "rights") == ["ok: s3://b/data/ (slot data): list, head and get work"]
        assert any("a HEAD takes" in line and "median of 7" in line for line in lines(findings, "origin"))
        assert {line.split(b" ")[0] for line in home.request_lines} <= {b"GET", b"HEAD"}


def test_9_8_what_keeps_objects_out_of_the_cache_is_said(home: StrictOrigin) -> None:
    """9.8 Weak ETags, no ranges, and one ETag for objects of different sizes; not one that copies share."""
    home.model.put("b", "data/copy", b"0123")
    with home:
        assert not [one for one in found(settings(home.endpoint_url)) if one.level is Level.WARNING]
        home.model.dialect.has_weak_etags = True
        home.model.dialect.knows_ranges = False
        objects = home.model.buckets["b"].objects
        home.model.put("b", "data/second", b"other size")
        objects["data/second"] = replace(objects["data/second"], etag=objects["data/copy"].etag)
        told = [one.found for one in found(settings(home.endpoint_url)) if one.level is Level.WARNING]
    assert [any(word in line for line in told) for word in ("weak ETags", "a range", "the same ETag")] == [True] * 3
    assert len(told) == 3


def test_the_dialect_is_told(home: StrictOrigin) -> None:
    """So that an operator sees what a host was taken for."""
    with home:
        given = settings(home.endpoint_url)
        google = settings(home.endpoint_url, dialect="gcs")
        assert not [line for line in lines(found(given), "origin") if "dialect" in line]
        told = [line for line in lines(found(google), "origin") if "dialect" in line]
    assert told == [f"ok: {home.endpoint_url}: is spoken to in the dialect gcs (docs/origins.md)"]


def test_different_bytes_under_one_etag_are_an_error(home: StrictOrigin) -> None:
    """Found by reading, among small objects of one length; copies of one object are none."""
    home.model.put("b", "data/copy", b"0123")
    home.model.put("b", "data/other", b"4567")
    with home:
        assert not [one for one in found(settings(home.endpoint_url)) if one.level is Level.ERROR]
        objects = home.model.buckets["b"].objects
        objects["data/other"] = replace(objects["data/other"], etag=objects["data/copy"].etag)
        objects["data/copy"] = replace(objects["data/copy"], etag='"another"')
        told = [one.found for one in found(settings(home.endpoint_url)) if one.level is Level.ERROR]
    assert told == ["s3://b/data/ (slot data): data/first & <best> and data/other have different bytes and one ETag"]


def test_the_write_test_tries_it_too(home: StrictOrigin) -> None:
    """With two small objects, of which nothing is left."""
    home.model.inject(on(Operation.PUT_OBJECT), AlterHeaders({"etag": '"default"'}), times=None)
    with home:
        told = lines(found(settings(home.endpoint_url), WHERE), "write test")
    assert 'error: two objects with different bytes have one ETag, "default"' in told
    assert not [key for key in home.model.buckets["b"].objects if key.startswith("doctor/")]


@pytest.mark.parametrize(
    "effect",
    [
        Answer(501, "NotImplemented"),
        Answer(416, "InvalidRange"),
        AlterHeaders({"etag": '"other-gzip"'}),
        AlterHeaders({"content-range": None}),
        AlterHeaders({"content-range": "bytes 1-2/*"}),
    ],
)
def test_9_8_ranges_that_are_withheld_are_said(home: StrictOrigin, effect: Effect) -> None:
    """9.8 The key may read; the origin does not give what HEAD names."""
    home.model.faults = [Fault(on(Operation.GET_OBJECT), effect, None)]
    with home:
        told = [one.found for one in found(settings(home.endpoint_url)) if one.level is not Level.OK]
    assert ["gives no ranges under the ETag" in one for one in told] == [True]


def test_a_slot_that_is_written_is_named_for_the_write_test(home: StrictOrigin) -> None:
    """What is to be typed can be copied."""
    with home:
        findings = found(settings(home.endpoint_url, mode="read-write"))
        [note] = [one for one in findings if one.level is Level.NOTE]
        assert note.found.endswith("slot data needs them")
        assert note.advice.startswith("forebay doctor --write-test s3://b/data/ writes")
        assert {line.split(b" ")[0] for line in home.request_lines} <= {b"GET", b"HEAD"}


def test_what_the_key_may_not_do_is_named_as_policies_name_it(home: StrictOrigin) -> None:
    """Each of them, with the origin's own code."""
    home.model.inject(on(Operation.LIST_OBJECTS_V2), Answer(403, "AccessDenied"), times=None)
    with home:
        [finding] = [one for one in found(settings(home.endpoint_url)) if one.area == "rights"]
    assert finding.level is Level.ERROR
    assert "refused are list (403 AccessDenied; s3:ListBucket)" in finding.found
    assert "policy" in finding.advice


def test_a_bucket_that_is_not_there_is_said_to_be_missing() -> None:
    """That is no question of rights."""
    with StrictOrigin() as empty:
        findings = found(settings(empty.endpoint_url), WHERE)
    assert lines(findings, "rights") == ["error: s3://b/data/ (slot data): there is no bucket b"]
    assert lines(findings, "write test") == ["error: there is no bucket b"]


def test_a_key_that_is_refused_is_one_finding(home: StrictOrigin) -> None:
    """Its rights are not looked at: all would be refused for that alone."""
    with home:
        findings = found(settings(home.endpoint_url, key="NOBODY"))
    assert [one.found for one in findings if one.level is Level.ERROR] == [
        f"{home.endpoint_url} refuses the gateway's own key: InvalidAccessKeyId"
    ]


def test_an_origin_that_is_away_is_one_finding() -> None:
    """Soon."""
    findings = found(settings("http://127.0.0.1:1"))
    assert [one.found for one in findings if one.level is Level.ERROR] == [
        "nobody listens at http://127.0.0.1:1 (connection refused)"
    ]


def test_a_clock_that_differs_is_an_error(home: StrictOrigin) -> None:
    """Signatures are judged by it."""
    home.model.inject(on(), AlterHeaders({"date": "Thu, 01 Jan 2026 00:02:00 GMT"}), times=None)
    with home:
        told = [one.found for one in found(settings(home.endpoint_url)) if one.level is Level.ERROR]
    assert len(told) == 1
    assert re.match(r"this machine's clock is \d+ seconds ahead of that of", told[0])


def test_a_clock_that_is_refused_is_one_finding(home: StrictOrigin) -> None:
    """Its rights are not looked at: all would be refused for that alone."""
    home.model.inject(on(), Answer(403, "RequestTimeTooSkewed"), times=None)
    with home:
        told = [one for one in found(settings(home.endpoint_url)) if one.level is Level.ERROR]
    assert len(told) == 1
    assert "refuses what Forebay signs, for its time" in told[0].found
    assert "chronyc" in told[0].advice


def test_writes_are_tried_where_that_is_asked_for_and_leave_nothing(home: StrictOrigin) -> None:
    """Put, conditions, multipart, abort, delete."""
    with home:
        findings = found(settings(home.endpoint_url), WHERE)
        assert {one.level for one in findings} == {Level.OK}, findings
        told = lines(findings, "write test")
        assert told[0].startswith("ok: put works, under s3://b/doctor/.forebay-doctor-")
        assert told[1:] == [
            "ok: conditional writes are honoured: If-Match and If-None-Match on put",
            "ok: multipart uploads work: create, part, complete, abort",
            "ok: delete works; nothing of the test is left",
        ]
        assert list(home.model.buckets["b"].objects) == ["data/first & <best>"]
        assert not home.model.buckets["b"].uploads


def test_what_cannot_be_deleted_is_named(home: StrictOrigin) -> None:
    """So that somebody can."""
    home.model.inject(on(Operation.DELETE_OBJECT), Answer(403, "AccessDenied"), times=None)
    with home:
        told = lines(found(settings(home.endpoint_url), WHERE), "write test")
    assert told[-1].startswith("error: delete is refused")
    assert told[-1].count("s3://b/doctor/.forebay-doctor-") == 3


def test_an_upload_that_fails_is_aborted(home: StrictOrigin) -> None:
    """Its parts would be paid for."""
    home.model.inject(on(Operation.UPLOAD_PART), Answer(403, "AccessDenied"), times=None)
    with home:
        told = lines(found(settings(home.endpoint_url), WHERE), "write test")
        assert "error: multipart upload: part: 403 AccessDenied (s3:PutObject)" in told
        assert not home.model.buckets["b"].uploads


def test_conditions_that_are_ignored_or_refused_are_a_warning(home: StrictOrigin) -> None:
    """With what it means for write-back."""

    def is_conditional(call: Call) -> bool:
        return call.operation is Operation.PUT_OBJECT and bool({"if-match", "if-none-match"} & {*call.headers})

    home.model.inject(is_conditional, Answer(501, "NotImplemented"), times=None)
    with home:
        [finding] = [one for one in found(settings(home.endpoint_url), WHERE) if one.level is Level.WARNING]
    assert finding.found == (
        "conditions of put are refused: If-None-Match (501 NotImplemented), If-Match (501 NotImplemented)"
    )
    assert "write = back" in finding.advice
