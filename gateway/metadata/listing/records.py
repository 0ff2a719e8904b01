"""The index's record of an object: packed, unpacked, and as the `<Contents>` of a listing. Pure.

u32 seconds · u16 milliseconds · u16 number of the template · u48 size · u16 parts · 16 bytes MD5 · the rest

docs/on-disk-format.md is the reference.
"""

from __future__ import annotations

import re
import struct
from binascii import unhexlify
from calendar import timegm
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, repeat
from operator import add, lt
from time import gmtime, strftime
from urllib.parse import quote_from_bytes

import orjson

from gateway.core.errors import OriginBodyError
from gateway.metadata.listing.pages import END, Listed
from gateway.s3.list_result import (
    EntryTemplate,
    ListedEntry,
    ListedPage,
    decoded_key,
    parse_listed_page,
    template_of_parts,
)
from gateway.s3.xml_writer import encode_list_key, escape, escape_etag

FIXED = struct.Struct("<IHHQ16s")
SIZE_MASK = 2**48 - 1
PARTS_SHIFT = 48

OWN_TEMPLATE = 2**16 - 1
"""In place of the number of a template that has none: it stands in the record, behind the fixed part."""

_TEMPLATE_AT = 6
_OWN_LENGTH_BYTES = 4
_MD5_ETAG = re.compile(r'"([0-9a-f]{32})(?:-([1-9][0-9]{0,3}|10000))?"')
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)", re.ASCII)
_MILLISECONDS = re.compile(r"\.(\d{3})Z", re.ASCII)
_SECONDS_MAX = 2**32 - 1
_NO_DIGEST = bytes(16)


def pack(entry: ListedEntry, template: int) -> bytes:
    """Return the record of an entry whose template has that number."""
    seconds, milliseconds = _parsed_date(entry.modified)
    etag = _MD5_ETAG.fullmatch(entry.etag)
    if seconds is None or etag is None:
        odd = f"{entry.modified}\n{entry.etag}".encode()
        return FIXED.pack(0, 0, template, entry.size_bytes, _NO_DIGEST) + odd
    size_and_parts = entry.size_bytes | int(etag[2] or 0) << PARTS_SHIFT
    return FIXED.pack(seconds, milliseconds, template, size_and_parts, bytes.fromhex(etag[1]))


def unpack(key: bytes, record: bytes, templates: Sequence[EntryTemplate]) -> ListedEntry:
    """Unpack a record; raise IndexError when it names an unknown template."""
    modified, etag, size_bytes = version_of(record)
    return ListedEntry(key, modified, etag, size_bytes, templates[template_of(record)])


def version_of(record: bytes) -> tuple[str, str, int]:
    """Date, ETag and size."""
    return modified_of(record), *etag_and_size(record)


def etag_and_size(record: bytes) -> tuple[str, int]:
    """Return the version's ETag and size in bytes without unpacking the rest; raise struct.error for no record."""
    _, _, _, size, digest = FIXED.unpack_from(record)
    if len(record) > FIXED.size:
        return odd_date_and_etag(record)[1], size & SIZE_MASK
    if size > SIZE_MASK:
        return f'"{digest.hex()}-{size >> PARTS_SHIFT}"', size & SIZE_MASK
    return f'"{digest.hex()}"', size


def modified_of(record: bytes) -> str:
    """Return the object's date as it was listed."""
    seconds, milliseconds, _, _, _ = FIXED.unpack_from(record)
    if len(record) > FIXED.size:
        return odd_date_and_etag(record)[0]
    return f"{date_text(seconds)}.{milliseconds:03}Z"


def with_template(record: bytes, template: int) -> bytes:
    """Replace the number of a record's template."""
    return record[:_TEMPLATE_AT] + template.to_bytes(2, "little") + record[_TEMPLATE_AT + 2 :]


def without_template(record: bytes) -> bytes:
    record = plain(record)
    return record[:_TEMPLATE_AT] + record[_TEMPLATE_AT + 2 :]


def with_own_template(record: bytes, template: EntryTemplate) -> bytes:
    """Return the record with its template in it, for one that has no number."""
    packed = pack_template(template)
    own = len(packed).to_bytes(_OWN_LENGTH_BYTES, "little") + packed
    return with_template(record[: FIXED.size], OWN_TEMPLATE) + own + record[FIXED.size :]


def plain(record: bytes) -> bytes:
    """Return the record without a template in it."""
    if template_of(record) != OWN_TEMPLATE:
        return record
    return record[: FIXED.size] + record[_own_template_end(record) :]


def own_template(record: bytes) -> EntryTemplate:
    """Return the template in a record of the template OWN_TEMPLATE; ValueError when there is none."""
    return unpack_template(record[FIXED.size + _OWN_LENGTH_BYTES : _own_template_end(record)])


def numbered_here(
    listed: Sequence[tuple[bytes, bytes]], templates: Sequence[EntryTemplate]
) -> tuple[list[tuple[bytes, bytes]], list[EntryTemplate]]:
    """With numbers for the templates that are in records, behind those that there are; for a page."""
    numbers: dict[EntryTemplate, int] = {}
    found = list(listed)
    for index, (key, record) in enumerate(found):
        if template_of(record) == OWN_TEMPLATE:
            number = numbers.setdefault(own_template(record), len(templates) + len(numbers))
            found[index] = key, with_template(plain(record), number)
    return found, [*templates, *numbers]


def template_of(record: bytes) -> int:
    return int.from_bytes(record[_TEMPLATE_AT : _TEMPLATE_AT + 2], "little")


def templates_of(listed: Iterable[tuple[bytes, bytes]]) -> set[int]:
    return {
        int.from_bytes(number, "little") for number in {record[_TEMPLATE_AT : _TEMPLATE_AT + 2] for _, record in listed}
    }


