"""The nonces of requests that a process has accepted lately: a table in memory that all processes of a gateway share.

    cell   u64: the nonce's first half; 0: free
           u64: 32 bits of its second half, and 32 bits of when its request was signed (seconds since 1970)
    floor  u64 for each set, behind the cells: nonces of requests signed until then are unknown

A nonce chooses a set of sixteen cells. Where all of them are in use, the oldest gives way, and the set's floor rises to
its time: a request that was signed before counts as a replay. Requests come within moments, so only replays notice.

A set is changed under a record lock on its bytes, against other processes.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from gateway.disk.atomic_write import map_shared, opened

WAYS = 16
SETS = 8192
_CELL_WORDS = 2
_WORD_BYTES = 8
_SET_BYTES = WAYS * _CELL_WORDS * _WORD_BYTES
_FLOORS = SETS * WAYS * _CELL_WORDS
FILE_BYTES = (_FLOORS + SETS) * _WORD_BYTES

_LOCK_SECONDS_MAX = 0.02
"""Longer than any process is busy with a set, unless it is stopped there."""


class SeenNonces:
    """The table at `path`, made where it does not exist. Event loop only. OSError."""

    def __init__(self, path: Path) -> None:
        self._map = map_shared(path, FILE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        with opened(path) as descriptor:
            self._locks = os.dup(descriptor)

    def close(self) -> None:
        """Close the table; may be repeated."""
        self._words.release()
        self._map.close()
        if self._locks >= 0:
            os.close(self._locks)
            self._locks = -1

    def accept(self, nonce: bytes, signed_at: int, forget_before: int) -> bool:
        """Remember a nonce of 16 bytes; return False if a process has accepted it before, or may have.

        Nonces of requests that were signed before `forget_before` need not be remembered: the caller refuses those by
        their time. TimeoutError if another process keeps the set.
        """
        first, second = int.from_bytes(nonce[:8], "little") or 1, int.from_bytes(nonce[8:12], "little") << 32
        number = first % SETS
        self._lock(number)
        try:
            return self._take(number, first, second | signed_at, signed_at, forget_before)
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, _SET_BYTES, number * _SET_BYTES)

    def _take(self, number: int, first: int, second: int, signed_at: int, forget_before: int) -> bool:
        words, begin = self._words, number * WAYS * _CELL_WORDS
        cells = words[begin : begin + WAYS * _CELL_WORDS].tolist()
        if signed_at <= words[_FLOORS + number]:
            return False
        oldest, place = 1 << 32, 0
        for at in range(0, len(cells), _CELL_WORDS):
            if cells[at] == first and cells[at + 1] >> 32 == second >> 32:
                return False
            time_of_cell = cells[at + 1] & 0xFFFFFFFF if cells[at] else 0
            if time_of_cell < oldest:
                oldest, place = time_of_cell, at
        if oldest >= forget_before:
            words[_FLOORS + number] = oldest
        words[begin + place + 1] = second
        words[begin + place] = first
        return True

    def _lock(self, number: int) -> None:
        give_up_at = 0.0
        while True:
            try:
                fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, _SET_BYTES, number * _SET_BYTES)
                return
            except BlockingIOError:
                now = time.monotonic()
                give_up_at = give_up_at or now + _LOCK_SECONDS_MAX
                if now > give_up_at:
                    raise TimeoutError("another process keeps a set of nonces") from None
                time.sleep(_LOCK_SECONDS_MAX / 100)
