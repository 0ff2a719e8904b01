"""What an operation gives back to the edge: a head, and a body that may be bytes or a stream."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from gateway.objects import BodyStream, HeldSpan
from gateway.s3.headers import NO_HEADERS, EncodedHeaders

CacheLabel: TypeAlias = Literal["hit", "partial", "miss", "bypass", "forwarded", "absorbed"]
"""Where an answer came from; `absorbed`: from the write-back buffer, or it acknowledges what lies there now."""


class Closable(Protocol):
    """Something that a streamed body holds on to: a connection to the origin, open block files."""

    async def aclose(self) -> None:
        """Give it back. Idempotent."""


@dataclass(slots=True)
class Reply:
    """An HTTP answer. Whoever receives one calls `aclose` in the end.

    `headers` are lower-case (name, value) pairs, values latin-1 decoded; the edge adds date, server, request ids and
    the content length of a body in memory. `encoded` are more of them, as they go onto the wire. `length_bytes` is the
    content length that the body does not tell: a HEAD's, or a streamed body's, which else brings its own
    `content-length` header, or is sent in HTTP chunks. A body that lies in a file whole can be given as its `HeldSpan`.
    `cache` becomes the `x-forebay-cache` header. `resource` is closed after
    the body: a stream that was never started could not give it back by itself.
    `on_failure` is told why the body could not be sent to its end, unless the client left.
    """

    status: int
    headers: Sequence[tuple[str, str]] = field(default_factory=list)
    body: bytes | memoryview | HeldSpan | BodyStream = b""
    cache: CacheLabel | None = None
    resource: Closable | None = None
    encoded: EncodedHeaders = NO_HEADERS
    on_failure: Callable[[Exception], None] | None = None
    length_bytes: int | None = None

    def failed(self, error: Exception) -> None:
        """The body broke off."""
        if self.on_failure is not None:
            self.on_failure(error)

    def close_now(self) -> bool:
        """As `aclose`, where nothing has to be waited for; False where something has."""
        if isinstance(self.body, HeldSpan):
            self.body.close()
        elif not isinstance(self.body, (bytes, memoryview)):
            return False
        return self.resource is None

    async def aclose(self) -> None:
        """Give back all that the body holds, sent or not."""
        if isinstance(self.body, HeldSpan):
            self.body.close()
        elif not isinstance(self.body, (bytes, memoryview)):
            await self.body.aclose()
        if self.resource is not None:
            await self.resource.aclose()


Answer: TypeAlias = Reply | Coroutine[Any, Any, Reply]
"""What a handler returns: the reply itself where nothing had to be waited for, else who brings it."""
