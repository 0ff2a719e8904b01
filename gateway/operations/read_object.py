"""GetObject and HeadObject (S3 API, pages of those names): the data path.

    which version? → may it be served? → which bytes? → blocks on disk, fetched when they are missing

The source of the version is made for each request:

    CurrentVersions    the catalog, within the bound of the key's slot, else the origin (here)
    SnapshotVersions   the snapshot that freezes the slot (snapshot_versions.py)
    PendingVersions    the write-back buffer, before the origin has the object (pending_versions.py)

Answers from fresh memory are given in the call itself; others are awaited. For an unknown object, the origin gives
version and first bytes in one answer (`ask_unpinned`); if checksums are wanted, which come only with the whole, this is
so if similar objects fit in one block. If anything there is unusual, the usual way, a HEAD first, finds out what to
answer.

A version that changed since it was learned answers 412 to the fetch; then the origin is asked, and all is made again.
Once the first byte is out, a change can only end the connection: bytes of two versions are never mixed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

from gateway.blocks.origin_gets import UnpinnedGet, UnpinnedResponse
from gateway.blocks.plan import Outcome
from gateway.core.clock import Clock
from gateway.core.errors import OriginAnswered, OriginBodyError, OriginError, OriginUnreachable
from gateway.core.model import BodyStream, ByteRange, MissReason, ObjectKey, ObjectVersion, PinnedFileSpan
from gateway.metadata.catalog import CHECKSUM_MODE, is_remembered, may_be_remembered
from gateway.metadata.entries import ObjectHead, ObservedAt, object_head_of_get, of_part
from gateway.operations.context import Answer, AppContext, CacheLabel, RequestContext, Response
from gateway.operations.passthrough import forward, forward_joined, handed_on, no_body, onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.visibility import changed_by, invalidate
from gateway.origin.client import OriginHead, OriginRequest, Purpose, age_of
from gateway.origin.peer_protocol import COPY
from gateway.origin.retry import asks_for_retry
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import (
    MD5_OF_NOTHING,
    READ_CONDITIONS,
    EncodedHeaders,
    evaluate_read,
    filter_response_headers,
    first_and_last,
    if_range_holds,
    is_one_range,
    parse_range,
    plain_etag,
    without,
)
from gateway.s3.origin_habits import NO_HABITS, OriginHabits, RangeIgnored, is_refusal
from gateway.s3.requests import S3Request
from gateway.telemetry import metrics

_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024

_ARCHIVED = frozenset({"GLACIER", "DEEP_ARCHIVE"})

_SENT_TO_THE_ORIGIN = frozenset({CHECKSUM_MODE, "x-amz-expected-bucket-owner", "x-amz-request-payer"})
"""Headers that the origin must judge; they go along with every request made for this one."""

_UNDERSTOOD = _SENT_TO_THE_ORIGIN | {
    "x-amz-api-version",  # the AWS SDK for C++ says it with every request, and so pyarrow does
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
    "x-amz-te",  # the AWS SDK for Java 2 takes an MD5 behind the body, and does without
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
    "traceparent",
    "tracestate",
    "user-agent",
}
"""Headers of most requests: set aside at once, so that few names need a closer look."""


PLAIN_FIELDS = _COMMON - {"x-amz-expected-bucket-owner", "x-amz-request-payer"} | {
    "content-type",  # the AWS SDK for C++ sends it without a body
    "if-match",
    "if-none-match",
}
"""Headers of a request that depends only on the object, its ETag, the range and the wish for checksums."""


class VersionReader(Protocol):
    """Gives the bytes of one range of one version."""

    @property
    def outcome(self) -> Outcome: ...

    def why_missing(self, before: ObjectVersion | None) -> MissReason | None:
        """Return why the first missing bytes were missing, or None. `before` is the version known before asking."""

    def whole(self) -> PinnedFileSpan | None:
        """Return all the bytes, if they are in one file."""

    def body(self) -> BodyStream:
        """Yield the bytes in order: all of them, or an exception."""

    def file_failed(self, error: Exception) -> None:
        """Report that the file of the bytes could not be sent."""

    async def aclose(self) -> None:
        """Release the reader. Idempotent."""


class VersionSource(Protocol):
    """Names the version that answers one GET or HEAD, and gives its bytes."""

    @property
    def context(self) -> RequestContext: ...

    @property
    def headers(self) -> dict[str, str]:
        """Return the request's headers that the origin must judge."""

    def must_forward(self) -> bool:
        """Return whether the request asks for something that only the origin can answer."""

    async def forward(self) -> Response:
        """Return the origin's own answer to the request."""

    def known(self) -> ObjectHead | None:
        """Return the version, without asking the origin; None: it must be asked.

        Raises S3Error NoSuchKey, or OriginAnswered 404, for a known absence.
        """

    async def ask(self, *, again: bool = False) -> ObjectHead:
        """Return the version, from the origin if nothing else knows it; `again`: the known one is out of date.

        Raises OriginAnswered for every error status, OriginUnreachable, and OriginBodyError.
        """

    def last_known(self) -> ObjectVersion | None:
        """Return the version known before `ask`, however old, or None."""

    async def stand_in(self, error: OriginError) -> ObjectHead | None:
        """Return the version to use after `ask` has raised `error`; None: answer `refused`. May raise."""

    async def refused(self) -> Response:
        """Answer a GET if the origin names no version."""

    def is_served(self, head: ObjectHead) -> bool:
        """Return whether the bytes of this version may be served from here; else `forward`."""

    def conditions(self) -> dict[str, str]:
        """Return the headers of a GET that asks the origin for version and bytes at once."""

    def accept(self, head: ObjectHead, *, with_checksums: bool) -> bool:
        """Return whether such a GET has brought the wanted version."""

    async def open(self, head: ObjectHead, byte_range: ByteRange, answer: UnpinnedResponse | None) -> VersionReader:
        """Return a reader of its bytes. Raises as `ask` if the origin does not give them."""

    async def is_outdated(self, head: ObjectHead, error: OriginAnswered | OriginBodyError) -> bool:
        """Return whether `open` failed because `head` is out of date: then it is forgotten; ask `again`."""

    def on_cut_body(self, head: ObjectHead) -> Callable[[OriginAnswered | OriginBodyError], Awaitable[object]]:
        """Return the function to call if the origin, in the middle of a body, does not have or give the version."""


