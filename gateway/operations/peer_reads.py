"""GET and HEAD of objects for the other nodes of the cluster: answers from this node's disk, or the origin.

    If-Match and a size? → that version: no look at the origin, and missing bytes from there, pinned
    else the current one, as young as the asker wants it; its age goes along

No other node is asked for these. Callers' rights were checked by the node that they asked. The account of a fetch, and
what is remembered, are those of the object's slot here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gateway.blocks.cache import BlockCache
from gateway.blocks.complete_ranges import CompleteRange, CompleteRanges
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.core.errors import OriginAnswered, OriginBusy, PinRefused, S3Error
from gateway.core.model import ByteRange, ObjectVersion, PinnedFileSpan
from gateway.metadata.catalog import answer_of
from gateway.metadata.entries import ObjectHead
from gateway.operations.context import NO_BODY, Answer, AppContext, CacheLabel, RequestContext, Response, awaited
from gateway.operations.handouts import Bytes, Handouts
from gateway.operations.read_wishes import judged_by_the_origin, wants_revalidation
from gateway.operations.unpinned_reads import ask_unpinned, begin_unpinned
from gateway.operations.version_answers import AnswerHead, VersionAnswers, is_cacheable
from gateway.origin import peer_protocol as peer
from gateway.origin.client import Purpose, is_of_s3
from gateway.policy.slots import EVERYTHING, Prefix, Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import EncodedHeaders, strong_etag
from gateway.s3.origin_habits import is_refusal
from gateway.s3.requests import Operation, S3Request

_READS = frozenset({Operation.GET_OBJECT, Operation.HEAD_OBJECT})
_PURPOSES = frozenset(Purpose)
_MISDIRECTED, _NO_PIN = 421, 409
_SIZE, _LENGTH = re.compile("[1-9][0-9]{0,14}"), re.compile("[0-9]{1,4}")


@dataclass(slots=True, eq=False)
class PeerQuestion:
    """One request of another node, and the facts that its answer carries beside the object's."""

    context: RequestContext
    age_seconds: float | None = None
    """Seconds since the origin was asked about the object; None: nothing of it is remembered, or wanted."""

    date: str | None = None
    sent: Bytes | None = None
    """The bytes that are sent."""

    @property
    def request(self) -> S3Request:
        return self.context.request

    @property
    def slot(self) -> Slot:
        return self.context.slot

    @property
    def asker(self) -> str:
        return self.request.headers.get(peer.FROM, "")

    @property
    def only(self) -> str | None:
        return self.request.headers.get(peer.ONLY)

    @property
    def purpose(self) -> Purpose:
        purpose = self.request.headers.get(peer.PURPOSE, Purpose.LIVE)
        return Purpose(purpose) if purpose in _PURPOSES else Purpose.LIVE


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
        services = self._services
        check_addressed(services, request, request.bucket)
        slot = services.slots.find(request.bucket, request.key)
        return PeerQuestion(RequestContext(services, request, NO_BODY, EVERYTHING, None, slot, of_peer=True))

    def answer(self, question: PeerQuestion) -> Answer:
        """Answer now if nothing must be waited for, else when awaited. Raises as a GET or HEAD of the object does."""
        if peer.UNPIN in question.request.headers and question.request.method == "HEAD":
            return self._unpinned(question)
        is_named = peer.SIZE in question.request.headers
        head = _named_version(question) if is_named else _remembered(question)
        if head is None:
            return Response(404) if question.only else self._asked(question)
        answer = self._of_object(question, head)
        return answer if is_named or isinstance(answer, Response) else self._or_next(question, answer)

    def _of_object(self, question: PeerQuestion, head: ObjectHead, answer: UnpinnedResponse | None = None) -> Answer:
        request, slot, version = question.request, question.slot.name, head.version
        is_named = peer.SIZE in request.headers
        question.date = head.headers.get("date")
        judged = VersionAnswers(head).judge(request.headers, self._services.clock)
        if request.method == "HEAD" and not is_named:
            return _without_body(judged, "hit" if head.remembered else "miss")
        if not is_named and not is_cacheable(question.context, head):
            raise misdirected("This object is read from the origin.")
        if judged.status == 304:
            return _without_body(judged, None)
        byte_range = ByteRange(judged.first, judged.first + judged.body_bytes - 1)
        if judged.status != 206 or not self._ranges.may_be_asked(version, byte_range, slot):
            raise s3_error("InvalidRequest", "Nodes ask for ranges of whole chunks of 64 KiB that lie in one block.")
        if peer.DOUBT in request.headers:
            self._ranges.doubt(version, byte_range, slot=slot)
            return Response(204)
        if request.method == "HEAD":
            return self._kept(question, version, byte_range)
        return self._bytes(question, (version, byte_range), EncodedHeaders(judged.lines), answer)

    # Bytes of a version

    def _bytes(
        self, question: PeerQuestion, asked: Bytes, fields: EncodedHeaders, answer: UnpinnedResponse | None = None
    ) -> Answer:
        others = self._others(question, asked)
        if others:
            return _named(others)
        complete = self._ranges.now(*asked, slot=question.slot.name) if others is not None else None
        if complete is not None:
            return _sent(question, asked, complete, fields)
        return self._fetched(question, asked, fields, answer)

    async def _fetched(
        self, question: PeerQuestion, asked: Bytes, fields: EncodedHeaders, answer: UnpinnedResponse | None
    ) -> Response:
        slot, ranges = question.slot.name, self._ranges
        try:
            if question.only:
                complete = await ranges.cached(*asked, slot=slot, is_arriving=question.only == peer.TAKEN)
            else:
                complete = await ranges.get(*asked, slot=slot, purpose=question.purpose, answer=answer)
        except OriginAnswered as refused:
            if is_refusal(refused) and self._services.catalog.has_learned(asked[0]):
                self._services.catalog.refused(asked[0])
            raise
        if complete is None:
            return Response(404)
        reply = _sent(question, asked, complete, fields)
        try:
            others = self._others(question, asked)
            if others is None and answer is None:  # else it has a turn that other reads wait for
                others = await self.handouts.turn(asked, question.asker)
        except BaseException:
            await reply.aclose()
            raise
        if not others:
            return reply
        await reply.aclose()
        question.sent = None
        return _named(others)

    def _others(self, question: PeerQuestion, asked: Bytes) -> Sequence[str] | None:
        """Return as `Handouts.others`; none where nobody keeps what it was sent."""
        if peer.LAST in question.request.headers or not self._ranges.are_copied(question.slot.name):
            return ()
        return self.handouts.others(asked, question.asker)

    async def _kept(self, question: PeerQuestion, version: ObjectVersion, byte_range: ByteRange) -> Response:
        """Bring a range to disk, and pin it if that is wanted, for a job that another node runs over the cluster."""
        blocks = self._services.blocks
        if not isinstance(blocks, BlockCache):
            raise OriginBusy("this node has no cache directory")
        slot, purpose, pin = question.slot.name, question.purpose, 0
        try:
            if peer.PIN in question.request.headers:
                prefix = _prefix_in(question, peer.PIN)
                pin = blocks.pin_of(question.context.object_key) or await blocks.pin(prefix, cluster=True)
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
            with _only_s3_denies():
                if question.request.method == "GET":
                    response = await self._at_once(question)
                    if response is not None:
                        return response
                head = await _current(question)
        finally:
            question.age_seconds = clock.monotonic() - began
        return await awaited(self._of_object(question, head))

    async def _or_next(self, question: PeerQuestion, answer: Coroutine[Any, Any, Response]) -> Response:
        """Return an answer by a remembered version, or by the next one if the origin has another by now."""
        try:
            return await answer
        except OriginAnswered as refused:
            if question.only or not is_refusal(refused):
                raise
        question.age_seconds = 0.0
        with _only_s3_denies():
            head = await _current(question)
        return await awaited(self._of_object(question, head))

    async def _at_once(self, question: PeerQuestion) -> Response | None:
        """Return the answer if the origin gives version and bytes at once; None: ask for the version."""
        context = question.context
        headers, request = judged_by_the_origin(context.request), context.request
        pin = {"if-match": request.headers["if-match"]} if "if-match" in request.headers else {}
        plain = replace(request, headers={name: said for name, said in request.headers.items() if name not in pin})
        of_request = self._services, plain, context.object_key, context.slot
        unpinned = begin_unpinned(*of_request, headers, headers | pin, of_peer=True)
        if unpinned is None:
            return None
        with unpinned.get as get:
            async with get.turns:
                head, answer = await ask_unpinned(context, unpinned)
                try:
                    return await awaited(self._of_object(question, head, answer)) if head is not None else None
                finally:
                    await answer.aclose()


