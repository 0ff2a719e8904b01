"""Recent requests worth a look: the slowest ones, those that failed, and failures of the origin.

Each process keeps its own in a small file in memory that all processes share; the admin port reads all files. A file
outlives its process: the next one with the same number goes on in it. It has rows of one size, so it never grows, and a
row tells by its checksum whether it is whole: it may be read while it is written, and its writer may be killed
meanwhile.

    slowest     the SLOWEST_ROWS slowest of each minute
    errors      the last that were answered 5xx, or not to the end
    refusals    the last that were answered 4xx, except 404, 412 and 416: clients risk these on purpose
    origin      the last requests to the origin that it answered 5xx or 429, or not at all

No row has a secret, a query or a header. Clients' names are cut to NAME_BYTES_MAX, and contain nothing that a
terminal would obey.
"""

from __future__ import annotations

import mmap
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappush, heapreplace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gateway.disk.atomic_write import map_shared
from gateway.shared.heartbeats import BACKGROUND_PROCESS

MINUTES_SHOWN = 5
"""Minutes of the slowest requests. The minute that has begun counts as well."""

SLOWEST_ROWS = 12

ERROR_ROWS, REFUSAL_ROWS, ORIGIN_ROWS = 48, 24, 48

_NO_REFUSALS = frozenset({"404", "412", "416"})

NAME_BYTES_MAX = 200
"""Limit of a key, and of any other name that a client has given."""

ROW_BYTES = 2048

_NAME = "recent-requests-"
MINUTE_SECONDS = 60
_MINUTES = MINUTES_SHOWN + 2
"""One more than can be shown, so that no row is written over that is shown still."""

_HEADER = struct.Struct("<QII")
"""Header of a row: its number or minute, the length of its content, and the checksum of all that."""

_SLOWEST = 0
_ERRORS = _MINUTES * SLOWEST_ROWS
_REFUSALS = _ERRORS + ERROR_ROWS
_ORIGIN = _REFUSALS + REFUSAL_ROWS
_ROWS = _ORIGIN + ORIGIN_ROWS

_PLACES = {
    "slowest": (_SLOWEST, _MINUTES * SLOWEST_ROWS),
    "errors": (_ERRORS, ERROR_ROWS),
    "refusals": (_REFUSALS, REFUSAL_ROWS),
    "origin_failures": (_ORIGIN, ORIGIN_ROWS),
}
"""First row and number of rows."""

FILE_BYTES = _ROWS * ROW_BYTES
"""Size of one process's file."""


class FinishedRequest(NamedTuple):
    """A request to the S3 port that is over. `status`: as in forebay_requests_total. `error_code`: the gateway's own.

    `caller`: its credential, as in metrics.
    """

    operation: str
    bucket: str | None
    key: str | None
    slot: str
    status: str
    cache: str | None
    reason: str | None
    error_code: str | None
    seconds: float
    sent_bytes: int
    received_bytes: int
    caller: str
    request_id: str
    remote: str | None


def is_error(status: str) -> bool:
    """Return True if a request that ended so failed by the gateway's or the origin's fault, judged by the status."""
    return status[0] == "5" or status == "broken-off"


def is_refusal(status: str) -> bool:
    """Return True if a request that ended so was refused; a test whether an object exists is not."""
    return status[0] == "4" and status not in _NO_REFUSALS


