"""From a request line to an S3 operation: addressing, keys, query, and which of S3's operations is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Operation(StrEnum):
    """S3's operations by their API names. FORWARD stands for all that Forebay does not handle itself."""

    LIST_BUCKETS = "ListBuckets"
    HEAD_BUCKET = "HeadBucket"
    GET_BUCKET_LOCATION = "GetBucketLocation"
    LIST_OBJECTS = "ListObjects"
    LIST_OBJECTS_V2 = "ListObjectsV2"
    LIST_MULTIPART_UPLOADS = "ListMultipartUploads"
    DELETE_OBJECTS = "DeleteObjects"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "HeadObject"
    PUT_OBJECT = "PutObject"
    COPY_OBJECT = "CopyObject"
    DELETE_OBJECT = "DeleteObject"
    CREATE_MULTIPART_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    UPLOAD_PART_COPY = "UploadPartCopy"
    COMPLETE_MULTIPART_UPLOAD = "CompleteMultipartUpload"
    ABORT_MULTIPART_UPLOAD = "AbortMultipartUpload"
    LIST_PARTS = "ListParts"
    FORWARD = "Forward"


@dataclass(slots=True)
class S3Request:
    """One parsed request. What the signature covers is kept as it was on the wire (`raw_*`, `headers`).

    `raw_path` and `raw_query` are the bytes of the request target between host, `?` and `#`; an absolute-form target has
    lost its scheme and authority. `headers` are lower-case names → latin-1 decoded values, repeated ones joined by `,`
    in order of arrival (RFC 9110, 5.3). `host` is the Host header (or the authority of an absolute-form target).
    `query` holds decoded (name, value) pairs in order, value None where there was no `=`.
    """

    method: str
    raw_path: bytes
    raw_query: bytes
    host: str
    headers: Mapping[str, str]
    bucket: str | None
    key: str | None
    query: Sequence[tuple[str, str | None]]
    operation: Operation

    def parameter(self, name: str) -> str | None:
        """The first value of a query parameter; empty when it came without one, None when it is absent."""
        for candidate, value in self.query:
            if candidate == name:
                return value or ""
        return None
