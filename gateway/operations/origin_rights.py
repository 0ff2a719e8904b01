"""Slots with `authorization = "origin"`: the origin decides about a caller, asked in the caller's own name.

    reads and listings   a question without a body, signed with the caller's key pair; then the usual answer
    everything else      is itself sent in the caller's own name: there is no harmless question. So is a CopyObject out
                         of such a slot, wherever its target is: it takes the tags too, which have their own right

A yes is remembered for `authorization_ttl` for exactly this question: this access key, and one object, or one listing
(prefix, delimiter, max-keys). Policies may depend on any of these, on an object's tags, and on the key that encrypts
it: nothing is concluded from one key for another. HEAD needs the right to read an object; if the object is encrypted
with a KMS key, its first byte is asked for too, as HEAD does not need the right to decrypt.

A refusal by the origin is passed on in its own words. That of a listing is remembered for a second, that of an object
is not: S3 denies a missing object to callers who may not list, and the object may come.

If something is pending (acknowledged when the slot had another `authorization`), the question comes before the wait for
its flush: neither a wait nor a conflict must show callers without the right to read that something is pending.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gateway.core.errors import OriginAnswered, OriginBodyError, OriginUnreachable, S3Error
from gateway.core.model import ObjectKey
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead, is_plainly_asked
from gateway.operations.context import Answer, RequestContext, Response, Told, awaited
from gateway.operations.current_versions import CurrentVersions
from gateway.operations.passthrough import handed_on
from gateway.operations.read_wishes import judged_by_the_origin
from gateway.operations.writeback.past_the_buffer import FlushWait
from gateway.origin.client import KeyPair, OriginRequest
from gateway.policy.remembered_rights import RememberedRights, Right, RightTo
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import (
    KEY_SIZE_BYTES_MAX,
    CopySource,
    Operation,
    S3Request,
    is_form,
    names_foreign_source,
    parse_copy_source,
)
from gateway.s3.xml import error_code_of
from gateway.telemetry import metrics

_READS = frozenset({Operation.GET_OBJECT, Operation.HEAD_OBJECT})
_LISTINGS = frozenset({Operation.LIST_OBJECTS, Operation.LIST_OBJECTS_V2, Operation.LIST_MULTIPART_UPLOADS})

_ANSWER_BYTES_MAX = 64 * 1024
_LAST_CHARACTER = "\U0010ffff"

_REFUSED = frozenset({401, 403})

_OF_A_SOURCE = {
    "x-amz-request-payer": "x-amz-request-payer",
    "x-amz-source-expected-bucket-owner": "x-amz-expected-bucket-owner",
    "x-amz-copy-source-server-side-encryption-customer-algorithm": "x-amz-server-side-encryption-customer-algorithm",
    "x-amz-copy-source-server-side-encryption-customer-key": "x-amz-server-side-encryption-customer-key",
    "x-amz-copy-source-server-side-encryption-customer-key-md5": "x-amz-server-side-encryption-customer-key-md5",
}
"""Headers of a copy about its source → headers of a read of that source."""


def authorized_by_origin(context: RequestContext, perform: Callable[[RequestContext], Answer]) -> Answer:
    """Return the answer of `perform` if the origin lets the caller have it; ask the origin unless that is remembered.

    Raises, now or when awaited: S3Error AccessDenied for a caller without a key; OriginAnswered with the origin's
    refusal; OriginUnreachable, or S3Error ServiceUnavailable, if the origin does not say.
    """
    slots, request = context.services.slots, context.request
    sources = [one for one in _copied(request) or () if _is_by_origin(slots.find(*one.key))]
    is_judged = _is_judged(context)
    context.signed_by, context.may_read = None, False
    pair = _pair(context) if sources or is_judged else None
    if pair is None:
        return perform(context)
    of_source = {_OF_A_SOURCE[name]: value for name, value in request.headers.items() if name in _OF_A_SOURCE}
    questions: list[_Question] = [_Read(context, pair, *one, of_source, None) for one in sources]
    operation = context.request.operation
    if sources and operation is Operation.COPY_OBJECT:
        context.signed_by = pair
    if is_judged:
        context.signed_by = pair
        if operation in _READS:
            is_current = context.slot.consistency != "snapshot" and not _is_pending(context, context.object_key)
            if is_current and CurrentVersions(context).must_forward():
                return perform(context)  # in the caller's own name: a question would ask the same
            headers = judged_by_the_origin(context.request)
            questions.append(_Read(context, pair, context.object_key, None, headers, operation))
        elif operation in _LISTINGS:
            questions.append(_RightsListing(context, pair))
    open_ones = [question for question in questions if not question.is_remembered()]
    if open_ones:
        return _asked(context, open_ones, perform)
    context.may_read = True
    return perform(context)


async def judge_deletions(context: RequestContext, keys: Sequence[str]) -> Mapping[str, OriginAnswered]:
    """Send a DeleteObjects in the caller's own name if the origin judges any of its keys.

    All that is pending under its keys goes to the origin first. Return the refused keys, about which the caller must
    not learn that something is pending, with the origin's refusals. Raises as `authorized_by_origin`.
    """
    services, bucket = context.services, context.request.bucket or ""
    if not services.slots.any_by_origin:
        return {}
    if not any(_is_by_origin(services.slots.find(bucket, key)) for key in keys):
        return {}
    context.signed_by = _pair(context)
    refusals: dict[str, OriginAnswered] = {}
    if context.signed_by is None or services.writeback is None:
        return refusals
    for key in keys:
        try:
            await judge_wait(context, [ObjectKey(bucket, key)])
        except OriginAnswered as refusal:
            refusals[key] = refusal
    await FlushWait(context).for_keys(ObjectKey(bucket, key) for key in keys if key not in refusals)
    return refusals


async def judge_wait(context: RequestContext, keys: Sequence[ObjectKey]) -> None:
    """Raise OriginAnswered if the caller may not read a key, judged by the origin, whose pending writes it awaits."""
    pair, slots = context.signed_by, context.services.slots
    if pair is None or (context.request.operation in _READS and context.may_read):
        return
    for key in keys:
        if _is_by_origin(slots.find(*key)) and _is_pending(context, key):
            await _Read(context, pair, key, None, judged_by_the_origin(context.request), None).may_be_told_to_wait()


async def judge_wait_for_all(context: RequestContext) -> None:
    """Check a request like `judge_wait` before it waits for all of a prefix or bucket: may the caller list that?"""
    if context.signed_by is not None and context.request.operation not in _LISTINGS:
        await _RightsListing(context, context.signed_by).ask()


def right_to_read(request: S3Request, access_key_id: str, rights: RememberedRights) -> Right:
    """Return the right that a plain GET or HEAD needs."""
    is_of_bytes = request.operation is Operation.GET_OBJECT or CHECKSUM_MODE in judged_by_the_origin(request)
    return rights.right(access_key_id, "bytes" if is_of_bytes else "metadata", request.bucket, request.key)


# Requests that the origin judges


def _is_by_origin(slot: Slot) -> bool:
    return slot.authorization == "origin"


def _is_judged(context: RequestContext) -> bool:
    """Return whether the request is about a slot whose callers the origin judges, or may be.

    A request without a key, or with one in its body, is if any part of the bucket is.
    """
    request, slots = context.request, context.services.slots
    if request.operation is Operation.DELETE_OBJECTS:
        return False  # by its keys (judge_deletions)
    if "x-amz-rename-source" in request.headers or _copied(request) is None or names_foreign_source(request.headers):
        return True  # it may name anything
    if request.key is not None and not is_form(request):
        return _is_by_origin(context.slot)
    prefix = (request.parameter("prefix") or "") if request.operation in _LISTINGS else ""
    return any(_is_by_origin(slot) for slot in slots.under(request.bucket or "", prefix))


def _copied(request: S3Request) -> set[CopySource] | None:
    """Return the request's sources: servers disagree on the meaning of `+`. None if one cannot be read here."""
    text = request.headers.get("x-amz-copy-source")
    if text is None:
        return set()
    try:
        return {parse_copy_source(one) for one in {text, text.replace("+", "%2B")}}
    except S3Error:
        return None


