"""Questions about buckets, besides listings: ListBuckets, CreateBucket, HeadBucket, GetBucketLocation, other settings.

Answers about a bucket come from memory while they are fresh, if they are asked for plainly; else the origin answers.
The caller's rights to the whole bucket have been checked. The gateway asks with its own rights for every caller, so all
allowed ones, unsigned ones too, get the same answer. Where the origin judges callers, it answers each.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

from gateway.core.errors import OriginUnreachable
from gateway.core.model import BodyStream
from gateway.metadata.bucket_metadata import ANSWER_BYTES_MAX, BucketAnswer, BucketQuery
from gateway.metadata.entries import Freshness, ObservedAt
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward, forward_write, is_plain, no_body, onward_request, streamed_reply
from gateway.operations.payload import Payload, receive_payload
from gateway.operations.read_wishes import wants_revalidation
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.policy.slots import refusal_of_bucket_operation
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import filter_response_headers, without
from gateway.s3.requests import BUCKET_SETTINGS, Operation, S3Request
from gateway.s3.xml import child_text, local_name, parse_bounded
from gateway.s3.xml_writer import element
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
    is_question = is_plain(request) and not any(value for name, value in request.query if name in BUCKET_SETTINGS)
    if not answers.is_on or not is_question or context.signed_by is not None:
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


_FIRST_REGION = "us-east-1"
"""The only region in which a bucket may be created again."""

_SETTINGS = ("x-amz-acl", "x-amz-grant-", "x-amz-bucket-", "x-amz-object-ownership")
"""Beginnings of headers that set properties of the bucket."""

_ROOT = "CreateBucketConfiguration"
_EMPTY_CONFIGURATION = b"<CreateBucketConfiguration/>"


async def create_bucket(context: RequestContext) -> Response:
    """Answer for a bucket that exists, as S3 answers its owner, or let the origin create it.

    Clients such as rclone ask for their bucket before they write to it. The origin is asked each time: the bucket may
    just have been removed. `edge/access.py` decides who may ask.
    """
    payload, bucket, services = await receive_payload(context), context.request.bucket or "", context.services
    question = OriginRequest(
        "HEAD", bucket, purpose=Purpose.FORWARD, slot=context.slot.name, signed_by=context.signed_by
    )
    # The region that the caller signs for counts as the origin's; for other signatures, S3's first.
    asked = context.seed.scope.split("/")[1] if context.seed is not None else _FIRST_REGION
    async with await services.origin.send(question) as response:
        status, region = response.status, response.headers.get("x-amz-bucket-region") or asked
    if status == 200:
        if _asks_for_settings(context, payload.body) or region != _FIRST_REGION:
            raise s3_error("BucketAlreadyOwnedByYou", BucketName=bucket)
        return Response(200, [("location", f"/{bucket}")], b"")
    if status >= 500:
        raise s3_error("ServiceUnavailable", "The origin does not say whether the bucket exists: try again.")
    refusal = refusal_of_bucket_operation(context.grant, services.slots, bucket, is_read=False)
    if refusal is not None:
        raise s3_error("AccessDenied", f"Access Denied. {refusal}")
    return await forward_write(context, payload)


def _asks_for_settings(context: RequestContext, document: object) -> bool:
    """Tell whether a CreateBucket asks for more than a bucket in S3's first region. S3Error MalformedXML."""
    # No configuration is too large to be received at once.
    root = parse_bounded(document or _EMPTY_CONFIGURATION, _ELEMENTS_MAX) if isinstance(document, bytes) else None
    if root is None or local_name(root) != _ROOT:
        raise s3_error("MalformedXML")
    if any(name.startswith(_SETTINGS) for name in context.request.headers):
        return True
    said = [(local_name(node), node.text or _FIRST_REGION) for node in root]
    return any(one != ("LocationConstraint", _FIRST_REGION) for one in said)


RESULT_SIZE_BYTES_MAX = 8 * 1024**2
"""Room for 10,000 buckets with long names, at 200 bytes each, four times over."""

_CREATED = "1970-01-01T00:00:00.000Z"
"""Clients insist on a date, and no origin was asked for it."""

_END = re.compile(rb"</(?:\w+:)?Buckets\s*>")
_EMPTY_LIST = re.compile(rb"<((?:\w+:)?Buckets)\s*/>")
_NAME = re.compile(rb"<(?:\w+:)?Name>\s*([^<\s]+)\s*</")
_GOES_ON = re.compile(rb"<(?:\w+:)?ContinuationToken>")


async def list_buckets(context: RequestContext) -> Response:
    """Return the origin's list, and after its last page the buckets that are placed at other homes; or its refusal.

    These homes are not asked: the gateway serves no other buckets of theirs.
    """
    prefix = context.request.parameter("prefix") or ""
    elsewhere = sorted(bucket for bucket in context.services.homes.by_bucket if bucket.startswith(prefix))
    if not elsewhere or context.request.parameter("bucket-region") is not None:
        return await forward(context)
    response = await context.services.origin.send(onward_request(context, await receive_payload(context)))
    if response.status != 200:
        return streamed_reply(response, head_only=False)
    async with response:
        listed = await response.read(RESULT_SIZE_BYTES_MAX)
    headers = without(filter_response_headers(response.headers), "content-length")
    return Response(200, headers, with_buckets(listed, elsewhere), "forwarded")


def with_buckets(listed: bytes, buckets: Sequence[str]) -> bytes:
    """Return a `<ListAllMyBucketsResult>` with these buckets added, if it is the last page and lacks them."""
    if _GOES_ON.search(listed):
        return listed
    known = {name.decode("utf-8", "replace") for name in _NAME.findall(listed)}
    told = "".join(
        f"<Bucket>{element('Name', bucket)}{element('CreationDate', _CREATED)}</Bucket>"
        for bucket in buckets
        if bucket not in known
    ).encode()
    if (end := _END.search(listed)) is not None:
        return listed[: end.start()] + told + listed[end.start() :]
    if (empty := _EMPTY_LIST.search(listed)) is not None:
        name = empty[1]
        return listed[: empty.start()] + b"<%b>%b</%b>" % (name, told, name) + listed[empty.end() :]
    return listed
