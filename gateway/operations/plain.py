"""Whether the answer to a question about a bucket depends on anything that only the origin can judge."""

from __future__ import annotations

from gateway.s3.requests import S3Request

_CHANGES_NOTHING = frozenset(
    {
        "x-amz-api-version",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-security-token",
        "x-amz-user-agent",
        "x-amzn-trace-id",
        "x-forebay-hop",
    }
)
"""Headers beginning with `x-` that no origin answers differently for; every other one is the origin's to judge."""


def is_plain(request: S3Request, *, besides: frozenset[str] = frozenset()) -> bool:
    """Whether method, bucket and query are all there is to it, but for the headers `besides`.

    What has a body is for the origin.
    """
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        return False
    return not any(_is_judged_by_the_origin(name) for name in request.headers if name not in besides)


def _is_judged_by_the_origin(header: str) -> bool:
    if header in ("origin", "range") or header.startswith("if-"):
        return True  # the bucket's CORS rules, and conditions that servers take seriously or not
    return header.startswith("x-") and header not in _CHANGES_NOTHING
