"""One request while it is here: what its log line, the metrics and an error answer need to know of it."""

from __future__ import annotations

import itertools
import os
import time
from typing import Protocol

from gateway.operations.context import RequestBody

CLIENT_LEFT = "client-left"
BROKEN_OFF = "broken-off"
"""Ends without a status: the client left before its answer was complete, or the answer failed behind its head."""

NO_SLOT = "none"
"""The slot of requests that were refused before it was looked up."""

_numbers = itertools.count(int.from_bytes(os.urandom(8), "big"))
_SPREAD = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: multiplied by it, no two of 2**64 numbers in a row give the same id."""


class CountedBody(RequestBody, Protocol):
    """A request body that knows how much of it was read."""

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read; if not, the connection cannot carry another request."""

    @property
    def received_bytes(self) -> int: ...


class RequestRecord:
    """See the module. `body` is None until the head has told how long it is."""

    __slots__ = (
        "body",
        "cache",
        "operation",
        "raw_path",
        "request_id",
        "sent_bytes",
        "slot",
        "started",
        "status",
        "waits",
    )

    def __init__(self, raw_path: bytes) -> None:
        self.raw_path = raw_path
        self.body: CountedBody | None = None
        self.waits = False
        self.request_id = _next_request_id()
        self.operation = "Unknown"
        self.slot = NO_SLOT
        self.status = BROKEN_OFF
        self.started = time.perf_counter()
        self.sent_bytes = 0
        self.cache: str | None = None

    @property
    def path(self) -> str:
        return self.raw_path.decode("latin-1")

    @property
    def body_complete(self) -> bool:
        """Whether the connection can carry another request. A head that could not be parsed settles nothing."""
        return self.body is not None and self.body.complete


def _next_request_id() -> str:
    """16 hexadecimal digits, another for every request: a system call for each would cost more than all the rest."""
    return "%016X" % (next(_numbers) * _SPREAD & 0xFFFFFFFFFFFFFFFF)
