"""Reading a page of ListObjectsV2 that was asked for with `encoding-type=url` (S3 API, "ListObjectsV2")."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from gateway.errors import OriginBodyError
from gateway.s3.xml_reader import child_text, local_name, parse_bounded

PAGE_SIZE_BYTES_MAX = 16 * 1024**2
"""A thousand keys of 1,024 bytes, each three times as long percent-encoded, and what else is said of them."""

_ELEMENTS_MAX = 64 * 1024


class ListedObject(NamedTuple):
    """One `<Contents>`: the decoded key, the ETag as it was sent, and the length in bytes."""

    key: str
    etag: str
    size_bytes: int
    storage_class: str = "STANDARD"


class ListPage(NamedTuple):
    """One page. `next_token` None: it is the last."""

    objects: list[ListedObject]
    next_token: str | None


def parse_list_page(body: bytes) -> ListPage:
    """The page; OriginBodyError when it is none, or lacks what every page has."""
    root = parse_bounded(body.lstrip(), _ELEMENTS_MAX)
    if root is None or local_name(root) != "ListBucketResult":
        raise OriginBodyError("the origin's answer to ListObjectsV2 is no ListBucketResult")
    objects = [_listed(node) for node in root if local_name(node) == "Contents"]
    truncated = (child_text(root, "IsTruncated") or "").strip() == "true"
    token = child_text(root, "NextContinuationToken")
    if truncated and not token:
        raise OriginBodyError("the origin's ListBucketResult is truncated and has no NextContinuationToken")
    return ListPage(objects, token if truncated else None)


def _listed(node: Element) -> ListedObject:
    fields = {local_name(child): child.text or "" for child in node}
    key, size = fields.get("Key", ""), fields.get("Size", "").strip()
    if not key or not size.isdecimal():
        raise OriginBodyError("the origin's ListBucketResult has an entry without key or size")
    storage_class = fields.get("StorageClass", "").strip() or "STANDARD"
    return ListedObject(unquote_plus(key), fields.get("ETag", "").strip(), int(size), storage_class)
