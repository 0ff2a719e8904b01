"""GetObject (S3 API, "GetObject"): the data path.

    which version is current? → may it be served? → which bytes? → blocks on disk, filled from the origin when missing

What is known, fresh and in memory is answered in the call itself; the rest is waited for.
Of an object of which nothing is known, the origin gives version and bytes in one answer (first_look.py).
A version that changed since the catalog learned of it answers 412 to the fill; then the origin is asked, and all is
made again. Once the first byte is out, a change can only end the connection: bytes of two versions are never mixed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import aclosing

from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.errors import OriginAnswered, OriginBodyError
from gateway.metadata.catalog import ObjectHead, is_remembered
from gateway.objects import BodyStream, ByteRange
from gateway.operations import first_look
from gateway.operations.exchange import Exchange
from gateway.operations.first_look import Refused
from gateway.operations.passthrough import forward, onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.reading import (
    HEADERS_OF_NOT_MODIFIED,
    current_head,
    judged_by_the_origin,
    needs_the_origin,
    remembered_head,
    towards_blocks,
)
from gateway.operations.reply import Answer, Reply
from gateway.operations.visibility import changed_by, invalidate
from gateway.s3.conditions import evaluate_read, if_range_holds
from gateway.s3.error_codes import s3_error
from gateway.s3.forwarding import EncodedHeaders, towards_client, without
from gateway.s3.ranges import content_range, parse_range
from gateway.s3.requests import S3Request

VERSION_RACES_MAX = 4

ERROR_DOCUMENT_BYTES_MAX = 64 * 1024

_OVERRIDES = {
    f"response-{name}": name
    for name in (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
}

_NO_HEADER_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]|[^\x00-\xff]")

_ARCHIVED = frozenset({"GLACIER", "DEEP_ARCHIVE"})


def get_object(exchange: Exchange) -> Answer:
    """Answer a GET from blocks; what they cannot answer is read from the origin (`x-forebay-cache: bypass`)."""
    overrides = response_overrides(exchange)
    if needs_the_origin(exchange.request):
        return forward(exchange, cache="bypass")
    headers = judged_by_the_origin(exchange.request)
    try:
        known = remembered_head(exchange, headers)
    except OriginAnswered:
        return _refused(exchange)
    if known is None:
        return _of_unknown(exchange, headers, overrides)
    if fit_for_blocks(exchange.request, known):
        reply = at_once(exchange, known, overrides)
        if reply is not None:
            return reply
    return _from_blocks(exchange, headers, overrides, known)


async def _of_unknown(exchange: Exchange, headers: dict[str, str], overrides: Mapping[str, str]) -> Reply:
    try:
        reply = await _at_first_look(exchange, headers, overrides)
    except Refused:
        return await _refused(exchange)
    return reply or await _from_blocks(exchange, headers, overrides, None)


async def _at_first_look(exchange: Exchange, headers: dict[str, str], overrides: Mapping[str, str]) -> Reply | None:
    """The answer where the origin gives version and bytes at once; None: the version is to be asked for."""
    begun = first_look.begin(exchange, headers)
    if begun is None:
        return None
    look, wanted = begun
    with look:
        async with look.turns:
            head, answer = await first_look.ask(exchange, headers, look, wanted)
            try:
                if head is None or not fit_for_blocks(exchange.request, head):
                    return None
                reply = arrived_reply(exchange, head, headers, overrides, answer)
                if reply is not None:
                    return reply
                return await serve(exchange, head, headers, overrides, answer)
            except OriginAnswered as error:
                if head is None or not _is_another_version(error, head):
                    raise
                await _forget_version(exchange)
                return None
            finally:
                await answer.aclose()


async def _from_blocks(
    exchange: Exchange, headers: dict[str, str], overrides: Mapping[str, str], known: ObjectHead | None
) -> Reply:
    """The answer by the version that is `known`, or that the origin names; again where that turns out to be another."""
    look = False
    for _ in range(VERSION_RACES_MAX):
        try:
            head = known or await current_head(exchange, headers, look=look)
        except (OriginAnswered, OriginBodyError):
            # HEAD has no error document, and one that makes no sense may still have an object behind it: whatever GET
            # answers, the client shall have as it is.
            return await _refused(exchange)
        if not fit_for_blocks(exchange.request, head):
            return await forward(exchange, cache="bypass")
        try:
            return await serve(exchange, head, headers, overrides)
        except (OriginAnswered, OriginBodyError) as error:
            if not _is_another_version(error, head):
                raise
            await _forget_version(exchange)
            known, look = None, True
    return await forward(exchange, cache="bypass")


def _is_another_version(error: OriginAnswered | OriginBodyError, head: ObjectHead) -> bool:
    """Whether a fill's refusal may only mean that `head` is out of date: then the origin is to be asked again.

    Of a version that is remembered, every refusal may; of one that the origin has just named, 412 alone.
    """
    if isinstance(error, OriginBodyError):
        return head.remembered
    return error.status == 412 or (head.remembered and error.status < 500)


async def _forget_version(exchange: Exchange) -> None:
    await invalidate(changed_by(exchange))
    await exchange.services.blocks.invalidate(exchange.object_key)


async def _refused(exchange: Exchange) -> Reply:
    """The origin's own answer to the GET, remembered where it is an absence and the slot allows that."""
    key, catalog, slot = exchange.object_key, exchange.services.catalog, exchange.slot
    if slot.negative_ttl_seconds == 0 or not is_remembered(slot, judged_by_the_origin(exchange.request)):
        return await forward(exchange, cache="bypass")
    asked = catalog.now(key)
    response = await exchange.services.origin.send(onward_request(exchange, await receive_payload(exchange)))
    if response.status != 404 or "x-amz-delete-marker" in response.headers:
        return streamed_reply(response, head_only=False, cache="bypass")
    async with response:
        document = await response.read(ERROR_DOCUMENT_BYTES_MAX)
    if b"<Code>NoSuchKey</Code>" in document:
        catalog.remember_absence(key, slot, asked, named=True)
    return Reply(404, without(towards_client(response.headers), "content-length"), document, "bypass")


