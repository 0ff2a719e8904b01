"""S3's answers about a bucket itself: HeadBucket, GetBucketLocation and other settings, from memory while fresh.

    asked plainly, and remembered? → that; else the origin's own answer, remembered when it is a normal one

The caller's rights to the whole bucket have been checked. The gateway asks the origin with its own rights for every
caller, so that all allowed ones, unsigned ones too, get the same answer. Where the origin judges callers
(origin_rights.py), it answers each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

from gateway.core.errors import OriginUnreachable
from gateway.core.model import BodyStream
from gateway.metadata.bucket_metadata import ANSWER_BYTES_MAX, BucketAnswer, BucketQuery
from gateway.metadata.entries import Freshness, ObservedAt
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward, is_plain, no_body, onward_request, streamed_reply
from gateway.operations.payload import Payload, receive_payload
from gateway.operations.read_object import wants_revalidation
from gateway.origin.client import OriginResponse
from gateway.s3.headers import filter_response_headers, without
from gateway.s3.requests import BUCKET_SETTINGS, Operation, S3Request
from gateway.s3.xml import child_text, local_name, parse_bounded
from gateway.telemetry import metrics

_NOT_SET: Mapping[Operation, str] = {
    Operation.GET_BUCKET_ENCRYPTION: "ServerSideEncryptionConfigurationNotFoundError",
    Operation.GET_BUCKET_TAGGING: "NoSuchTagSet",
    Operation.GET_OBJECT_LOCK_CONFIGURATION: "ObjectLockConfigurationNotFoundError",
}
"""Operations whose normal answer may be 404 → the code that tells it from a missing bucket."""

_ROOTS: Mapping[Operation, str] = {
    Operation.GET_BUCKET_LOCATION: "LocationConstraint",
    Operation.GET_BUCKET_VERSIONING: "VersioningConfiguration",
    Operation.GET_BUCKET_ENCRYPTION: "ServerSideEncryptionConfiguration",
    Operation.GET_BUCKET_TAGGING: "Tagging",
    Operation.GET_OBJECT_LOCK_CONFIGURATION: "ObjectLockConfiguration",
}
"""Operation → root element of its document."""

_ELEMENTS_MAX = 1024
_XML = ("application/xml", "text/xml")

_OF_ONE_ANSWER = ("x-forebay-origin-request-id", "x-amzn-requestid", "x-request-id")

_OF_ONE_CLIENT = frozenset({"content-encoding", "set-cookie"})
"""Answers with these were made for one client."""


async def bucket_answer(context: RequestContext) -> Response:
    """Answer from memory, or ask and remember; forward a request that is not a plain question."""
    answers, request = context.services.answers, context.request
    if not answers.is_on or not _is_plain(request) or context.signed_by is not None:
        return await forward(context)
    payload = await receive_payload(context)
    question = BucketQuery(request.operation.value, request.bucket or "")
    looks_anew = wants_revalidation(context)
    known = None if looks_anew else await answers.recall(question, context.slot)
    if known is not None and known.freshness is Freshness.FRESH:
        metrics.SMALL_ANSWERS.add(1, question.operation, "hit")
        return _remembered(request, known.answer)
    stale = known.answer if known is not None and known.freshness is Freshness.STALE else None
    reply = await _ask(context, question, payload, stale=stale)
    if reply.cache == "miss":
        reply.reason = "expired" if looks_anew or known is not None else "first-read"
    return reply


def _is_plain(request: S3Request) -> bool:
    return is_plain(request) and not any(value for name, value in request.query if name in BUCKET_SETTINGS)


async def _ask(
    context: RequestContext, question: BucketQuery, payload: Payload, *, stale: BucketAnswer | None
) -> Response:
    """Return the origin's answer, or `stale` if it gives none."""
    answers = context.services.answers
    asked = answers.now(question.bucket)
    try:
        response = await context.services.origin.send(onward_request(context, payload))
    except OriginUnreachable:
        if stale is None:
            raise
        metrics.SMALL_ANSWERS.add(1, question.operation, "stale")
        return _remembered(context.request, stale)
    if stale is not None and response.status >= 500:
        await response.aclose()
        metrics.SMALL_ANSWERS.add(1, question.operation, "stale")
        return _remembered(context.request, stale)
    metrics.SMALL_ANSWERS.add(1, question.operation, "miss")
    if not _may_be_kept(context.request.operation, response):
        return streamed_reply(response, head_only=context.request.method == "HEAD")
    return await _learned(context, question, asked, response)


def _may_be_kept(operation: Operation, response: OriginResponse) -> bool:
    """Return whether the head of the answer lets it be remembered. To HEAD, proxies announce a page of their own."""
    headers, kind = response.headers, response.headers.get("content-type", "")
    is_page = not kind.startswith(_XML) and headers.get("content-length", kind) not in ("", "0")
    if response.status != 200 and not (response.status == 404 and operation in _NOT_SET):
        return False
    return not (_OF_ONE_CLIENT & headers.keys() or (is_page and operation is Operation.HEAD_BUCKET))


def _is_document(operation: Operation, status: int, body: bytes) -> bool:
    """Return whether S3 answers the operation so; what a proxy says in its place is not remembered."""
    root = parse_bounded(body.lstrip(), _ELEMENTS_MAX)
    if root is None or status == 200:
        return root is not None and local_name(root) == _ROOTS[operation]
    return local_name(root) == "Error" and child_text(root, "Code") == _NOT_SET[operation]


async def _learned(
    context: RequestContext, question: BucketQuery, asked: ObservedAt, response: OriginResponse
) -> Response:
    """Return the answer, received whole and remembered; pass on one that is too long as it comes."""
    operation, headers = context.request.operation, filter_response_headers(response.headers)
    if operation is Operation.HEAD_BUCKET:
        await response.aclose()
        context.services.answers.keep(question, asked, BucketAnswer(200, without(headers, *_OF_ONE_ANSWER), b""))
        return Response(200, headers, no_body(), "miss")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(response)
        pieces, body = response.stream(), b""
        async for piece in pieces:
            body += piece
            if len(body) > ANSWER_BYTES_MAX:
                stack.pop_all()
                return Response(response.status, headers, _continued(body, pieces), "forwarded", response)
    headers = without(headers, "content-length")
    if not _is_document(operation, response.status, body):
        return Response(response.status, headers, body, "forwarded")
    context.services.answers.keep(
        question, asked, BucketAnswer(response.status, without(headers, *_OF_ONE_ANSWER), body)
    )
    return Response(response.status, headers, body, "miss")


async def _continued(begun: bytes, pieces: AsyncIterator[bytes | memoryview]) -> BodyStream:
    yield begun
    async for piece in pieces:
        yield piece


def _remembered(request: S3Request, answer: BucketAnswer) -> Response:
    return Response(answer.status, answer.headers, no_body() if request.method == "HEAD" else answer.body, "hit")
