"""What an operation gives back to the edge: a head, and a body that may be bytes or a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.objects import BodyStream


@dataclass(slots=True)
class Reply:
    """An HTTP answer.

    `headers` are lower-case (name, value) pairs, values latin-1 decoded; the edge adds date, server, request ids and
    the content length of a `bytes` body. A streamed body brings its own `content-length` header, or is sent in HTTP
    chunks. `cache` becomes the `x-forebay-cache` header: hit, partial, miss, bypass or forwarded.
    """

    status: int
    headers: Sequence[tuple[str, str]] = field(default_factory=list)
    body: bytes | BodyStream = b""
    cache: str | None = None
