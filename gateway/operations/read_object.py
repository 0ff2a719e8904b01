"""GetObject and HeadObject (S3 API, pages of those names): the data path.

    which version? → may it be served? → which bytes? → blocks on disk, fetched when they are missing

The source of the version is made for each request:

    CurrentVersions    the catalog, within the bound of the key's slot, else the origin (current_versions.py)
    SnapshotVersions   the snapshot that freezes the slot (snapshot_versions.py)
    PendingVersions    the write-back buffer, before the origin has the object (pending_versions.py)

Answers from fresh memory are given in the call itself; others are awaited. For an unknown object, the origin gives
version and first bytes in one answer (unpinned_reads.py); where it does not, a HEAD comes first.

A version that changed since it was learned answers 412 to the fetch; then the origin is asked, and all is made again.
Once the first byte is out, a change can only end the connection: bytes of two versions are never mixed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from gateway.blocks.origin_gets import TURN_SECONDS_MAX, UnpinnedResponse
from gateway.blocks.plan import Outcome
from gateway.core.errors import OriginAnswered, OriginBodyError, OriginError, OriginUnreachable
from gateway.core.model import BodyStream, ByteRange, MissReason, ObjectVersion, PinnedFileSpan
from gateway.metadata.entries import ObjectHead
from gateway.operations.context import Answer, CacheLabel, RequestContext, Response
from gateway.operations.passthrough import no_body
from gateway.operations.read_wishes import response_overrides
from gateway.operations.unpinned_reads import Refused, ask_unpinned, begin_unpinned
from gateway.operations.version_answers import AnswerHead, VersionAnswers
from gateway.origin.client import PATIENCE, Patience
from gateway.origin.retry import asks_for_retry
from gateway.s3.headers import EncodedHeaders, filter_response_headers
from gateway.telemetry import metrics


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


VERSION_RACES_MAX = 4

ResponseBody: TypeAlias = bytes | memoryview | PinnedFileSpan | BodyStream


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
        patience = Patience(TURN_SECONDS_MAX)
        PATIENCE.set(patience)
        try:
            return await self._fetched(known)
        finally:
            patience.end()

    async def _fetched(self, known: ObjectHead | None) -> Response:
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
        body = blocks.inline_response(version, judged.sent, slot=slot, headers=fields, answer=answer)
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
        reader = await self.versions.open(head, judged.sent, answer)
        why = reader.why_missing(self.before)
        span = reader.whole()
        if span is not None:
            return _response(judged, span, reader.outcome, why)
        response = _response(judged, _watched(reader.body(), self.versions.on_cut_body(head)), reader.outcome, why)
        response.resource, response.on_failure = reader, reader.file_failed
        return response


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
