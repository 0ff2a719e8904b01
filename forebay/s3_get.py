"""GETs and HEADs of objects over HTTP, signed (SigV4), with the standard library alone."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import ssl
import time
from email.message import Message
from typing import NamedTuple
from urllib.parse import quote, urlsplit

ATTEMPTS_MAX = 6
TIMEOUT_SECONDS = 120.0
_NOTHING = hashlib.sha256(b"").hexdigest()


class Credentials(NamedTuple):
    """A key pair for the gateway."""

    access_key_id: str
    secret_access_key: str
    session_token: str = ""

    @classmethod
    def found(cls) -> Credentials | None:
        """Return those of the environment, else those that botocore finds if it is installed."""
        name, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if name and secret:
            return cls(name, secret, os.environ.get("AWS_SESSION_TOKEN", ""))
        try:
            from botocore.session import get_session
        except ImportError:
            return None
        pair = get_session().get_credentials()
        return cls(pair.access_key, pair.secret_key, pair.token or "") if pair is not None else None


class ReadError(OSError):
    """The gateway refused a read. `status` is that of HTTP, 0 when no answer came."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpReads:
    """Connections that threads share, each for one request at a time. A fork's child calls `close` first."""

    def __init__(self, endpoint_url: str, credentials: Credentials, region: str, agent: str) -> None:
        parts = urlsplit(endpoint_url)
        self._host, self._tls = parts.netloc, None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
        self._credentials, self._region, self._agent = credentials, region, agent
        self._idle: list[http.client.HTTPConnection] = []

    def get(self, name: str, first: int = 0, count: int = 0, etag: str = "") -> memoryview:
        """Return bytes of an object, as far as there are any; `count` 0: to the end. Raises ReadError.

        With an `etag`, another version is refused. Refusals that may pass are tried again, and connections that fail.
        """
        return memoryview(self._ask("GET", name, first, count, etag)[1])

    def head(self, name: str) -> Message:
        """Return the headers of an object. Raises as `get`."""
        return self._ask("HEAD", name)[0]

    def _ask(self, method: str, name: str, first: int = 0, count: int = 0, etag: str = "") -> tuple[Message, bytes]:
        path, error = "/" + quote(name, safe="/-._~", errors="surrogateescape"), ReadError("no answer", 0)
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                time.sleep(min(0.1 * 2**attempt, 3.0))
            connection = self._connection()
            try:
                connection.request(method, path, headers=self._headers(method, path, first, count, etag))
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as failure:
                connection.close()
                self.close()  # the others may be as old
                error = ReadError(f"{name}: {failure!r}", 0)
                continue
            self._idle.append(connection)
            if answer.status in (200, 206):
                return answer.headers, body
            text = body[:2000].decode("utf-8", "replace")
            error = ReadError(f"{name}: HTTP {answer.status}: {text}", answer.status)
            if answer.status < 500 and answer.status != 429:
                break
        if error.status == 404:
            raise FileNotFoundError(str(error))
        if error.status == 403:
            raise PermissionError(str(error))
        raise error

    def close(self) -> None:
        """Close the connections that no thread uses now."""
        while self._idle:
            self._idle.pop().close()

    def _connection(self) -> http.client.HTTPConnection:
        try:
            return self._idle.pop()
        except IndexError:
            if self._tls is not None:
                return http.client.HTTPSConnection(self._host, timeout=TIMEOUT_SECONDS, context=self._tls)
            return http.client.HTTPConnection(self._host, timeout=TIMEOUT_SECONDS)

    def _headers(self, method: str, path: str, first: int, count: int, etag: str) -> dict[str, str]:
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        signed = {"host": self._host, "x-amz-content-sha256": _NOTHING, "x-amz-date": now}
        if first or count:
            signed["range"] = f"bytes={first}-{first + count - 1 if count else ''}"
        if etag:
            signed["if-match"] = etag
        if self._credentials.session_token:
            signed["x-amz-security-token"] = self._credentials.session_token
        names = ";".join(sorted(signed))
        lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
        request = f"{method}\n{path}\n\n{lines}\n{names}\n{_NOTHING}"
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self._credentials.secret_access_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        signed["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._credentials.access_key_id}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return signed | {"user-agent": self._agent, "accept-encoding": "identity"}
