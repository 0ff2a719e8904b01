"""Why a flush has failed: one of few names, whatever the origin has said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.core.errors import CredentialsUnavailable, OriginBodyError, OriginUnreachable
from gateway.origin.s3 import OwnKeyOrigin
from gateway.s3.requests import Operation
from gateway.telemetry.metrics import FailureKind
from gateway.writeback.flushing.requests import kind_of_error
from tests.support.flushing import Buffer
from tests.support.memory_origin.faults import Answer, Unreachable, on
from tests.support.writeback import key


@pytest.mark.parametrize(
    ("effect", "kind"),
    [
        (Unreachable(), "unreachable"),
        (Answer(403, "ExpiredToken"), "credentials"),
        (Answer(403, "RequestTimeTooSkewed"), "clock"),
        (Answer(403, "AccessDenied"), "refused"),
        (Answer(404, "NoSuchBucket"), "no-bucket"),
        (Answer(503, "SlowDown"), "slow-down"),
        (Answer(429, "TooManyRequests"), "slow-down"),
        (Answer(500, "InternalError"), "origin-error"),
        (Answer(507, "Whatever"), "origin-error"),
        (Answer(400, "KeyTooLongError"), "other"),
    ],
)
def test_a_flush_that_fails_is_counted_by_why(tmp_path: Path, effect: Answer | Unreachable, kind: FailureKind) -> None:
    """What is told of the gateway's own key is not what is told of its rights."""

    async def run() -> None:
        buffer = Buffer(tmp_path)
        try:
            await buffer.learn()
            buffer.origin.inject(on(Operation.PUT_OBJECT), effect, times=1)
            await buffer.put(key("k"), b"x")
            buffer.start(OwnKeyOrigin(buffer.origin))
            await buffer.until(lambda: not buffer.left())
            assert buffer.observer.kinds == [kind]
            is_of_own_key = buffer.observer.failures == ["AccessDenied: the origin refuses the gateway's own key"]
            assert is_of_own_key is (kind == "credentials")
            assert ("the origin has another time" in buffer.observer.failures[0]) is (kind == "clock")
        finally:
            await buffer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CredentialsUnavailable("expired"), "credentials"),
        (OriginUnreachable("dead"), "unreachable"),
        (OriginBodyError("broken off"), "unreachable"),
        (OSError(5, "I/O error"), "disk"),
        (ValueError("what"), "other"),
    ],
)
def test_errors_have_a_name_too(error: Exception, kind: FailureKind) -> None:
    """Of no key to sign with nothing is said about the origin."""
    assert kind_of_error(error) == kind