def fit_for_blocks(request: S3Request, head: ObjectHead) -> bool:
    if not head.version.etag or "x-amz-server-side-encryption-customer-algorithm" in head.headers:
        return False
    if head.headers.get("x-amz-storage-class") in _ARCHIVED and "x-amz-restore" not in head.headers:
        return False
    if head.version.size_bytes == 0 and "range" in request.headers:
        return False  # servers differ about ranges of nothing, and nothing is lost by asking
    return request.parameter("partNumber") is None or head.part is not None


async def serve(
    exchange: Exchange,
    head: ObjectHead,
    headers: Mapping[str, str],
    overrides: Mapping[str, str],
    answer: UnpinnedResponse | None = None,
) -> Reply:
    reply = at_once(exchange, head, overrides)
    if reply is not None:
        return reply
    asked = head.part or asked_range(exchange.request, head)
    byte_range = asked or ByteRange(0, head.version.size_bytes - 1)
    reader = await exchange.services.blocks.open_range(
        head.version, byte_range, slot=exchange.slot.name, headers=towards_blocks(headers), answer=answer
    )
    status, lengths, encoded = 206 if asked else 200, lengths_of(head, asked), encoded_headers(head, asked, overrides)
    span = reader.whole()
    if span is not None:
        return Reply(status, lengths, span, reader.outcome, None, encoded, span.failed)
    body = _forgetting_changes(exchange, reader.body()) if head.remembered else reader.body()
    return Reply(status, lengths, body, reader.outcome, reader, encoded, reader.file_failed)


