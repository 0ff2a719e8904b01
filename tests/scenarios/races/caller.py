"""A client of its own for each racer: one connection at a time, kept alive, nothing ever sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.support.serving import Wire, request

_BODILESS = frozenset({204, 304})


class Broken(Exception):
    """The connection ended before the answer did. `answer` is what had come, None when not even a head had."""

    def __init__(self, why: str, answer: Answer | None = None) -> None:
        super().__init__(why)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def etag(self) -> str | None:
        return self.headers.get("etag")


class Caller:
    """Sends to `url`; TimeoutError when nothing comes for `serving.PATIENCE_SECONDS`: a request is stuck."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._address = urlsplit(url)
        self._wire: Wire | None = None

    def another(self) -> Caller:
        """A client of the same gateway, with a connection of its own."""
        return Caller(self._url)

    async def call(self, method: str, target: str, body: bytes = b"", *headers: str) -> Answer:
        """One request and its whole answer. Broken when the connection ends in between."""
        if method in ("PUT", "POST") and not body:
            headers = (*headers, "Content-Length: 0")
        return await self._exchange(method, request(method, target, body, *headers, host=self._address.netloc))

    async def call_and_leave(self, target: str) -> None:
        """Ask for an object and go away when its answer begins."""
        try:
            wire = await self._connected()
            await wire.say(request("GET", target, host=self._address.netloc))
            await wire.head()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self.hang_up()

    async def send_half(self, target: str, body: bytes) -> None:
        """Begin to store a body and go away in the middle of it."""
        whole = request("PUT", target, body, host=self._address.netloc)
        try:
            wire = await self._connected()
            await wire.say(whole[: len(whole) - (len(body) + 1) // 2])
        except ConnectionError:
            return
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """The next request goes over a connection of its own."""
        if self._wire is not None:
            self._wire.abort()
            self._wire = None

    def close(self) -> None:
        """For `contextlib.closing`."""
        self.hang_up()

    async def _connected(self) -> Wire:
        if self._wire is None:
            self._wire = Wire(*await asyncio.open_connection(self._address.hostname, self._address.port, limit=2**20))
        return self._wire

    async def _exchange(self, method: str, data: bytes) -> Answer:
        try:
            wire = await self._connected()
            await wire.say(data)
            status, headers = await wire.head()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self.hang_up()
            raise Broken(f"no head of an answer: {error!r}") from error
        except BaseException:
            self.hang_up()
            raise
        return await self._read(wire, Answer(status, headers, b""), head_only=method == "HEAD")

    async def _read(self, wire: Wire, head: Answer, *, head_only: bool) -> Answer:
        if head_only or head.status in _BODILESS:
            self._keep_or_not(head.headers)
            return head
        try:
            body = await wire.body(head.headers)
        except asyncio.IncompleteReadError as error:
            self.hang_up()
            raise Broken("the body ended early", Answer(head.status, head.headers, error.partial)) from error
        except ConnectionError as error:
            self.hang_up()
            raise Broken(f"the body ended early: {error!r}", head) from error
        except BaseException:
            self.hang_up()
            raise
        self._keep_or_not(head.headers)
        return Answer(head.status, head.headers, body)

    def _keep_or_not(self, headers: Mapping[str, str]) -> None:
        if headers.get("connection", "").lower() == "close":
            self.hang_up()
