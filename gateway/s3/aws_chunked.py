"""The aws-chunked body framing, both ways, without I/O (S3 API, "Signature Calculations … Multiple Chunks").

    signed:    hexlen;chunk-signature=<64 hex> CRLF <data> CRLF … 0;chunk-signature=<64 hex> CRLF [trailers] CRLF
    unsigned:  hexlen CRLF <data> CRLF … 0 CRLF [trailers] CRLF
    trailers:  x-amz-checksum-crc32:BASE64 CRLF, then x-amz-trailer-signature:<64 hex> CRLF where chunks are signed

The decoder streams inside a chunk, so its state is one line and one hash, whatever a client declares. The price: with
signed chunks, bytes are handed out before their chunk's signature has been checked. Nothing of a body may become
visible before `finish` has returned.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator
from enum import Enum, auto

from gateway.core.errors import S3Error
from gateway.s3.error_codes import s3_error
from gateway.s3.signature_v4 import PayloadMode, SeedSignature, sign

LINE_SIZE_BYTES_MAX = 1024
SIGNED_CHUNK_SIZE_BYTES_MIN = 8192
"""S3's minimum for every signed chunk but the last one with data."""

CHUNK_SIZE_BYTES_MIN = 1024
"""The average size that unsigned chunks need at least. S3 wants 8 KiB of every one but the last."""

SMALL_CHUNKS_MAX = 1024
"""Chunks that may have any size. Each costs as much as a KiB does, however short it is."""

_LOOK_AHEAD_BYTES = 128
"""Longer than every line but a long trailer's."""

TRAILER_SIGNATURE = "x-amz-trailer-signature"

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_UNSIGNED_HEAD = re.compile(rb"([0-9a-fA-F]{1,16})")
_SIGNED_HEAD = re.compile(rb"([0-9a-fA-F]{1,16});chunk-signature=([0-9a-f]{64})")


class _State(Enum):
    """The part of the encoding that the next byte belongs to."""

    HEAD = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILERS = auto()
    DONE = auto()
    FAILED = auto()