def _named_version(question: PeerQuestion) -> ObjectHead:
    etag, size = question.request.headers.get("if-match", ""), question.request.headers[peer.SIZE]
    if _SIZE.fullmatch(size) is None or strong_etag(etag) != etag or "," in etag:
        raise s3_error("InvalidRequest", "The version is named by one ETag and its size.")
    return ObjectHead(ObjectVersion(question.context.object_key, etag, int(size)), {"etag": etag}, None)


def _prefix_in(question: PeerQuestion, header: str) -> str:
    """Return the prefix of the key that a header means."""
    length, key = question.request.headers[header], question.context.object_key
    if _LENGTH.fullmatch(length) is None or int(length) > len(key.key):
        raise s3_error("InvalidRequest", f"{header} is no length of a prefix of the key.")
    return str(Prefix(key.bucket, key.key[: int(length)]))


def _remembered(question: PeerQuestion) -> ObjectHead | None:
    """Return the current version as young as the asker wants it; None: the origin must be asked. Raises for absence."""
    context, text = question.context, question.request.headers.get(peer.MAX_AGE, "0")
    try:
        max_age_seconds = float(text)
    except ValueError:
        max_age_seconds = math.nan
    if not max_age_seconds >= 0:
        raise s3_error("InvalidRequest", f"{peer.MAX_AGE} is no number of seconds.")
    if not max_age_seconds or wants_revalidation(context):
        return None
    key, headers = context.object_key, judged_by_the_origin(context.request)
    found = context.services.catalog.learned_within(max_age_seconds, key, context.slot, headers=headers)
    if found is None:
        return None
    question.age_seconds, entry = found
    return answer_of(key, entry, headers)


