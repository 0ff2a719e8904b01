"""Requests to a directory as the origin, and what they leave in it."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from gateway.core.steps import at_once
from gateway.origin.client import StreamedBody
from gateway.origin.stores.directory.key_paths import OWN
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document
from tests.origin.origins import Answer, ask, xml
from tests.support.directory_origin import BUCKET, DirectoryOrigin

MEBIBYTE = 1024 * 1024
PART = 5 * MEBIBYTE
KEY = "dir/file"


def md5_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


async def put(nas: DirectoryOrigin, key: str, data: bytes | StreamedBody, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await ask(nas, "PUT", BUCKET, key, headers=named, body=data)


def code(answer: Answer) -> str | None:
    return xml(answer.body).findtext("Code")


def litter(nas: DirectoryOrigin) -> list[str]:
    """Return what lies in Forebay's own directory, without locks. A thread may be removing it meanwhile."""
    own = nas.bucket / OWN
    paths = (Path(folder, name) for folder, _, names in os.walk(own) for name in names)
    return sorted(str(path.relative_to(own)) for path in paths if path.is_file() and "locks" not in path.parts)


async def begin(nas: DirectoryOrigin, key: str = KEY, **headers: str) -> str:
    made = await ask(nas, "POST", BUCKET, key, query=[("uploads", None)], headers=headers)
    return xml(made.body).findtext("UploadId") or ""


async def part(nas: DirectoryOrigin, upload_id: str, number: int, data: bytes | StreamedBody, key: str = KEY) -> Answer:
    return await ask(nas, "PUT", BUCKET, key, query=[("partNumber", str(number)), ("uploadId", upload_id)], body=data)


async def complete(
    nas: DirectoryOrigin, upload_id: str, etags: dict[int, str], key: str = KEY, **headers: str
) -> Answer:
    listed = [CompletedPart(number, etag, {}) for number, etag in sorted(etags.items())]
    document = at_once(complete_multipart_upload_document(listed))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await ask(nas, "POST", BUCKET, key, query=[("uploadId", upload_id)], headers=named, body=document)


def cannot(*_: object) -> None:
    """Refuse as a file system does that does not know a call."""
    raise OSError(errno.EINVAL, "not supported")


def without_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file system has any."""

    def unsupported(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    for name in ("getxattr", "setxattr", "removexattr"):
        monkeypatch.setattr(os, name, unsupported)
