"""Writing XML by string formatting: ten times faster than a tree, and nothing to get wrong but escaping."""

from __future__ import annotations

import re
from urllib.parse import quote

PROLOG = '<?xml version="1.0" encoding="UTF-8"?>\n'

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
"""The namespace of every success document; `<Error>` has none."""

_NEEDS_CARE = re.compile('[&<>"\r\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]')
_FORBIDDEN = (*range(9), 11, 12, *range(14, 32), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)
_ENTITIES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord('"'): "&quot;", ord("\r"): "&#13;"}
_ESCAPED = dict.fromkeys(_FORBIDDEN, "\ufffd") | _ENTITIES
_ESCAPED_IN_LISTS = {code: f"&#x{code:x};" for code in _FORBIDDEN} | _ENTITIES


def escape(text: str) -> str:
    """`text` as XML character data. What XML 1.0 cannot carry (section 2.2) becomes U+FFFD."""
    if not _NEEDS_CARE.search(text):
        return text
    return text.translate(_ESCAPED)


def escape_etag(etag: str) -> str:
    """Escape an ETag, whose quotes are as a rule all that needs it."""
    return f"&quot;{escape(etag[1:-1])}&quot;" if etag[:1] == '"' == etag[-1:] and len(etag) > 1 else escape(etag)


def encode_list_key(value: str, url: bool) -> str:
    """Return a key, prefix or delimiter of a listing, ready to stand in the document.

    With `url` (`encoding-type=url`) it is percent-encoded with `/` kept and `+` as `%2B`, because botocore decodes with
    `unquote_plus`. Without, control characters become numeric references, as S3 writes them: XML 1.0 parsers refuse the
    document, which is better than a key that does not exist. Clients with such keys must ask for `encoding-type=url`.
    """
    if url:
        return quote(value, safe="/-_.~")
    if not _NEEDS_CARE.search(value):
        return value
    return value.translate(_ESCAPED_IN_LISTS)


def element(name: str, text: str) -> str:
    """`<name>text</name>`, the text escaped."""
    return f"<{name}>{escape(text)}</{name}>"


def document(root: str, children: str) -> bytes:
    """Return a success document: prolog, and `root` in S3's namespace around `children`, which is XML already."""
    return f'{PROLOG}<{root} xmlns="{NAMESPACE}">{children}</{root}>'.encode()