async def _current(question: PeerQuestion) -> ObjectHead:
    context, headers = question.context, judged_by_the_origin(question.request)
    catalog, purpose = context.services.catalog, question.purpose
    return await catalog.current(context.object_key, context.slot, headers=headers, look=True, purpose=purpose)


@contextmanager
def _only_s3_denies() -> Iterator[None]:
    """Let the asker ask for itself if something in the bucket's stead says that there is no object."""
    try:
        yield
    except OriginAnswered as refused:
        if refused.status == 404 and not is_of_s3(dict(refused.headers)):
            raise misdirected("Something else has answered in the bucket's stead.") from refused
        raise


def _without_body(judged: AnswerHead, cache: CacheLabel | None) -> Response:
    fields = EncodedHeaders(judged.lines)
    return Response(judged.status, cache=cache, encoded=fields, length_bytes=judged.length_bytes)


def _sent(question: PeerQuestion, asked: Bytes, complete: CompleteRange, fields: EncodedHeaders) -> Response:
    question.sent = asked
    body, reader = complete.body, complete.reader
    failed = body.failed if isinstance(body, PinnedFileSpan) else reader.file_failed if reader is not None else None
    checksums = [(peer.CRC32C, peer.encode_checksums(complete.checksums))]
    cache: CacheLabel = "hit" if complete.was_cached else "miss"
    return Response(206, checksums, body, cache, reader, fields, failed, asked[1].length)


def _named(others: Sequence[str]) -> Response:
    return Response(303, [(peer.ASK, ", ".join(others))])


def check_addressed(services: AppContext, request: S3Request, bucket: str) -> None:
    """Raise S3Error 421 if the asker means another bucket, or speaks another version of the protocol."""
    if request.headers.get(peer.PEER) != peer.VERSION:
        raise misdirected(f"This node speaks version {peer.VERSION} of the protocol between nodes.")
    if request.headers.get(peer.HOME) != peer.home_digest(services.homes.of(bucket)):
        raise misdirected("This node has the bucket at another endpoint.")


def misdirected(why: str) -> S3Error:
    return s3_error("MisdirectedRequest", why, status=_MISDIRECTED)
