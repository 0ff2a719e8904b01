"""Bytes of one version of an object from the origin: pinned by If-Match, checked, and resumed where they broke off."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.clock import Clock
from gateway.errors import OriginAnswered, OriginBodyError, OriginError, S3Error
from gateway.objects import ByteRange, ObjectVersion
from gateway.origin.client import Origin, OriginRequest, OriginResponse, Purpose
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.s3.checksums import ALGORITHMS, PREFIX, Checksum, decode_checksum

ERROR_DOCUMENT_BYTES_MAX = 64 * 1024
RETRY_PAUSE_SECONDS = 0.1
_RETRYABLE = frozenset({429, 500, 502, 503, 504})
_CHECKSUMS = frozenset(PREFIX + algorithm for algorithm in ALGORITHMS)


class WrongAnswer(OriginBodyError):
    """The origin answered with something else than what was asked for: asking again would not help."""


@dataclass(slots=True)
class PinnedGet:
    """One range of one version. `start`, then `pieces`, then `aclose`, whatever happened.

    Once the first answer was good, up to `retries` further requests fetch what is missing.
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
    _response: OriginResponse | None = field(default=None)
    _check: BodyCheck | None = field(default=None)
    _unpinned: bool = False

    def begin_with(self, answer: UnpinnedResponse | None) -> None:
        """Have the first answer be one that has come already, if it fits; it was judged when it came."""
        self._response = answer.take(self.range) if answer is not None else None
        self._unpinned = self._response is not None
        if self._response is not None:
            self._check = self._check_of(self._response, self.range)

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
        request = OriginRequest("GET", key.bucket, key.key, headers=headers, purpose=self.purpose, slot=self.slot)
        self._response, self._unpinned = await self.origin.send(request), False
        if self._response.status not in (200, 206):
            body = await self._response.read(ERROR_DOCUMENT_BYTES_MAX)
            raise OriginAnswered(self._response.status, list(self._response.headers.items()), body)
        asked = ByteRange(first, self.range.last)
        check_head(self._response, self.version, asked)
        self._check = self._check_of(self._response, asked)

    async def pieces(self, buffer: ReceiveBuffer | None = None) -> AsyncGenerator[bytes | memoryview, None]:
        """The bytes in order, all of them or an exception. With a buffer as `OriginResponse.stream`."""
        retries_left, length = self.retries, self.range.length
        while True:
            try:
                if self._response is None:
                    await self.start()
                assert self._response is not None  # noqa: S101 - it has just been started
                stream = self._response.stream(buffer)
                try:
                    async for piece in stream:
                        yield self._taken(piece, length)
                        if self._received == length and self._unpinned:
                            return
                finally:
                    if isinstance(stream, AsyncGenerator):  # here and now, not when the garbage collector comes to it
                        await stream.aclose()
                if self._received < length:
                    raise OriginBodyError(f"the origin sent {self._received} of {length} bytes")
                return
            except OriginError as error:
                await self.aclose()
                if retries_left == 0 or not _worth_another_try(error):
                    raise
                await self.clock.sleep(RETRY_PAUSE_SECONDS * 2 ** (self.retries - retries_left))
                retries_left -= 1

    async def aclose(self) -> None:
        """Give the connection back. Idempotent."""
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()

    def _taken(self, piece: bytes | memoryview, length: int) -> bytes | memoryview:
        """What is wanted of a piece, counted and checked. WrongAnswer where the body is not what was promised."""
        left = length - self._received
        if len(piece) > left:
            if not self._unpinned:
                raise WrongAnswer("the origin sent more bytes than were asked for")
            piece = piece[:left]
        self._received += len(piece)
        if self._check is not None:
            self._check.update(piece)
            if self._received == length and not self._check.holds():
                raise WrongAnswer("the origin's body does not have the checksum that came with it")
        return piece

    def _check_of(self, response: OriginResponse, asked: ByteRange) -> BodyCheck | None:
        return BodyCheck.of(response.headers) if asked.length == self.version.size_bytes else None


def check_head(response: OriginResponse, version: ObjectVersion, asked: ByteRange) -> None:
    """WrongAnswer unless a 200 or 206 carries exactly the bytes asked for, of the version asked for.

    A 200 (an origin that knows no ranges) is as good where the range is the whole object. A Content-Encoding is the
    object's own: whoever re-coded the bytes on the way cannot also keep the length.
    """
    headers = response.headers
    if _bare(headers.get("etag", "")) != _bare(version.etag):
        raise WrongAnswer("the origin's ETag is not the one asked for")
    if response.status == 206:
        expected = f"bytes {asked.first}-{asked.last}/{version.size_bytes}"
        if headers.get("content-range") != expected:
            raise WrongAnswer(f"Content-Range {headers.get('content-range')!r} instead of {expected!r}")
    elif asked.length != version.size_bytes:
        raise WrongAnswer("the origin answered with the whole object instead of a range")
    if headers.get("content-length", str(asked.length)) != str(asked.length):
        raise WrongAnswer(f"Content-Length {headers.get('content-length')!r} instead of {asked.length}")


def _worth_another_try(error: OriginError) -> bool:
    if isinstance(error, OriginAnswered):
        return error.status in _RETRYABLE
    return not isinstance(error, WrongAnswer)


def _bare(etag: str) -> str:
    """Some origins leave the quotes out."""
    return etag.strip('"')


class BodyCheck:
    """Sees the bytes of a whole object in order, and says in the end whether they are those that were promised."""

    def __init__(self, algorithm: str, expected: bytes) -> None:
        self._running = Checksum(algorithm)
        self._expected = expected
        self.update = self._running.update

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> BodyCheck | None:
        """The check that an answer's headers allow, if any. A checksum of checksums of parts is none."""
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
        """Whether the bytes seen are the whole object, as it was promised."""
        return self._running.digest() == self._expected
