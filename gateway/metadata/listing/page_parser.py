"""A page of ListObjectsV2 straight into records of the index: for crawls, which read nothing else of it. Pure.

What most servers write is read by one regular expression and packed without an object per key, at half the cost of the
page for a client; whatever differs from that by a letter goes that way.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, repeat
from operator import add, lt

from gateway.core.errors import OriginBodyError
from gateway.metadata.listing.pages import END, Listed
from gateway.metadata.listing.records import FIXED, PARTS_SHIFT, numbered, parsed_seconds
from gateway.s3.list_result import EntryTemplate, decoded_key, parse_listed_page, template_of_parts

_ENTRY = re.compile(
    rb"<Contents><Key>([^<&]+)</Key><LastModified>([0-9-]{10}T[0-9:]{5}):([0-5][0-9])\.([0-9]{3})Z</LastModified>"
    rb'<ETag>(?:&quot;|&#34;|")([0-9a-f]{32})(?:-([1-9][0-9]{0,3}|10000))?(?:&quot;|&#34;|")</ETag>'
    rb"((?:<Checksum[A-Za-z]+>[^<&]*</Checksum[A-Za-z]+>)*)<Size>([0-9]{1,14})</Size>"
    rb"((?:<Owner>(?:<(?:ID|DisplayName)>[^<&]*</(?:ID|DisplayName)>)*</Owner>)?"
    rb"(?:<StorageClass>[^<&]*</StorageClass>)?)</Contents>"
)
_BEGIN, _END, _BETWEEN = b"<Contents><Key>", b"</Contents>", b"</Contents><Contents><Key>"


@dataclass(frozen=True, slots=True)
class PackedPage:
    """Keys in order with their records, which number `templates`. `next_token` None: it is the last page.

    `is_cut`: keys at or behind the requested cut were left out.
    """

    listed: list[Listed]
    templates: Sequence[EntryTemplate]
    next_token: str | None
    is_cut: bool = False


def packed_page(body: bytes, stop: bytes = END) -> PackedPage:
    """Return a page's keys before `stop`; its request had `encoding-type=url`, `fetch-owner` and no delimiter.

    Raises OriginBodyError as `parse_listed_page`.
    """
    quick = _quick(body, stop)
    if quick is not None:
        return quick
    page = parse_listed_page(body, with_owner=True)
    entries = [entry for entry in page.entries if entry.key < stop]
    return PackedPage(*numbered(entries), page.next_token, len(entries) < len(page.entries))


def _quick(body: bytes, stop: bytes) -> PackedPage | None:
    start, end = body.find(_BEGIN), body.rfind(_END) + len(_END)
    if start < 0 or end < start:
        return None
    page = parse_listed_page(body[:start] + body[end:], with_owner=True)
    url = page.is_url_encoded
    cut = _place_of(stop, body, start, end, url=url)
    if cut is None:
        return None
    if cut == start:
        return PackedPage([], [], page.next_token, is_cut=True)
    read = _entries(body, start, cut, url=url)
    if read is None or page.entries:
        return None
    listed, templates = read
    keys = [key for key, _ in listed]
    if not all(map(lt, keys, islice(keys, 1, None))):
        raise OriginBodyError("the origin does not list keys in the order of their bytes")
    return PackedPage(listed, templates, page.next_token, is_cut=cut < end)


def _place_of(stop: bytes, body: bytes, low: int, high: int, *, url: bool) -> int | None:
    """Return where the first entry begins, from `low` on, whose key is not before `stop`; `high` if none.

    None: a key is written in a way that only the XML parser reads.
    """
    offset = high
    while low < high:
        middle = (low + high) // 2
        found = body.find(_BEGIN, middle, offset)
        if found < 0:
            high = middle
            continue
        key = _key_at(body, found)
        if not url and b"&" in key:
            return None
        if (decoded_key(key) if url else key) < stop:
            low = found + 1
        else:
            offset, high = found, middle
    return offset


def _key_at(body: bytes, offset: int) -> bytes:
    first = offset + len(_BEGIN)
    return body[first : body.find(b"<", first)]


def _entries(body: bytes, start: int, end: int, *, url: bool) -> tuple[list[Listed], list[EntryTemplate]] | None:
    found = _ENTRY.findall(body, start, end)
    if len(found) != body.count(_BEGIN, start, end) or body.count(_BETWEEN, start, end) != len(found) - 1:
        return None
    raw, minute, second, fraction, digests, parts, before, size, after = zip(*found, strict=True)
    keys, minutes = _keys(raw, url=url), _minutes(set(minute))
    numbers = {both: number for number, both in enumerate(dict.fromkeys(zip(before, after, strict=True)))}
    templates = [template for one in numbers if (template := _template(*one)) is not None]
    if keys is None or minutes is None or len(templates) < len(numbers):
        return None
    seconds = map(add, map(minutes.__getitem__, minute), map(int, second))
    kinds = repeat(0) if len(templates) == 1 else map(numbers.__getitem__, zip(before, after, strict=True))
    sizes = [int(one) | int(many or 0) << PARTS_SHIFT for one, many in zip(size, parts, strict=True)]
    records = map(FIXED.pack, seconds, map(int, fraction), kinds, sizes, map(unhexlify, digests))
    return list(zip(keys, records, strict=True)), templates


def _keys(raw: Sequence[bytes], *, url: bool) -> Sequence[bytes] | None:
    """Decode keys if the page is percent-encoded; None where one is no UTF-8. One check covers all without encoding."""
    together = b"\n".join(raw)
    if not together.isascii():
        return None
    if not url or (b"%" not in together and b"+" not in together):
        return raw
    keys = list(map(decoded_key, raw))
    try:
        b"\n".join(keys).decode()
    except UnicodeDecodeError:
        return None
    return keys


def _minutes(texts: set[bytes]) -> dict[bytes, int] | None:
    """Seconds since 1970 by minute; None where one is no date."""
    minutes = {text: seconds for text in texts if (seconds := _minute(text)) is not None}
    return minutes if len(minutes) == len(texts) else None


@lru_cache(maxsize=65536)
def _minute(text: bytes) -> int | None:
    return parsed_seconds(f"{text.decode()}:00")


@lru_cache(maxsize=4096)
def _template(before: bytes, after: bytes) -> EntryTemplate | None:
    return template_of_parts(before, after, with_owner=True)
