"""Writers that save checkpoints: an upload in parts each, over a connection each, as fast as it is taken."""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from loadtests.harness.content import BUCKET
from loadtests.harness.signed_requests import Signer

_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes that every part has, and what is said of them."""

    content: bytes
    md5: bytes

    @classmethod
    def of(cls, content: bytes) -> Part:
        return cls(content, hashlib.md5(content, usedforsecurity=False).digest())


class Saver:
    """Saves one object after another over one connection, in steps. RuntimeError for any answer but 200.

    With `tells_md5` parts go with `Content-MD5`.
    """

    def __init__(self, address: tuple[str, int], part: Part, *, tells_md5: bool = False) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=300)
        self._signer = Signer("{}:{}".format(*address))
        self._part = part
        self._headers = {"content-md5": base64.b64encode(part.md5).decode()} if tells_md5 else {}
        self._path, self._upload_id, self._sent = "", "", 0

    def begin(self, key: str) -> None:
        """CreateMultipartUpload."""
        self._path, self._sent = f"/{BUCKET}/{key}", 0
        found = _UPLOAD_ID.search(self._ask("POST", self._path, "uploads="))
        if found is None:
            raise RuntimeError(f"no upload id for {key}")
        self._upload_id = found[1].decode()

    def send(self, parts: int) -> None:
        """UploadPart, one after another."""
        for _ in range(parts):
            self._sent += 1
            query = f"partNumber={self._sent}&uploadId={quote(self._upload_id, safe='')}"
            self._ask("PUT", self._path, query, self._part.content, self._headers)

    def complete(self) -> None:
        """CompleteMultipartUpload."""
        etag, numbers = self._part.md5.hex(), range(1, self._sent + 1)
        listed = "".join(f'<Part><PartNumber>{n}</PartNumber><ETag>"{etag}"</ETag></Part>' for n in numbers)
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        self._ask("POST", self._path, f"uploadId={quote(self._upload_id, safe='')}", document)

    def save(self, key: str, parts: int) -> None:
        """Return when all of it is acknowledged."""
        self.begin(key)
        self.send(parts)
        self.complete()

    def put(self, key: str, content: bytes) -> None:
        """PutObject."""
        self._ask("PUT", f"/{BUCKET}/{key}", "", content)

    def close(self) -> None:
        self._connection.close()

    def _ask(
        self, method: str, path: str, query: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> bytes:
        target = f"{path}?{query}" if query else path
        signed = self._signer.headers(method, path, query, "UNSIGNED-PAYLOAD")
        self._connection.request(method, target, body, signed | (headers or {}))
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")
        return content


def at_once(works: list[Callable[[], None]]) -> float:
    """Seconds until the last of them is done, each on a thread; raises what the first of them has raised."""
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - began
