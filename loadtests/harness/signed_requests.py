"""Requests signed with Signature Version 4 in the Authorization header, as bytes ready for a socket.

Source: "Authenticating Requests (AWS Signature Version 4)", Amazon S3 API reference. Keys must need no escaping.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.gateway_process import ORIGIN_KEYS

_REGION = "us-east-1"
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(slots=True)
class Signer:
    """Signs for one `host` (`127.0.0.1:port`), each request with its own date."""

    host: str
    access_key_id: str = ORIGIN_KEYS[0]
    secret_access_key: str = field(default=ORIGIN_KEYS[1], repr=False)
    _keys: dict[str, bytes] = field(default_factory=dict, repr=False)

    def get(
        self,
        path: str,
        byte_range: str | None = None,
        *,
        at: float | None = None,
        method: str = "GET",
        query: str = "",
    ) -> bytes:
        """A GET of `path`; `byte_range` is `first-last`; `at` is the time of the signature, now unless given.

        `query` must be in its canonical form: percent-encoded, sorted by name.
        """
        extra = {} if byte_range is None else {"range": f"bytes={byte_range}"}
        headers = self.headers(method, path, query, _EMPTY, at=at, extra=extra)
        target = f"{path}?{query}" if query else path
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def headers(
        self,
        method: str,
        path: str,
        query: str,
        payload_hash: str,
        *,
        at: float | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """All that are signed, `extra` among them, and the signature."""
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
        headers = {"host": self.host, "x-amz-content-sha256": payload_hash, "x-amz-date": moment, **(extra or {})}
        names = ";".join(sorted(headers))
        canonical = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = f"{method}\n{path}\n{query}\n{canonical}\n{names}\n{payload_hash}"
        scope = f"{moment[:8]}/{_REGION}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(self._key(moment[:8]), text.encode(), "sha256").hex()
        authorization = (
            f"AWS4-HMAC-SHA256 Credential={self.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers | {"authorization": authorization}

    def _key(self, day: str) -> bytes:
        if day not in self._keys:
            key = f"AWS4{self.secret_access_key}".encode()
            for part in (day, _REGION, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._keys[day] = key
        return self._keys[day]
