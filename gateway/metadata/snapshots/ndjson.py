r"""Snapshots as newline-delimited JSON: a line about the snapshot, then one for every object. Pure.

{"snapshot": 1, "prefix": "s3://bucket/prefix", …}
{"key": "prefix/a", "etag": "\"…\"", "size": 123, "last_modified": "2026-01-02T03:04:05.000Z"}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.core.errors import ForebayError
from gateway.metadata.snapshots.store import TIME_MAX, Manifest
from gateway.policy.slots import Prefix
from gateway.s3.headers import format_iso_date, parse_iso_date
from gateway.s3.list_result import EntryTemplate, ListedEntry, checked_template

VERSION = 1
LINE_BYTES_MAX = 64 * 1024
HEADER_BYTES_MAX = 16 * 2**20
_KEY_BYTES_MAX = 1024
_ETAG_CHARACTERS_MAX = 1024
_SIZE_BYTES_MAX = 2**48 - 1
_USUAL = EntryTemplate("", "", "<StorageClass>STANDARD</StorageClass>")
_OF_HEADER = frozenset(
    {"snapshot", "name", "prefix", "origin", "objects", "bytes", "started_at", "ended_at", "digest", "forms"}
)
_OF_OBJECT = frozenset({"key", "etag", "size", "last_modified", "form"})


class BadLine(ForebayError):
    """A line of an import is not what it should be; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line. If `objects` or `digest` is None, the reader compares nothing."""

    prefix: Prefix
    origin: str
    started_at: float | None
    ended_at: float | None
    objects: int | None
    digest: str | None
    templates: Sequence[EntryTemplate]


def header_line(manifest: Manifest, templates: Sequence[EntryTemplate]) -> bytes:
    """Return an export's first line; `forms` are what objects' lines give by number, none of them the first."""
    return _line({"snapshot": VERSION, **manifest.document(), "forms": [list(template) for template in templates]})


def object_lines(entries: Sequence[ListedEntry], templates: Sequence[EntryTemplate]) -> bytes:
    numbers = {template: number for number, template in enumerate(templates)}
    return b"".join([_object_line(entry, numbers[entry.template]) for entry in entries])


def _object_line(entry: ListedEntry, template: int) -> bytes:
    document: dict[str, Any] = {
        "key": entry.key.decode(),
        "etag": entry.etag,
        "size": entry.size_bytes,
        "last_modified": entry.modified,
    }
    return _line(document | ({"form": template} if template else {}))


def _line(document: Any) -> bytes:
    return orjson.dumps(document) + b"\n"


class LineReader:
    """Turns the pieces of an import into its objects, whatever way the pieces cut it. Empty lines are passed over.

    `header` is there once the first line has come; `number` is that of the line read last.
    """

    def __init__(self) -> None:
        self.header: Header | None = None
        self.number = 0
        self._rest = b""
        self._usual_date = ""

    def feed(self, piece: bytes) -> Iterator[tuple[int, ListedEntry]]:
        """Line number and object of the lines that end in this piece; BadLine."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            yield from self._read(line)
        self._check_length(self._rest, self.number + 1)

    def end(self) -> Iterator[tuple[int, ListedEntry]]:
        """Yield the last line, where it has no line feed; BadLine also when there was no line at all."""
        rest, self._rest = self._rest, b""
        yield from self._read(rest)
        if self.header is None:
            raise BadLine('line 1: there must be a first line such as {"snapshot": 1, "prefix": "s3://bucket/prefix"}')

    def _read(self, line: bytes) -> Iterator[tuple[int, ListedEntry]]:
        self.number += 1
        self._check_length(line, self.number)
        if not line.strip():
            return
        try:
            document = orjson.loads(line)
            if not isinstance(document, dict):
                raise ValueError("not a JSON object")
            if self.header is None:
                self.header = _header(document)
                self._usual_date = format_iso_date(self.header.ended_at or 0.0).removesuffix("Z") + ".000Z"
            else:
                yield self.number, _entry(document, self.header, self._usual_date)
        except ValueError as error:
            raise BadLine(f"line {self.number}: {error}") from None

    def _check_length(self, line: bytes, number: int) -> None:
        length_max = LINE_BYTES_MAX if self.header is not None else HEADER_BYTES_MAX
        if len(line) > length_max:
            raise BadLine(f"line {number}: longer than {length_max} bytes")


def _header(document: dict[str, Any]) -> Header:
    _refuse_others(document, _OF_HEADER)
    if document.get("snapshot") != VERSION:
        raise ValueError(f'the first line must have "snapshot": {VERSION}, the version of the format that is read here')
    if not isinstance(document.get("prefix"), str):
        raise ValueError('"prefix" must be s3://bucket/prefix')
    prefix = Prefix.parse(document["prefix"])
    if not prefix.bucket:
        raise ValueError('"prefix" must name a bucket: s3://bucket/prefix')
    return Header(
        prefix,
        _optional(document, "origin", str) or "",
        _time(document, "started_at"),
        _time(document, "ended_at"),
        _optional(document, "objects", int),
        _optional(document, "digest", str),
        [checked_template(template) for template in _optional(document, "forms", list) or []] or [_USUAL],
    )


def _entry(document: dict[str, Any], header: Header, usual_date: str) -> ListedEntry:
    _refuse_others(document, _OF_OBJECT)
    key, etag, size_bytes = document.get("key"), document.get("etag"), document.get("size")
    if not isinstance(key, str) or not 1 <= len(key.encode()) <= _KEY_BYTES_MAX:
        raise ValueError(f'"key" must be a key of 1 to {_KEY_BYTES_MAX} bytes')
    if not key.startswith(header.prefix.key_prefix):
        raise ValueError(f"the key {key!r} does not begin with {header.prefix.key_prefix!r}")
    if not isinstance(etag, str) or not 1 <= len(etag) <= _ETAG_CHARACTERS_MAX or not _is_header_value(etag):
        raise ValueError('"etag" must be an ETag, as the bucket gives it')
    if type(size_bytes) is not int or not 0 <= size_bytes <= _SIZE_BYTES_MAX:
        raise ValueError('"size" must be a number of bytes')
    modified = document.get("last_modified", usual_date)
    if not isinstance(modified, str) or parse_iso_date(modified) is None:
        raise ValueError('"last_modified" must be a date such as "2026-01-02T03:04:05.000Z"')
    template = document.get("form", 0)
    if type(template) is not int or not 0 <= template < len(header.templates):
        raise ValueError('"form" must be the number of one of the first line\'s "forms"')
    return ListedEntry(key.encode(), modified, etag, size_bytes, header.templates[template])


def _is_header_value(text: str) -> bool:
    return text.isprintable() and all(ord(character) < 256 for character in text)


def _optional(document: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = document.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ValueError(f"{name!r} has a value of the wrong kind")
    return value


def _time(document: dict[str, Any], name: str) -> float | None:
    value: float | None = _optional(document, name, (int, float))
    if value is not None and not 0 <= value <= TIME_MAX:
        raise ValueError(f"{name!r} must be seconds since 1970, before the year 10000")
    return value


def _refuse_others(document: dict[str, Any], known: frozenset[str]) -> None:
    others = sorted(document.keys() - known)
    if others:
        raise ValueError(f"unknown: {', '.join(map(repr, others))}")
