"""The first read of a small object: asked of the origin and answered in callbacks, without a task.

`begin_cold_read` asks as `read_object` asks for an unknown object, and `ColdRead.answer` answers as it does, while the
bytes go to disk behind the answer. Whatever is not as expected, `read_object` goes on with: it takes the question
along, and what has come of the origin's answer to it.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.core.errors import S3Error
from gateway.core.model import MissReason, ObjectKey
from gateway.metadata.catalog import is_remembered
from gateway.operations.context import AppContext
from gateway.operations.read_wishes import get_must_bypass, judged_by_the_origin
from gateway.operations.unpinned_reads import Refused, UnpinnedQuestion, begin_unpinned, understood_answer
from gateway.operations.version_answers import AnswerHead, VersionAnswers, has_cacheable_bytes
from gateway.origin.client import BegunRead, OnEnd, OriginResponse
from gateway.policy.slots import Slot
from gateway.s3.headers import READ_CONDITIONS
from gateway.s3.origin_habits import NO_HABITS
from gateway.s3.requests import Operation, S3Request
from gateway.writeback.order import is_marker


class ColdAnswer(NamedTuple):
    """The answer to a cold read; `body` is the range of it that was asked for."""

    head: AnswerHead
    body: memoryview
    reason: MissReason | None


class ColdRead:
    """A GET of an unknown object that the origin is asked for. Close it in the end; idempotent."""

    __slots__ = ("_begun", "_question", "_request", "_services", "key", "slot")

    def __init__(
        self, services: AppContext, request: S3Request, key: ObjectKey, slot: Slot, question: UnpinnedQuestion
    ) -> None:
        self._services = services
        self._request = request
        self._question: UnpinnedQuestion | None = question
        self._begun: BegunRead | None = None
        self.key = key
        self.slot = slot

    def begin(self, on_end: OnEnd) -> bool:
        """Ask the origin; `on_end` is called once, unless it is closed before. False: that needs a wait."""
        if self._question is not None:
            self._begun = self._services.begin_read(self._question.request, on_end)
        return self._begun is not None

    def answer(self) -> ColdAnswer | None:
        """Return the answer, to be called in `on_end`; None: call `read_object` with the `question`."""
        question, begun, services = self._question, self._begun, self._services
        if question is None or begun is None or not begun.is_whole:
            return None
        response = UnpinnedResponse(question.get, question.wanted, cast(OriginResponse, begun))  # as far as it is used
        try:
            head = understood_answer(self.key, begun, response, question)
            if head is None or not has_cacheable_bytes(head) or services.catalog.habits(self.key.bucket) != NO_HABITS:
                return None
            judged = VersionAnswers(head).judge(self._request.headers, services.clock)
        except (Refused, S3Error):
            return None
        if not judged.body_bytes:
            return None
        blocks, slot, version = services.blocks, self.slot, head.version
        is_new = is_remembered(slot, question.headers) and blocks.keeps_all_it_fetches
        reason = "first-read" if is_new else blocks.why_missing(version, slot=slot.name, before=None)
        body = blocks.inline_response(version, judged.sent, slot=slot.name, headers=question.fields, answer=response)
        if body is None:
            return None
        learned = services.catalog.learned
        learned(head, slot, question.since, headers=question.headers, with_checksums=question.whole)
        self._question = None
        question.get.on_end(question.get)
        return ColdAnswer(judged, body, reason)

    def hand_over(self) -> None:
        """Let `read_object` go on with the `question`. To be called in `on_end`."""
        if self._question is not None and self._begun is not None:
            self._question = self._question._replace(request=self._begun.onward())

    def question(self) -> UnpinnedQuestion | None:
        """Return the question, once."""
        question, self._question = self._question, None
        return question

    def close(self) -> None:
        question, self._question = self._question, None
        if self._begun is not None:
            self._begun.close()
        if question is not None:
            question.get.on_end(question.get)


def begin_cold_read(services: AppContext, request: S3Request, on_end: OnEnd) -> ColdRead | None:
    """Ask the origin for an object that catalog and index do not know; None: call `read_object`.

    `request` is a plain GET (`is_plain`) whose caller may read the object.
    """
    bucket, name = request.bucket, request.key
    if request.operation is not Operation.GET_OBJECT or bucket is None or name is None:
        return None
    if not READ_CONDITIONS.isdisjoint(request.headers) or get_must_bypass(request):
        return None
    key, slot = ObjectKey(bucket, name), services.slots.find(bucket, name)
    if slot.consistency == "snapshot" or slot.authorization == "origin" or slot.write == "scratch":
        return None
    if services.writeback is not None:
        if services.writeback.may_be_pending(key):
            return None
        if slot.is_buffered and (services.reads is not None or is_marker(name, slot.markers)):
            return None  # its reads are counted, or its answer has more
    elif services.buffer_closed and slot.is_buffered:
        return None
    if services.cluster_writes is not None and services.cluster_writes.asks(slot):
        return None
    since = services.catalog.unknown_at(key)
    if since is None or services.catalog.is_listed_absent(key, slot):
        return None
    headers = judged_by_the_origin(request)
    question = begin_unpinned(services, request, key, slot, headers, headers, since)
    if question is None:
        return None
    read = ColdRead(services, request, key, slot, question)
    if read.begin(on_end):
        return read
    read.close()
    return None
