"""CreateBucket (S3 API, "CreateBucket"): clients such as rclone ask for their bucket before they write to it.

    the origin has it, and the caller may look into it? → answered here, as S3 answers its owner: nothing changes
    else → the origin, if the caller may create it

The origin is asked each time: the bucket may just have been removed. `edge/access.py` decides who may ask.
"""

from __future__ import annotations

from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward_write
from gateway.operations.payload import receive_payload
from gateway.origin.client import OriginRequest, Purpose
from gateway.policy.slots import refusal_of_bucket_operation
from gateway.s3.error_codes import s3_error
from gateway.s3.xml import local_name, parse_bounded

_FIRST_REGION = "us-east-1"
"""The only region in which a bucket may be created again."""

_SETTINGS = ("x-amz-acl", "x-amz-grant-", "x-amz-bucket-", "x-amz-object-ownership")
"""Beginnings of headers that set properties of the bucket."""

_ROOT, _ELEMENTS_MAX = "CreateBucketConfiguration", 1024
_EMPTY = b"<CreateBucketConfiguration/>"


async def create_bucket(context: RequestContext) -> Response:
    """Answer for a bucket that exists, or let the origin create it."""
    payload, bucket, services = await receive_payload(context), context.request.bucket or "", context.services
    question = OriginRequest(
        "HEAD", bucket, purpose=Purpose.FORWARD, slot=context.slot.name, signed_by=context.signed_by
    )
    async with await services.origin.send(question) as response:
        status, region = response.status, response.headers.get("x-amz-bucket-region") or _region_asked(context)
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


def _region_asked(context: RequestContext) -> str:
    """Return the region that the caller signs for as the origin's; for other signatures, S3's first."""
    return context.seed.scope.split("/")[1] if context.seed is not None else _FIRST_REGION


def _asks_for_settings(context: RequestContext, document: object) -> bool:
    """Tell whether a CreateBucket asks for more than a bucket in S3's first region. S3Error MalformedXML."""
    # No configuration is too large to be received at once.
    root = parse_bounded(document or _EMPTY, _ELEMENTS_MAX) if isinstance(document, bytes) else None
    if root is None or local_name(root) != _ROOT:
        raise s3_error("MalformedXML")
    if any(name.startswith(_SETTINGS) for name in context.request.headers):
        return True
    said = [(local_name(node), node.text or _FIRST_REGION) for node in root]
    return any(one != ("LocationConstraint", _FIRST_REGION) for one in said)
