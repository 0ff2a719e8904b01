"""A request body as the operations see it: whatever carries it, read in order, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Sink = Callable[[memoryview], None]
"""Takes the next bytes of a body, which are good only during the call. Runs on threads, never two calls at once."""


class RequestBody(Protocol):
    """The bytes of a request body as they were on the wire, HTTP framing taken off."""

    @property
    def length_bytes(self) -> int | None:
        """The Content-Length; None when the body came in HTTP chunks."""

    async def read(self) -> bytes:
        """The next bytes, however many have arrived; `b""` once the body is complete.

        Raises S3Error `RequestTimeout` when nothing, or too little, arrives in time, and ClientDisconnected when the
        client leaves before the end.
        """

    async def receive(self, sink: Sink) -> None:
        """Hand all the rest of the body to `sink`, in order, on threads.

        Raises as `read`, and what the sink raises, which ends the receiving; then nothing more can be read. When the
        caller is cancelled, no call of the sink is under way any more once this has raised.
        """