def _pair(context: RequestContext) -> KeyPair | None:
    """Return the caller's own pair; None: the gateway's, whose rights need no question."""
    if context.anonymous:
        raise s3_error(
            "AccessDenied", "Access Denied. The origin judges the callers of this slot: requests must be signed."
        )
    return context.pair


def _is_pending(context: RequestContext, key: ObjectKey) -> bool:
    buffer = context.services.writeback
    return buffer is not None and context.buffer.may_be_pending(key) and context.buffer.pending(key) is not None


# Asking

T = TypeVar("T")


class _Question(Protocol):
    def is_remembered(self) -> bool:
        """Return whether the origin has granted it. Raises OriginAnswered if it has just refused it."""

    async def ask(self) -> None:
        """Return when the origin grants it. Raises as `authorized_by_origin`."""


async def _asked(
    context: RequestContext, questions: Sequence[_Question], perform: Callable[[RequestContext], Answer]
) -> Response:
    for question in questions:
        await question.ask()
    context.may_read = True
    return await awaited(perform(context))


async def _counted(slot: Slot, asking: Awaitable[T]) -> T:
    try:
        answer = await asking
    except OriginUnreachable:
        metrics.AUTHORIZATIONS.add(1, slot.name, "failed")
        raise
    except OriginAnswered as refusal:
        metrics.AUTHORIZATIONS.add(1, slot.name, "denied" if refusal.status == 403 else "other")
        raise
    metrics.AUTHORIZATIONS.add(1, slot.name, "allowed")
    return answer