def odd_date_and_etag(record: bytes) -> tuple[str, str]:
    """Return date and ETag as the origin sent them, from a record longer than `FIXED`."""
    date, _, etag = record[FIXED.size :].decode("utf-8", "replace").partition("\n")
    return date, etag


def _own_template_end(record: bytes) -> int:
    length = int.from_bytes(record[FIXED.size : FIXED.size + _OWN_LENGTH_BYTES], "little")
    return FIXED.size + _OWN_LENGTH_BYTES + length


def pack_template(template: EntryTemplate) -> bytes:
    return orjson.dumps(list(template))


def unpack_template(packed: bytes) -> EntryTemplate:
    """ValueError when these bytes are no template."""
    parts = orjson.loads(packed)
    if not isinstance(parts, list) or len(parts) != 3:
        raise ValueError("not a template of entries")
    return EntryTemplate(*parts)


def numbered(entries: Sequence[ListedEntry]) -> tuple[list[tuple[bytes, bytes]], list[EntryTemplate]]:
    """Keys and records with numbers into the list of templates that comes along, before the index has given any."""
    templates: dict[EntryTemplate, int] = {}
    listed = [(entry.key, pack(entry, templates.setdefault(entry.template, len(templates)))) for entry in entries]
    return listed, list(templates)


def date_text(seconds: int) -> str:
    """`2009-10-12T17:50:30`; S3 writes the fraction behind it."""
    return minute_text(seconds // 60) + TWO_DIGITS[seconds % 60]


TWO_DIGITS = [f"{number:02}" for number in range(60)]


@lru_cache(maxsize=65536)
def minute_text(minutes: int) -> str:
    """`2009-10-12T17:50:`, so many minutes after 1970 began: most objects share theirs with others."""
    return strftime("%Y-%m-%dT%H:%M:", gmtime(minutes * 60))


@lru_cache(maxsize=4096)
def parsed_seconds(text: str) -> int | None:
    """Seconds since 1970. None for what is no date, or none that `date_text` gives back to the letter."""
    found = _DATE.fullmatch(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = map(int, found.groups())
    if not 1 <= month <= 12 or year < 1970:
        return None
    seconds = timegm((year, month, day, hour, minute, second))
    return seconds if seconds <= _SECONDS_MAX and date_text(seconds) == text else None


def _parsed_date(text: str) -> tuple[int | None, int]:
    fraction = _MILLISECONDS.fullmatch(text, 19)
    if fraction is None:
        return None, 0
    return parsed_seconds(text[:19]), int(fraction[1])


_UNRESERVED = bytes(range(48, 58)) + bytes(range(65, 91)) + bytes(range(97, 123)) + b"-_.~/"
_NEEDS_NO_XML = bytes(code for code in range(32, 127) if code not in b'&<>"')


def contents_xml(listed: Sequence[Listed], templates: Sequence[EntryTemplate], *, url: bool, owner: bool) -> str:
    """All of them; `templates` by number. IndexError when a record names a template that is not there."""
    ends = [_end(template, owner=owner) for template in templates]
    unpack, fixed_bytes, minute = FIXED.unpack_from, FIXED.size, minute_text
    pieces = []
    for text, (_, record) in zip(_key_texts([key for key, _ in listed], url=url), listed, strict=True):
        seconds, milliseconds, number, size, digest = unpack(record)
        before, after = ends[number]
        if len(record) != fixed_bytes:
            pieces.append(_odd(text, record, before, size, after))
            continue
        parts = ""
        if size > SIZE_MASK:
            parts, size = f"-{size >> PARTS_SHIFT}", size & SIZE_MASK
        second = TWO_DIGITS[seconds % 60]
        fraction = f"{milliseconds:03}" if milliseconds else "000"
        pieces.append(
            f"<Contents><Key>{text}</Key><LastModified>{minute(seconds // 60)}{second}.{fraction}Z</LastModified>"
            f"<ETag>&quot;{digest.hex()}{parts}&quot;</ETag>{before}<Size>{size}</Size>{after}</Contents>"
        )
    return "".join(pieces)


def encoded(key: bytes, *, url: bool) -> str:
    """One key or common prefix as it stands in a listing."""
    return quote_from_bytes(key, safe="/-_.~") if url else encode_list_key(key.decode("utf-8", "replace"), url=False)


def _odd(text: str, record: bytes, before: str, size_bytes: int, after: str) -> str:
    """One whose date or ETag is not written as most are."""
    date, etag = odd_date_and_etag(record)
    return (
        f"<Contents><Key>{text}</Key><LastModified>{escape(date)}</LastModified><ETag>{escape_etag(etag)}</ETag>"
        f"{before}<Size>{size_bytes}</Size>{after}</Contents>"
    )


def _end(template: EntryTemplate, *, owner: bool) -> tuple[str, str]:
    return template.before_size, ((template.owner or "") if owner else "") + template.after_size


def _key_texts(keys: list[bytes], *, url: bool) -> list[str]:
    """Encode each as `encoded`. One test of all finds out whether any needs care: in most pages none does."""
    together = b"\n".join(keys)
    if together.translate(None, _UNRESERVED if url else _NEEDS_NO_XML) == b"\n" * (len(keys) - 1):
        return together.decode().split("\n") if keys else []
    return [encoded(key, url=url) for key in keys]


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


def packed_page(told: bytes | ListedPage, stop: bytes = END) -> PackedPage:
    """Return a page's keys before `stop`; its request had `encoding-type=url`, `fetch-owner` and no delimiter.

    Raises OriginBodyError as `parse_listed_page`.
    """
    if isinstance(told, bytes) and (quick := _quick(told, stop)) is not None:
        return quick
    page = parse_listed_page(told, with_owner=True) if isinstance(told, bytes) else told
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
