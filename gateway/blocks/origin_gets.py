"""GETs of the origin whose bytes fill blocks.

A `PinnedGet` brings bytes of one version: pinned by If-Match, checked, and resumed where they broke off. What another
node sends is compared with the checksums that it has promised, chunk by chunk, and the bucket replaces what is damaged.

An unpinned GET reads an unknown object: it asks the origin for version and bytes at once. Its answer shows to which
block the bytes belong, so fetches cannot be shared before it. Until then one process has the lock of the place
(fetch_locks.py): readers that learn the version in another way wait before they begin to fetch the same bytes. Until
the fetch has ended, when the bytes can be found, no other reader sends an unpinned GET: others ask for the version, and
share the fetch.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Literal, Protocol

from gateway.blocks import layout
from gateway.blocks.block_file import ChunkChecksums
from gateway.blocks.fetch_locks import FETCHED, FetchLocks, FileWatcher, LockKey, lock_of_place
from gateway.blocks.layout import CHUNK_BYTES
from gateway.core.clock import Clock
from gateway.core.errors import OriginAnswered, OriginBodyError, OriginBusy, OriginError, S3Error
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.origin.client import (
    FromPeer,
    Origin,
    OriginRequest,
    OriginResponse,
    Purpose,
    doubt,
    error_of,
    from_peer,
    turn_seconds,
)
from gateway.origin.peer_protocol import COPY, FROM_BUCKET
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.s3.checksums import ALGORITHMS, PREFIX, Checksum, decode_checksum
from gateway.s3.headers import without_doubtful_checksums
from gateway.s3.origin_habits import WrongAnswer, WrongBody, check_head

KNOWN_EMPTY_MAX = 16_384
"""Places where there were no bytes, remembered by each process."""

TURN_SECONDS_MAX = 60.0
"""S3's clients wait about as long for an answer, and ask anew. A request has no longer for all its turns."""


class Turns(asyncio.Semaphore):
    """Turns of one process to ask the origin for bytes: their number, and each wait for one, is bounded."""

    async def acquire(self) -> Literal[True]:
        """Wait for a turn. Raises OriginBusy when there is none in TURN_SECONDS_MAX, or in the caller's patience."""
        if not self.locked():
            return await super().acquire()
        try:
            async with asyncio.timeout(turn_seconds(TURN_SECONDS_MAX)):
                return await super().acquire()
        except TimeoutError:
            raise OriginBusy("others have kept this one waiting for its turn for too long") from None


@dataclass(slots=True)
class UnpinnedGet:
    """The exclusive right to fetch bytes of an unknown version.

    A context manager: the version becomes known within its body. `turns` bounds those of a process: its caller holds
    one from the question until a fetch has taken the answer, because each waiting answer has some of its body in
    memory.

    Set `known_empty` if there were no bytes: the next time the version is asked for first. Set `whole` if all bytes
    came with the version.
    """

    locks: FetchLocks
    lock: LockKey
    turns: Turns
    on_end: Callable[[UnpinnedGet], None]
    object_id: bytes
    known_empty: bool = False
    whole: bool = False
    _holders: int = 1
    _over: asyncio.Event | None = None

    def __enter__(self) -> UnpinnedGet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(self)

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self.locks.release(self.lock)

    def becomes(self, lock: LockKey) -> bool:
        """Replace the lock by a block's lock, until it is released; return False when that is of another place.

        The version is known then, so waiting readers continue.
        """
        if self.lock.version or lock.of_version(self.lock.version) != self.lock:
            return self.lock == lock
        before, self.lock = self.lock, lock
        self.locks.exchange(before, lock)
        return True

    def is_over(self) -> None:
        """Let readers that wait for the version continue; no such GET is sent before the fetch, if any, has ended.

        If the answer was `whole`, they continue when the fetch has ended, as they would wait for its bytes anyway.
        """
        if self._holders > 1 and not self.lock.version and not self.whole:
            self.becomes(self.lock.of_version(FETCHED))
        self.let_go()
        if self._over is not None:
            self._over.set()

    async def over(self) -> None:
        """Wait until the version is found out, or is not."""
        if self._over is None:
            self._over = asyncio.Event()
        await self._over.wait()


