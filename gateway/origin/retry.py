"""Handling of a failing origin: which requests may be sent again, when, and whether asking is worth it at all.

Exponential backoff with full jitter; a budget shared by everything that talks to one origin, as in the standard retry
mode of AWS's SDKs: when most requests fail, retries stop, so that a struggling origin is not buried under them.

If it is unknown whether the origin has carried a request out, a retry depends on the request (`repetition`). A GET, a
plain PUT of an object and a plain DELETE of one end the same however often they are carried out. A second
CreateMultipartUpload leaves an unknown upload, and a second conditional PUT is answered 412 because the first
has been carried out: the writer of a lock would believe that another client holds it.

While an origin is dead or says nothing, requests fail at once and one at a time finds out whether it is back
(`CircuitBreaker`). A worker tells the others its finding in a page of memory that all of them map
(`OriginHealth`).
"""

from __future__ import annotations

import hashlib
import mmap
import random
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import unquote

import structlog

from gateway.core.clock import Clock
from gateway.disk.atomic_write import map_shared
from gateway.origin.client import OriginRequest, OriginSettings, is_of_s3
from gateway.s3.headers import parse_http_date

_RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
_REFUSALS = frozenset({501, 503, 505, 507, 508, 511})
"""Statuses that mean "not implemented", "later", "no such version", "no room", "in a loop" and "not you"."""
_RETRIED_CODES = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable"})

