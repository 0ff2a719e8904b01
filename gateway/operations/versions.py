"""Which version of an object a GET or HEAD is answered by, and who names it.

    CurrentVersions    the catalog, within the bound of the key's slot, else the origin (this file)
    SnapshotVersions   the snapshot that freezes the slot (snapshot_versions.py)
    PendingVersions    the write-back buffer, before the origin has the object (pending_versions.py)

Each is made for one request. read_object.py answers GET and HEAD by any of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.blocks.reading.reader import Outcome
from gateway.errors import OriginAnswered, OriginBodyError, OriginError
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead, is_remembered
from gateway.objects import BodyStream, ByteRange, HeldSpan
from gateway.operations.context import Exchange, Reply
from gateway.operations.passthrough import forward, forward_joined, onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.visibility import changed_by, invalidate
from gateway.s3.conditions import is_one_range
from gateway.s3.headers import towards_client, without
from gateway.s3.requests import S3Request

_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024

_ARCHIVED = frozenset({"GLACIER", "DEEP_ARCHIVE"})

_SENT_TO_THE_ORIGIN = frozenset({CHECKSUM_MODE, "x-amz-expected-bucket-owner", "x-amz-request-payer"})
"""Headers that the origin must judge; they go along with every request made for this one."""

_UNDERSTOOD = _SENT_TO_THE_ORIGIN | {
    "x-amz-api-version",  # the AWS SDK for C++ says it with every request, and so pyarrow does
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
    "x-amz-user-agent",
    "x-amzn-trace-id",
}

_COMMON = _UNDERSTOOD | {
    "accept",
    "accept-encoding",
    "amz-sdk-invocation-id",
    "amz-sdk-request",
    "authorization",
    "connection",
    "host",
    "range",
    "user-agent",
}
"""What most requests have: set aside at once, so that few names are left to be looked at one by one."""


class VersionReader(Protocol):
    """Gives the bytes of one range of one version."""

    @property
    def outcome(self) -> Outcome: ...

    def whole(self) -> HeldSpan | None:
        """All of them, where they lie in one file."""

    def body(self) -> BodyStream:
        """The bytes in order: all of them, or an exception."""

    def file_failed(self, error: Exception) -> None:
        """The file that the bytes came from could not be sent."""

    async def aclose(self) -> None:
        """Idempotent."""


class VersionSource(Protocol):
    """Names the version that one GET or HEAD is answered by, and gives its bytes."""

    @property
    def exchange(self) -> Exchange: ...

    @property
    def headers(self) -> dict[str, str]:
        """The request's headers that the origin must judge."""

    def must_forward(self) -> bool:
        """Whether the request asks for something that only the origin can answer."""

    async def forward(self) -> Reply:
        """The origin's own answer to the request."""

    def known(self) -> ObjectHead | None:
        """The version, without asking the origin; None: it must be asked.

        Raises S3Error NoSuchKey, or OriginAnswered 404, for an absence that is known.
        """

    async def ask(self, *, again: bool = False) -> ObjectHead:
        """The version, from the origin where nothing else knows it; `again`: what was known is out of date.

        Raises OriginAnswered for every error status, OriginUnreachable, and OriginBodyError.
        """

    async def stand_in(self, error: OriginError) -> ObjectHead | None:
        """The version to answer by where `ask` has raised `error`; None: answer `refused`. May raise, to end it."""

    async def refused(self) -> Reply:
        """What to answer to a GET where the origin names no version."""

    def is_served(self, head: ObjectHead) -> bool:
        """Whether the bytes of this version may be served from here; else `forward`."""

    def conditions(self) -> dict[str, str]:
        """The headers of a GET that asks the origin for version and bytes at once."""

    def accept(self, head: ObjectHead, *, with_checksums: bool) -> bool:
        """Whether such a GET has brought the version that is wanted."""

    async def open(self, head: ObjectHead, byte_range: ByteRange, answer: UnpinnedResponse | None) -> VersionReader:
        """A reader of its bytes. Raises as `ask` does where the origin does not give them."""

    async def is_outdated(self, head: ObjectHead, error: OriginAnswered | OriginBodyError) -> bool:
        """Whether `open` failed because `head` is out of date: then it is forgotten, and is to be asked for `again`."""

    def on_cut_body(self, head: ObjectHead) -> Callable[[], Awaitable[None]] | None:
        """What to call when the origin turns out in the midst of a body not to have the version."""


