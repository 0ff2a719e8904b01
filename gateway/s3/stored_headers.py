"""What HeadObject says of an object by what PutObject or CreateMultipartUpload said of it (S3 API, both actions)."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_CONTENT_TYPE = "binary/octet-stream"

_KEPT = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
        "x-amz-object-lock-legal-hold",
        "x-amz-object-lock-mode",
        "x-amz-object-lock-retain-until-date",
        "x-amz-server-side-encryption",
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-server-side-encryption-bucket-key-enabled",
        "x-amz-website-redirect-location",
    }
)

_METADATA = "x-amz-meta-"


def stored_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of the answer that follow from the request's, lower-case names; all but those about the bytes."""
    stored = {"content-type": DEFAULT_CONTENT_TYPE}
    stored |= {name: value for name, value in headers.items() if name in _KEPT or name.startswith(_METADATA)}
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class != "STANDARD":
        stored["x-amz-storage-class"] = storage_class
    tags = [tag for tag in headers.get("x-amz-tagging", "").split("&") if tag]
    if tags:
        stored["x-amz-tagging-count"] = str(len(tags))
    return stored
