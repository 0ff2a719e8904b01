"""Records as the `<Contents>` of a listing: the loop that a page's time goes into, so no object per key."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote_from_bytes

from gateway.metadata.listing.pages import Listed
from gateway.metadata.listing.records import (
    FIXED,
    PARTS_SHIFT,
    SIZE_MASK,
    TWO_DIGITS,
    minute_text,
    odd_date_and_etag,
)
from gateway.s3.list_result import EntryForm
from gateway.s3.xml_writer import encode_list_key, escape

_UNRESERVED = bytes(range(48, 58)) + bytes(range(65, 91)) + bytes(range(97, 123)) + b"-_.~/"
_NEEDS_NO_XML = bytes(code for code in range(32, 127) if code not in b'&<>"')


def contents_xml(listed: Sequence[Listed], forms: Sequence[EntryForm], *, url: bool, owner: bool) -> str:
    """All of them; `forms` by number. IndexError when a record names a form that is not there."""
    ends = [_end(form, owner=owner) for form in forms]
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
    date, etag = map(escape, odd_date_and_etag(record))
    return (
        f"<Contents><Key>{text}</Key><LastModified>{date}</LastModified><ETag>{etag}</ETag>"
        f"{before}<Size>{size_bytes}</Size>{after}</Contents>"
    )


def _end(form: EntryForm, *, owner: bool) -> tuple[str, str]:
    return form.before_size, ((form.owner or "") if owner else "") + form.after_size


def _key_texts(keys: list[bytes], *, url: bool) -> list[str]:
    """Each as `encoded`. Whether any of them needs care is asked of all at once: in most pages none does."""
    together = b"\n".join(keys)
    if together.translate(None, _UNRESERVED if url else _NEEDS_NO_XML) == b"\n" * (len(keys) - 1):
        return together.decode().split("\n") if keys else []
    return [encoded(key, url=url) for key in keys]
