"""Requests without a body, and their answers, over the pool."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping

from yarl import URL

from gateway import cancellation
from gateway.errors import OriginBodyError, OriginUnreachable
from gateway.origin.addressing import Target
from gateway.origin.landing import Landing, landed
from gateway.origin.response import HttpResponse
from gateway.origin.settings import OriginSettings
from gateway.origin.wire.answer import Answer, Broken
from gateway.origin.wire.pool import Endpoint, Pool


class WireClient:
    """Must be made where an event loop runs."""

    def __init__(self, settings: OriginSettings, trust: ssl.SSLContext) -> None:
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        self._pool = Pool(
            settings.max_connections,
            trust,
            connect_seconds_max=settings.connect_timeout_seconds,
            silence_seconds_max=settings.read_timeout_seconds,
        )

    async def exchange(self, method: str, target: Target, headers: Mapping[str, str]) -> HttpResponse:
        """Send a request and return its answer, of any status; OriginUnreachable when there is none.

        `headers` are all that are sent, `host` among them, in characters that need no escape but UTF-8.
        """
        request = request_head(method, target, headers)
        try:
            with cancellation.turn():
                connection = await self._pool.take(self._endpoint(target))
        except (OSError, TimeoutError) as error:
            text = f"no connection to the origin: {type(error).__name__}: {error}"
            raise OriginUnreachable(text, may_be_done=False) from error
        answer = connection.ask(request, bodiless=method == "HEAD")
        try:
            await answer.begun()
        except Broken as error:
            raise OriginUnreachable(f"no answer from the origin: {error}") from error
        except BaseException:
            answer.close()
            raise
        return WireResponse(answer)

    async def aclose(self) -> None:
        await self._pool.aclose()

    def _endpoint(self, target: Target) -> Endpoint:
        place = target.scheme, target.host
        endpoint = self._endpoints.get(place)
        if endpoint is None:
            url = URL(f"{target.scheme}://{target.host}", encoded=True)
            endpoint = Endpoint(url.host or "", url.port or 0, target.scheme == "https")
            if len(self._endpoints) >= ENDPOINTS_MAX:
                self._endpoints.clear()
            self._endpoints[place] = endpoint
        return endpoint


ENDPOINTS_MAX = 1024


class WireResponse(HttpResponse):
    """An answer of the origin."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.head.status, answer.head.headers)
        self._answer = answer

    def whole(self) -> memoryview | None:
        return None if self._prefix else self._answer.whole()

    async def aclose(self) -> None:
        self._answer.close()

    async def _landed(self, landing: Landing) -> AsyncIterator[memoryview]:
        if self._prefix or not self._answer.can_land:
            async for view in landed(self._pieces(), landing):
                yield view
            return
        try:
            while view := await self._answer.land(landing):
                yield view
        except Broken as error:
            raise _broke_off(error) from error

    async def _next(self) -> bytes:
        try:
            return await self._answer.piece()
        except Broken as error:
            raise _broke_off(error) from error


def _broke_off(error: Broken) -> OriginBodyError:
    return OriginBodyError(f"the origin's answer broke off: {error}")


def request_head(method: str, target: Target, headers: Mapping[str, str]) -> bytes:
    """The request as it goes onto the wire."""
    query = f"?{target.query}" if target.query else ""
    lines = [f"{method} {target.path}{query} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
