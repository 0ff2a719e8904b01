"""The XML documents of requests, and of the answers that the gateway writes itself (S3 API, schemas of the actions).

They are read within bounds: no DTD, no entities, no more elements than the document's schema can have. Elements are
recognised by their local names, because clients and origins differ about the namespace.

Requests are parsed in steps (`Steps`), between which the event loop does other work: a large document takes ten to
thirty milliseconds for each MiB.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter, lt
from typing import NamedTuple, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers.expat import ExpatError, ParserCreate

from gateway.core.steps import Steps, at_once, each
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import quote, unquote
from gateway.s3.requests import PARTS_COUNT_MAX, part_number
from gateway.s3.xml_writer import document, element

ANSWER_SIZE_BYTES_MAX = 1024**2

_DEPTH_MAX = 8
_STEP_BYTES = 16 * 1024

_TOKEN_BYTES_MAX = 32 * 1024
"""The longest tag with its attributes, or comment. Expat reads an unfinished one again from its beginning, and
delivers it whole. Text has no such limit: it is delivered in pieces."""


def error_code_of(body: bytes, size_bytes_max: int = ANSWER_SIZE_BYTES_MAX) -> str | None:
    """Return the code of an `<Error>` document, with or without white space before it; None when it is anything else.

    Needed where status 200 does not mean success: CompleteMultipartUpload, CopyObject, UploadPartCopy.
    """
    root = _parse_answer(body, size_bytes_max)
    if root is None or local_name(root) != "Error":
        return None
    return (child_text(root, "Code") or "").strip()


def text_of(body: bytes, name: str, size_bytes_max: int = ANSWER_SIZE_BYTES_MAX) -> str | None:
    """Return the first text of an element of that local name; None when there is none, or the document is not XML."""
    root = _parse_answer(body, size_bytes_max)
    if root is None:
        return None
    return next((node.text or "" for node in root.iter() if local_name(node) == name), None)


def _parse_answer(body: bytes, size_bytes_max: int) -> Element | None:
    if len(body) > size_bytes_max:
        return None
    return parse_bounded(body.lstrip(), size_bytes_max // 16)


class _Refused(Exception):
    """More elements, or deeper ones, than the document may have, or a DTD, with which entities come."""


class _BoundedTree(TreeBuilder):
    """Builds a tree and gives up beyond `elements_max`: a megabyte of `<a/>` would become a hundred of objects."""

    def __init__(self, elements_max: int, kept: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._left = elements_max
        self._kept = kept
        self._depth = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> Element:
        self._left -= 1
        self._depth += 1
        if self._left < 0 or self._depth > _DEPTH_MAX:
            raise _Refused
        return super().start(tag, {name: attrs[name] for name in self._kept & attrs.keys()})

    def end(self, tag: str, /) -> Element:
        self._depth -= 1
        return super().end(tag)


class _RequestTree(_BoundedTree):
    """Gives up beyond `entries_max` children of the root, and where one of them has more elements than any may have."""

    def __init__(self, entries_max: int) -> None:
        super().__init__(1)
        self._entries_left = entries_max

    def start(self, tag: str, attrs: dict[str, str], /) -> Element:
        if self._depth == 1:
            self._entries_left -= 1
            self._left = 1 + _ELEMENTS_PER_ENTRY_MAX if self._entries_left >= 0 else 0
        return super().start(tag, attrs)


def _refuse(*_: object) -> NoReturn:
    raise _Refused


def parse_bounded(body: bytes, elements_max: int) -> Element | None:
    """Return the root element; None for everything that is not well-formed, too large, or has a DTD or entities.

    Names stay as they are written, prefix included. A parser that puts namespaces in their place copies the namespace
    for every element and attribute: half a megabyte, made of one long namespace and many names, takes it a minute.
    """
    return at_once(parse_in_steps(body, elements_max))


def parse_in_steps(body: bytes, elements_max: int, kept: frozenset[str] = frozenset()) -> Steps[Element | None]:
    """Parse a document as `parse_bounded` does, in steps. The tree has only those attributes whose names are `kept`."""
    return _parse(body, _BoundedTree(elements_max, kept))


def _parse(body: bytes, tree: _BoundedTree) -> Steps[Element | None]:
    parser = ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = tree.start, tree.end
    parser.CharacterDataHandler = tree.data
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = parser.ExternalEntityRefHandler = _refuse
    rest, parsed_bytes = memoryview(body), 0
    try:
        while len(rest) > _STEP_BYTES:
            parser.Parse(rest[:_STEP_BYTES], False)
            rest, parsed_bytes = rest[_STEP_BYTES:], parsed_bytes + _STEP_BYTES
            if parsed_bytes - parser.CurrentByteIndex > _TOKEN_BYTES_MAX:
                return None
            yield
        parser.Parse(rest, True)
        return tree.close()
    except (ExpatError, _Refused, ValueError, LookupError):
        return None


def local_name(node: Element) -> str:
    """Return the element's name without its namespace's prefix."""
    return node.tag.rpartition(":")[2]


def child_text(node: Element, name: str) -> str | None:
    """Return the text of the first child of that local name."""
    return next((child.text or "" for child in node if local_name(child) == name), None)


OBJECTS_COUNT_MAX = 1000

DELETE_SIZE_BYTES_MAX = 8 * 1024**2
DELETE_RESULT_BYTES_MAX = 8 * 1024**2
COMPLETE_SIZE_BYTES_MAX = 8 * 1024**2
_ELEMENTS_PER_ENTRY_MAX = 16
_RESULT_END = re.compile(rb"</(?:\w++:)?DeleteResult\s*+>\s*+\Z")
_EMPTY_RESULT = re.compile(rb"<DeleteResult([^<>/]*+)/>\s*+\Z")
_PART_NUMBER = re.compile(r"\s*(-?\d{1,9})\s*", re.ASCII)


class DeleteEntry(NamedTuple):
    """One object to delete. `extras` are conditions kept as they came (LastModifiedTime, Size: directory buckets)."""

    key: str
    version_id: str | None = None
    etag: str | None = None
    extras: tuple[tuple[str, str], ...] = ()


class DeleteRequest(NamedTuple):
    """The body of DeleteObjects."""

    objects: Sequence[DeleteEntry]
    quiet: bool


class DeleteError(NamedTuple):
    """An object that DeleteObjects could not delete."""

    key: str
    version_id: str | None
    code: str
    message: str


class CompletedPart(NamedTuple):
    """A part that an upload is completed with. `etag` is quoted; `checksums` maps an algorithm (`crc32`) to base64."""

    number: int
    etag: str
    checksums: Mapping[str, str]


# --- from clients ---------------------------------------------------------------------------------------------------


def parse_delete(body: bytes, size_bytes_max: int = DELETE_SIZE_BYTES_MAX) -> Steps[DeleteRequest]:
    """Return the objects to delete, 1 to 1,000 of them; S3Error MalformedXML or MaxMessageLengthExceeded."""
    root = yield from _parse_request(body, "Delete", size_bytes_max, OBJECTS_COUNT_MAX)
    if any(local_name(child) not in ("Object", "Quiet") for child in root):
        raise s3_error("MalformedXML")
    entries = yield from each(_delete_entry, [child for child in root if local_name(child) == "Object"])
    if not 1 <= len(entries) <= OBJECTS_COUNT_MAX:
        raise s3_error("MalformedXML")
    return DeleteRequest(entries, quiet=(child_text(root, "Quiet") or "").strip().lower() == "true")


def _delete_entry(node: Element) -> DeleteEntry:
    """One `<Object>`, refused unless it can be read in one way only: the origin must not see another key than we do."""
    fields = {local_name(child): child.text or "" for child in node}
    ambiguous = len({name.lower() for name in fields}) != len(node) or any(len(child) for child in node)
    key = fields.pop("Key", "")
    if not key or ambiguous:
        raise s3_error("MalformedXML")
    version_id, etag = fields.pop("VersionId", None), fields.pop("ETag", None)
    return DeleteEntry(key, version_id or None, etag or None, tuple(fields.items()))


def parse_complete_multipart_upload(
    body: bytes, size_bytes_max: int = COMPLETE_SIZE_BYTES_MAX
) -> Steps[list[CompletedPart]]:
    """Return the parts of a CompleteMultipartUpload in ascending order.

    Raises S3Error: MalformedXML, MaxMessageLengthExceeded, InvalidArgument (part number), InvalidPartOrder.
    """
    root = yield from _parse_request(body, "CompleteMultipartUpload", size_bytes_max, PARTS_COUNT_MAX)
    parts = list(filter(None, (yield from each(_completed_part, list(root)))))
    if not parts:
        raise s3_error("MalformedXML")
    numbers = list(map(attrgetter("number"), parts))
    if not all(map(lt, numbers, numbers[1:])):
        raise s3_error("InvalidPartOrder")
    return parts


def _completed_part(node: Element) -> CompletedPart | None:
    """None: it is something else."""
    if local_name(node) != "Part":
        return None
    fields = {local_name(child): child.text or "" for child in node}
    number = _PART_NUMBER.fullmatch(fields.get("PartNumber", ""))
    etag = fields.get("ETag", "").strip()
    if number is None or not etag:
        raise s3_error("MalformedXML")
    checksums = {
        name.removeprefix("Checksum").lower(): value.strip()
        for name, value in fields.items()
        if name.startswith("Checksum") and name != "ChecksumType" and value.strip()
    }
    return CompletedPart(part_number("PartNumber", number[1]), quote(etag), checksums)


def _parse_request(body: bytes, root_name: str, size_bytes_max: int, entries_max: int) -> Steps[Element]:
    if len(body) > size_bytes_max:
        raise s3_error("MaxMessageLengthExceeded", MaxMessageLengthBytes=str(size_bytes_max))
    # A few more than entries: what else the document says.
    root = yield from _parse(body, _RequestTree(entries_max + _ELEMENTS_PER_ENTRY_MAX))
    if root is None or local_name(root) != root_name:
        raise s3_error("MalformedXML")
    return root


# --- to clients and the origin --------------------------------------------------------------------------------------


def complete_multipart_upload_result(bucket: str, key: str, etag: str, location: str | None = None) -> bytes:
    """Return the success document of CompleteMultipartUpload; `etag` with or without quotes."""
    of_object = _elements(Bucket=bucket, Key=key, ETag=quote(etag))
    return document("CompleteMultipartUploadResult", element("Location", location or f"/{bucket}/{key}") + of_object)


def complete_multipart_upload_document(parts: Sequence[CompletedPart]) -> Steps[bytes]:
    def written(part: CompletedPart) -> str:
        sums = {f"Checksum{algorithm.upper()}": value for algorithm, value in part.checksums.items()}
        return f"<Part>{_elements(PartNumber=str(part.number), ETag=quote(part.etag), **sums)}</Part>"

    return document("CompleteMultipartUpload", "".join((yield from each(written, parts))))


def delete_request_document(request: DeleteRequest) -> bytes:
    objects = [
        f"<Object>{_elements(Key=one.key, VersionId=one.version_id, ETag=one.etag, **dict(one.extras))}</Object>"
        for one in request.objects
    ]
    return document("Delete", "".join(objects) + _elements(Quiet="true" if request.quiet else None))


def _elements(**texts: str | None) -> str:
    """Return an element for each text that there is."""
    return "".join([element(name, text) for name, text in texts.items() if text is not None])


def insert_delete_results(result: bytes, errors: Sequence[DeleteError], deleted: Sequence[str] = ()) -> bytes:
    """Add errors and deleted keys to a `<DeleteResult>`, the rest unchanged. ValueError if it is no such document."""
    entries = [f"<Deleted>{element('Key', key)}</Deleted>" for key in deleted]
    for one in errors:
        fields = _elements(Key=one.key, VersionId=one.version_id, Code=one.code, Message=one.message)
        entries.append(f"<Error>{fields}</Error>")
    added = "".join(entries).encode()
    end = _RESULT_END.search(result)
    if end is not None:
        return result[: end.start()] + added + result[end.start() :]
    empty = _EMPTY_RESULT.search(result)
    if empty is None:
        raise ValueError("not a DeleteResult document")
    return result[: empty.start()] + b"<DeleteResult" + empty[1] + b">" + added + b"</DeleteResult>"


def entries_left(result: bytes, asked: Collection[DeleteEntry]) -> Steps[frozenset[DeleteEntry]]:
    """Return the entries that a `<DeleteResult>` reports as refused, or all of them for any other document."""
    root = yield from _parse(result, _BoundedTree(1 + OBJECTS_COUNT_MAX * _ELEMENTS_PER_ENTRY_MAX))
    if root is None or local_name(root) != "DeleteResult":
        return frozenset(asked)
    errors = [node for node in root if local_name(node) == "Error"]
    refused = {(child_text(node, "Key"), child_text(node, "VersionId")) for node in errors}
    # What an origin calls the version of a key that was asked for without one is its own matter.
    named = {(entry.key, entry.version_id) for entry in asked if entry.version_id is not None}
    plain = {key for key, _ in refused - named}
    return frozenset(
        entry
        for entry in asked
        if (entry.key in plain if entry.version_id is None else (entry.key, entry.version_id) in refused)
    )


RESULT_SIZE_BYTES_MAX = 64 * 1024
"""More than any of them takes."""


def says_nothing_yet(document: bytes) -> bool:
    """Return whether a document so far has only keep-alive white space, with or without the prolog."""
    return not without_prolog(document)


def without_prolog(document: bytes) -> bytes:
    """Return a document without its prolog and leading white space, which were sent before."""
    document = document.lstrip()
    return document.partition(b"?>")[2].lstrip() if document.startswith(b"<?xml") else document


def etag_of_result(document: bytes) -> str | None:
    """Return the quoted ETag of the object that was made; None for an error, behind a 200 too, or where none is named.

    Some origins leave the quotes out here, and have them in HEAD.
    """
    if error_code_of(document) is not None:
        return None
    etag = unquote(text_of(document, "ETag") or "")
    return quote(etag) if etag else None
