"""The meaning of the origin's answers to a flush: refused, nobody knows, or what it has; with a cause for metrics.

Only an S3 error document decides anything: all else comes from a proxy or load balancer, and the bucket is away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

from gateway.core.errors import CredentialsUnavailable, OriginBodyError, OriginUnreachable
from gateway.origin.client import OWN_CLOCK_REFUSED, OWN_KEY_REFUSED, Origin, OriginRequest, OriginResponse, Purpose
from gateway.origin.retry import asks_for_retry
from gateway.s3.xml import error_code_of, text_of
from gateway.telemetry.metrics import FailureKind
from gateway.writeback.flushing.state import Lost, WriteRefused

P = ParamSpec("P")
R = TypeVar("R")

ANSWER_SIZE_BYTES_MAX = 64 * 1024

WORDS_MAX = 300
"""Characters of an origin's message about a refusal."""

_OF_CODES: dict[str, FailureKind] = {
    "NoSuchBucket": "no-bucket",
    "SlowDown": "slow-down",
    "ServiceUnavailable": "slow-down",
    "PreconditionFailed": "changed",
    "ConditionalRequestConflict": "changed",
    "OperationAborted": "changed",
    "InternalError": "origin-error",
    "RequestTimeout": "origin-error",
}

_FINAL_STATUSES = frozenset({400, 405, 409, 413, 414, 501})

_MAY_PASS = frozenset(
    [
        "AuthorizationHeaderMalformed",
        "BadDigest",
        "ConditionalRequestConflict",
        "ExpiredToken",
        "IllegalLocationConstraintException",
        "IncompleteBody",
        "InvalidToken",
        "OperationAborted",
        "RequestTimeout",
        "TokenRefreshRequired",
        "XAmzContentSHA256Mismatch",
    ]
)
"""Codes that S3 gives such a status, but that are not about the write: the next attempt may succeed."""


def answered(ask: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R | Lost]]:
    """Return Lost if the origin does not answer, or the disk does not give the bytes to send."""

    @wraps(ask)
    async def asked(*arguments: P.args, **keywords: P.kwargs) -> R | Lost:
        try:
            return await ask(*arguments, **keywords)
        except (OriginUnreachable, OriginBodyError, OSError) as error:
            return Lost(str(error), kind_of_error(error))

    return asked


async def head_of(
    origin: Origin, request: OriginRequest, *, believes_404: bool
) -> Mapping[str, str] | WriteRefused | Lost | None:
    """Return the headers of the object that a HEAD asks for, None if there is none.

    An answer to HEAD has no document by which S3 could be told from a proxy: unless a 404 is believed, ask by GET too.
    """
    async with await origin.send(request) as response:
        if response.status == 404 and believes_404:
            return None
        if response.status == 200 or asks_for_retry(response.status):
            return await found_in(response)
    async with await origin.send(replace(request, method="GET")) as response:
        return await found_in(response)


async def found_in(response: OriginResponse) -> Mapping[str, str] | WriteRefused | Lost | None:
    """Return the headers of the object that an answer to HEAD or GET shows, None if there is none."""
    if response.status == 200:
        return response.headers if response.headers.get("etag") else untold(200, "an ETag")
    failure = await failure_of(response)
    return None if failure == WriteRefused("NoSuchKey") else failure


@answered
async def first_key(
    origin: Origin, bucket: str, prefix: str, slot: str = "default", purpose: Purpose = Purpose.FLUSH
) -> str | WriteRefused | Lost | None:
    """Return the first key with this prefix in S3's order, None if there is none."""
    query = [("list-type", "2"), ("prefix", prefix), ("max-keys", "1")]
    async with await origin.send(OriginRequest("GET", bucket, None, query, purpose=purpose, slot=slot)) as response:
        if response.status != 200:
            return await failure_of(response)
        return text_of(await response.read(ANSWER_SIZE_BYTES_MAX), "Key")


async def failure_of(response: OriginResponse) -> WriteRefused | Lost:
    """Return what an answer that is no success says."""
    body = await response.read(ANSWER_SIZE_BYTES_MAX)
    code = error_code_of(body)
    return refusal_of(response.status, code, body) if code else untold(response.status, "an S3 error document")


def untold(status: int, missing: str) -> Lost:
    return Lost(f"HTTP {status} without {missing}", "slow-down" if status == 429 else "origin-error")


def refusal_of(status: int, code: str, document: bytes = b"") -> WriteRefused | Lost:
    """Return an error's meaning: a 5xx, or one behind a 200, leaves the outcome open; NotImplemented does not.

    A refusal is final if a person must change something. One without a code (`HTTP 400`) may come from a proxy.
    """
    kind = _kind_of_answer(status, code, document)
    words = (text_of(document, "Message") or "")[:WORDS_MAX]
    if code == "NotImplemented":
        return WriteRefused(code, kind, words, is_final=True)
    if status >= 500 or code in ("InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout"):
        return Lost(code, kind)
    is_lasting = status in _FINAL_STATUSES and code not in _MAY_PASS and not code.startswith("KMS.")
    return WriteRefused(code, kind, words, is_final=is_lasting or code == "NoSuchBucket")


def kind_of_error(error: Exception) -> FailureKind:
    """Name the error that kept the origin from answering; an OSError is of this node's own disk."""
    match error:
        case CredentialsUnavailable():
            return "credentials"
        case OriginUnreachable() | OriginBodyError():
            return "unreachable"
        case OSError():
            return "disk"
    return "other"


def _kind_of_answer(status: int, code: str, document: bytes) -> FailureKind:
    """Name an answer that is no success. A HEAD has no document, so any 403 to it counts as a refused key."""
    if status in (401, 403):
        if OWN_CLOCK_REFUSED.encode() in document:
            return "clock"
        return "credentials" if OWN_KEY_REFUSED.encode() in document else "refused"
    if code in _OF_CODES:
        return _OF_CODES[code]
    if status == 429:
        return "slow-down"
    return "origin-error" if status >= 500 else "other"