class CurrentVersions:
    """The origin's current version, as the catalog has it within the bound of the slot."""

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.headers = judged_by_the_origin(context.request)

    def must_forward(self) -> bool:
        request = self.context.request
        if request.method == "HEAD":
            return not is_remembered(self.context.slot, self.headers) or head_must_bypass(request)
        return get_must_bypass(request)

    async def forward(self) -> Response:
        if self.context.request.method == "HEAD":
            reply = await forward_joined(self.context)
        else:
            reply = await forward(self.context, cache="bypass")
        if reply.status in (200, 206, 304, 404) and self.context.request.parameter("versionId") is None:
            etag = next((value for name, value in reply.headers if name == "etag"), None)
            if etag is not None or reply.status == 404:
                self.context.services.catalog.shown(self.context.object_key, etag)
        return reply

    def known(self) -> ObjectHead | None:
        context = self.context
        if context.request.parameter("partNumber") is not None or wants_revalidation(context):
            return None
        return context.services.catalog.remembered(context.object_key, context.slot, headers=self.headers)

    async def ask(self, *, again: bool = False) -> ObjectHead:
        context = self.context
        told, context.told = context.told, None
        if told is not None and told.outcome is not None and not again:
            if isinstance(told.outcome, Exception):
                raise told.outcome
            return told.outcome
        catalog, key = context.services.catalog, context.object_key
        part_number = context.request.parameter("partNumber")
        if part_number is not None:
            return await catalog.ask(key, context.slot, headers=self.headers, part_number=part_number)
        look, of_peer = again or wants_revalidation(context), context.of_peer
        return await catalog.current(key, context.slot, headers=self.headers, look=look, of_peer=of_peer)

    def last_known(self) -> ObjectVersion | None:
        if not is_remembered(self.context.slot, self.headers):
            return None  # nothing is learned there: save a look for each warm GET
        head = self.context.services.catalog.last_learned(self.context.object_key)
        return head.version if head is not None else None

    async def stand_in(self, error: OriginError) -> ObjectHead | None:
        if not isinstance(error, (OriginAnswered, OriginBodyError)):
            raise error
        return None

    async def refused(self) -> Response:
        """Return the origin's own answer to the GET, and remember an absence if the slot allows that.

        HEAD has no error document, and behind an answer to it that makes no sense there may still be an object.
        """
        context = self.context
        key, catalog, slot = context.object_key, context.services.catalog, context.slot
        if slot.negative_ttl_seconds == 0 or not is_remembered(slot, self.headers):
            return await self.forward()
        asked = catalog.now(key)
        request = onward_request(context, await receive_payload(context))
        response = handed_on(context, request, await context.services.origin.send(request))
        if response.status != 404 or "x-amz-delete-marker" in response.headers:
            return streamed_reply(response, head_only=False, cache="bypass")
        async with response:
            document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
        if b"<Code>NoSuchKey</Code>" in document:
            catalog.remember_absence(key, slot, asked, named=True)
        return Response(404, without(filter_response_headers(response.headers), "content-length"), document, "bypass")

    def is_served(self, head: ObjectHead) -> bool:
        """Return False for versions that cannot be cached.

        If the origin knows no ranges, blocks serve cached bytes and whole objects of one block; if it withholds the
        version's ranges, only cached bytes. Some proxies answer HEAD with a wrong length: the origin itself answers
        for an object without bytes, unless its ETag confirms that.
        """
        context, version = self.context, head.version
        if not is_cacheable(context, head) or (not version.size_bytes and plain_etag(version.etag) != MD5_OF_NOTHING):
            return False
        if self._is_behind_doubtful_end(version):
            return False
        if not head.remembered:
            context.services.catalog.named(version)
        habits = context.services.catalog.habits(version.key.bucket)
        if habits == NO_HABITS or not habits.concern(version) or not version.size_bytes:
            return True
        blocks, whole = context.services.blocks, ByteRange(0, version.size_bytes - 1)
        is_one = version.size_bytes <= blocks.first_fetched(0, None, context.slot.name).length
        return (is_one and habits.gives_ranges(version) and "range" not in context.request.headers) or blocks.holds(
            version, whole, slot=context.slot.name
        )

    def _is_behind_doubtful_end(self, version: ObjectVersion) -> bool:
        """Return whether the range begins behind all bytes, and no block of the first or last one confirms the size."""
        asked = first_and_last(self.context.request.headers.get("range"))
        if asked is None or not 0 < version.size_bytes <= asked[0]:
            return False
        blocks, slot = self.context.services.blocks, self.context.slot.name
        ends = (ByteRange(at, at) for at in (0, version.size_bytes - 1))
        return not any(blocks.holds(version, end, slot=slot) for end in ends)

    def conditions(self) -> dict[str, str]:
        return self.headers

    def accept(self, head: ObjectHead, *, with_checksums: bool) -> bool:
        return True

    async def open(self, head: ObjectHead, byte_range: ByteRange, answer: UnpinnedResponse | None) -> VersionReader:
        return await open_cached(self.context, head, byte_range, self.headers, answer)

    async def is_outdated(self, head: ObjectHead, error: OriginAnswered | OriginBodyError) -> bool:
        """Return True for a refusal, and for any other answer to a question about a remembered version.

        Once the catalog knows that ranges are missing or withheld, the version is read in another way.
        """
        if isinstance(error, RangeIgnored):
            self.context.services.catalog.learn_habits(head.version.key.bucket, OriginHabits(no_ranges=True))
            return True
        if is_refusal(error):
            self.context.services.catalog.refused(head.version)
            is_outdated = True
        else:
            is_outdated = head.remembered and (isinstance(error, OriginBodyError) or error.status < 500)
        if is_outdated:
            await self._forget()
        return is_outdated

    def on_cut_body(self, head: ObjectHead) -> Callable[[OriginAnswered | OriginBodyError], Awaitable[object]]:
        return partial(self.is_outdated, head)

    async def _forget(self) -> None:
        await invalidate(changed_by(self.context))
        await self.context.services.blocks.invalidate(self.context.object_key)