@dataclass(slots=True)
class UnpinnedResponse:
    """A good answer to an unpinned GET; `range` are the bytes of the object that its body holds.

    Its maker closes it in the end; a fetch takes the response before that, if it needs it. A reader may have
    it for long after: it holds the response, with what has come of its body, no longer than it is of use.
    """

    get: UnpinnedGet
    range: ByteRange
    _response: OriginResponse | None

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers if self._response is not None else {}

    @property
    def told(self) -> FromPeer | None:
        return from_peer(self._response)

    def take(self, wanted: ByteRange) -> OriginResponse | None:
        """Return the response, once, if its body begins with the bytes wanted and has all; the caller closes it."""
        if self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        response, self._response = self._response, None
        return response

    def whole(self, wanted: ByteRange) -> memoryview | None:
        """Return the bytes wanted, if the body begins with them and is here whole. Call it once, before `take`."""
        if self._response is None or self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        body = self._response.whole()
        if body is None or len(body) != self.range.length:
            return None
        self._response = None  # a body that is here whole leaves nothing to be closed
        return body[: wanted.length]

    async def aclose(self) -> None:
        """Give the connection back, unless the response was taken. Idempotent."""
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()


@dataclass(slots=True)
class UnpinnedGets:
    """Unpinned GETs of one process, with its view of those of others. Event loop only."""

    locks: FetchLocks
    watcher: FileWatcher
    turns: Turns
    turns_of_copies: Turns
    """Turns of GETs that ask other nodes: GETs for other nodes never wait for these."""

    _own: dict[LockKey, UnpinnedGet] = field(default_factory=dict)
    _known_empty: OrderedDict[LockKey, None] = field(default_factory=OrderedDict)

    def begin(self, object_id: bytes, offset: int, headers: Mapping[str, str]) -> UnpinnedGet | None:
        """Return the right to find out the version at `offset`, to be entered; None: another caller has it."""
        lock = lock_of_place(object_id, offset, headers)
        taken = lock in self._known_empty or lock in self._own or self.locks.has(lock)
        if taken or not (self.locks.take_unlisted(lock) or self.locks.take(lock) == self.locks.worker):
            return None
        turns = self.turns_of_copies if COPY in headers else self.turns
        get = self._own[lock] = UnpinnedGet(self.locks, lock, turns, partial(self._end, lock), object_id)
        return get

    @property
    def any_pending(self) -> bool:
        return bool(self._own)

    def pending(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> bool:
        lock = lock_of_place(layout.object_id(key), offset, headers)
        return lock in self._own or self._holder_elsewhere(lock) is not None

    async def settled(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> bool:
        """Wait until the version at these bytes is found out; False: it is not being found out, or not in time."""
        lock = lock_of_place(layout.object_id(key), offset, headers)
        own = self._own.get(lock)
        if own is not None:
            await own.over()
            return True
        holder = self._holder_elsewhere(lock)
        return holder is not None and await self.locks.released(lock, holder, self.watcher)

    def _holder_elsewhere(self, lock: LockKey) -> int | None:
        holder = self.locks.holder(lock)
        return holder if holder != self.locks.worker else None

    def _end(self, lock: LockKey, get: UnpinnedGet) -> None:
        del self._own[lock]
        get.is_over()
        if get.known_empty:  # it has no blocks by which it would be known
            self._known_empty[lock] = None
            if len(self._known_empty) > KNOWN_EMPTY_MAX:
                self._known_empty.popitem(last=False)


RETRY_PAUSE_SECONDS = 0.1
_RETRYABLE = frozenset({429, 500, 502, 503, 504})
_CHECKSUMS = frozenset(PREFIX + algorithm for algorithm in ALGORITHMS)


@dataclass(slots=True)
class PinnedGet:
    """One range of one version. `start`, then `pieces`, then `aclose`, whatever happened.

    Once the first answer was good, up to `retries` further requests fetch what is missing. All of them together wait
    for their turns as long as one.
    """

    origin: Origin
    version: ObjectVersion
    range: ByteRange
    headers: Mapping[str, str]
    purpose: Purpose
    slot: str
    clock: Clock
    retries: int
    _received: int = 0
    _waited_seconds: float = 0.0
    _response: OriginResponse | None = field(default=None)
    _check: BodyCheck | None = field(default=None)
    _unpinned: bool = False
    _told: FromPeer | None = None

    @property
    def received_bytes(self) -> int:
        return self._received

    @property
    def is_from_peer(self) -> bool:
        return self._told is not None

    def begin_with(self, answer: UnpinnedResponse | None) -> None:
        """Begin with an answer that has arrived already, if it fits; it was checked on arrival."""
        self._response = answer.take(self.range) if answer is not None else None
        self._unpinned = self._response is not None
        if self._response is not None:
            self._check = self._check_of(self._response, self.range)
            self._told = from_peer(self._response)

    async def start(self) -> None:
        """Ask, and judge the head of the answer, unless there is one.

        Raises OriginAnswered for every refusal (412: the object has another version now), OriginUnreachable, and
        OriginBodyError for an answer of another version, range or length.
        """
        if self._response is not None:
            return
        first = self.range.first + self._received
        headers = {
            **self.headers,
            "range": f"bytes={first}-{self.range.last}",
            "if-match": self.version.etag,
            "accept-encoding": "identity",
        }
        key = self.version.key
        request = OriginRequest(
            "GET",
            key.bucket,
            key.key,
            headers=headers,
            purpose=self.purpose,
            slot=self.slot,
            waited_seconds=self._waited_seconds,
            size_bytes=self.version.size_bytes,
        )
        asked_at = self.clock.monotonic()
        try:
            self._response, self._unpinned = await self.origin.send(request), False
        finally:
            self._waited_seconds += self.clock.monotonic() - asked_at
        self._told = from_peer(self._response)
        if self._response.status not in (200, 206):
            raise await error_of(self._response)
        asked = ByteRange(first, self.range.last)
        check_head(self._response.status, self._response.headers, self.version, asked)
        self._check = self._check_of(self._response, asked)

    async def pieces(
        self, buffer: ReceiveBuffer | None = None, taker: ChunkTaker | None = None
    ) -> AsyncGenerator[bytes | memoryview, None]:
        """Yield the bytes in order, all of them, or raise. With a buffer as `OriginResponse.stream`.

        A thread that takes bytes calls `check` with them first.

        Bytes of another node are compared with the checksums that came with them before they are yielded, or by a
        `taker`. Where they differ, or break off, the rest comes from the bucket, for a taker from the last chunk on
        that it has: `received_bytes` goes back there.
        """
        retries_left, length = self.retries, self.range.length
        while True:
            try:
                if self._response is None:
                    await self.start()
                assert self._response is not None  # noqa: S101 - it has just been started
                stream = self._response.stream(buffer)
                if taker is not None:
                    taker.promised = self._told.checksums if self._told is not None else None
                elif self._told is not None:
                    stream = _verified(stream, self._told.checksums, self._response.headers)
                try:
                    async for piece in stream:
                        yield self._taken(piece, length)
                        if taker is not None and taker.is_damaged:
                            raise _DAMAGED
                        if self._received == length and self._unpinned:
                            return
                finally:
                    if isinstance(stream, AsyncGenerator):  # here and now, not when the garbage collector comes to it
                        await stream.aclose()
                if self._received < length:
                    raise OriginBodyError(f"the origin sent {self._received} of {length} bytes")
                return
            except OriginError as error:
                if isinstance(error, OriginBodyError):
                    doubt(self._response)
                await self.aclose()
                if self._told is not None and not isinstance(error, OriginAnswered | WrongAnswer):
                    self._leave_peer(error, taker)
                    continue
                is_refused = isinstance(error, OriginAnswered) and error.status not in _RETRYABLE
                if retries_left == 0 or is_refused or isinstance(error, WrongAnswer | OriginBusy):
                    raise
                await self.clock.sleep(RETRY_PAUSE_SECONDS * 2 ** (self.retries - retries_left))
                retries_left -= 1

    def check(self, content: memoryview) -> None:
        """Compare bytes, on the thread that takes them, with the checksum that came with the whole object, if any."""
        if self._check is not None:
            self._check.update(content)

    async def aclose(self) -> None:
        """Give the connection back. Idempotent."""
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()

    def _leave_peer(self, error: OriginError, taker: ChunkTaker | None) -> None:
        """Ask the bucket for the rest, whole chunks of the range having been compared."""
        told, self._told = self._told, None
        if told is not None and isinstance(error, _ChunkDiffers):
            told.doubt()
        elif told is not None:
            told.broke_off()
        self._received = taker.go_back() if taker is not None else self._received // CHUNK_BYTES * CHUNK_BYTES
        self.headers = {**self.headers, COPY: FROM_BUCKET}

    def _taken(self, piece: bytes | memoryview, length: int) -> bytes | memoryview:
        """Return the wanted part of a piece, counted and checked. Raises WrongAnswer."""
        left = length - self._received
        if len(piece) > left:
            if not self._unpinned:
                raise WrongBody("the origin sent more bytes than were asked for")
            piece = piece[:left]
        self._received += len(piece)
        if self._check is not None:
            self._check.update(piece)  # one that was taken has no content, and was checked by its taker
            if self._received == length and not self._check.holds():
                raise WrongBody("the origin's body does not have the checksum that came with it")
        return piece

    def _check_of(self, response: OriginResponse, asked: ByteRange) -> BodyCheck | None:
        return BodyCheck.of(response.headers) if asked.length == self.version.size_bytes else None


class ChunkTaker(Protocol):
    """Takes the bytes of a range, and compares chunks with another node's checksums before a reader gets them."""

    promised: bytes | None
    """The packed checksums of the chunks of the whole range; None: nothing was promised."""

    is_damaged: bool
    """The last bytes differ: they, and what follows, were not taken, until `go_back`."""

    def go_back(self) -> int:
        """Drop what comes behind the last complete chunk; return how many bytes are left."""


class _ChunkDiffers(OriginBodyError):
    """A peer's bytes are not those that it has promised."""


_DAMAGED = _ChunkDiffers("another node sent other bytes than it has promised")


def is_as_promised(packed: bytes | bytearray, promised: bytes) -> bool:
    """Return True if the first chunks of a body have the checksums that came with it."""
    return packed == promised[: len(packed)]


async def _verified(
    stream: AsyncIterator[bytes | memoryview], promised: bytes, headers: Mapping[str, str]
) -> AsyncGenerator[memoryview, None]:
    """Yield the chunks of a peer's body that are as promised; _ChunkDiffers at the first that is not."""
    length = headers.get("content-length", "")
    checksums, held = ChunkChecksums(int(length) if length.isdecimal() else 0), b""
    try:
        async for piece in stream:
            before = checksums.complete_bytes
            checksums.update(piece)
            if not is_as_promised(checksums.packed, promised):
                raise _DAMAGED
            count = checksums.complete_bytes - before
            whole = memoryview(held + piece if held else piece)
            held = bytes(whole[count:])
            if count > 0:
                yield whole[:count]
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


class BodyCheck:
    """Sees the bytes of a whole object in order, and says in the end whether they are those that were promised."""

    def __init__(self, algorithm: str, expected: bytes) -> None:
        self._running = Checksum(algorithm)
        self._expected = expected
        self.update = self._running.update

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> BodyCheck | None:
        """Return the check that an answer's headers allow, if any. A checksum of checksums of parts is none."""
        if _CHECKSUMS.isdisjoint(headers):
            return None
        headers = without_doubtful_checksums(headers)
        if _CHECKSUMS.isdisjoint(headers) or headers.get("x-amz-checksum-type", "FULL_OBJECT").upper() != "FULL_OBJECT":
            return None
        for algorithm in ALGORITHMS:
            value = headers.get(PREFIX + algorithm)
            if value is not None and "-" not in value:
                try:
                    return cls(algorithm, decode_checksum(algorithm, value))
                except S3Error:
                    return None  # none that can be understood: the origin may know others
        return None

    def holds(self) -> bool:
        """Return True if the bytes seen are the whole object, as promised."""
        return self._running.digest() == self._expected
