"""The documents that answer CopyObject and CompleteMultipartUpload: what they say, or that they still say nothing."""

from __future__ import annotations

from gateway.s3.headers import quote, unquote
from gateway.s3.xml import error_code_of, text_of

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