# The wishes of a request


def judged_by_the_origin(request: S3Request) -> dict[str, str]:
    """Return the headers among `_SENT_TO_THE_ORIGIN`; presigning moves them into the query."""
    if not request.query and _SENT_TO_THE_ORIGIN.isdisjoint(request.headers):
        return {}
    found = {name: value or "" for name, value in request.query if name in _SENT_TO_THE_ORIGIN}
    found.update((name, value) for name, value in request.headers.items() if name in _SENT_TO_THE_ORIGIN)
    return found


def get_must_bypass(request: S3Request) -> bool:
    """Return whether a GET asks for something that the catalog and blocks of the current version cannot know."""
    asked = request.headers.get("range")
    if asked is not None and (request.parameter("partNumber") is not None or not is_one_range(asked)):
        return True
    return must_bypass(request)


WARM_UP_RANGE = "bytes=0-0"
"""The range of a HEAD that asks for a warm-up (warm_up.py)."""


def head_must_bypass(request: S3Request) -> bool:
    """Return whether a HEAD asks for more than metadata: of a part, a range, a version, with other headers."""
    if request.headers.get("range", WARM_UP_RANGE) != WARM_UP_RANGE or must_bypass(request):
        return True
    return any(name == "partNumber" or name.startswith("response-") for name, _ in request.query)


