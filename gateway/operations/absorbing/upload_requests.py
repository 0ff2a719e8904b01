"""What a request says of an upload that is here: which, which part, which checksum. Raises S3Error as S3 does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import S3Error
from gateway.operations.context import RequestContext
from gateway.origin.client import OriginRequest
from gateway.s3.checksums import upload_checksum_type
from gateway.s3.error_codes import s3_error
from gateway.s3.xml import part_number
from gateway.writeback.journal.records import Upload

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


_OWNER = "x-amz-expected-bucket-owner"


def upload_of(context: RequestContext, buffer: WritebackBuffer) -> Upload:
    """The upload; NoSuchUpload for one that has ended, or is of another key."""
    upload_id = context.request.parameter("uploadId") or ""
    upload = buffer.look(lambda book: book.upload(upload_id))
    if upload is None or upload.fixed.key != context.object_key:
        raise no_such_upload(upload_id)
    return upload


async def check_owner(context: RequestContext, upload: Upload) -> None:
    """S3Error AccessDenied where the request names another owner of the bucket than it has.

    The origin is asked, unless it has begun the upload for the same. OriginUnreachable.
    """
    owner = context.request.headers.get(_OWNER)
    if owner is None or owner == upload.fixed.headers.get(_OWNER):
        return
    bucket = upload.fixed.key.bucket
    request = OriginRequest("HEAD", bucket, None, headers={_OWNER: owner}, slot=context.slot.name)
    async with await context.services.origin.send(request) as response:
        if response.status != 200:
            raise s3_error("AccessDenied" if response.status == 403 else "ServiceUnavailable")


def number_of_part(context: RequestContext) -> int:
    """Of UploadPart and UploadPartCopy."""
    return part_number("partNumber", context.request.parameter("partNumber") or "")


def number_of(context: RequestContext, name: str, default: int) -> int:
    """A parameter that is a number; `default` where it is not given."""
    text = context.request.parameter(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise s3_error("InvalidArgument", f"{name} must be a number.", ArgumentName=name, ArgumentValue=text)
    return int(text)


def check_algorithm(context: RequestContext, upload: Upload) -> None:
    """A part brings the checksum that Create has announced, or none."""
    declared = upload.fixed.headers.get("x-amz-checksum-algorithm")
    if declared is None:
        return
    algorithm, _ = upload_checksum_type(declared, upload.fixed.headers.get("x-amz-checksum-type"))
    headers = context.request.headers
    brought = {name for name in (*headers, *headers.get("x-amz-trailer", "").split(",")) if _is_checksum(name.strip())}
    if any(name.strip() != f"x-amz-checksum-{algorithm}" for name in brought):
        raise s3_error("InvalidRequest", f"Checksum Type mismatch occurred, expected checksum Type: {algorithm}.")


def _is_checksum(name: str) -> bool:
    return name.startswith("x-amz-checksum-") and name not in ("x-amz-checksum-algorithm", "x-amz-checksum-type")


def no_such_upload(upload_id: str) -> S3Error:
    """404, as for one that never was."""
    return s3_error("NoSuchUpload", UploadId=upload_id)