def at_once(exchange: Exchange, head: ObjectHead, overrides: Mapping[str, str]) -> Reply | None:
    """The answer that needs no byte of the object, or bytes that are warm; None: they are to be waited for."""
    request, version = exchange.request, head.version
    now = exchange.services.clock.now()
    if evaluate_read(request.headers, etag=version.etag, last_modified=head.last_modified, now=now) == "not-modified":
        onward = towards_client(head.headers)
        return Reply(304, [(name, value) for name, value in onward if name in HEADERS_OF_NOT_MODIFIED], cache="hit")
    asked = head.part or asked_range(request, head)
    if version.size_bytes == 0:
        return Reply(200, lengths_of(head, None), b"", cache="hit", encoded=encoded_headers(head, None, overrides))
    byte_range = asked or ByteRange(0, version.size_bytes - 1)
    span = exchange.services.blocks.warm_span(version, byte_range, slot=exchange.slot.name)
    if span is None:
        return None
    encoded = encoded_headers(head, asked, overrides)
    if asked is None:
        return Reply(200, (), span, "hit", None, encoded, span.failed, version.size_bytes)
    return Reply(206, lengths_of(head, asked), span, "hit", None, encoded, span.failed)


def arrived_reply(
    exchange: Exchange,
    head: ObjectHead,
    headers: Mapping[str, str],
    overrides: Mapping[str, str],
    answer: UnpinnedResponse,
) -> Reply | None:
    """The answer to a first look at a small object, all of which has come."""
    version, asked = head.version, asked_range(exchange.request, head)
    if version.size_bytes == 0:
        return None
    body = exchange.services.blocks.arrived(
        version,
        asked or ByteRange(0, version.size_bytes - 1),
        slot=exchange.slot.name,
        headers=towards_blocks(headers),
        answer=answer,
    )
    if body is None:
        return None
    lengths, encoded = lengths_of(head, asked), encoded_headers(head, asked, overrides)
    return Reply(206 if asked else 200, lengths, body, "miss", encoded=encoded)


async def _forgetting_changes(exchange: Exchange, body: BodyStream) -> BodyStream:
    """The body; where the origin turns out to have another version in the midst of it, the next try shall see that."""
    async with aclosing(body):
        try:
            async for piece in body:
                yield piece
        except (OriginAnswered, OriginBodyError):
            await _forget_version(exchange)
            raise


def asked_range(request: S3Request, head: ObjectHead) -> ByteRange | None:
    if not if_range_holds(request.headers, etag=head.version.etag, last_modified=head.last_modified):
        return None
    return parse_range(request.headers.get("range"), head.version.size_bytes)


def encoded_headers(head: ObjectHead, asked: ByteRange | None, overrides: Mapping[str, str]) -> EncodedHeaders:
    """The headers of HeadObject, but for lengths, with the overrides that the caller asked for."""
    onward = head.of_whole if asked is None or head.part is not None else head.of_range
    if not overrides:
        return onward
    kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in onward.pairs]
    return EncodedHeaders.of([*((name, value) for name, value in kept if name not in overrides), *overrides.items()])


def lengths_of(head: ObjectHead, asked: ByteRange | None) -> list[tuple[str, str]]:
    """The headers that say which bytes are sent."""
    if asked is None:
        return [("content-length", str(head.version.size_bytes))]
    return [
        ("content-range", content_range(asked, head.version.size_bytes)),
        ("content-length", str(asked.length)),
    ]


def response_overrides(exchange: Exchange) -> dict[str, str]:
    """`response-content-type` and its five siblings (S3 API, GetObject, "Overriding response header values")."""
    query = exchange.request.query
    overrides = {_OVERRIDES[name]: _header_value(name, value or "") for name, value in query if name in _OVERRIDES}
    if overrides and exchange.anonymous:
        raise s3_error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")
    return overrides


def _header_value(parameter: str, value: str) -> str:
    """An override's value, if a header can carry it: line breaks would be the beginning of another header."""
    if _NO_HEADER_VALUE.search(value):
        raise s3_error(
            "InvalidArgument",
            "Header value cannot be represented using ISO-8859-1.",
            ArgumentName=parameter,
            ArgumentValue=value,
        )
    return value
