"""An S3 client that writes down what it may expect, and looks whether it is so."""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from typing import Any
from urllib.parse import quote, urlsplit

from tests.crash.points.ledger import Difference, Ledger, State, Upload, Value

BUCKET = "bucket"
PATIENCE_SECONDS = 60.0


class Interrupted(Exception):
    """The connection ended before the answer: whether it was done nobody knows."""


class SentAway(Interrupted):
    """503: it may be tried again."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """Each request has a connection of its own, so that any worker may take it. Writes raise Interrupted."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self.url = url
        self.ledger = ledger
        self.on_answer: Callable[[], None] = self.ignore

    @staticmethod
    def ignore() -> None:
        """Nobody wants to know that there was an answer."""

    def ask(self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """One request and its whole answer."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, f"/{BUCKET}/{target}", body, dict(headers or {}))
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, headers, response.read())
            self.on_answer()
            return answer
        except (ConnectionError, http.client.HTTPException) as error:
            raise Interrupted(repr(error)) from error
        finally:
            connection.close()

    # Writes

    def put(self, key: str, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        value = Value.of(content)
        self.ledger.trying(key, value)
        answer = self._done(self.ask("PUT", quote(key), content, headers))
        _same("the ETag of a PUT", answer.headers["etag"], value.etag)
        self.ledger.is_now(key, value)

    def copy(self, source: str, key: str) -> None:
        (value,) = self.ledger.may_be(source)
        assert value is not None
        self.ledger.trying(key, value)
        answer = self._done(self.ask("PUT", quote(key), headers={"x-amz-copy-source": f"/{BUCKET}/{quote(source)}"}))
        _same("the ETag of a copy", _text(answer.body, "ETag"), value.etag)
        self.ledger.is_now(key, value)

    def delete(self, key: str) -> None:
        self.ledger.trying(key, None)
        self._done(self.ask("DELETE", quote(key)), 204)
        self.ledger.is_now(key, None)

    def delete_many(self, keys: list[str]) -> None:
        for key in keys:
            self.ledger.trying(key, None)
        listed = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
        body = f"<Delete>{listed}</Delete>".encode()
        answer = self._done(self.ask("POST", "?delete", body, {"content-md5": _base64_md5(body)}))
        for key in keys:
            if f"<Deleted><Key>{key}</Key>".encode() not in answer.body:
                raise Difference(f"{key} was not deleted: {answer.body!r}")
            self.ledger.is_now(key, None)

    def create(self, key: str) -> str:
        """An upload's id."""
        answer = self._done(self.ask("POST", f"{quote(key)}?uploads"))
        upload_id = _text(answer.body, "UploadId")
        self.ledger.uploads[upload_id] = Upload(key)
        return upload_id

    def part(self, upload_id: str, number: int, content: bytes) -> None:
        upload, part = self.ledger.uploads[upload_id], Value.of(content)
        upload.trying(number, part)
        answer = self._done(self.ask("PUT", self._of(upload_id, f"partNumber={number}"), content))
        _same("the ETag of a part", answer.headers["etag"], part.etag)
        upload.is_now(number, part)

    def complete(self, upload_id: str, headers: Mapping[str, str] | None = None) -> None:
        """Of all parts, each of which is known."""
        upload = self.ledger.uploads[upload_id]
        value = upload.value()
        upload.completing = value if headers is None else None  # with a condition it is the origin that makes it so
        self.ledger.trying(upload.key, value)
        upload.may_be_over = True
        upload.may_end_later = headers is not None
        listed = [f"<PartNumber>{number}</PartNumber><ETag>{one[-1].etag}</ETag>" for number, one in _known(upload)]
        body = "".join(["<CompleteMultipartUpload>", *(f"<Part>{one}</Part>" for one in listed)])
        body += "</CompleteMultipartUpload>"
        answer = self._done(self.ask("POST", self._of(upload_id), body.encode(), headers))
        _same("the ETag of a Complete", _text(answer.body, "ETag"), value.etag)
        self.ledger.is_now(upload.key, value)
        upload.may_be_open = False
        upload.completing = None

    def inherit(self, upload_id: str, key: str) -> None:
        """Somebody has begun an upload, and has not heard of it."""
        self.ledger.uploads.setdefault(upload_id, Upload(key))

    def abort(self, upload_id: str) -> None:
        """Also of one that is over, when nobody knows."""
        upload = self.ledger.uploads[upload_id]
        may_be_over, upload.may_be_over = upload.may_be_over, True
        answer = self.ask("DELETE", self._of(upload_id))
        if not (answer.status == 404 and may_be_over):
            self._done(answer, 204)
        upload.may_be_open = False

    @contextmanager
    def half_put(self, key: str, content: bytes) -> Iterator[None]:
        """Half of an object is sent, and no more while this lasts: it is never to be seen."""
        self.ledger.may_be(key)
        address = urlsplit(self.url)
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS) as connection:
            head = f"PUT /{BUCKET}/{quote(key)} HTTP/1.1\r\nHost: {address.netloc}\r\n"
            head += f"Content-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content[: len(content) // 2])
            yield

    def _of(self, upload_id: str, parameters: str = "") -> str:
        key = quote(self.ledger.uploads[upload_id].key)
        return f"{key}?{parameters}{'&' if parameters else ''}uploadId={quote(upload_id, safe='')}"

    def _done(self, answer: Answer, status: int = 200) -> Answer:
        if answer.status == 503:
            raise SentAway(f"503 {answer.body!r}")
        if answer.status != status:
            raise Difference(f"{answer.status}, not {status}: {answer.body!r}")
        return answer

    # Looks

    def check(self, key: str) -> None:
        """GET, HEAD and LIST say the same, and it is one of what may be there."""
        found = self.found(key)
        self.ledger.saw(key, found)
        head = self.with_retries("HEAD", quote(key))
        if found is None:
            _same(f"HEAD of {key}", head.status, 404)
        else:
            said = (head.status, head.headers.get("etag"), head.headers.get("content-length"))
            _same(f"HEAD of {key}", said, (200, found.etag, str(len(found.content))))
        listed = self.listed(key).get(key)
        _same(f"LIST of {key}", listed, None if found is None else (found.etag, len(found.content)))

    def found(self, key: str) -> State:
        answer = self.with_retries("GET", quote(key))
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise Difference(f"GET of {key}: {answer.status} {answer.body[:500]!r}")
        return Value(answer.body, answer.headers["etag"])

    def listed(self, prefix: str) -> dict[str, tuple[str, int]]:
        """ETag and size of each key, of all pages."""
        found: dict[str, tuple[str, int]] = {}
        token = ""
        while True:
            answer = self.with_retries("GET", f"?list-type=2&prefix={quote(prefix, safe='')}{token}")
            _same(f"LIST of {prefix}", answer.status, 200)
            for entry in re.findall(r"<Contents>(.*?)</Contents>", answer.body.decode(), re.DOTALL):
                said = {name: _text(entry.encode(), name) for name in ("Key", "ETag", "Size")}
                found[said["Key"]] = (said["ETag"], int(said["Size"]))
            following = _text(answer.body, "NextContinuationToken")
            if not following:
                return found
            token = f"&continuation-token={quote(following, safe='')}"

    def check_upload(self, upload_id: str) -> None:
        """ListParts says what may be there."""
        upload = self.ledger.uploads[upload_id]
        answer = self.with_retries("GET", self._of(upload_id))
        if answer.status == 404:
            upload.saw(None)
            return
        _same("ListParts", answer.status, 200)
        listed = {}
        for entry in re.findall(rb"<Part>(.*?)</Part>", answer.body, re.DOTALL):
            listed[int(_text(entry, "PartNumber"))] = (_text(entry, "ETag"), int(_text(entry, "Size")))
        upload.saw(listed)

    def with_retries(self, method: str, target: str) -> Answer:
        """A read, again and again until it is answered."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = self.ask(method, target)
            except Interrupted:
                answer = None
            if answer is not None and answer.status < 500:
                return answer
            if time.monotonic() > deadline:
                raise Difference(f"no answer to {method} {target}: {answer}")
            time.sleep(0.02)


def _known(upload: Upload) -> list[tuple[int, list[Value]]]:
    return [(number, [one for one in states if one is not None]) for number, states in sorted(upload.parts.items())]


def _same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Difference(f"{what}: {found}, not {expected}")


def _text(body: bytes, name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>".encode(), body, re.DOTALL)
    return unescape(found[1].decode()) if found else ""


def _base64_md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
