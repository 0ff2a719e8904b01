"""What of a request body is the client's data, and whether it is as promised. No I/O: whoever reads it, feeds it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from gateway.s3.aws_chunked import AwsChunkedDecoder
from gateway.s3.canonical import PayloadMode, payload_mode
from gateway.s3.checksums import BodyVerifier
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation, S3Request
from gateway.s3.signature_v4 import SeedSignature

PUT_SIZE_BYTES_MAX = 5 * 1024**3
"""S3's limit for PutObject and UploadPart."""

_LENGTH = re.compile(r"\d{1,19}", re.ASCII)

_OBJECT_WRITES = frozenset({Operation.PUT_OBJECT, Operation.UPLOAD_PART})


class IncomingBody:
    """One body: how it is framed, and what it must add up to.

    `wire_length_bytes` is the Content-Length, None for HTTP chunks; `length_bytes` that of the data, None where nobody
    says. `also` names checksums that the caller wants. Raises S3Error, when made and later: MissingContentLength,
    InvalidRequest, EntityTooLarge, and what AwsChunkedDecoder and BodyVerifier raise.
    """

    def __init__(
        self,
        request: S3Request,
        seed: SeedSignature | None,
        wire_length_bytes: int | None,
        *,
        also: Collection[str] = (),
    ) -> None:
        self.mode = _mode_of(request)
        # The checksum headers of CompleteMultipartUpload are about the object, not about the request's body.
        of_body = request.operation is not Operation.COMPLETE_MULTIPART_UPLOAD
        self._verifier = BodyVerifier(request.headers, self.mode, of_body=of_body, also=also)
        self._decoder: AwsChunkedDecoder | None = None
        self._left_bytes = self.length_bytes = wire_length_bytes
        self.trailer_names: frozenset[str] = frozenset()
        self.trailers: dict[str, str] = {}
        if self.mode.streaming:
            self._expect_chunks(request, seed)
        elif request.operation in _OBJECT_WRITES and wire_length_bytes is None:
            raise s3_error("MissingContentLength")
        _refuse_too_large(request, self.length_bytes)

    def _expect_chunks(self, request: S3Request, seed: SeedSignature | None) -> None:
        if not _stores_an_object(request):
            raise s3_error("InvalidRequest", f"{request.operation.value} does not take a streaming payload.")
        declared = request.headers.get("x-amz-decoded-content-length", "")
        if not _LENGTH.fullmatch(declared):
            raise s3_error("MissingContentLength", "aws-chunked bodies need x-amz-decoded-content-length.")
        self.length_bytes = int(declared)
        self.trailer_names = _announced_trailers(request)
        self._decoder = AwsChunkedDecoder(self.mode, self.length_bytes, self.trailer_names, seed)

    def feed(self, data: bytes | memoryview) -> Sequence[bytes | memoryview]:
        """The data in the next bytes from the wire: views, not copies. Nobody may be shown it before `finish`."""
        if self._decoder is not None:
            pieces: Sequence[bytes | memoryview] = self._decoder.feed(data)
        else:
            pieces = (data,)
            if self._left_bytes is not None:
                self._left_bytes -= len(data)
        for piece in pieces:
            self._verifier.update(piece)
        return pieces

    def finish(self) -> dict[str, str]:
        """The body has ended, and all of it is as promised: the checksum header that it came with, if any."""
        if self._decoder is not None:
            self.trailers = self._decoder.finish()
        elif self._left_bytes:
            raise s3_error("IncompleteBody")
        return self._verifier.verify(self.trailers)

    def digest(self, algorithm: str) -> bytes:
        """That of the data, for a checksum of `also`."""
        return self._verifier.digest(algorithm)


def is_checksum(name: str) -> bool:
    """Whether a header or trailer, in lower case, is a checksum of the data."""
    return name.startswith("x-amz-checksum-")


def is_streaming(request: S3Request) -> bool:
    """Whether the body is aws-chunked. S3Error for what `x-amz-content-sha256` must not say."""
    return _mode_of(request).streaming


def _mode_of(request: S3Request) -> PayloadMode:
    """What `x-amz-content-sha256` says of the body; presigned requests may say it in the query, or not at all."""
    value = request.parameter("X-Amz-Content-Sha256") or request.headers.get("x-amz-content-sha256")
    return payload_mode(value)


def _stores_an_object(request: S3Request) -> bool:
    if request.operation in _OBJECT_WRITES:
        return True
    return request.operation is Operation.FORWARD and request.method == "PUT" and request.key is not None


def _announced_trailers(request: S3Request) -> frozenset[str]:
    names = request.headers.get("x-amz-trailer", "").lower().split(",")
    return frozenset(name.strip() for name in names if name.strip())


def _refuse_too_large(request: S3Request, length_bytes: int | None) -> None:
    if request.operation in _OBJECT_WRITES and length_bytes is not None and length_bytes > PUT_SIZE_BYTES_MAX:
        raise s3_error("EntityTooLarge", ProposedSize=str(length_bytes), MaxSizeAllowed=str(PUT_SIZE_BYTES_MAX))