_CODES_OF_RATES = frozenset({"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "ServerBusy", "Throttling"})


def asks_for_retry(status: int) -> bool:
    """Return True if a request is sent again after this status, whatever the answer's document says."""
    return status in _RETRIED_STATUSES


def is_retried(status: int, code: str | None) -> bool:
    """Return True if an answer means "later" rather than "no". `code` is its S3 error code, if it has one."""
    return asks_for_retry(status) or (status >= 400 and code in _RETRIED_CODES)


def is_throttled(method: str, status: int, code: str | None, headers: Mapping[str, str]) -> bool:
    """Return True if the answer means that requests come too fast.

    A 503 to a HEAD has no code: S3 sends an S3 request id with it, a proxy does not.
    """
    if status == 429:
        return True
    if status != 503:
        return False
    return code in _CODES_OF_RATES or (method == "HEAD" and is_of_s3(headers))


def may_be_done(status: int) -> bool:
    """Return True if an error answer leaves open whether the origin has acted; "later" means that it has not."""
    return status >= 500 and status not in _REFUSALS


class RetryBudget:
    """A bucket of tokens: a retry takes some, a success gives some back.

    Figures of botocore's standard mode: 500 tokens, 5 a retry, 10 after no answer, 1 back for a success at once.
    """

    def __init__(self, capacity: int = 500) -> None:
        self._capacity = capacity
        self._tokens = capacity

    @property
    def tokens(self) -> int:
        return self._tokens

    def take(self, amount: int) -> bool:
        """Take `amount` tokens; False, and none taken, when there are too few."""
        if amount > self._tokens:
            return False
        self._tokens -= amount
        return True

    def release(self, amount: int) -> None:
        self._tokens = min(self._capacity, self._tokens + amount)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt was no success: an answer that says "later" or, with `answered` False, no answer."""

    answered: bool
    retry_after_seconds: float | None = None
    may_be_done: bool = True
    """True if the origin may have carried the request out all the same."""


class RetryPolicy:
    """The rules; holds no state but the random numbers."""

    def __init__(self, settings: OriginSettings, rng: random.Random | None = None) -> None:
        self._settings = settings
        self._rng = rng or random.Random()

    def new_series(self, budget: RetryBudget, started: float) -> RetrySeries:
        """Start the attempts of one request; the first began at monotonic time `started`."""
        return RetrySeries(self._settings, self._rng, budget, started)


class RetrySeries:
    """The attempts of one request: counts them, and pays for them from the budget."""

    def __init__(self, settings: OriginSettings, rng: random.Random, budget: RetryBudget, started: float) -> None:
        self._settings = settings
        self._rng = rng
        self._budget = budget
        self._started = started
        self._taken = 0
        self.attempts = 1

    def delay_before_next(self, failure: Failure, now: float) -> float | None:
        """Return seconds to wait before the next attempt. None: give up.

        So also if the origin asks for a longer pause than clients wait for; the client gets it.
        """
        if self.attempts >= self._settings.max_attempts:
            return None
        if (failure.retry_after_seconds or 0.0) > self._settings.retry_after_cap_seconds:
            return None
        delay = self._delay(failure)
        if not failure.answered and now + delay - self._started > self._settings.unreachable_after_seconds:
            return None
        price = 5 if failure.answered else 10
        if not self._budget.take(price):
            return None
        self._taken = price
        self.attempts += 1
        return delay

    def succeeded(self) -> None:
        """Give back what the last retry took, or a token when none was needed."""
        self._budget.release(self._taken or 1)

    def _delay(self, failure: Failure) -> float:
        ceiling = min(self._settings.backoff_cap_seconds, self._settings.backoff_base_seconds * 2**self.attempts)
        delay = self._rng.uniform(0, ceiling)
        if failure.retry_after_seconds is not None:
            return max(delay, failure.retry_after_seconds)
        return delay


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """Return the answer's Retry-After (RFC 9110, 10.2.3): seconds or a date; None when absent or unreadable."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    moment = parse_http_date(value)
    return None if moment is None else max(0.0, moment - now)


_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_CONDITION = re.compile(r"(?:^|-)if-|-forbid-overwrite$")
_SOURCE = "x-amz-copy-source"
_APPEND = "x-amz-write-offset-bytes"
_CONDITIONS_OF_ENTRIES = (b"ETag>", b"LastModifiedTime>", b"Size>")
"""Elements of a DeleteObjects document by which an object is deleted in a certain state only."""


class Repetition(Enum):
    """The effect of a request that is carried out twice."""

    HARMLESS = "harmless"
    """State and answer are unchanged."""

    LITTER = "litter"
    """Something is left over, or "there is no such thing (any more)" is the answer; no object is affected."""

    WRONG_ANSWER = "wrong answer"
    """The second is refused because the first was carried out, and the refusal says the opposite."""


def repetition(request: OriginRequest) -> Repetition:
    if request.method in _READS:
        return Repetition.HARMLESS
    parameters = {name for name, _ in request.query}
    if _depends_on_state(request, parameters):
        return Repetition.WRONG_ANSWER
    if request.method == "POST":
        return Repetition.HARMLESS if parameters & {"delete", "select"} else Repetition.LITTER
    if request.key is None:  # a bucket is made or deleted, or one of its settings
        return Repetition.HARMLESS if parameters else Repetition.LITTER
    if request.method == "DELETE" and "uploadId" in parameters:
        return Repetition.LITTER
    return Repetition.HARMLESS


def is_slow(request: OriginRequest) -> bool:
    """Return True if a healthy origin may take minutes: for lists, copies, CompleteMultipartUpload, bulk operations."""
    if request.method == "GET":
        return request.key is None
    return (
        request.method == "POST"
        or _SOURCE in request.headers
        or any(name == "renameObject" for name, _ in request.query)
    )


def _depends_on_state(request: OriginRequest, parameters: set[str]) -> bool:
    if "renameObject" in parameters or _APPEND in request.headers:
        return True
    of_source = f"{_SOURCE}-if-"
    conditions = [name for name in request.headers if _CONDITION.search(name)]
    if any(not name.startswith(of_source) or _copies_onto_itself(request) for name in conditions):
        return True
    if request.method == "POST" and "delete" in parameters and isinstance(request.body, bytes):
        return any(element in request.body for element in _CONDITIONS_OF_ENTRIES)
    return False


def _copies_onto_itself(request: OriginRequest) -> bool:
    source = unquote(request.headers.get(_SOURCE, "").partition("?")[0], "latin-1")
    return source.lstrip("/").encode("latin-1") == f"{request.bucket}/{request.key}".encode()


BELIEVED_SECONDS = 10.0
"""Seconds after which a report of silence expires; a process that still finds silence repeats it."""

_RECORD = struct.Struct("=Qd")
_CELLS = 1024
_SIZE_BYTES = _CELLS * _RECORD.size

log = structlog.get_logger(__name__)


class OriginHealth:
    """For each host, when it was last found silent, and when a request to it last failed.

    Times are monotonic, the same for all processes. A cell is written without a lock. A half-written cell, or one
    overwritten by another host, costs a question to the origin at most.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Share `file` with other processes; make it if missing. Without it, or room for it, this one is alone."""
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        if file is None:
            return
        try:
            self._memory = map_shared(file, _SIZE_BYTES)
        except OSError as error:
            log.warning("workers cannot tell each other that the origin is silent", error=str(error))

    def cell(self, host: str) -> OriginHealthCell:
        return self._cell(host)

    def failures(self, host: str) -> OriginHealthCell:
        """Return the cell for failed requests of an endpoint, or for a lack of a key to ask it."""
        return self._cell(f"failed: {host}")

    def _cell(self, name: str) -> OriginHealthCell:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return OriginHealthCell(self._memory, int.from_bytes(digest, "little"))


class OriginHealthCell:
    """One host's record."""

    __slots__ = ("_memory", "_name", "_offset")

    def __init__(self, memory: mmap.mmap, name: int) -> None:
        self._memory = memory
        self._name = name
        self._offset = name % _CELLS * _RECORD.size

    def tell(self, moment: float) -> None:
        """Note that the host is silent, or has failed."""
        _RECORD.pack_into(self._memory, self._offset, self._name, moment)

    def clear(self) -> None:
        if self.told_at():
            _RECORD.pack_into(self._memory, self._offset, self._name, 0.0)

    def is_silent(self, now: float, heard_at: float) -> bool:
        """Return True if a process has just found the host silent, after the caller last heard of it."""
        moment = self.told_at()
        return 0 < moment <= now < moment + BELIEVED_SECONDS and heard_at < moment

    def told_at(self) -> float:
        """When it was told last; 0: never, or another host's record has taken its place."""
        name, moment = _RECORD.unpack_from(self._memory, self._offset)
        return moment if name == self._name else 0.0


class CircuitBreaker:
    """A breaker: closed until the gateway's own probe gets no answer; then open until any request gets one.

    Clients' requests never open it: the origin may fail that one request only. `threshold` attempts in a row
    without an answer cause a probe. While open, a probe is due after `cooldown_seconds`, doubled with every one
    that gets no answer, up to `cooldown_cap_seconds`.
    """

    def __init__(
        self,
        clock: Clock,
        silence: OriginHealthCell | None = None,
        *,
        threshold: int = 5,
        cooldown_seconds: float = 0.5,
        cooldown_cap_seconds: float = 5.0,
    ) -> None:
        """`silence`: where other processes are told that the origin is silent, and tell it."""
        self._clock = clock
        self._silence = silence or OriginHealth().cell("")
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
        """True if so many attempts in a row got no answer that a probe is due."""
        return self._failures >= self._threshold

    @property
    def answers_nobody(self) -> bool:
        """True if it is open because nothing came back, not even a refusal: callers would wait for long."""
        return self._is_silent and self.is_open

    def hears_from_others(self) -> bool:
        """Return True if it is open, also if another process has just found the origin silent."""
        if self.is_open or self._silence.told_at() <= self._heard_at:
            return self.is_open
        if self._silence.is_silent(self._clock.monotonic(), self._heard_at):
            self.is_open = self._is_silent = True
            self._next_probe_at = 0.0
        return self.is_open

    def was_heard_since(self, moment: float) -> bool:
        """Return True if any attempt has been answered since a monotonic time."""
        return self._heard_at >= moment

    def may_be_probed(self) -> bool:
        return not self.is_open or self._clock.monotonic() >= self._next_probe_at

    def answered(self) -> None:
        self._heard_at = self._clock.monotonic()
        if self._is_silent:
            self._silence.clear()
        self._failures = 0
        self._cooldown = self._first_cooldown
        self.is_open = self._is_silent = False

    def unanswered(self) -> None:
        """Note an attempt without a connection, or without an answer."""
        self._failures += 1

    def probe_failed(self, started: float, *, silent: bool) -> None:
        """Open the breaker if no answer came since a probe began at monotonic `started`; `silent`: nor a refusal."""
        if self.was_heard_since(started):
            return
        if self.is_open:
            self._cooldown = min(self._cooldown_cap, self._cooldown * 2)
        self.is_open, self._is_silent = True, silent
        now = self._clock.monotonic()
        self._next_probe_at = now + self._cooldown
        if silent:
            self._silence.tell(now)