def _not_said(slot: Slot) -> Exception:
    metrics.AUTHORIZATIONS.add(1, slot.name, "failed")
    return s3_error(
        "ServiceUnavailable",
        "The origin does not say whether the caller may do this. Please try again.",
        headers={"Retry-After": "1"},
    )


async def _check(context: RequestContext, slot: Slot, request: OriginRequest) -> None:
    """Raise OriginAnswered with the origin's document if it refuses a request in the caller's own name."""
    async with handed_on(context, request, await context.services.origin.send(request)) as response:
        if response.status == 206:
            await response.read(_ANSWER_BYTES_MAX)
        if response.status in (200, 206, 416):  # an empty object has no first byte
            return
        if response.status >= 500:
            raise _not_said(slot)
        document = await response.read(_ANSWER_BYTES_MAX)
        if error_code_of(document) != "InvalidObjectState":  # that an object is archived, only allowed readers learn
            raise OriginAnswered(response.status, list(response.headers.items()), document)


@dataclass(slots=True)
class _Read:
    """The question whether the caller may read an object. `operation` None: only as the source of a copy."""

    context: RequestContext
    pair: KeyPair
    key: ObjectKey
    version_id: str | None
    headers: Mapping[str, str]
    operation: Operation | None
    slot: Slot = field(init=False)
    is_of_bytes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.slot = self.context.services.slots.find(*self.key)
        self.is_of_bytes = self.operation is not Operation.HEAD_OBJECT or CHECKSUM_MODE in self.headers

    def is_remembered(self) -> bool:
        right = self._right("bytes" if self.is_of_bytes else "metadata")
        if self.version_id is not None or not self.context.services.rights.holds(right):
            return False
        if self.operation is None and not is_plainly_asked(self.headers):
            return False
        metrics.AUTHORIZATIONS.add(1, self.slot.name, "remembered")
        return True

    async def ask(self) -> None:
        context, rights = self.context, self.context.services.rights
        if _is_pending(context, self.key):
            await self.may_be_told_to_wait()
            await FlushWait(context).for_keys([self.key])  # else it says "not there"
        asked_seconds, generation, began = context.services.clock.monotonic(), rights.generation, time.perf_counter()
        head = await self._granted()
        if self.version_id is None and is_plainly_asked(self.headers):
            kinds: set[RightTo] = {"metadata"}
            if self.is_of_bytes or (head is not None and not _needs_a_key(head)):
                kinds.add("bytes")
            for kind in kinds:
                rights.grant(self._right(kind), asked_seconds + self.slot.authorization_ttl_seconds, generation)
        is_whole = context.request.parameter("partNumber") is None
        if head is not None and self.operation is not None and self.slot.consistency == "strict" and is_whole:
            context.told = Told(head, began)

    async def may_be_told_to_wait(self) -> None:
        """Raise OriginAnswered if the origin refuses the caller the object that it has.

        If it has none, one may be pending, and is asked about once it is there. A yes for the older object is not kept.
        """
        try:
            await self._granted()
        except OriginAnswered as answer:
            if answer.status in _REFUSED:
                raise

    async def _granted(self) -> ObjectHead | None:
        try:
            return await _counted(self.slot, self._head())
        except OriginAnswered:
            self.context.services.rights.revoke(self._right("bytes"))
            self.context.services.rights.revoke(self._right("metadata"))
            raise

    def _right(self, kind: RightTo) -> Right:
        return self.context.services.rights.right(self.pair.access_key_id, kind, *self.key)

    async def _head(self) -> ObjectHead | None:
        """Return the head of an object that the caller may read, if HEAD shows it; otherwise the first byte decides."""
        catalog, head = self.context.services.catalog, None
        if self.version_id is None:
            try:
                head = await catalog.ask(self.key, self.slot, headers=self.headers, signed_by=self.pair)
            except OriginAnswered as answer:  # HEAD has no document
                if answer.status >= 500:
                    raise _not_said(self.slot) from answer
            except OriginBodyError:
                head = None
        if head is None or (self.is_of_bytes and _needs_a_key(head)):
            headers = frozenset(item for item in self.headers.items() if item[0] != CHECKSUM_MODE)
            question = "first byte", self.key, self.version_id, headers, self.pair
            onward = {**dict(headers), "range": "bytes=0-0", "accept-encoding": "identity"}
            query = (("versionId", self.version_id),) if self.version_id is not None else ()
            request = OriginRequest("GET", *self.key, query, onward, slot=self.slot.name, signed_by=self.pair)
            await catalog.joined_calls.ask(question, lambda: _check(self.context, self.slot, request))
        return head