class CurrentVersions:
    """The version that is current at the origin, as the catalog has it within the bound of the slot."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.headers = judged_by_the_origin(exchange.request)

    def must_forward(self) -> bool:
        request = self.exchange.request
        if request.method == "HEAD":
            return not is_remembered(self.exchange.slot, self.headers) or asks_for_more_than_head(request)
        return asks_for_more_than_bytes(request)

    async def forward(self) -> Reply:
        if self.exchange.request.method == "HEAD":
            return await forward_joined(self.exchange)
        return await forward(self.exchange, cache="bypass")

    def known(self) -> ObjectHead | None:
        exchange = self.exchange
        if exchange.request.parameter("partNumber") is not None or wants_revalidation(exchange):
            return None
        return exchange.services.catalog.remembered(exchange.object_key, exchange.slot, headers=self.headers)

    async def ask(self, *, again: bool = False) -> ObjectHead:
        exchange = self.exchange
        catalog, key = exchange.services.catalog, exchange.object_key
        part_number = exchange.request.parameter("partNumber")
        if part_number is not None:
            return await catalog.ask(key, exchange.slot, headers=self.headers, part_number=part_number)
        look = again or wants_revalidation(exchange)
        return await catalog.current(key, exchange.slot, headers=self.headers, look=look)

    async def stand_in(self, error: OriginError) -> ObjectHead | None:
        if not isinstance(error, (OriginAnswered, OriginBodyError)):
            raise error
        return None

    async def refused(self) -> Reply:
        """The origin's own answer to the GET, remembered where it is an absence and the slot allows that.

        HEAD has no error document, and one that makes no sense may still have an object behind it.
        """
        exchange = self.exchange
        key, catalog, slot = exchange.object_key, exchange.services.catalog, exchange.slot
        if slot.negative_ttl_seconds == 0 or not is_remembered(slot, self.headers):
            return await self.forward()
        asked = catalog.now(key)
        response = await exchange.services.origin.send(onward_request(exchange, await receive_payload(exchange)))
        if response.status != 404 or "x-amz-delete-marker" in response.headers:
            return streamed_reply(response, head_only=False, cache="bypass")
        async with response:
            document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
        if b"<Code>NoSuchKey</Code>" in document:
            catalog.remember_absence(key, slot, asked, named=True)
        return Reply(404, without(towards_client(response.headers), "content-length"), document, "bypass")

    def is_served(self, head: ObjectHead) -> bool:
        return is_cacheable(self.exchange.request, head)

    def conditions(self) -> dict[str, str]:
        return self.headers

    def accept(self, head: ObjectHead, *, with_checksums: bool) -> bool:
        return True

    async def open(self, head: ObjectHead, byte_range: ByteRange, answer: UnpinnedResponse | None) -> VersionReader:
        return await open_cached(self.exchange, head, byte_range, self.headers, answer)

    async def is_outdated(self, head: ObjectHead, error: OriginAnswered | OriginBodyError) -> bool:
        """Of a remembered version every refusal may mean so; of one that the origin has just named, 412 alone."""
        if isinstance(error, OriginBodyError):
            is_outdated = head.remembered
        else:
            is_outdated = error.status == 412 or (head.remembered and error.status < 500)
        if is_outdated:
            await self._forget()
        return is_outdated

    def on_cut_body(self, head: ObjectHead) -> Callable[[], Awaitable[None]] | None:
        return self._forget if head.remembered else None

    async def _forget(self) -> None:
        await invalidate(changed_by(self.exchange))
        await self.exchange.services.blocks.invalidate(self.exchange.object_key)


# What a request asks for


def judged_by_the_origin(request: S3Request) -> dict[str, str]:
    """The headers among `_SENT_TO_THE_ORIGIN`; presigning moves them into the query."""
    if not request.query and _SENT_TO_THE_ORIGIN.isdisjoint(request.headers):
        return {}
    found = {name: value or "" for name, value in request.query if name in _SENT_TO_THE_ORIGIN}
    found.update((name, value) for name, value in request.headers.items() if name in _SENT_TO_THE_ORIGIN)
    return found


def asks_for_more_than_bytes(request: S3Request) -> bool:
    """Whether a GET asks for something that the catalog and blocks of the current version cannot know."""
    asked = request.headers.get("range")
    if asked is not None and (request.parameter("partNumber") is not None or not is_one_range(asked)):
        return True
    return asks_for_more(request)


def asks_for_more_than_head(request: S3Request) -> bool:
    """Whether a HEAD asks for more than the object's metadata: of a part, a range, a version, with other headers."""
    if "range" in request.headers or request.parameter("partNumber") is not None or asks_for_more_than_bytes(request):
        return True
    return bool(request.query) and any(name.startswith("response-") for name, _ in request.query)


def asks_for_more(request: S3Request) -> bool:
    """Whether it asks for anything but bytes and metadata of the current version."""
    if request.parameter("versionId") is not None:
        return True
    if "origin" in request.headers:
        return True  # the bucket's CORS rules go by origin and method, and a HEAD is another method
    if _COMMON.issuperset(request.headers):
        return False
    return any(name.startswith("x-amz-") for name in request.headers.keys() - _COMMON)


def wants_revalidation(exchange: Exchange) -> bool:
    """Whether the caller wants the origin to be asked, whatever is remembered: `Cache-Control: no-cache`, signed."""
    asked = exchange.request.headers.get("cache-control")
    if asked is None or exchange.anonymous:
        return False
    return "no-cache" in (directive.strip() for directive in asked.lower().split(","))


# What the cache may hold


def is_cacheable(request: S3Request, head: ObjectHead) -> bool:
    """Whether blocks may hold the bytes that a request asks of a version."""
    if not head.version.etag or "x-amz-server-side-encryption-customer-algorithm" in head.headers:
        return False
    if head.headers.get("x-amz-storage-class") in _ARCHIVED and "x-amz-restore" not in head.headers:
        return False
    if head.version.size_bytes == 0 and "range" in request.headers:
        return False  # servers differ about ranges of nothing, and nothing is lost by asking
    return request.parameter("partNumber") is None or head.part is not None


def vary_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that fetches go by: readers whose bytes may be refused to one another do not share one."""
    return {name: value for name, value in headers.items() if name != CHECKSUM_MODE}


async def open_cached(
    exchange: Exchange,
    head: ObjectHead,
    byte_range: ByteRange,
    headers: dict[str, str],
    answer: UnpinnedResponse | None,
) -> VersionReader:
    """A reader of blocks; those that are missing come from the origin."""
    return await exchange.services.blocks.open_range(
        head.version, byte_range, slot=exchange.slot.name, headers=vary_headers(headers), answer=answer
    )
