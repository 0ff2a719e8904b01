"""A request body as the operations see it: whatever carries it, read in order, once."""

from __future__ import annotations

from typing import Protocol


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
