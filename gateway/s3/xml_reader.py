"""Reading XML within bounds: no DTD, no entities, no more elements than the document's schema can have.

Elements are recognised by their local names, because clients and origins differ about the namespace.
"""

from __future__ import annotations

from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers.expat import ExpatError, ParserCreate

ANSWER_SIZE_BYTES_MAX = 1024**2

_DEPTH_MAX = 8


def error_code_of(body: bytes, size_bytes_max: int = ANSWER_SIZE_BYTES_MAX) -> str | None:
    """The code of an `<Error>` document, with or without white space before it; None when it is anything else.

    Needed where status 200 does not mean success: CompleteMultipartUpload, CopyObject, UploadPartCopy.
    """
    root = _parse_answer(body, size_bytes_max)
    if root is None or local_name(root) != "Error":
        return None
    return (child_text(root, "Code") or "").strip()


def text_of(body: bytes, name: str, size_bytes_max: int = ANSWER_SIZE_BYTES_MAX) -> str | None:
    """The text of the first element of that local name; None when there is none, or the document is not XML."""
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

    def __init__(self, elements_max: int) -> None:
        super().__init__()
        self._left = elements_max
        self._depth = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> Element:
        self._left -= 1
        self._depth += 1
        if self._left < 0 or self._depth > _DEPTH_MAX:
            raise _Refused
        return super().start(tag, {})

    def end(self, tag: str, /) -> Element:
        self._depth -= 1
        return super().end(tag)


def _refuse(*_: object) -> NoReturn:
    raise _Refused


def parse_bounded(body: bytes, elements_max: int) -> Element | None:
    """The root element; None for everything that is not well-formed, too large, or has a DTD or entities.

    Names stay as they are written, prefix included. A parser that puts namespaces in their place copies the namespace
    for every element and attribute: half a megabyte, made of one long namespace and many names, takes it a minute.
    """
    tree = _BoundedTree(elements_max)
    parser = ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = tree.start, tree.end
    parser.CharacterDataHandler = tree.data
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = parser.ExternalEntityRefHandler = _refuse
    try:
        parser.Parse(body, True)
        return tree.close()
    except (ExpatError, _Refused, ValueError, LookupError):
        return None


def local_name(node: Element) -> str:
    """The element's name without its namespace's prefix."""
    return node.tag.rpartition(":")[2]


def child_text(node: Element, name: str) -> str | None:
    """The text of the first child of that local name."""
    return next((child.text or "" for child in node if local_name(child) == name), None)
