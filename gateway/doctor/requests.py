"""Questions to the origin as the gateway signs and sends them, one at a time, with short answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import time

from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import Origin, OriginRequest
from gateway.s3.list_result import ListedEntry, listed_objects
from gateway.s3.xml import error_code_of

SECONDS_MAX = 5.0
_DOCUMENT_BYTES_MAX = 256 * 1024


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

    def objects(self) -> list[ListedEntry]:
        """Return the objects of a listing. Other documents have none."""
        with suppress(OriginBodyError):
            return listed_objects(self.document)
        return []


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
        """Return the answer, of any status; OriginError where there is none in time."""
        request = OriginRequest(method, bucket, key, query=list(query), headers=dict(headers or {}), body=body)
        try:
            async with asyncio.timeout(SECONDS_MAX), await self._origin.send(request) as response:
                document = b"" if method == "HEAD" else await response.read(_DOCUMENT_BYTES_MAX)
                self.date, self.date_seen_at = response.headers.get("date", ""), time()
                return Answered(response.status, response.headers, document)
        except TimeoutError as error:
            raise OriginUnreachable(f"no answer within {SECONDS_MAX:g} seconds") from error
