"""A circuit breaker: while an origin is dead or says nothing, requests fail at once and one at a time finds out whether
it is back. What one worker finds out, it tells the others in a page of memory that all of them map (`SilenceBoard`).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path

import structlog

from gateway.clock import Clock

BELIEVED_SECONDS = 10.0
"""What was told longer ago says nothing any more: whoever told it would have told it again."""

_RECORD = struct.Struct("=Qd")
_CELLS = 64
_SIZE_BYTES = _CELLS * _RECORD.size

log = structlog.get_logger(__name__)


class SilenceBoard:
    """For each host, when it was last found silent. Times are monotonic, the same for all processes.

    A cell is written without a lock. What is read of it half written, or overwritten by another host, costs a question
    to the origin at most.
    """

    def __init__(self, file: Path | None = None) -> None:
        """`file` is shared with other processes, made where it is missing. Without it, or room for it, this one is
        alone, and finds out by itself.
        """
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        if file is None:
            return
        try:
            self._memory = _shared_memory(file)
        except OSError as error:
            log.warning("workers cannot tell each other that the origin is silent", error=str(error))

    def cell(self, host: str) -> SilenceCell:
        """Where one host's record lies."""
        name = int.from_bytes(hashlib.blake2b(host.encode(), digest_size=8).digest(), "little")
        return SilenceCell(self._memory, name)


class SilenceCell:
    """One host's record."""

    __slots__ = ("_memory", "_name", "_offset")

    def __init__(self, memory: mmap.mmap, name: int) -> None:
        self._memory = memory
        self._name = name
        self._offset = name % _CELLS * _RECORD.size

    def tell(self, moment: float) -> None:
        """The host is silent."""
        _RECORD.pack_into(self._memory, self._offset, self._name, moment)

    def clear(self) -> None:
        """It is not."""
        if self._told():
            _RECORD.pack_into(self._memory, self._offset, self._name, 0.0)

    def is_silent(self, now: float, heard_at: float) -> bool:
        """Whether somebody found the host silent just now, and later than the caller has heard of it."""
        moment = self._told()
        return 0 < moment <= now < moment + BELIEVED_SECONDS and heard_at < moment

    def _told(self) -> float:
        name, moment = _RECORD.unpack_from(self._memory, self._offset)
        return moment if name == self._name else 0.0


def _shared_memory(file: Path) -> mmap.mmap:
    """Allocated, not only mapped: a page that a full file system cannot give kills whoever touches it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE_BYTES)
        return mmap.mmap(descriptor, _SIZE_BYTES)
    finally:
        os.close(descriptor)


class CircuitBreaker:
    """Closed until a question of the gateway's own gets no answer; then open until anybody gets one.

    What a client asks for never opens it: the origin may fail that one request only. `threshold` attempts in a row
    without an answer are the reason to ask. Open, a question is due after `cooldown_seconds`, doubled with every one
    that gets no answer up to `cooldown_cap_seconds`.
    """

    def __init__(
        self,
        clock: Clock,
        silence: SilenceCell | None = None,
        *,
        threshold: int = 5,
        cooldown_seconds: float = 0.5,
        cooldown_cap_seconds: float = 5.0,
    ) -> None:
        """`silence`: where other processes are told that the origin is silent, and tell it."""
        self._clock = clock
        self._silence = silence or SilenceBoard().cell("")
        self._threshold = threshold
        self._first_cooldown = cooldown_seconds
        self._cooldown_cap = cooldown_cap_seconds
        self._cooldown = cooldown_seconds
        self._failures = 0
        self._next_probe_at = 0.0
        self._heard_at = float("-inf")
        self._is_silent = False
        self.is_open = False

    @property
    def is_suspect(self) -> bool:
        """Whether so many attempts in a row got no answer that the origin is to be asked whether it lives."""
        return self._failures >= self._threshold

    @property
    def answers_nobody(self) -> bool:
        """Whether it is open because nothing came back, not even a refusal: whoever asks would wait for long."""
        return self._is_silent and self.is_open

    def hears_from_others(self) -> bool:
        """Whether it is open, be it because another process has found the origin silent just now."""
        if not self.is_open and self._silence.is_silent(self._clock.monotonic(), self._heard_at):
            self.is_open = self._is_silent = True
            self._next_probe_at = 0.0
        return self.is_open

    def was_heard_since(self, moment: float) -> bool:
        """Whether any attempt has been answered since a monotonic time."""
        return self._heard_at >= moment

    def may_be_probed(self) -> bool:
        """Whether a question of the gateway's own may be asked now."""
        return not self.is_open or self._clock.monotonic() >= self._next_probe_at

    def answered(self) -> None:
        """The origin answered: it lives."""
        self._heard_at = self._clock.monotonic()
        if self._is_silent:
            self._silence.clear()
        self._failures = 0
        self._cooldown = self._first_cooldown
        self.is_open = self._is_silent = False

    def unanswered(self) -> None:
        """An attempt had no connection, or none that gave an answer."""
        self._failures += 1

    def probe_failed(self, started: float, *, silent: bool) -> None:
        """The gateway's own question, asked at monotonic time `started`, got no answer; `silent`: not even a refusal.

        Where somebody else was answered meanwhile, the origin lives.
        """
        if self.was_heard_since(started):
            return
        if self.is_open:
            self._cooldown = min(self._cooldown_cap, self._cooldown * 2)
        self.is_open, self._is_silent = True, silent
        now = self._clock.monotonic()
        self._next_probe_at = now + self._cooldown
        if silent:
            self._silence.tell(now)
