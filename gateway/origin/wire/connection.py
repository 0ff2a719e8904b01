"""One connection to the origin: a request at a time, and its answer received where it is to stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway.origin.wire.answer import Answer
from gateway.origin.wire.heads import MalformedAnswer

RECEIVED_AT_ONCE_BYTES = 256 * 1024


class Connection(asyncio.BufferedProtocol):
    """`buffer` may be shared by all connections of one event loop: what has come is taken before anything else is read.

    `on_free` is called when it can take another request, `on_lost` when it has ended. It ends by itself where a byte is
    waited for and none comes in `silence_seconds_max`.
    """

    def __init__(
        self,
        buffer: bytearray,
        silence_seconds_max: float,
        on_free: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._silence_seconds_max = silence_seconds_max
        self._on_free = on_free
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._answer: Answer | None = None
        self._paused = False
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0
        self.usable = False

    def ask(self, request: bytes, *, bodiless: bool) -> Answer:
        """Send a request; `bodiless`: its answer has no body, whatever its head says of one (HEAD)."""
        self._heard_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._silence_seconds_max, self._look_for_silence)
        answer = self._answer = Answer(self, self._loop, bodiless=bodiless)
        self._transport.write(request)
        return answer

    def close(self) -> None:
        """At once, whatever is on its way. Idempotent."""
        self.usable = False
        self._transport.abort()

    # For the answer.

    def answered(self, *, keep_alive: bool) -> None:
        """The last byte has come."""
        self._answer = None
        if keep_alive and self.usable:
            self.go_on()
            self.idle_since = self._heard_at
            self._on_free(self)
        else:
            self.close()

    def hold(self) -> None:
        """Nobody reads just now: what comes stays with the kernel."""
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Somebody has read. That nobody did was no silence of the origin."""
        if self._paused and (self._answer is None or self._answer.is_little):
            self._paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    # For the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def get_buffer(self, sizehint: int) -> memoryview:
        landing = self._answer.landing if self._answer is not None else None
        return self._view if landing is None else landing

    def buffer_updated(self, nbytes: int) -> None:
        answer = self._answer
        if answer is None:
            self.close()  # nothing was asked
            return
        self._heard_at = self._loop.time()
        if answer.landing is not None:
            answer.landed(nbytes)
        else:
            self._receive(answer, nbytes)
        if self._answer is answer and answer.is_much:
            self.hold()

    def _receive(self, answer: Answer, count: int) -> None:
        try:
            answer.received(self._buffer, count)
        except MalformedAnswer as error:
            self._fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        reason = "the origin closed the connection" if exc is None else f"{type(exc).__name__}: {exc}"
        self._fail(reason, orderly=exc is None)
        self._on_lost(self)

    def _fail(self, reason: str, *, orderly: bool = False) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.ended(reason, orderly=orderly)
        self.close()

    def _look_for_silence(self) -> None:
        """One timer for many requests: it looks whether it has rung too early, and is set again while one is on."""
        self._timer = None
        if self._answer is None:
            return
        silence = 0.0 if self._paused else self._loop.time() - self._heard_at
        if silence >= self._silence_seconds_max:
            self._fail(f"nothing came for {self._silence_seconds_max:g} seconds")
        else:
            self._timer = self._loop.call_later(self._silence_seconds_max - silence, self._look_for_silence)
