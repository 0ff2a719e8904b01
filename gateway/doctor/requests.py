"""Questions to the origin as the gateway signs and sends them, one at a time, with short answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time

from gateway.core.errors import OriginUnreachable
from gateway.origin.client import Origin, OriginRequest
from gateway.s3.xml import error_code_of

SECONDS_MAX = 5.0
_DOCUMENT_BYTES_MAX = 256 * 1024
_KEY = re.compile(rb"<Key>([^<]+)</Key>")
_SIZE = re.compile(rb"<Size>(\d+)</Size>")


@dataclass(frozen=True, slots=True)
class Answered:
    """A response of the origin."""

    status: int
    headers: Mapping[str, str]
    document: bytes

    @property
    def code(self) -> str | None:
        """The code of the error document. HEAD has none."""
        return error_code_of(self.document) if self.status >= 300 else None

    @property
    def described(self) -> str:
        """`403 AccessDenied`."""
        return f"{self.status} {self.code}" if self.code else str(self.status)

    def first_key(self) -> str | None:
        """Return the first key of a listing."""
        found = _KEY.search(self.document) if self.status == 200 else None
        return None if found is None else _unescaped(found[1].decode(errors="replace"))

    def first_size(self) -> int:
        """Return the size of the first object of a listing, in bytes."""
        found = _SIZE.search(self.document)
        return int(found[1]) if found is not None else 0


def _unescaped(text: str) -> str:
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        text = text.replace(entity, character)
    return text


class OriginProbe:
    """Asks, and remembers what time the origin told last."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.date = ""
        self.date_seen_at = 0.0

    async def ask(
        self,
        method: str,
        bucket: str | None = None,
        key: str | None = None,
        *,
        query: Sequence[tuple[str, str | None]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answered:
        """The answer, of any status; OriginError where there is none in time."""
        request = OriginRequest(method, bucket, key, query=list(query), headers=dict(headers or {}), body=body)
        try:
            async with asyncio.timeout(SECONDS_MAX), await self._origin.send(request) as response:
                document = b"" if method == "HEAD" else await response.read(_DOCUMENT_BYTES_MAX)
                self.date, self.date_seen_at = response.headers.get("date", ""), time()
                return Answered(response.status, response.headers, document)
        except TimeoutError as error:
            raise OriginUnreachable(f"no answer within {SECONDS_MAX:g} seconds") from error