def must_bypass(request: S3Request) -> bool:
    """Return whether a request asks for anything but bytes and metadata of the current version."""
    if request.query and request.parameter("versionId") is not None:
        return True
    if "origin" in request.headers:
        return True  # CORS rules of the bucket depend on origin and method, and a HEAD is another method
    if _COMMON.issuperset(request.headers):
        return False
    return any(name.startswith("x-amz-") for name in request.headers.keys() - _COMMON)


def wants_revalidation(context: RequestContext) -> bool:
    """Return whether the caller wants the origin asked, whatever is remembered: `Cache-Control: no-cache`, signed."""
    asked = context.request.headers.get("cache-control")
    if asked is None or context.anonymous:
        return False
    return "no-cache" in (directive.strip() for directive in asked.lower().split(","))


# What the cache may hold


def has_cacheable_bytes(head: ObjectHead) -> bool:
    if (
        not head.version.etag
        or head.version.etag.startswith("W/")
        or "x-amz-server-side-encryption-customer-algorithm" in head.headers
    ):
        return False
    return head.headers.get("x-amz-storage-class") not in _ARCHIVED or "x-amz-restore" in head.headers


def is_cacheable(context: RequestContext, head: ObjectHead) -> bool:
    """Return whether blocks may hold the bytes that a request asks of a version."""
    request, habits = context.request, context.services.catalog.habits(head.version.key.bucket)
    if not has_cacheable_bytes(head) or (habits != NO_HABITS and not habits.is_distinct(head.version)):
        return False
    if head.version.size_bytes == 0 and "range" in request.headers:
        return False  # servers differ about ranges of nothing, and asking costs nothing
    return request.parameter("partNumber") is None or head.part is not None


