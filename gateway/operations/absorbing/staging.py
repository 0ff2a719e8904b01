"""A request's body on its way into the buffer: verified, staged, sealed; or nothing is left of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable, S3Error
from gateway.operations.absorbing.upload_requests import no_such_upload
from gateway.operations.context import Exchange
from gateway.operations.payload import receive_verified
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.writeback.files.staged_file import StagedWriter
from gateway.writeback.journal.records import Part, Upload

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


@dataclass(frozen=True, slots=True)
class Staged:
    """A sealed body, as the part it is to be, and what is said of its checksums in the answer."""

    part: Part
    answer_headers: list[tuple[str, str]]


async def stage_body(exchange: Exchange, buffer: WritebackBuffer, number: int) -> Staged:
    """Receive the request's body into a staged file that survives a power cut; S3Error and nothing left otherwise."""
    writer = buffer.stage()

    def write(data: memoryview) -> None:
        try:
            writer.write(data)
        except OSError as error:  # the disk's: those of the client's connection come from elsewhere
            raise BufferUnavailable(f"a staged file cannot be written: {error}") from error

    try:
        received = await receive_verified(exchange, write)
    except BufferUnavailable as error:
        await buffer.discard(writer)
        buffer.bounds.trouble(error)
        raise unavailable(error) from error
    except BaseException:
        await buffer.discard(writer)
        raise
    return await _sealed(exchange, buffer, writer, number, received.md5, dict(received.checksums))


async def _sealed(
    exchange: Exchange, buffer: WritebackBuffer, writer: StagedWriter, number: int, md5: bytes, sums: dict[str, str]
) -> Staged:
    try:
        file = await buffer.seal(writer, md5)
    except BufferUnavailable as error:
        raise unavailable(error) from error
    checksums = {name.removeprefix(PREFIX): value for name, value in sums.items()}
    part = Part(number, file, exchange.services.clock.now(), checksums)
    return Staged(part, [("etag", file.etag), *sums.items()])


def unavailable(error: BufferUnavailable) -> S3Error:
    """What the client is told: it may try again, nothing was acknowledged."""
    return s3_error("ServiceUnavailable", f"The write-back buffer cannot take this now: {error}")


async def store_part(buffer: WritebackBuffer, upload: Upload, part: Part) -> None:
    """Write a part down; S3Error, and its file is gone, where that cannot be."""
    try:
        stored = await buffer.put_part(upload.upload_id, part)
    except BufferUnavailable as error:
        raise unavailable(error) from error
    if not stored:
        raise no_such_upload(upload.upload_id)
