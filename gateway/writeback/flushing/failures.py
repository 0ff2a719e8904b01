"""The causes of failed flushes, as a few names for a label of metrics. No handling depends on them."""

from __future__ import annotations

from gateway.core.errors import CredentialsUnavailable, OriginBodyError, OriginUnreachable
from gateway.origin.client import OWN_CLOCK_REFUSED, OWN_KEY_REFUSED
from gateway.telemetry.metrics import FailureKind

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


def is_for_good(status: int, code: str) -> bool:
    """Tell whether a person must change something. A refusal without a code (`HTTP 400`) may come from a proxy."""
    if code == "NoSuchBucket":
        return True
    return status in _FINAL_STATUSES and code not in _MAY_PASS and not code.startswith("KMS.")


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


def kind_of_answer(status: int, code: str, document: bytes = b"") -> FailureKind:
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