def vary_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that separate fetches: readers whose bytes may be refused to one another share none."""
    if not headers:
        return {}
    return {name: value for name, value in headers.items() if name != CHECKSUM_MODE}


async def open_cached(
    context: RequestContext,
    head: ObjectHead,
    byte_range: ByteRange,
    headers: dict[str, str],
    answer: UnpinnedResponse | None,
) -> VersionReader:
    """Return a reader of blocks; missing ones come from the origin."""
    return await context.services.blocks.open_range(
        head.version,
        byte_range,
        slot=context.slot.name,
        headers=vary_headers(headers),
        answer=answer,
        of_peer=context.of_peer,
    )


_CONDITIONS = READ_CONDITIONS | {"if-range"}

_NO_OBJECT_BYTES = 2**60
"""No object is this long."""


class Refused(OriginAnswered):
    """The origin has answered the GET with an error; its document was read if it says "later"."""


class Seen(NamedTuple):
    """The result of a first look; `head` None if the answer alone makes no sense. The caller closes the answer."""

    head: ObjectHead | None
    answer: UnpinnedResponse


class UnpinnedQuestion(NamedTuple):
    """A GET that asks for a version and its first bytes at once, and the right to send it.

    `headers` are those that the origin must judge, `fields` those that separate fetches; `whole`: the whole object is
    asked for, as its checksums are wanted; `since` is when.
    """

    get: UnpinnedGet
    wanted: ByteRange
    request: OriginRequest
    since: ObservedAt
    headers: Mapping[str, str]
    fields: Mapping[str, str]
    whole: bool


def begin_unpinned(
    services: AppContext,
    asked: S3Request,
    key: ObjectKey,
    slot: Slot,
    headers: Mapping[str, str],
    conditions: Mapping[str, str],
    since: ObservedAt | None = None,
    *,
    of_peer: bool = False,
) -> UnpinnedQuestion | None:
    """Return the question about a request's first bytes; None: the version must be asked for first.

    `since`: from when the answer counts; None: from now on. While its `get` lasts, others wait for the same bytes.
    `of_peer` is of RequestContext.
    """
    bounds = _asked(asked)
    if bounds is None:
        return None
    blocks, catalog = services.blocks, services.catalog
    wanted, whole = blocks.first_fetched(*bounds, slot.name), brings_checksums(asked, headers)
    if whole and not catalog.sizes_seen.are_within(key, wanted.length):
        return None  # the whole would be asked for, and all behind the first block discarded
    habits = catalog.habits(key.bucket)
    if habits.weak_etags or habits.no_ranges or habits.withheld_etags:
        return None  # the answer could not be continued
    fields: Mapping[str, str] = vary_headers(headers)
    roles = services.roles
    by_nodes = roles is not None and "cache-control" not in asked.headers and may_be_remembered(slot, fields)
    if roles is not None and by_nodes and not of_peer:
        fields = roles.headers(key, wanted.first // blocks.block_size_of(slot.name), fields, slot.name)
        if COPY in fields and whole:
            return None  # the checksums come with the HEAD, and the bytes from each block's owner
        if COPY in fields:
            conditions = {**conditions, COPY: fields[COPY]}
    get = blocks.begin_unpinned_get(key, wanted.first, fields)
    if get is None:
        return None
    request = _request(key, slot.name, conditions, None if whole else wanted)
    if by_nodes:
        request = replace(request, ages=catalog.ages(key, slot))
    return UnpinnedQuestion(get, wanted, request, since or catalog.now(key), headers, fields, whole)


async def ask_unpinned(context: RequestContext, question: UnpinnedQuestion) -> Seen:
    """Ask for the bytes; remember the answer's facts of the object if allowed. Raises Refused, OriginUnreachable."""
    catalog, key = context.services.catalog, context.object_key
    response = await context.services.origin.send(question.request)
    answer = UnpinnedResponse(question.get, question.wanted, response)
    try:
        if asks_for_retry(response.status):
            document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
            raise Refused(response.status, list(response.headers.items()), document)
        head, wanted = understood_answer(key, response, answer, question), question.wanted
        question.get.known_empty = head is None
        if head is not None:
            is_whole = not question.whole and response.status == 200
            if is_whole and (wanted.first or head.version.size_bytes > wanted.length):
                catalog.learn_habits(key.bucket, OriginHabits(no_ranges=True))
            since, whole = question.since.before(age_of(response)), question.whole
            catalog.learned(head, context.slot, since, headers=question.headers, with_checksums=whole)
        return Seen(head, answer)
    except BaseException:
        await answer.aclose()
        raise


def brings_checksums(asked: S3Request, headers: Mapping[str, str]) -> bool:
    """Return whether the answer has the checksums of the object: one to a range has none."""
    return CHECKSUM_MODE in headers and "range" not in asked.headers


def _asked(request: S3Request) -> tuple[int, int | None] | None:
    """Return the requested bytes; None if these, or whether any are wanted, depend on the version."""
    if request.parameter("partNumber") is not None or not _CONDITIONS.isdisjoint(request.headers):
        return None
    asked = first_and_last(request.headers.get("range"))
    return asked if asked is not None and asked[0] < _NO_OBJECT_BYTES else None


