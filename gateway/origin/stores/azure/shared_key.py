"""Requests to Azure Blob, signed with the key of a storage account.

Source: "Authorize with Shared Key" (learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import defaultdict
from collections.abc import Mapping

from gateway.core.errors import CredentialsUnavailable
from gateway.origin.client import KeyPair, OriginRequest
from gateway.origin.request_body import RequestBody
from gateway.origin.signing import EncodeHead, RequestSigner, Target
from gateway.s3.headers import format_http_date

VERSION = "2021-12-02"
"""The version of the service that requests are for. Blocks have up to 4,000 MiB since 2019, odd names come encoded in
listings since 2021."""

_SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)


class SharedKeySigner(RequestSigner):
    """As `RequestSigner`: the access key id is the name of the account, the secret its key in base64."""

    async def headers(self, request: OriginRequest, target: Target, body: RequestBody) -> dict[str, str]:
        pair = await self._pair(request)
        headers = {"host": target.host, "x-ms-version": VERSION, **request.headers, **body.framing_headers}
        headers["x-ms-date"] = format_http_date(self._clock.now() + self._clock_offset)
        headers["authorization"] = authorization(pair, request, target.path, headers)
        return headers

    def head_now(self, request: OriginRequest, target: Target, encode: EncodeHead) -> bytes | None:
        """None: each head is made for its request."""


def authorization(pair: KeyPair, request: OriginRequest, path: str, headers: Mapping[str, str]) -> str:
    """Return the value of the header. `path` is as it is sent; all of the request's own `headers` are there."""
    told = [headers.get(name, "") for name in _SIGNED]
    if told[2] == "0":
        told[2] = ""
    lines = [request.method, *told]
    lines += [f"{name}:{headers[name].strip()}" for name in sorted(headers) if name.startswith("x-ms-")]
    lines.append(f"/{pair.access_key_id}{path}")
    parameters = defaultdict[str, list[str]](list)
    for name, value in request.query:
        parameters[name.lower()].append(value or "")
    lines += [f"{name}:{','.join(sorted(values))}" for name, values in sorted(parameters.items())]
    try:
        key = base64.b64decode(pair.secret_access_key, validate=True)
    except ValueError:
        raise CredentialsUnavailable("the key of the storage account is not base64") from None
    digest = hmac.digest(key, "\n".join(lines).encode(), hashlib.sha256)
    return f"SharedKey {pair.access_key_id}:{base64.b64encode(digest).decode()}"
