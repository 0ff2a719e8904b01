"""Which requests may be sent again when nobody knows whether the origin has carried them out: pure decisions.

A GET, a plain PUT of an object and a plain DELETE of one end the same however often they are carried out. A second
CreateMultipartUpload leaves an upload that nobody knows, and a second conditional PUT is answered 412 because the first
has been carried out: who writes a lock would believe that somebody else holds it.
"""

from __future__ import annotations

import re
from enum import Enum
from urllib.parse import unquote

from gateway.origin.client import OriginRequest

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_CONDITION = re.compile(r"(?:^|-)if-")
_SOURCE = "x-amz-copy-source"
_APPEND = "x-amz-write-offset-bytes"
_CONDITIONS_OF_ENTRIES = (b"ETag>", b"LastModifiedTime>", b"Size>")
"""Elements of a DeleteObjects document by which an object is deleted in a certain state only."""


class Repetition(Enum):
    """What comes of a request that is carried out twice."""

    HARMLESS = "harmless"
    """The same state, and the same answer."""

    LITTER = "litter"
    """Something is left over, or "there is no such thing (any more)" is the answer; no object is affected."""

    WRONG_ANSWER = "wrong answer"
    """The second is refused because the first was carried out, and the refusal says the opposite."""


def repetition(request: OriginRequest) -> Repetition:
    """What a repetition of `request` does."""
    if request.method in _READS:
        return Repetition.HARMLESS
    parameters = {name for name, _ in request.query}
    if _depends_on_state(request, parameters):
        return Repetition.WRONG_ANSWER
    if request.method == "POST":
        return Repetition.HARMLESS if parameters & {"delete", "select"} else Repetition.LITTER
    if request.key is None:  # a bucket is made or deleted, or one of its settings
        return Repetition.HARMLESS if parameters else Repetition.LITTER
    if request.method == "DELETE" and "uploadId" in parameters:
        return Repetition.LITTER
    return Repetition.HARMLESS


def is_slow(request: OriginRequest) -> bool:
    """Whether a healthy origin may take minutes: it lists, copies, puts parts together, or does much at a time."""
    if request.method == "GET":
        return request.key is None
    return (
        request.method == "POST"
        or _SOURCE in request.headers
        or any(name == "renameObject" for name, _ in request.query)
    )


def _depends_on_state(request: OriginRequest, parameters: set[str]) -> bool:
    """Whether the request is carried out only in a state that it ends itself."""
    if "renameObject" in parameters or _APPEND in request.headers:
        return True
    of_source = f"{_SOURCE}-if-"
    conditions = [name for name in request.headers if _CONDITION.search(name)]
    if any(not name.startswith(of_source) or _copies_onto_itself(request) for name in conditions):
        return True
    if request.method == "POST" and "delete" in parameters and isinstance(request.body, bytes):
        return any(element in request.body for element in _CONDITIONS_OF_ENTRIES)
    return False


def _copies_onto_itself(request: OriginRequest) -> bool:
    source = unquote(request.headers.get(_SOURCE, "").partition("?")[0], "latin-1")
    return source.lstrip("/").encode("latin-1") == f"{request.bucket}/{request.key}".encode()