def _request(key: ObjectKey, slot: str, headers: Mapping[str, str], wanted: ByteRange | None) -> OriginRequest:
    """Ask for the whole object if its checksums are wanted, as they do not come with a part of it."""
    onward = {**headers, "accept-encoding": "identity"}
    if wanted is not None:
        onward["range"] = f"bytes={wanted.first}-{wanted.last}"
    return OriginRequest("GET", key.bucket, key.key, headers=onward, purpose=Purpose.LIVE, slot=slot)


def understood_answer(
    key: ObjectKey, response: OriginHead, answer: UnpinnedResponse, question: UnpinnedQuestion
) -> ObjectHead | None:
    """Return what the answer to a question says of the object, and set its `range`; None: HEAD tells. Raises Refused.

    The whole object, or the range under a wrong status, is such an answer.
    """
    first = answer.range.first
    if response.status in (400, 405, 416, 501):
        return None  # of an empty object, behind the end, or from an origin that refuses ranges: HEAD tells which
    if response.status not in (200, 206):
        raise Refused(response.status, list(response.headers.items()), b"")
    try:
        head, body = object_head_of_get(key, response.status, response.headers)
    except OriginBodyError:
        return None
    if body is None or not body.first <= first < body.stop:
        return None
    answer.range = body
    return None if not question.whole and response.status == 200 and body == question.wanted else head


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

_NO_OVERRIDES: Mapping[str, str] = MappingProxyType({})

ResponseBody: TypeAlias = bytes | memoryview | PinnedFileSpan | BodyStream

_NO_HEADER_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]|[^\x00-\xff]")


def get_object(versions: VersionSource) -> Answer:
    """Answer a GET from blocks; the origin answers where these cannot (`x-forebay-cache: bypass`)."""
    get = _Get(versions, versions.context, response_overrides(versions.context))
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
    """Answer a HEAD from memory, or ask; conditions are judged here."""
    if versions.must_forward():
        return versions.forward()
    try:
        head = versions.known()
    except OriginAnswered as absence:
        return _refusal(absence)
    if head is None:
        return _asked_head(versions)
    if _is_range_of_nothing(versions, head):
        return versions.forward()
    return _head_response(versions.context, head, "hit")


async def _asked_head(versions: VersionSource) -> Response:
    before = versions.last_known()
    try:
        head = await versions.ask()
    except (OriginAnswered, OriginBodyError, OriginUnreachable) as error:
        known = await versions.stand_in(error)
        if known is not None:
            return _head_response(versions.context, known, "hit")
        return _refusal(error) if isinstance(error, OriginAnswered) else await versions.forward()
    if _is_range_of_nothing(versions, head):
        return await versions.forward()
    if head.remembered:
        return _head_response(versions.context, head, "hit")
    reply = _head_response(versions.context, head, "miss")
    reply.reason = "first-read" if before is None else "expired" if before == head.version else "changed"
    return reply


def _is_range_of_nothing(versions: VersionSource, head: ObjectHead) -> bool:
    """Return whether bytes of an empty object are asked for, where servers differ; we answer for pending ones."""
    return head.version.size_bytes == 0 and "range" in versions.context.request.headers and not versions.is_served(head)


def _refusal(answer: OriginAnswered) -> Response:
    return Response(answer.status, filter_response_headers(dict(answer.headers)), no_body())


def _head_response(context: RequestContext, head: ObjectHead, cache: CacheLabel) -> Response:
    answers = VersionAnswers(head, response_overrides(context))
    return _response(answers.judge(context.request.headers, context.services.clock), b"", cache)


class AnswerHead(NamedTuple):
    """The head of an answer by a version, and the bytes of the object that a GET's has for its body."""

    status: int
    lines: bytes
    """Its fields, encoded, without Content-Length."""

    length_bytes: int | None
    """Content-Length; None: it has none."""

    first: int
    body_bytes: int


