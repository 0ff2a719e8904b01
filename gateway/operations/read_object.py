"""GetObject and HeadObject (S3 API, pages of those names): the data path.

    which version? (versions.py) → may it be served? → which bytes? → blocks on disk, fetched when they are missing

What is known, fresh and in memory is answered in the call itself; the rest is waited for.
Of an object of which nothing is known, the origin gives version and bytes in one answer (unpinned_get.py).
A version that changed since it was learned answers 412 to the fetch; then the origin is asked, and all is made again.
Once the first byte is out, a change can only end the connection: bytes of two versions are never mixed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.metadata.catalog import ObjectHead
from gateway.objects import BodyStream, ByteRange
from gateway.operations import unpinned_get
from gateway.operations.context import Answer, CacheLabel, Exchange, Reply
from gateway.operations.passthrough import no_body
from gateway.operations.unpinned_get import Refused
from gateway.operations.versions import VersionSource, vary_headers
from gateway.s3.conditions import content_range, evaluate_read, if_range_holds, parse_range
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import EncodedHeaders, towards_client

VERSION_RACES_MAX = 4

_OF_NOT_MODIFIED = frozenset({"etag", "last-modified", "cache-control", "expires", "vary", "x-amz-version-id"})

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


def get_object(versions: VersionSource) -> Answer:
    """Answer a GET from blocks; what they cannot answer is read from the origin (`x-forebay-cache: bypass`)."""
    get = _Get(versions, versions.exchange, response_overrides(versions.exchange))
    if versions.must_forward():
        return versions.forward()
    try:
        head = versions.known()
    except OriginAnswered:
        return versions.refused()
    if head is not None and versions.is_served(head):
        response = get.warm(head)
        if response is not None:
            return response
    return get.fetched(head)


def head_object(versions: VersionSource) -> Answer:
    """Answer a HEAD from what is known, or ask; conditions are judged here."""
    if versions.must_forward():
        return versions.forward()
    try:
        head = versions.known()
    except OriginAnswered as absence:
        return _refusal(absence)
    return _head_response(versions.exchange, head, "hit") if head is not None else _asked_head(versions)


async def _asked_head(versions: VersionSource) -> Reply:
    try:
        head = await versions.ask()
    except (OriginAnswered, OriginBodyError, OriginUnreachable) as error:
        known = await versions.stand_in(error)
        if known is not None:
            return _head_response(versions.exchange, known, "hit")
        return _refusal(error) if isinstance(error, OriginAnswered) else await versions.forward()
    return _head_response(versions.exchange, head, "hit" if head.remembered else "miss")


def _refusal(answer: OriginAnswered) -> Reply:
    return Reply(answer.status, towards_client(dict(answer.headers)), no_body())


def _head_response(exchange: Exchange, head: ObjectHead, cache: CacheLabel) -> Reply:
    if is_not_modified(exchange, head):
        return _not_modified(head, cache)
    asked = head.part or _asked_range(exchange, head)
    encoded = _encoded_headers(head, asked, response_overrides(exchange))
    if asked is None:
        return Reply(200, (), b"", cache, encoded=encoded, length_bytes=head.version.size_bytes)
    return Reply(206, _lengths(head, asked), b"", cache, encoded=encoded)


@dataclass(slots=True)
class _Get:
    """One GET on its way to an answer."""

    versions: VersionSource
    exchange: Exchange
    overrides: Mapping[str, str]

    def warm(self, head: ObjectHead) -> Reply | None:
        """The answer that needs no byte of the object, or bytes that are warm; None: they are to be waited for."""
        exchange, version = self.exchange, head.version
        if is_not_modified(exchange, head):
            return _not_modified(head, "hit")
        asked = head.part or _asked_range(exchange, head)
        if version.size_bytes == 0:
            encoded = _encoded_headers(head, None, self.overrides)
            return Reply(200, _lengths(head, None), b"", cache="hit", encoded=encoded)
        byte_range = asked or ByteRange(0, version.size_bytes - 1)
        span = exchange.services.blocks.warm_span(version, byte_range, slot=exchange.slot.name)
        if span is None:
            return None
        encoded = _encoded_headers(head, asked, self.overrides)
        if asked is None:
            return Reply(200, (), span, "hit", None, encoded, span.failed, version.size_bytes)
        return Reply(206, _lengths(head, asked), span, "hit", None, encoded, span.failed)

    async def fetched(self, known: ObjectHead | None) -> Reply:
        """The answer by the version that is known, or that is asked for; again where that turns out to be another."""
        versions, again = self.versions, False
        if known is None:
            try:
                response = await self._at_once()
            except (Refused, OriginUnreachable) as error:
                known = await versions.stand_in(error)
                if known is None:
                    return await versions.refused()
            else:
                if response is not None:
                    return response
        for _ in range(VERSION_RACES_MAX):
            head = known or await self._asked(again=again)
            if head is None:
                return await versions.refused()
            if not versions.is_served(head):
                break
            try:
                return await self._served(head)
            except (OriginAnswered, OriginBodyError) as error:
                if not await versions.is_outdated(head, error):
                    raise
                known, again = None, True
        return await versions.forward()

    async def _asked(self, *, again: bool) -> ObjectHead | None:
        try:
            return await self.versions.ask(again=again)
        except (OriginAnswered, OriginBodyError, OriginUnreachable) as error:
            return await self.versions.stand_in(error)

    async def _at_once(self) -> Reply | None:
        """The answer where the origin gives version and bytes at once; None: the version is to be asked for."""
        versions, exchange = self.versions, self.exchange
        begun = unpinned_get.begin(exchange, versions.headers)
        if begun is None:
            return None
        get, wanted = begun
        with get:
            async with get.turns:
                head, answer = await unpinned_get.ask(exchange, versions.conditions(), get, wanted)
                try:
                    with_checksums = unpinned_get.brings_checksums(exchange, versions.headers)
                    if head is None or not versions.accept(head, with_checksums=with_checksums):
                        return None
                    if not versions.is_served(head):
                        return None
                    return self._inline(head, answer) or await self._served(head, answer)
                except (OriginAnswered, OriginBodyError) as error:
                    if head is None or not await versions.is_outdated(head, error):
                        raise
                    return None
                finally:
                    await answer.aclose()

    def _inline(self, head: ObjectHead, answer: UnpinnedResponse) -> Reply | None:
        """The answer by an unpinned GET of a small object, all of which has come."""
        exchange, version = self.exchange, head.version
        asked = _asked_range(exchange, head)
        if version.size_bytes == 0:
            return None
        body = exchange.services.blocks.arrived(
            version,
            asked or ByteRange(0, version.size_bytes - 1),
            slot=exchange.slot.name,
            headers=vary_headers(self.versions.headers),
            answer=answer,
        )
        if body is None:
            return None
        encoded = _encoded_headers(head, asked, self.overrides)
        return Reply(206 if asked else 200, _lengths(head, asked), body, "miss", encoded=encoded)

    async def _served(self, head: ObjectHead, answer: UnpinnedResponse | None = None) -> Reply:
        response = self.warm(head)
        if response is not None:
            return response
        asked = head.part or _asked_range(self.exchange, head)
        reader = await self.versions.open(head, asked or ByteRange(0, head.version.size_bytes - 1), answer)
        status, lengths = 206 if asked else 200, _lengths(head, asked)
        encoded = _encoded_headers(head, asked, self.overrides)
        span = reader.whole()
        if span is not None:
            return Reply(status, lengths, span, reader.outcome, None, encoded, span.failed)
        on_cut = self.versions.on_cut_body(head)
        body = reader.body() if on_cut is None else _watched(reader.body(), on_cut)
        return Reply(status, lengths, body, reader.outcome, reader, encoded, reader.file_failed)


async def _watched(body: BodyStream, on_cut: Callable[[], Awaitable[None]]) -> BodyStream:
    """The body; where the origin turns out to have another version in the midst of it, the next try shall see that."""
    async with aclosing(body):
        try:
            async for piece in body:
                yield piece
        except (OriginAnswered, OriginBodyError):
            await on_cut()
            raise


def is_not_modified(exchange: Exchange, head: ObjectHead) -> bool:
    """Whether the request's conditions ask for 304; S3Error PreconditionFailed where they fail."""
    now, version = exchange.services.clock.now(), head.version
    judged = evaluate_read(exchange.request.headers, etag=version.etag, last_modified=head.last_modified, now=now)
    return judged == "not-modified"


def _not_modified(head: ObjectHead, cache: CacheLabel) -> Reply:
    headers = towards_client(head.headers)
    return Reply(304, [pair for pair in headers if pair[0] in _OF_NOT_MODIFIED], cache=cache)


def _asked_range(exchange: Exchange, head: ObjectHead) -> ByteRange | None:
    headers = exchange.request.headers
    if not if_range_holds(headers, etag=head.version.etag, last_modified=head.last_modified):
        return None
    return parse_range(headers.get("range"), head.version.size_bytes)


def _encoded_headers(head: ObjectHead, asked: ByteRange | None, overrides: Mapping[str, str]) -> EncodedHeaders:
    """The headers of HeadObject, but for lengths, with the overrides that the caller asked for."""
    onward = head.of_whole if asked is None or head.part is not None else head.of_range
    if not overrides:
        return onward
    kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in onward.pairs]
    return EncodedHeaders.of([*((name, value) for name, value in kept if name not in overrides), *overrides.items()])


def _lengths(head: ObjectHead, asked: ByteRange | None) -> list[tuple[str, str]]:
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