class AwsChunkedDecoder:
    """Takes the framing off, piece by piece.

    `decoded_length` is `x-amz-decoded-content-length` in bytes; `trailer_names` are the lower-case names announced in
    `x-amz-trailer`; `seed` is the request's own verified signature, needed where chunks are signed. After an error the
    decoder refuses everything.
    """

    def __init__(
        self, mode: PayloadMode, decoded_length: int, trailer_names: frozenset[str], seed: SeedSignature | None
    ) -> None:
        if mode.signed and seed is None:
            raise s3_error("InvalidRequest", "Signed chunks need a request that is signed with Signature Version 4.")
        self._mode = mode
        self._signatures = _ChunkSignatures(seed) if mode.signed and seed is not None else None
        self._trailer_names = trailer_names if mode.trailer else frozenset()
        self._trailers: dict[str, str] = {}
        self._trailer_signature: str | None = None
        self._state = _State.HEAD
        self._line = bytearray()
        self._left_of_body = decoded_length
        self._left_of_chunk = 0
        self._small_chunk_size: int | None = None
        self._missing_bytes = 0
        self._chunk_signature = ""

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Return the decoded pieces that `data`, the next bytes of the body, brings: views of it, not copies.

        Raises S3Error: IncompleteBody (framing, lengths), InvalidChunkSizeError, SignatureDoesNotMatch,
        MalformedTrailerError.
        """
        pieces: list[bytes | memoryview] = []
        position = 0
        try:
            while position < len(data):
                if self._state is _State.DATA:
                    position = self._take_data(data, position, pieces)
                else:
                    position = self._take_line(data, position)
        except S3Error:
            self._state = _State.FAILED
            raise
        return pieces

    def finish(self) -> dict[str, str]:
        """Return the trailers but their signature, once the body has ended. S3Error IncompleteBody: ended too early."""
        if self._state is not _State.DONE:
            raise s3_error("IncompleteBody", "The request body terminated unexpectedly")
        return self._trailers

    def _take_data(self, data: bytes | memoryview, position: int, pieces: list[bytes | memoryview]) -> int:
        end = min(position + self._left_of_chunk, len(data))
        piece = data if end - position == len(data) else memoryview(data)[position:end]
        if self._signatures is not None:
            self._signatures.update(piece)
        pieces.append(piece)
        self._left_of_chunk -= end - position
        self._left_of_body -= end - position
        if self._left_of_chunk == 0:
            self._check_chunk()
            self._state = _State.DATA_END
            if data[end : end + 2] == b"\r\n":  # nearly always
                self._state = _State.HEAD
                return end + 2
        return end

    def _take_line(self, data: bytes | memoryview, position: int) -> int:
        if self._state in (_State.DONE, _State.FAILED):
            raise s3_error("IncompleteBody", "The request body goes on behind its end")
        ahead = bytes(data[position : position + _LOOK_AHEAD_BYTES])
        end = position + (ahead.find(b"\n") + 1 or len(ahead))
        self._line += ahead[: end - position]
        if len(self._line) > LINE_SIZE_BYTES_MAX:
            raise s3_error("IncompleteBody", f"A line of the chunked body is longer than {LINE_SIZE_BYTES_MAX} bytes")
        if self._line.endswith(b"\r\n"):
            line = bytes(self._line[:-2])
            self._line.clear()
            if self._state is _State.HEAD:
                self._begin_chunk(line)
            elif self._state is _State.TRAILERS:
                self._handle_trailer(line)
            elif line:
                raise s3_error("IncompleteBody", "A chunk is longer than it says")
            else:
                self._state = _State.HEAD
        return end

    def _begin_chunk(self, line: bytes) -> None:
        found = (_SIGNED_HEAD if self._mode.signed else _UNSIGNED_HEAD).fullmatch(line)
        if found is None:
            raise s3_error("IncompleteBody", "A chunk header is malformed")
        size = int(found[1], 16)
        if size > self._left_of_body or (size == 0 and self._left_of_body > 0):
            raise s3_error("IncompleteBody", "The chunks do not add up to x-amz-decoded-content-length")
        if self._mode.signed:
            self._chunk_signature = found[2].decode()
            if size > 0 and self._small_chunk_size is not None:
                raise s3_error("InvalidChunkSizeError", BadChunkSize=str(self._small_chunk_size))
            if size < SIGNED_CHUNK_SIZE_BYTES_MIN:
                self._small_chunk_size = size
        else:
            self._check_average(size)
        self._left_of_chunk = size
        self._state = _State.DATA
        if size == 0:
            self._check_chunk()
            self._state = _State.TRAILERS

    def _check_average(self, size: int) -> None:
        """No average over all of the body: a large chunk makes up for those before it, never for those behind it."""
        self._missing_bytes = max(0, self._missing_bytes + CHUNK_SIZE_BYTES_MIN - size)
        if self._missing_bytes > SMALL_CHUNKS_MAX * CHUNK_SIZE_BYTES_MIN:
            message = f"More than {SMALL_CHUNKS_MAX} chunks are smaller than {CHUNK_SIZE_BYTES_MIN} bytes."
            raise s3_error("InvalidChunkSizeError", message, BadChunkSize=str(size))

    def _check_chunk(self) -> None:
        if self._signatures is not None:
            self._signatures.check_chunk(self._chunk_signature)

    def _handle_trailer(self, line: bytes) -> None:
        # Some clients end a trailer with \n\r\n instead of \r\n.
        name_part, colon, value_part = line.rstrip(b"\n").decode("latin-1").partition(":")
        name, value = name_part.strip().lower(), value_part.strip()
        if not name and not colon:
            self._end_trailers()
        elif self._trailer_signature is not None:
            raise s3_error("MalformedTrailerError", "A trailer follows the trailer signature")
        elif name == TRAILER_SIGNATURE and self._mode.signed and self._mode.trailer:
            self._trailer_signature = value
        elif name not in self._trailer_names or name in self._trailers:
            raise s3_error(
                "MalformedTrailerError", f"The trailer {name} was not announced in x-amz-trailer, or came twice"
            )
        else:
            self._trailers[name] = value

    def _end_trailers(self) -> None:
        missing = self._trailer_names - self._trailers.keys()
        if missing:
            raise s3_error(
                "MalformedTrailerError", f"Announced in x-amz-trailer but missing: {', '.join(sorted(missing))}"
            )
        if self._signatures is not None and self._mode.trailer:
            if self._trailer_signature is None:
                raise s3_error("MalformedTrailerError", f"{TRAILER_SIGNATURE} is missing")
            self._signatures.check_trailers(self._trailers, self._trailer_signature)
        self._state = _State.DONE


class _ChunkSignatures:
    """The chain of chunk signatures: each one signs its chunk and the signature before it."""

    def __init__(self, seed: SeedSignature) -> None:
        self._seed = seed
        self._previous = seed.signature
        self._hash = hashlib.sha256()

    def update(self, piece: bytes | memoryview) -> None:
        self._hash.update(piece)

    def check_chunk(self, signature: str) -> None:
        digest = self._hash.hexdigest()
        self._hash = hashlib.sha256()
        self._check("AWS4-HMAC-SHA256-PAYLOAD", f"{_EMPTY_SHA256}\n{digest}", signature)

    def check_trailers(self, trailers: dict[str, str], signature: str) -> None:
        block = "".join(f"{name}:{trailers[name]}\n" for name in sorted(trailers))
        digest = hashlib.sha256(block.encode("latin-1")).hexdigest()
        self._check("AWS4-HMAC-SHA256-TRAILER", digest, signature)

    def _check(self, algorithm: str, digests: str, signature: str) -> None:
        seed = self._seed
        text = f"{algorithm}\n{seed.timestamp}\n{seed.scope}\n{self._previous}\n{digests}"
        expected = sign(seed.signing_key, text)
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise s3_error("SignatureDoesNotMatch", StringToSign=text, SignatureProvided=signature)
        self._previous = expected


# --- towards the origin: unsigned chunks, one trailer ---------------------------------------------------------------


def encoded_length(decoded_length: int, trailer_name: str, trailer_value_length: int, chunk_size: int) -> int:
    """Bytes on the wire of `decoded_length` bytes in chunks of `chunk_size` (the last one shorter), and a trailer."""
    whole, rest = divmod(decoded_length, chunk_size)
    length = whole * _chunk_length(chunk_size) + (_chunk_length(rest) if rest else 0)
    return length + len("0\r\n") + len(trailer_name) + len(":") + trailer_value_length + len("\r\n\r\n")


def _chunk_length(size: int) -> int:
    return len(f"{size:x}") + 2 + size + 2


def encode_chunk(data: bytes | memoryview) -> bytes:
    """Return `data`, which must not be empty, as one chunk."""
    if not len(data):
        raise ValueError("an empty chunk ends the body: use final_chunk")
    return b"".join((b"%x\r\n" % len(data), data, b"\r\n"))


def final_chunk(trailer_name: str, value: str) -> bytes:
    """Return the end of the body: the empty chunk and the trailer."""
    return f"0\r\n{trailer_name}:{value}\r\n\r\n".encode("latin-1")


class AwsChunkedEncoder:
    """Frames pieces of any size in chunks of `chunk_size` bytes, without copying or holding any.

    The length is known beforehand, so a chunk's head can go out before all of its data is there.
    """

    def __init__(self, decoded_length: int, chunk_size: int) -> None:
        self._left_of_body = decoded_length
        self._left_of_chunk = 0
        self._chunk_size = chunk_size

    def encode(self, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """Yield the encoded form of `data`. Raise ValueError when it is longer than the declared length."""
        if len(data) > self._left_of_body:
            raise ValueError("more data than was declared")
        view = memoryview(data)
        while view:
            if self._left_of_chunk == 0:
                self._left_of_chunk = min(self._chunk_size, self._left_of_body)
                yield b"%x\r\n" % self._left_of_chunk
            piece, view = view[: self._left_of_chunk], view[self._left_of_chunk :]
            self._left_of_chunk -= len(piece)
            self._left_of_body -= len(piece)
            yield piece
            if self._left_of_chunk == 0:
                yield b"\r\n"

    def finish(self, trailer_name: str, value: str) -> bytes:
        """Return the end of the body; ValueError when data is missing."""
        if self._left_of_body:
            raise ValueError(f"{self._left_of_body} bytes of the declared length are missing")
        return final_chunk(trailer_name, value)