class VersionAnswers:
    """The heads of answers by one version to GETs and HEADs, encoded once."""

    __slots__ = ("_lines", "_of_range", "_part", "_whole", "etag", "last_modified", "size_bytes")

    def __init__(self, head: ObjectHead, overrides: Mapping[str, str] = _NO_OVERRIDES) -> None:
        self.etag, self.size_bytes, self.last_modified = head.version.etag, head.version.size_bytes, head.last_modified
        self._part = head.part
        self._lines = self._whole = head.of_whole.lines
        if overrides:
            kept = [(name, value) for name, value in head.of_whole.pairs if name not in overrides]
            self._whole = EncodedHeaders.of([*kept, *overrides.items()]).lines
        self._of_range: bytes | None = None
        """Encoded when it is asked for, as most objects are read as a whole."""

    def judge(self, headers: Mapping[str, str], clock: Clock) -> AnswerHead:
        """Return the answer to a request's conditions and range. S3Error PreconditionFailed (412), InvalidRange."""
        etag, last_modified, size_bytes, asked = self.etag, self.last_modified, self.size_bytes, self._part
        if not READ_CONDITIONS.isdisjoint(headers):
            judged = evaluate_read(headers, etag=etag, last_modified=last_modified, now=clock.now())
            if judged == "not-modified":
                kept = [pair for pair in EncodedHeaders(self._lines).pairs if pair[0] in _OF_NOT_MODIFIED]
                return AnswerHead(304, EncodedHeaders.of(kept).lines, None, 0, 0)
        counts = "if-range" not in headers or if_range_holds(headers, etag=etag, last_modified=last_modified)
        if asked is None and counts and "range" in headers:
            asked = parse_range(headers["range"], size_bytes)
        if asked is None:
            return self.whole()
        if self._of_range is None:  # a part has its own checksums
            self._of_range = of_part(EncodedHeaders(self._whole)).lines if self._part is None else self._whole
        first, last = asked.first, asked.last
        lines = b"%bcontent-range: bytes %d-%d/%d\r\n" % (self._of_range, first, last, size_bytes)
        return AnswerHead(206, lines, last - first + 1, first, last - first + 1)

    def whole(self) -> AnswerHead:
        """Return the answer with the whole object."""
        return AnswerHead(200, self._whole, self.size_bytes, 0, self.size_bytes)


def _response(head: AnswerHead, body: ResponseBody, cache: CacheLabel, reason: MissReason | None = None) -> Response:
    on_failure, encoded = body.failed if isinstance(body, PinnedFileSpan) else None, EncodedHeaders(head.lines)
    return Response(head.status, (), body, cache, None, encoded, on_failure, head.length_bytes, reason)