def shown(text: str | None, bytes_max: int = NAME_BYTES_MAX) -> str | None:
    """Return a name that can be shown: unprintable characters escaped, the middle of a long one left out."""
    if text is None:
        return None
    if len(text) > 4 * bytes_max:
        text = text[: 2 * bytes_max] + text[-2 * bytes_max :]
    if not (text.isascii() and text.isprintable()):
        text = "".join(one if one.isprintable() else _escaped(one) for one in text)
    encoded = text.encode()
    if len(encoded) <= bytes_max:
        return text
    first = bytes_max // 3
    last = bytes_max - first - len("…".encode())
    return encoded[:first].decode(errors="ignore") + "…" + encoded[-last:].decode(errors="ignore")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class RecentRequests:
    """Recent requests of one process. Event loop only; `close` at the end."""

    def __init__(self, directory: Path | None, process: int, wall: Callable[[], float] = time.time) -> None:
        """`directory` is shared by all processes; None: only this process sees the requests. Raises OSError."""
        self._wall = wall
        if directory is None:
            self._map = mmap.mmap(-1, FILE_BYTES)
        else:
            self._map = map_shared(directory / f"{_NAME}{process}", FILE_BYTES)
        self.slow_seconds = -1.0
        """Only requests that took longer are among the slowest of this minute. Its readers call `look` now and then."""

        self.minute = -1
        self._slowest: list[tuple[float, int]] = []
        """A heap of how long those of this minute took, with their rows."""

        self._errors = _Ring(self._map, _ERRORS, ERROR_ROWS)
        self._refusals = _Ring(self._map, _REFUSALS, REFUSAL_ROWS)
        self._origin = _Ring(self._map, _ORIGIN, ORIGIN_ROWS)

    def close(self) -> None:
        self.slow_seconds = float("inf")
        self._map.close()

    def look(self) -> None:
        """Notice that another minute has begun: what is slow in it is not known yet."""
        if self.minute >= 0 and int(self._wall()) // MINUTE_SECONDS != self.minute:
            self.minute, self.slow_seconds = -1, -1.0

    def is_kept(self, status: str, seconds: float) -> bool:
        return seconds > self.slow_seconds or is_error(status) or is_refusal(status)

    def add(self, request: FinishedRequest) -> None:
        """Keep it, if it is one to be kept."""
        status = request.status
        if self._map.closed or not self.is_kept(status, request.seconds):
            return
        document = _document(request, self._wall())
        if request.seconds > self.slow_seconds:
            self._add_slow(request.seconds, document)
        if is_error(status):
            self._errors.add(document)
        elif is_refusal(status):
            self._refusals.add(document)

    def origin_failed(
        self, method: str, bucket: str | None, key: str | None, slot: str, purpose: str, status: str, seconds: float
    ) -> None:
        """Record that the origin answered one try with a failure, or (unreachable) not at all."""
        if self._map.closed:
            return
        self._origin.add(
            {
                "at": round(self._wall(), 3),
                "method": shown(method),
                "bucket": shown(bucket),
                "key": shown(key),
                "slot": shown(slot),
                "purpose": purpose,
                "status": status,
                "seconds": round(seconds, 6),
            }
        )

    def _add_slow(self, seconds: float, document: Mapping[str, Any]) -> None:
        minute = int(document["at"]) // MINUTE_SECONDS
        if minute != self.minute:
            self._begin(minute)
        if seconds <= self.slow_seconds:  # a process before this one has had slower ones in this minute
            return
        first = _SLOWEST + minute % _MINUTES * SLOWEST_ROWS
        if len(self._slowest) < SLOWEST_ROWS:
            row = min(set(range(first, first + SLOWEST_ROWS)) - {row for _, row in self._slowest})
            heappush(self._slowest, (seconds, row))
        else:
            row = self._slowest[0][1]
            heapreplace(self._slowest, (seconds, row))
        _write(self._map, row, minute, document)
        self._bar()

    def _begin(self, minute: int) -> None:
        """Go on with what a process before this one has kept of a minute."""
        first = _SLOWEST + minute % _MINUTES * SLOWEST_ROWS
        rows = [(row, _read(self._map, row)) for row in range(first, first + SLOWEST_ROWS)]
        self.minute = minute
        self._slowest = [(found[1]["seconds"], row) for row, found in rows if found is not None and found[0] == minute]
        heapify(self._slowest)
        self.slow_seconds = -1.0
        self._bar()

    def _bar(self) -> None:
        """Once there are as many as are kept, faster ones need not be looked at until the minute is over."""
        if len(self._slowest) == SLOWEST_ROWS:
            self.slow_seconds = self._slowest[0][0]


class _Ring:
    def __init__(self, memory: mmap.mmap, first: int, rows: int) -> None:
        self._memory = memory
        self._first = first
        self._rows = rows
        self._next = 1 + max((number for number, _ in _found(memory, first, rows)), default=-1)

    def add(self, document: Mapping[str, Any]) -> None:
        _write(self._memory, self._first + self._next % self._rows, self._next, document)
        self._next += 1


def _document(request: FinishedRequest, at: float) -> dict[str, Any]:
    fields = {name: shown(one) if isinstance(one, str) else one for name, one in request._asdict().items()}
    del fields["remote"]
    error = fields.pop("error_code")
    return {"at": round(at, 3), **fields, "error": error, "seconds": round(request.seconds, 6)}


def _write(memory: mmap.mmap, row: int, number: int, document: Mapping[str, Any]) -> None:
    content = orjson.dumps(document)
    if len(content) > ROW_BYTES - _HEADER.size:  # all names are of their greatest length, and full of quotes
        short = {name: shown(one, 60) if isinstance(one, str) else one for name, one in document.items()}
        content = orjson.dumps(short)
    packed = _HEADER.pack(number, len(content), _checksum(number, content)) + content
    at = row * ROW_BYTES
    memory[at : at + len(packed)] = packed


def _read(content: bytes | mmap.mmap, row: int) -> tuple[int, dict[str, Any]] | None:
    """Return number and document of a row; None: it is empty, or not whole."""
    at = row * ROW_BYTES
    number, length, checksum = _HEADER.unpack_from(content, at)
    text = content[at + _HEADER.size : at + _HEADER.size + length]
    if not 0 < length <= ROW_BYTES - _HEADER.size or _checksum(number, text) != checksum:
        return None
    return number, orjson.loads(text)


def _checksum(number: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(number.to_bytes(8)))


def _found(content: bytes | mmap.mmap, first: int, rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for row in range(first, first + rows):
        found = _read(content, row)
        if found is not None:
            yield found


def recent_requests(directory: Path, limit: int, now: float) -> dict[str, list[dict[str, Any]]]:
    """Return all processes' requests: the slowest of the last minutes first, of all others the latest first. Blocks."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in _PLACES}
    for path in directory.glob(f"{_NAME}*"):
        number = path.name.removeprefix(_NAME)
        process = {"process": "background" if number == str(BACKGROUND_PROCESS) else f"worker{number}"}
        content = path.read_bytes()
        if len(content) < FILE_BYTES:  # it is being made
            continue
        for name, (first, rows) in _PLACES.items():
            found[name] += [process | document for _, document in _found(content, first, rows)]
    since = now - MINUTES_SHOWN * MINUTE_SECONDS
    found["slowest"] = [one for one in found["slowest"] if one["at"] >= since]
    for name, kind in found.items():
        kind.sort(key=itemgetter("seconds" if name == "slowest" else "at"), reverse=True)
    return {name: kind[:limit] for name, kind in found.items()}
