"""Refusals of the gateway's own key, and all other refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.origin.client import KeyPair, OriginRequest
from gateway.origin.s3 import OwnKeyOrigin, refusal_of_own_key
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Answer

GET = OriginRequest("GET", "bucket", "key")


def asked(request: OriginRequest, effect: Answer) -> tuple[int, dict[str, str], bytes]:
    async def run() -> tuple[int, dict[str, str], bytes]:
        origin = MemoryOrigin(ManualClock())
        origin.put("bucket", "key", b"content")
        origin.inject(lambda call: True, effect)
        async with await OwnKeyOrigin(origin).send(request) as response:
            return response.status, dict(response.headers), await response.read(2**20)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "code"), [(403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (400, "ExpiredToken")]
)
def test_the_gateways_key_is_not_the_callers(status: int, code: str) -> None:
    """The client is told whose key it is, with the same status each time, and no secret of the signature."""
    told, headers, body = asked(GET, Answer(status, code))
    assert (told, headers["content-length"]) == (403, str(len(body)))
    assert b"<Code>AccessDenied</Code>" in body
    assert f"refuses the key of this gateway ({code})".encode() in body


def test_a_clock_that_the_origin_refuses_is_neither_the_callers_nor_the_keys() -> None:
    """The client is told that the times differ."""
    told, _, body = asked(GET, Answer(403, "RequestTimeTooSkewed"))
    assert told == 403
    assert b"another time than this gateway, and refuses what it signs (RequestTimeTooSkewed)" in body
    assert b"refuses the key" not in body


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (400, "InvalidArgument"), (404, "NoSuchKey"), (403, "InvalidObjectState")],
)
def test_other_refusals_arrive_as_they_are(status: int, code: str) -> None:
    """They are about what was asked for."""
    told, _, body = asked(GET, Answer(status, code))
    assert told == status
    assert f"<Code>{code}</Code>".encode() in body


@pytest.mark.parametrize(
    ("code", "signed_by", "is_told"),
    [
        ("ExpiredToken", None, True),
        ("InvalidAccessKeyId", None, True),
        ("InvalidToken", None, True),
        ("SignatureDoesNotMatch", None, False),
        ("AccessDenied", None, False),
        ("InvalidAccessKeyId", KeyPair("CALLER", "secret"), False),
    ],
)
async def test_who_has_the_key_is_told_that_it_is_not_known(
    code: str, signed_by: KeyPair | None, *, is_told: bool
) -> None:
    """Not of what is about a request, nor of callers' own keys."""
    refused: list[OriginRequest] = []
    request = replace(GET, signed_by=signed_by)
    origin = MemoryOrigin(ManualClock())
    origin.inject(lambda call: True, Answer(403, code))
    async with await OwnKeyOrigin(origin, refused.append).send(request) as response:
        await response.read(2**20)
    assert refused == ([request] if is_told else [])


def test_a_refusal_that_is_too_long_ends_where_it_says() -> None:
    """Nothing is promised that does not come."""
    told, headers, body = asked(GET, Answer(403, body=b"x" * 100_000))
    assert (told, headers["content-length"], body) == (403, "0", b"")


def test_a_head_has_no_document() -> None:
    """Its status is all there is."""
    assert asked(OriginRequest("HEAD", "bucket", "key"), Answer(403, "InvalidAccessKeyId"))[0] == 403
    assert refusal_of_own_key(200, b"<Code>InvalidAccessKeyId</Code>") is None