@dataclass(slots=True)
class _Get:
    """One GET on its way to an answer."""

    versions: VersionSource
    context: RequestContext
    overrides: Mapping[str, str]
    before: ObjectVersion | None = None
    """The version known before the origin was asked."""

    def warm(self, head: ObjectHead) -> Response | None:
        """Return the answer if it needs no bytes of the object, or only warm ones; None: wait for them."""
        judged = self._judged(head)
        if not judged.body_bytes:
            return _response(judged, b"", "hit")
        blocks, slot = self.context.services.blocks, self.context.slot.name
        span = blocks.warm_span(head.version, judged.first, judged.body_bytes, slot=slot)
        return _response(judged, span, "hit") if span is not None else None

    def _judged(self, head: ObjectHead) -> AnswerHead:
        return VersionAnswers(head, self.overrides).judge(self.context.request.headers, self.context.services.clock)

    async def fetched(self, known: ObjectHead | None) -> Response:
        """Return the answer by the known version, or the one that is asked for; again if it has changed."""
        versions, again = self.versions, False
        self.before = known.version if known is not None else versions.last_known()
        if known is None:
            try:
                response = await self._at_once()
            except (Refused, OriginUnreachable) as error:
                known = await versions.stand_in(error)
                if known is None:
                    _hand_on_if_later(error)
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
            known = await self.versions.stand_in(error)
            if known is None:
                _hand_on_if_later(error)
            return known

    async def _at_once(self) -> Response | None:
        """Return the answer if the origin gives version and bytes at once; None: ask for the version."""
        versions, context = self.versions, self.context
        told, question = context.told, None
        if told is not None and told.question is not None:
            context.told, question = None, told.question()
        if question is None:
            of_request = context.services, context.request, context.object_key, context.slot
            question = begin_unpinned(*of_request, versions.headers, versions.conditions(), of_peer=context.of_peer)
        if question is None:
            return None
        with question.get as get:
            async with get.turns:
                head, answer = await ask_unpinned(context, question)
                try:
                    if head is None or not versions.accept(head, with_checksums=question.whole):
                        return None
                    if not versions.is_served(head):
                        return None
                    return self._inline(head, answer, question.fields) or await self._served(head, answer)
                except (OriginAnswered, OriginBodyError) as error:
                    if head is None or not await versions.is_outdated(head, error):
                        raise
                    return None
                finally:
                    await answer.aclose()

    def _inline(self, head: ObjectHead, answer: UnpinnedResponse, fields: Mapping[str, str]) -> Response | None:
        version, judged = head.version, self._judged(head)
        if not judged.body_bytes:
            return None
        blocks, slot = self.context.services.blocks, self.context.slot.name
        why = blocks.why_missing(version, slot=slot, before=self.before)
        is_from_peer = answer.told is not None
        body = blocks.inline_response(version, _bytes(judged), slot=slot, headers=fields, answer=answer)
        if body is None:
            return None
        if is_from_peer:
            return _response(judged, body, "peer")
        metrics.CACHE_MISS_BYTES.add(len(body), slot)
        return _response(judged, body, "miss", why)

    async def _served(self, head: ObjectHead, answer: UnpinnedResponse | None = None) -> Response:
        response = self.warm(head)
        if response is not None:
            return response
        judged = self._judged(head)
        reader = await self.versions.open(head, _bytes(judged), answer)
        why = reader.why_missing(self.before)
        span = reader.whole()
        if span is not None:
            return _response(judged, span, reader.outcome, why)
        response = _response(judged, _watched(reader.body(), self.versions.on_cut_body(head)), reader.outcome, why)
        response.resource, response.on_failure = reader, reader.file_failed
        return response


def _bytes(head: AnswerHead) -> ByteRange:
    return ByteRange(head.first, head.first + head.body_bytes - 1)


def _hand_on_if_later(error: OriginError) -> None:
    """Raise an answer after the allowed number of tries: another question would start a new series."""
    if isinstance(error, OriginAnswered) and asks_for_retry(error.status):
        raise error


async def _watched(
    body: BodyStream, on_cut: Callable[[OriginAnswered | OriginBodyError], Awaitable[object]]
) -> BodyStream:
    """Yield the body; if the origin turns out to have another version meanwhile, the next request must see it."""
    async with aclosing(body):
        try:
            async for piece in body:
                yield piece
        except (OriginAnswered, OriginBodyError) as error:
            await on_cut(error)
            raise


def is_not_modified(context: RequestContext, head: ObjectHead) -> bool:
    """Return whether the request's conditions ask for 304; S3Error PreconditionFailed if they fail."""
    if READ_CONDITIONS.isdisjoint(context.request.headers):
        return False
    now, version, headers = context.services.clock.now(), head.version, context.request.headers
    return evaluate_read(headers, etag=version.etag, last_modified=head.last_modified, now=now) == "not-modified"


def response_overrides(context: RequestContext) -> dict[str, str]:
    """Return `response-content-type` and its five siblings (S3 API, GetObject, "Overriding response header values")."""
    query = context.request.query
    if not query:
        return {}
    overrides = {_OVERRIDES[name]: _header_value(name, value or "") for name, value in query if name in _OVERRIDES}
    if overrides and context.anonymous:
        raise s3_error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")
    return overrides


def _header_value(parameter: str, value: str) -> str:
    """Return an override's value, if a header can carry it: line breaks would begin another header."""
    if _NO_HEADER_VALUE.search(value):
        raise s3_error(
            "InvalidArgument",
            "Header value cannot be represented using ISO-8859-1.",
            ArgumentName=parameter,
            ArgumentValue=value,
        )
    return value