def _needs_a_key(head: ObjectHead) -> bool:
    return head.headers.get("x-amz-server-side-encryption", "AES256") != "AES256"


class _RightsListing:
    """The question whether the caller may list what the request lists: in its words, but from behind the end on."""

    def __init__(self, context: RequestContext, pair: KeyPair) -> None:
        self._context = context
        request = context.request
        of_uploads = request.operation is Operation.LIST_MULTIPART_UPLOADS
        limit, begin = ("max-uploads", "key-marker") if of_uploads else ("max-keys", "start-after")
        said = [(name, value) for name, value in request.query if name in ("prefix", "delimiter", limit)]
        right_to: RightTo = "uploads" if of_uploads else "listing"
        scope = [part for pair in sorted(said, key=lambda one: one[0]) for part in pair]
        self._right = context.services.rights.right(pair.access_key_id, right_to, request.bucket, *scope)
        end = (request.parameter("prefix") or "") + _LAST_CHARACTER
        query: list[tuple[str, str | None]] = [("uploads", None) if of_uploads else ("list-type", "2"), *said]
        if len(end.encode()) <= KEY_SIZE_BYTES_MAX:
            query.append((begin, end))
        headers = judged_by_the_origin(request)
        self._request = OriginRequest(
            "GET", request.bucket, None, query, headers, slot=context.slot.name, signed_by=pair
        )

    def is_remembered(self) -> bool:
        rights, slot = self._context.services.rights, self._context.slot
        refusal = rights.refusal(self._right)
        if refusal is None and not rights.holds(self._right):
            return False
        metrics.AUTHORIZATIONS.add(1, slot.name, "remembered")
        if refusal is not None:
            raise refusal
        return True

    async def ask(self) -> None:
        context, services, request = self._context, self._context.services, self._request
        rights, slots, is_plain = services.rights, services.slots, is_plainly_asked(request.headers)
        asked_seconds, generation = services.clock.monotonic(), rights.generation
        question = self._right, frozenset(request.headers.items()), request.signed_by
        asking = services.catalog.joined_calls.ask(question, lambda: _check(context, context.slot, request))
        try:
            await _counted(context.slot, asking)
        except OriginAnswered as answer:
            if answer.status == 403 and is_plain:
                rights.refuse(self._right, answer, generation)
            else:
                rights.revoke(self._right)
            raise
        if is_plain:
            under = slots.under(request.bucket or "", context.request.parameter("prefix") or "")
            ttls = [slot.authorization_ttl_seconds for slot in under if _is_by_origin(slot)]
            rights.grant(self._right, asked_seconds + min(ttls, default=0.0), generation)
