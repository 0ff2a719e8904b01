"""IAM policy documents at a `MemoryOrigin`: which actions a request takes (S3's "Actions defined by Amazon S3")."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gateway.core.errors import S3Error
from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation, classify, parse_copy_source

_OF_BUCKET: Mapping[Operation, str] = {
    Operation.HEAD_BUCKET: "s3:ListBucket",
    Operation.LIST_OBJECTS: "s3:ListBucket",
    Operation.LIST_OBJECTS_V2: "s3:ListBucket",
    Operation.LIST_MULTIPART_UPLOADS: "s3:ListBucketMultipartUploads",
}
_OF_OBJECT: Mapping[Operation, str] = {
    Operation.GET_OBJECT: "s3:GetObject",
    Operation.HEAD_OBJECT: "s3:GetObject",
    Operation.PUT_OBJECT: "s3:PutObject",
    Operation.COPY_OBJECT: "s3:PutObject",
    Operation.CREATE_MULTIPART_UPLOAD: "s3:PutObject",
    Operation.UPLOAD_PART: "s3:PutObject",
    Operation.UPLOAD_PART_COPY: "s3:PutObject",
    Operation.COMPLETE_MULTIPART_UPLOAD: "s3:PutObject",
    Operation.DELETE_OBJECT: "s3:DeleteObject",
    Operation.ABORT_MULTIPART_UPLOAD: "s3:AbortMultipartUpload",
    Operation.LIST_PARTS: "s3:ListMultipartUploadParts",
}

LIST_BUCKETS = ("s3:ListAllMyBuckets", "*")
"""What the health check asks for: a refusal tells it, too, that origin and key are good."""


def actions_of(request: OriginRequest) -> list[tuple[str, str]]:
    """(action, ARN) of everything that must be allowed. An operation that is not known here takes an unknown action."""
    operation = classify(request.method, request.bucket, request.key, request.query, request.headers)
    if operation is Operation.LIST_BUCKETS:
        return [LIST_BUCKETS]
    bucket = f"arn:aws:s3:::{request.bucket}"
    if operation in _OF_BUCKET:
        return [(_OF_BUCKET[operation], bucket)]
    if operation is Operation.DELETE_OBJECTS:
        return [("s3:DeleteObject", f"{bucket}/{key}") for key in request.keys or ["any"]]
    if operation not in _OF_OBJECT or any(name == "versionId" for name, _ in request.query):
        return [(f"unknown: {operation} {request.query}", f"{bucket}/{request.key}")]
    needed = [(_OF_OBJECT[operation], f"{bucket}/{request.key}")]
    source = request.headers.get("x-amz-copy-source")
    if source is not None:
        key = parse_copy_source(source).key
        needed.append(("s3:GetObject", f"arn:aws:s3:::{key.bucket}/{key.key}"))
    return needed


class IamPolicy:
    """A policy for `MemoryOrigin.policies`. `used`: actions that were asked for; `refused`: not allowed."""

    def __init__(self, file: Path, bucket: str) -> None:
        statements: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["Statement"]
        self.allowed = {
            (action, one["Resource"].replace("BUCKET", bucket)) for one in statements for action in one["Action"]
        }
        self.used: set[str] = set()
        self.refused: list[tuple[str, str]] = []

    @property
    def actions(self) -> set[str]:
        return {action for action, _ in self.allowed}

    def __call__(self, request: OriginRequest) -> S3Error | None:
        for action, arn in actions_of(request):
            self.used.add(action)
            if not any(action == named and fnmatchcase(arn, resource) for named, resource in self.allowed):
                self.refused.append((action, arn))
                return s3_error("AccessDenied", f"{action} on {arn} is not allowed")
        return None
