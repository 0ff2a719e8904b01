"""GET and HEAD of objects for the other nodes of the cluster: answers from this node's disk, or the origin.

    If-Match and a size? → that version: no look at the origin, and missing bytes from there, pinned
    else the current one, as young as the asker wants it; its age goes along

No other node is asked for these. Callers' rights were checked by the node that they asked. The account of a fetch, and
what is remembered, are those of the object's slot here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.blocks.cache import BlockCache
from gateway.blocks.complete_ranges import CompleteRange, CompleteRanges
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.core.errors import OriginAnswered, OriginBusy, PinRefused
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion, PinnedFileSpan
from gateway.metadata.entries import Freshness, ObjectHead
from gateway.operations.context import NO_BODY, Answer, AppContext, RequestContext, Response
from gateway.operations.handouts import Bytes, Handouts
from gateway.operations.read_object import (
    VersionAnswers,
    ask_unpinned,
    begin_unpinned,
    is_cacheable,
    judged_by_the_origin,
    wants_revalidation,
)
from gateway.origin import peer_protocol as peer
from gateway.origin.client import Purpose
from gateway.policy.slots import EVERYTHING, Prefix, Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import EncodedHeaders, parse_range, strong_etag
from gateway.s3.origin_habits import is_refusal
from gateway.s3.requests import Operation, S3Request

_READS = frozenset({Operation.GET_OBJECT, Operation.HEAD_OBJECT})
_PURPOSES = frozenset(Purpose)
_MISDIRECTED, _NO_PIN = 421, 409
_SIZE, _LENGTH = re.compile("[1-9][0-9]{0,14}"), re.compile("[0-9]{1,4}")


@dataclass(slots=True, eq=False)
class PeerQuestion:
    """One request of another node, and the facts that its answer carries beside the object's."""

    request: S3Request
    key: ObjectKey
    slot: Slot
    services: AppContext
    age_seconds: float | None = None
    """Seconds since the origin was asked about the object; None: nothing of it is remembered, or wanted."""

    date: str | None = None
    sent: Bytes | None = None
    """The bytes that are sent."""

    only_cached: bool = field(init=False)
    purpose: Purpose = field(init=False)

    def __post_init__(self) -> None:
        headers = self.request.headers
        self.only_cached = headers.get(peer.ONLY) in (peer.CACHED, peer.TAKEN)
        purpose = headers.get(peer.PURPOSE, Purpose.LIVE)
        self.purpose = Purpose(purpose) if purpose in _PURPOSES else Purpose.LIVE

    @property
    def asker(self) -> str:
        return self.request.headers.get(peer.FROM, "")

    def context(self) -> RequestContext:
        return RequestContext(self.services, self.request, NO_BODY, EVERYTHING, None, self.slot, of_peer=True)


