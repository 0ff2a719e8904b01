"""Requests that are answered in the call that brings them: no task, no ASGI messages.

Most of what a cache answers, it can answer at once, and half the cost of such an answer is what is made for those that
must wait. So an application may have, besides ASGI's `__call__`, the methods of `ImmediateApp`. The server asks them
about requests without a body; whatever is not immediate goes on in a task as ever, from where it has got to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.objects import FileSpan

BEGUN = "forebay.begun"
"""Where in the scope the application finds what its `begin` returned."""


@dataclass(slots=True)
class ImmediateResponse:
    """A whole response. `headers` are looked at as those of ASGI are; `lines` are ready to be sent, and nobody looks at
    them again. `length_bytes` is the Content-Length, where it is not among the headers.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    lines: bytes
    body: bytes | FileSpan
    length_bytes: int | None = None


class ImmediateApp(Protocol):
    """What an application may offer the server."""

    def begin(self, method: str, raw_path: bytes, raw_query: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Any:
        """Begin with a request that has no body, as far as it goes without waiting. Never raises."""

    def immediate(self, begun: Any) -> ImmediateResponse | None:
        """The response, if it is there; then the server sends it and calls `end`."""

    def end(self, begun: Any, sent_bytes: int, error: Exception | None = None) -> None:
        """The response is over, sent to its end unless there is an error."""


def immediate_app(app: object) -> ImmediateApp | None:
    """The application itself, if it has the methods."""
    return app if callable(getattr(app, "begin", None)) else None  # type: ignore[return-value]
