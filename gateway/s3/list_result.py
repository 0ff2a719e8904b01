"""A page of ListObjectsV2 with all that it says of each object (S3 API, "ListObjectsV2").

The origin was asked with `encoding-type=url`. Not all stores know that: keys are decoded where the answer names an
`EncodingType`. Entries written the way most servers write them are read by a regular expression, at a tenth of an XML
parser's cost; what does not fit it to the letter goes through the parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from operator import lt
from typing import NamedTuple
from urllib.parse import unquote_to_bytes
from xml.etree.ElementTree import Element

from gateway.core.errors import OriginBodyError
from gateway.s3.xml import child_text, local_name, parse_bounded
from gateway.s3.xml_writer import escape

PAGE_SIZE_BYTES_MAX = 16 * 1024**2
"""A thousand keys of 1,024 bytes, each three times as long percent-encoded, and what else is said of them."""

_ELEMENTS_MAX = 64 * 1024


class EntryTemplate(NamedTuple):
    """The XML of `<Contents>` besides key, date, ETag and size. Most objects of a bucket share one.

    `before_size` stands between ETag and size (checksums), `after_size` behind the owner (storage class). `owner` is
    the element, empty where the origin gave none though it was asked, None where it was not asked.
    """

    before_size: str
    owner: str | None
    after_size: str


class ListedEntry(NamedTuple):
    """One `<Contents>`; `modified` and `etag` as they were sent, quotes included."""

    key: bytes
    modified: str
    etag: str
    size_bytes: int
    template: EntryTemplate


class ListedPage(NamedTuple):
    """One page, entries and common prefixes each in the order of their bytes. `next_token` None: it is the last."""

    entries: list[ListedEntry]
    prefixes: list[bytes]
    next_token: str | None
    is_url_encoded: bool = False
    """Tells that the document had its keys percent-encoded."""


EMPTY_PAGES_MAX = 100
"""In a row: some origins give pages without a key, for versions that are deleted, but not so many."""


class PageChain:
    """The chain of pages of one listing, each named by the token of the previous one. It must not repeat.

    It remembers one page, and replaces it after 1, 2, 4, … pages (Brent's cycle detection): a repeated page is found
    within three times as many pages as there are different ones.
    """

    def __init__(self) -> None:
        self._remembered: tuple[bytes, bytes, str] | None = None
        self._until_next = self._distance = 1
        self._empty_pages = 0

    def follow(self, keys: Sequence[bytes], next_token: str) -> None:
        """Check a page with these keys that is not the last. OriginBodyError when no end can be expected."""
        self._empty_pages = 0 if keys else self._empty_pages + 1
        if self._empty_pages >= EMPTY_PAGES_MAX:
            raise OriginBodyError(f"the origin has given {EMPTY_PAGES_MAX} pages without a key")
        page = (keys[0], keys[-1], next_token) if keys else (b"", b"", next_token)
        if page == self._remembered:
            raise OriginBodyError("the origin's pages lead back to one that was given before")
        self._until_next -= 1
        if not self._until_next:
            self._remembered, self._distance = page, 2 * self._distance
            self._until_next = self._distance


_ENTRY = re.compile(
    rb"<Contents><Key>([^<&]+)</Key><LastModified>([^<&]*)</LastModified><ETag>([^<]*)</ETag>"
    rb"((?:<Checksum[A-Za-z]+>[^<&]*</Checksum[A-Za-z]+>)*)<Size>([0-9]{1,15})</Size>"
    rb"((?:<Owner>(?:<(?:ID|DisplayName)>[^<&]*</(?:ID|DisplayName)>)*</Owner>)?"
    rb"(?:<StorageClass>[^<&]*</StorageClass>)?)</Contents>\s*"
)

_SIZE = re.compile("[0-9]{1,15}")
_OBJECTS = frozenset({"Contents", "Version", "DeleteMarker"})


def parse_listed_page(body: bytes, *, with_owner: bool) -> ListedPage:
    """Return the page. Raise OriginBodyError if it is none, lacks what every page has, or is not in order."""
    root, url, entries = _parsed(body, with_owner=with_owner)
    if local_name(root) != "ListBucketResult":
        raise OriginBodyError("the origin's answer to ListObjectsV2 is no ListBucketResult")
    if child_text(root, "Name") is None and child_text(root, "IsTruncated") is None:
        raise OriginBodyError("the origin's ListBucketResult has neither Name nor IsTruncated")
    prefixes = [
        _key((child_text(node, "Prefix") or "").encode(), url=url)
        for node in root
        if local_name(node) == "CommonPrefixes"
    ]
    if not _ascend([entry.key for entry in entries]) or not _ascend(prefixes):
        raise OriginBodyError("the origin does not list keys in the order of their bytes")
    token = child_text(root, "NextContinuationToken")
    truncated = (child_text(root, "IsTruncated") or ("true" if token else "")).strip().lower() == "true"
    if truncated and not token:
        raise OriginBodyError("the origin's ListBucketResult is truncated and has no NextContinuationToken")
    return ListedPage(entries, prefixes, token if truncated else None, url)


def listed_objects(body: bytes) -> list[ListedEntry]:
    """Return the current objects that a page of any kind of listing shows, in order. A deleted one has size -1."""
    return sorted(_parsed(body, with_owner=False)[2], key=lambda entry: entry.key)


def _parsed(body: bytes, *, with_owner: bool) -> tuple[Element, bool, list[ListedEntry]]:
    quick, rest = _quick_entries(body, with_owner=with_owner)
    root = parse_bounded(rest.lstrip(), _ELEMENTS_MAX)
    if root is None:
        raise OriginBodyError("the origin's listing is no XML")
    url = (child_text(root, "EncodingType") or "").strip().lower() == "url"
    entries = [ListedEntry(_key(entry.key, url=url), *entry[1:]) for entry in quick]
    entries += [
        _entry(node, with_owner=with_owner, url=url)
        for node in root
        if local_name(node) in _OBJECTS and (child_text(node, "IsLatest") or "true").strip() == "true"
    ]
    return root, url, entries


def _quick_entries(body: bytes, *, with_owner: bool) -> tuple[list[ListedEntry], bytes]:
    """Return the entries that could be read quickly, keys as written, and the document without them: all or none."""
    start, end = body.find(b"<Contents>"), body.rfind(b"</Contents>") + len(b"</Contents>")
    if start < 0 or end < start:
        return [], body
    entries, place = [], start
    while place < end:
        found = _ENTRY.match(body, place)
        if found is None:
            return [], body
        key, modified, etag, before, size, after = found.groups()
        plain_etag = etag.replace(b"&quot;", b'"').replace(b"&#34;", b'"')
        template = template_of_parts(before, after, with_owner)
        if b"&" in plain_etag or template is None:
            return [], body
        entries.append(
            ListedEntry(key, modified.decode("latin-1"), plain_etag.decode("utf-8", "replace"), int(size), template)
        )
        place = found.end()
    return entries, body[:start] + body[place:]


@lru_cache(maxsize=4096)
def template_of_parts(before: bytes, after: bytes, with_owner: bool) -> EntryTemplate | None:
    """Return the template of an entry with this between ETag and size, and this behind; None: not readable so."""
    root = parse_bounded(b"<x>" + before + b"<Size/>" + after + b"</x>", _ELEMENTS_MAX)
    return None if root is None else _template(root, with_owner=with_owner)


def _entry(node: Element, *, with_owner: bool, url: bool) -> ListedEntry:
    fields = {local_name(child): child.text or "" for child in node}
    key, size = _key(fields.get("Key", "").encode(), url=url), fields.get("Size", "").strip()
    if local_name(node) == "DeleteMarker":
        size = "-1"
    elif not _SIZE.fullmatch(size):
        raise OriginBodyError("the origin's ListBucketResult has an entry without size")
    return ListedEntry(
        key,
        fields.get("LastModified", "").strip(),
        fields.get("ETag", "").strip(),
        int(size),
        _template(node, with_owner=with_owner),
    )


def _template(node: Element, *, with_owner: bool) -> EntryTemplate:
    before, owner, after = "", "" if with_owner else None, ""
    for child in node:
        name = local_name(child)
        if name == "Owner":
            owner = _xml(child)
        elif name.startswith("Checksum"):
            before += _xml(child)
        elif name not in ("Key", "LastModified", "ETag", "Size"):
            after += _xml(child)
    return EntryTemplate(before, owner, after)


def checked_template(parts: object) -> EntryTemplate:
    """Return the template in `[before_size, owner, after_size]` of a document from outside, as `_template` writes it.

    Raise ValueError for anything else, because answers contain the text unchanged.
    """
    if not isinstance(parts, list) or len(parts) != 3 or not all(isinstance(part, str) for part in parts):
        raise ValueError("a template must be a list of three texts")
    before, owner, after = parts
    root = parse_bounded(f"<x>{before}<Size/>{owner}{after}</x>".encode(), _ELEMENTS_MAX)
    template = EntryTemplate(before, owner, after)
    if root is None or _template(root, with_owner=True) != template:
        raise ValueError("a template must be of XML elements as listings have them")
    return template


def _xml(node: Element) -> str:
    name = local_name(node)
    return f"<{name}>{escape(node.text or '')}{''.join(_xml(child) for child in node)}</{name}>"


def decoded_key(text: bytes) -> bytes:
    """Decode a percent-encoded key or prefix; S3 writes a space as `+`."""
    return unquote_to_bytes(text.replace(b"+", b" "))


def _key(text: bytes, *, url: bool) -> bytes:
    key = decoded_key(text) if url else text
    if not key:
        raise OriginBodyError("the origin's ListBucketResult has an entry without key")
    try:
        key.decode()
    except UnicodeDecodeError:
        raise OriginBodyError("the origin's ListBucketResult has a key that is not UTF-8") from None
    return key


def _ascend(keys: Sequence[bytes]) -> bool:
    return all(map(lt, keys, keys[1:]))