class PeerReads:
    """The answers of one worker."""

    def __init__(self, services: AppContext) -> None:
        self._services = services
        self._ranges: CompleteRanges = services.blocks.complete_ranges()
        self.handouts = Handouts()

    def question(self, request: S3Request) -> PeerQuestion:
        """Return the question of a request. S3Error if no node asks so; 421 if the asker means another bucket."""
        if request.operation not in _READS or request.bucket is None or request.key is None or request.query:
            code = "NotImplemented" if request.method in ("GET", "HEAD") else "MethodNotAllowed"
            raise s3_error(code, "This port answers GET and HEAD of objects.")
        services, headers, key = self._services, request.headers, ObjectKey(request.bucket, request.key)
        if headers.get(peer.PEER) != peer.VERSION:
            raise _misdirected(f"This node speaks version {peer.VERSION} of the protocol between nodes.")
        if headers.get(peer.HOME) != peer.home_digest(services.homes.of(key.bucket)):
            raise _misdirected("This node has the bucket at another endpoint.")
        return PeerQuestion(request, key, services.slots.find(*key), services)

    def answer(self, question: PeerQuestion) -> Answer:
        """Answer now if nothing must be waited for, else when awaited. Raises as a GET or HEAD of the object does."""
        request = question.request
        if peer.UNPIN in request.headers and request.method == "HEAD":
            return self._unpinned(question)
        if peer.SIZE in request.headers:
            version = _named_version(question)
            byte_range = self._range(question, version)
            if peer.DOUBT in request.headers:
                return self._doubted(question, version, byte_range)
            if request.method == "GET":
                return self._of_version(question, version, byte_range)
            return self._kept(question, version, byte_range)
        head = _remembered(question)
        if head is None:
            return Response(404) if question.only_cached else self._asked(question)
        return _of_head(question, head) if request.method == "HEAD" else self._of_current(question, head)

    def _range(self, question: PeerQuestion, version: ObjectVersion) -> ByteRange:
        found = parse_range(question.request.headers.get("range"), version.size_bytes)
        if found is None:
            raise s3_error("InvalidRequest", "Another node asks for a range of bytes.")
        if not self._ranges.may_be_asked(found, question.slot.name):
            raise s3_error("InvalidRequest", "The range must begin at a multiple of 64 KiB and lie in one block.")
        return found

    # A version that the asker names

    def _of_version(self, question: PeerQuestion, version: ObjectVersion, byte_range: ByteRange) -> Answer:
        others = self._others(question, (version, byte_range))
        if others:
            return _named(others)
        fields = [
            ("etag", version.etag),
            ("content-range", f"bytes {byte_range.first}-{byte_range.last}/{version.size_bytes}"),
        ]
        complete = self._ranges.now(version, byte_range, slot=question.slot.name) if others is not None else None
        if complete is not None:
            return _sent(question, (version, byte_range), complete, fields)
        return self._fetched(question, version, byte_range, fields)

    async def _fetched(
        self,
        question: PeerQuestion,
        version: ObjectVersion,
        byte_range: ByteRange,
        fields: Sequence[tuple[str, str]],
        answer: UnpinnedResponse | None = None,
    ) -> Response:
        asked, slot, ranges = (version, byte_range), question.slot.name, self._ranges
        try:
            if question.only_cached:
                is_arriving = question.request.headers[peer.ONLY] == peer.TAKEN
                complete = await ranges.cached(version, byte_range, slot=slot, is_arriving=is_arriving)
            else:
                complete = await ranges.get(version, byte_range, slot=slot, purpose=question.purpose, answer=answer)
        except OriginAnswered as refused:
            if is_refusal(refused) and self._services.catalog.has_learned(version):
                self._services.catalog.refused(version)
            raise
        if complete is None:
            return Response(404)
        try:
            others = self._others(question, asked)
            if others is None and answer is None:  # else it has a turn that other reads wait for
                others = await self.handouts.turn(asked, question.asker)
        except BaseException:
            await Response(200, body=complete.body).aclose()
            raise
        if not others:
            return _sent(question, asked, complete, fields)
        await Response(200, body=complete.body).aclose()
        return _named(others)

    def _others(self, question: PeerQuestion, asked: Bytes) -> Sequence[str] | None:
        """Return as `Handouts.others`."""
        return () if peer.LAST in question.request.headers else self.handouts.others(asked, question.asker)

    async def _doubted(self, question: PeerQuestion, version: ObjectVersion, byte_range: ByteRange) -> Response:
        await self._ranges.drop_if_damaged(version, byte_range, slot=question.slot.name)
        return Response(204)

    async def _kept(self, question: PeerQuestion, version: ObjectVersion, byte_range: ByteRange) -> Response:
        """Bring a range to disk, and pin it if that is wanted, for a job that another node runs over the cluster."""
        blocks = self._services.blocks
        if not isinstance(blocks, BlockCache):
            raise OriginBusy("this node has no cache directory")
        slot, purpose, pin = question.slot.name, question.purpose, 0
        try:
            if peer.PIN in question.request.headers:
                prefix = _prefix_in(question, peer.PIN)
                pin = blocks.pin_of(question.key) or await blocks.pin(prefix, cluster=True)
            fetched_bytes, kept = await blocks.fetch(version, byte_range, slot=slot, purpose=purpose, of_peer=True)
            if not kept:
                raise OriginBusy("the disk does not take the block")
            if pin:
                await blocks.hold(version, byte_range, pin, slot=slot)
        except PinRefused as refused:
            raise s3_error("InvalidRequest", str(refused), status=_NO_PIN) from None
        return Response(201 if fetched_bytes else 200)

    async def _unpinned(self, question: PeerQuestion) -> Response:
        blocks, prefix = self._services.blocks, _prefix_in(question, peer.UNPIN)
        was_pinned = isinstance(blocks, BlockCache) and await blocks.unpin(prefix, cluster=True)
        return Response(200 if was_pinned else 404)

    # The current version

    async def _asked(self, question: PeerQuestion) -> Response:
        """Ask the origin; the age of its answer is that of the question, which others may have had before."""
        clock = self._services.clock
        began = clock.monotonic()
        try:
            if question.request.method == "GET":
                response = await self._at_once(question)
                if response is not None:
                    return response
            head = await _current(question)
        finally:
            question.age_seconds = clock.monotonic() - began
        return _of_head(question, head) if question.request.method == "HEAD" else await self._of_current(question, head)

    async def _of_current(self, question: PeerQuestion, head: ObjectHead) -> Response:
        """Answer a GET by a version; by the next one if the origin has another by now."""
        try:
            return await self._of_object(question, head, None)
        except OriginAnswered as refused:
            if question.only_cached or not head.remembered or not is_refusal(refused):
                raise
        question.age_seconds = 0.0
        return await self._of_object(question, await _current(question), None)

    async def _of_object(self, question: PeerQuestion, head: ObjectHead, answer: UnpinnedResponse | None) -> Response:
        if not is_cacheable(question.context(), head):
            raise _misdirected("This object is read from the origin.")
        question.date = head.headers.get("date")
        judged = VersionAnswers(head).judge(question.request.headers, self._services.clock)
        fields = EncodedHeaders(judged.lines).pairs
        if not judged.body_bytes:
            return Response(judged.status, fields)
        byte_range = self._range(question, head.version)
        others = self._others(question, (head.version, byte_range))
        return _named(others) if others else await self._fetched(question, head.version, byte_range, fields, answer)

    async def _at_once(self, question: PeerQuestion) -> Response | None:
        """Return the answer if the origin gives version and bytes at once; None: ask for the version."""
        context = question.context()
        headers = judged_by_the_origin(question.request)
        of_request = self._services, question.request, question.key, question.slot
        unpinned = begin_unpinned(*of_request, headers, headers, of_peer=True)
        if unpinned is None:
            return None
        with unpinned.get as get:
            async with get.turns:
                head, answer = await ask_unpinned(context, unpinned)
                try:
                    return await self._of_object(question, head, answer) if head is not None else None
                finally:
                    await answer.aclose()


