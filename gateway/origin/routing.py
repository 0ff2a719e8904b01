"""Several origins as one: each bucket's requests go to its home."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.origin.client import Origin, OriginRequest, OriginResponse


class RoutedOrigin:
    """An `Origin`: `main`, except for buckets that have a home of their own. It closes them all.

    A copy goes to the home of its target: its sender has checked that its source is there, too.
    """

    def __init__(self, main: Origin, by_bucket: Mapping[str, Origin]) -> None:
        self._main = main
        self._by_bucket = dict(by_bucket)

    async def send(self, request: OriginRequest) -> OriginResponse:
        return await self._by_bucket.get(request.bucket or "", self._main).send(request)

    async def aclose(self) -> None:
        for origin in {id(one): one for one in (self._main, *self._by_bucket.values())}.values():
            await origin.aclose()
