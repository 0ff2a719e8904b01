"""A directory as an S3 whose small files are read in callbacks, without a task of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.core.model import ObjectKey
from gateway.origin.client import BegunRead, OnEnd, OriginRequest, StillSo
from gateway.origin.stores.directory.files import OpenFile
from gateway.origin.stores.directory.store import DirectoryStore
from gateway.origin.stores.face import StoreOrigin, likely_bytes, names_version
from gateway.origin.stores.response import StoreResponse
from gateway.origin.stores.store import Found


class DirectoryOrigin(StoreOrigin):
    """As `Origin`."""

    store: DirectoryStore

    def begin_read(self, request: OriginRequest, on_end: OnEnd) -> BegunRead | None:
        """As `BeginRead`."""
        if request.bucket is None or request.key is None:
            return None
        outcome: asyncio.Future[Any] | None
        key = ObjectKey(request.bucket, request.key)
        if request.method == "GET":
            outcome = self.store.begin_read(key, likely_bytes(request))
        else:
            outcome = self.store.begin_head(key)
        return _BegunRead(self, request, outcome, on_end) if outcome is not None else None

    def is_still(self, request: OriginRequest, found: Found) -> bool:
        """As `StillSo`, of a request that was answered by `found`."""
        started = self.clock.monotonic()
        if self.store.head_at_once(ObjectKey(request.bucket or "", found.key)) is not found:
            return False
        self.report(request, 200, started)
        return True

    async def answer(self, request: OriginRequest) -> StoreResponse:
        if isinstance(request.begun, _BegunRead):
            request.begun.check()
        return await super().answer(request)


class _BegunRead:
    """As `BegunRead`. Its file is closed, so another request has nothing to go on with but its error."""

    def __init__(
        self, origin: DirectoryOrigin, request: OriginRequest, outcome: asyncio.Future[Any], on_end: OnEnd
    ) -> None:
        self._origin = origin
        self._request = request
        self._outcome = outcome
        self._on_end: OnEnd | None = on_end
        self._started = origin.clock.monotonic()
        self._response = StoreResponse(0)
        self._error: Exception | None = None
        self.is_whole = False
        self.still: StillSo | None = None
        self.passes: Callable[[int], bool] = bool
        outcome.add_done_callback(self._ended, context=copy_context())

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    def whole(self) -> memoryview | None:
        body = self._response.whole() or memoryview(b"")
        if body and not self.passes(len(body)):
            return None
        self._origin.report(self._request, self.status, self._started)
        return body

    def onward(self) -> OriginRequest:
        return replace(self._request, begun=self)

    def check(self) -> None:
        """Raise, once, what made it fail: nobody waits twice for a file that hangs."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._on_end = None
        self._outcome.cancel()

    def _ended(self, outcome: asyncio.Future[Found | OpenFile]) -> None:
        on_end, self._on_end = self._on_end, None  # no circle of references keeps the bytes
        if outcome.cancelled():
            return
        try:
            told = outcome.result()
            found, reading = (told, None) if isinstance(told, Found) else (told.found, self._origin.store.reading(told))
            if found.settles_at is None or not names_version(self._request, found):
                response = self._origin.read_answer(self._request, found, reading)
                self._origin.complete(self._request, response)
                is_whole = response.wanted is None or response.whole() is not None
                self.is_whole = response.status in (200, 206) and is_whole
                if isinstance(told, Found):
                    self.still = partial(self._origin.is_still, self._request, told)
                self._response = response
        except Exception as error:  # noqa: BLE001 - `send` raises it
            self._error = error
        if on_end is not None:
            on_end(self)