def _named_version(question: PeerQuestion) -> ObjectVersion:
    etag, size = question.request.headers.get("if-match", ""), question.request.headers[peer.SIZE]
    if _SIZE.fullmatch(size) is None or strong_etag(etag) != etag or "," in etag:
        raise s3_error("InvalidRequest", "The version is named by one ETag and its size.")
    return ObjectVersion(question.key, etag, int(size))


def _prefix_in(question: PeerQuestion, header: str) -> str:
    """Return the prefix of the key that a header means."""
    length, key = question.request.headers[header], question.key
    if _LENGTH.fullmatch(length) is None or int(length) > len(key.key):
        raise s3_error("InvalidRequest", f"{header} is no length of a prefix of the key.")
    return str(Prefix(key.bucket, key.key[: int(length)]))


def _remembered(question: PeerQuestion) -> ObjectHead | None:
    """Return the current version as young as the asker wants it; None: the origin must be asked. Raises for absence."""
    slot, text = question.slot, question.request.headers.get(peer.MAX_AGE, "0")
    try:
        max_age_seconds = float(text)
    except ValueError:
        max_age_seconds = math.nan
    if not max_age_seconds >= 0:
        raise s3_error("InvalidRequest", f"{peer.MAX_AGE} is no number of seconds.")
    if not max_age_seconds or slot.consistency not in ("ttl", "immutable") or wants_revalidation(question.context()):
        return None
    bounds = max_age_seconds if slot.consistency == "immutable" else min(max_age_seconds, slot.metadata_ttl_seconds)
    catalog = question.services.catalog
    hit = catalog.explain(question.key, slot)
    if hit is None or hit.age_seconds is None or hit.freshness is not Freshness.FRESH:
        return None
    if hit.age_seconds >= (bounds if hit.head is not None else slot.negative_ttl_seconds):
        return None  # only a listing confirms it, or the asker wants it younger
    question.age_seconds = hit.age_seconds
    return catalog.remembered(question.key, slot, headers=judged_by_the_origin(question.request))


async def _current(question: PeerQuestion) -> ObjectHead:
    headers = judged_by_the_origin(question.request)
    catalog, purpose = question.services.catalog, question.purpose
    return await catalog.current(question.key, question.slot, headers=headers, look=True, purpose=purpose)


def _of_head(question: PeerQuestion, head: ObjectHead) -> Response:
    question.date = head.headers.get("date")
    judged = VersionAnswers(head).judge(question.request.headers, question.services.clock)
    fields = EncodedHeaders(judged.lines).pairs
    return Response(judged.status, [*fields, _cache(was_cached=head.remembered)], length_bytes=judged.length_bytes)


def _sent(question: PeerQuestion, asked: Bytes, complete: CompleteRange, fields: Sequence[tuple[str, str]]) -> Response:
    question.sent = asked
    checksums = peer.encode_checksums(complete.checksums)
    own = [*fields, (peer.CRC32C, checksums), _cache(was_cached=complete.was_cached)]
    on_failure = complete.body.failed if isinstance(complete.body, PinnedFileSpan) else None
    return Response(206, own, complete.body, on_failure=on_failure, length_bytes=asked[1].length)


def _named(others: Sequence[str]) -> Response:
    return Response(303, [(peer.ASK, ", ".join(others))])


def _cache(*, was_cached: bool) -> tuple[str, str]:
    return "x-forebay-cache", "hit" if was_cached else "miss"


def _misdirected(why: str) -> Exception:
    return s3_error("MisdirectedRequest", why, status=_MISDIRECTED)
