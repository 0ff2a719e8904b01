"""Calls an ASGI application as a signed S3 client would, without a socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.cache_label import cache_label

HOST = "127.0.0.1:9000"

ACCESS_KEY_ID = "AKIDEXAMPLE"
SECRET_ACCESS_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


READ_LOCALLY: Callable[..., Awaitable[tuple[int, str, bytes] | None]] | None = None
"""Reads what a GET is about to ask for from the gateway's files: status, ETag and bytes; None: they do not give it."""


@dataclass(frozen=True)
class Answer:
    """What came back. `complete` is False when the application stopped before the end of the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs the payload hash that the headers give, right or wrong, instead of computing it."""

    given_hash: str | None = None

    def payload(self, request: AWSRequest) -> str:
        return self.given_hash or str(super().payload(request))


def signed_headers(
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    access_key_id: str = ACCESS_KEY_ID,
    secret_access_key: str = SECRET_ACCESS_KEY,
    session_token: str | None = None,
    host: str = HOST,
) -> dict[str, str]:
    """The headers as botocore signs them; it is the reference that the gateway is held against."""
    request = AWSRequest(method, f"http://{host}{target}", dict(headers), body)
    signer = _Signer(Credentials(access_key_id, secret_access_key, session_token), "s3", "us-east-1")
    signer.given_hash = headers.get("x-amz-content-sha256")
    signer.add_auth(request)
    return {**dict(request.headers.items()), "Host": host}


async def call(
    app: Callable[..., Any],
    method: str,
    target: str,
    headers: Mapping[str, str] | None = None,
    body: bytes | Sequence[bytes] = b"",
    *,
    sign: bool = True,
    extensions: Mapping[str, Any] | None = None,
    before_piece: Callable[[], Awaitable[None]] | None = None,
    by_client: bool = True,
    **credentials: Any,
) -> Answer:
    """One request. A sequence as `body` arrives in those pieces, `before_piece` before each; `sign=False` sends the
    headers as given. `by_client`: and by no other node, which is not told why bytes were missing."""
    pieces = [body] if isinstance(body, bytes) else list(body)
    whole = b"".join(pieces)
    sent = {"Host": HOST, **(headers or {})}
    if sign:
        sent = signed_headers(method, target, headers or {}, whole, **credentials)
    if whole and "Content-Length" not in sent and "Transfer-Encoding" not in sent:
        sent["Content-Length"] = str(len(whole))
    conversation = _Conversation(pieces, before_piece)
    is_read_locally = READ_LOCALLY is not None and method == "GET" and sign and not whole
    locally = await READ_LOCALLY(app, target, headers or {}, credentials) if is_read_locally and READ_LOCALLY else None
    await app(_scope(method, target, sent, extensions), conversation.receive, conversation.send)
    found = conversation.answer()
    if by_client:
        cache_label(found)  # whatever a test asks: each miss has a reason, and nothing else has one
    if locally is not None:
        assert (found.status, found.headers["etag"], found.body) == locally, "a local read gave something else"
    return found


def _scope(
    method: str, target: str, headers: Mapping[str, str], extensions: Mapping[str, Any] | None
) -> dict[str, Any]:
    path, _, query = target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 9000),
        "extensions": dict(extensions or {}),
    }


class _Conversation:
    def __init__(self, pieces: Sequence[bytes], before_piece: Callable[[], Awaitable[None]] | None) -> None:
        self._before_piece = before_piece
        self._pieces = list(pieces) or [b""]
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._complete = False

    async def receive(self) -> dict[str, Any]:
        if not self._pieces:
            return {"type": "http.disconnect"}
        if self._before_piece is not None:
            await self._before_piece()
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")
            self._complete = not message.get("more_body", False)

    def answer(self) -> Answer:
        return Answer(self._status, self._headers, bytes(self._body), self._complete)
