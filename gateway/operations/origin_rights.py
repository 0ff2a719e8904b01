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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.errors import OriginAnswered, OriginBodyError, OriginUnreachable, S3Error
from gateway.core.model import ObjectKey
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead, is_plainly_asked
from gateway.operations.context import Answer, RequestContext, Response, Told
from gateway.operations.read_object import CurrentVersions, judged_by_the_origin
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

_LATER = {"Retry-After": "1"}

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
    sources, is_judged = _sources(context), _is_judged(context)
    context.signed_by, context.may_read = None, False
    if not sources and not is_judged:
        return perform(context)
    pair = _pair(context)
    if pair is None:
        return perform(context)
    of_source = _headers_of_source(context.request)
    questions: list[_Question] = [_Read(context, pair, key, version, of_source, None) for key, version in sources]
    operation = context.request.operation
    if sources and operation is Operation.COPY_OBJECT:
        context.signed_by = pair
    if is_judged:
        context.signed_by = pair
        if operation in _READS:
            if _is_forwarded(context):
                return perform(context)
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
    await FlushWait(context, services.writeback).for_keys(ObjectKey(bucket, key) for key in keys if key not in refusals)
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
    if _names_anything(request):
        return True
    if request.key is not None and not is_form(request):
        return _is_by_origin(context.slot)
    prefix = (request.parameter("prefix") or "") if request.operation in _LISTINGS else ""
    return any(_is_by_origin(slot) for slot in slots.under(request.bucket or "", prefix))


def _names_anything(request: S3Request) -> bool:
    if "x-amz-rename-source" in request.headers or _copied(request) is None:
        return True
    return names_foreign_source(request.headers)


def _sources(context: RequestContext) -> list[tuple[ObjectKey, str | None]]:
    """Return what a copy reads of slots whose callers the origin judges. Servers disagree on the meaning of `+`."""
    slots = context.services.slots
    return [(one.key, one.version_id) for one in _copied(context.request) or () if _is_by_origin(slots.find(*one.key))]


def _copied(request: S3Request) -> set[CopySource] | None:
    """Return the request's sources; None if it has a copy source that cannot be read here."""
    text = request.headers.get("x-amz-copy-source")
    if text is None:
        return set()
    try:
        return {parse_copy_source(one) for one in {text, text.replace("+", "%2B")}}
    except S3Error:
        return None


def _headers_of_source(request: S3Request) -> dict[str, str]:
    return {_OF_A_SOURCE[name]: value for name, value in request.headers.items() if name in _OF_A_SOURCE}


def _pair(context: RequestContext) -> KeyPair | None:
    """Return the caller's own pair; None: the gateway's, whose rights need no question."""
    if context.anonymous:
        raise s3_error(
            "AccessDenied", "Access Denied. The origin judges the callers of this slot: requests must be signed."
        )
    return context.pair


def _is_forwarded(context: RequestContext) -> bool:
    """Return whether a read is itself sent to the origin in the caller's own name: a question would ask the same."""
    if context.slot.consistency == "snapshot" or _is_pending(context, context.object_key):
        return False
    return CurrentVersions(context).must_forward()


def _is_pending(context: RequestContext, key: ObjectKey) -> bool:
    buffer = context.services.writeback
    return buffer is not None and buffer.may_be_pending(key) and buffer.pending(key) is not None


# Asking


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
    answer = perform(context)
    return answer if isinstance(answer, Response) else await answer


@dataclass(frozen=True, slots=True)
class _Asked:
    """The time of a question, and the settings under which it was asked."""

    at_seconds: float
    generation: int


def _now(context: RequestContext) -> _Asked:
    services = context.services
    return _Asked(services.clock.monotonic(), services.rights.generation)


def _not_said(slot: Slot) -> Exception:
    metrics.AUTHORIZATIONS.add(1, slot.name, "failed")
    return s3_error(
        "ServiceUnavailable",
        "The origin does not say whether the caller may do this. Please try again.",
        headers=_LATER,
    )


class _Read:
    """The question whether the caller may read an object. `operation` None: only as the source of a copy."""

    def __init__(
        self,
        context: RequestContext,
        pair: KeyPair,
        key: ObjectKey,
        version_id: str | None,
        headers: Mapping[str, str],
        operation: Operation | None,
    ) -> None:
        self._context = context
        self._pair = pair
        self._key = key
        self._version_id = version_id
        self._slot = context.services.slots.find(*key)
        self._headers = headers
        self._is_own = operation is not None
        self._is_of_bytes = operation is not Operation.HEAD_OBJECT or CHECKSUM_MODE in self._headers

    def is_remembered(self) -> bool:
        if self._version_id is not None or not self._context.services.rights.holds(self._right(self._kind)):
            return False
        if not self._is_own and not is_plainly_asked(self._headers):
            return False
        metrics.AUTHORIZATIONS.add(1, self._slot.name, "remembered")
        return True

    async def ask(self) -> None:
        context = self._context
        if _is_pending(context, self._key) and context.services.writeback is not None:
            await self.may_be_told_to_wait()
            await FlushWait(context, context.services.writeback).for_keys([self._key])  # else it says "not there"
        asked, began = _now(context), time.perf_counter()
        head = await self._granted()
        self._remember(head, asked)
        if head is not None and self._is_own and self._may_be_told():
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
            head = await self._head()
            if head is None or (self._is_of_bytes and _needs_a_key(head)):
                await self._ask_for_a_byte()
        except OriginUnreachable:
            metrics.AUTHORIZATIONS.add(1, self._slot.name, "failed")
            raise
        except OriginAnswered as answer:
            self._context.services.rights.revoke(self._right("bytes"))
            self._context.services.rights.revoke(self._right("metadata"))
            metrics.AUTHORIZATIONS.add(1, self._slot.name, "denied" if answer.status == 403 else "other")
            raise
        metrics.AUTHORIZATIONS.add(1, self._slot.name, "allowed")
        return head

    @property
    def _kind(self) -> RightTo:
        return "bytes" if self._is_of_bytes else "metadata"

    def _right(self, kind: RightTo) -> Right:
        return self._context.services.rights.right(self._pair.access_key_id, kind, *self._key)

    def _remember(self, head: ObjectHead | None, asked: _Asked) -> None:
        if self._version_id is not None or not is_plainly_asked(self._headers):
            return
        rights, until = self._context.services.rights, asked.at_seconds + self._slot.authorization_ttl_seconds
        kinds: set[RightTo] = {"metadata"}
        if self._is_of_bytes or (head is not None and not _needs_a_key(head)):
            kinds.add("bytes")
        for kind in kinds:
            rights.grant(self._right(kind), until, asked.generation)

    def _may_be_told(self) -> bool:
        return self._slot.consistency == "strict" and self._context.request.parameter("partNumber") is None

    async def _head(self) -> ObjectHead | None:
        """Return the head; None if the answer to HEAD does not decide yet."""
        if self._version_id is not None:
            return None
        catalog = self._context.services.catalog
        try:
            return await catalog.ask(self._key, self._slot, headers=self._headers, signed_by=self._pair)
        except OriginAnswered as answer:
            if answer.status >= 500:
                raise _not_said(self._slot) from answer
            return None  # HEAD has no document
        except OriginBodyError:
            return None

    async def _ask_for_a_byte(self) -> None:
        """Raise OriginAnswered with the origin's document if it refuses the first byte."""
        calls = self._context.services.catalog.joined_calls
        headers = frozenset(item for item in self._headers.items() if item[0] != CHECKSUM_MODE)
        question = "first byte", self._key, self._version_id, headers, self._pair
        await calls.ask(question, lambda: self._get(dict(headers)))

    async def _get(self, headers: Mapping[str, str]) -> None:
        query = (("versionId", self._version_id),) if self._version_id is not None else ()
        onward = {**headers, "range": "bytes=0-0", "accept-encoding": "identity"}
        request = OriginRequest(
            "GET", self._key.bucket, self._key.key, query, onward, slot=self._slot.name, signed_by=self._pair
        )
        async with await self._context.services.origin.send(request) as response:
            if response.status == 206:
                await response.read(_ANSWER_BYTES_MAX)
            if response.status in (200, 206, 416):  # an empty object has no first byte
                return
            if response.status >= 500:
                raise _not_said(self._slot)
            document = await response.read(_ANSWER_BYTES_MAX)
            if error_code_of(document) == "InvalidObjectState":
                return  # it is archived, as only allowed readers learn
            raise OriginAnswered(response.status, list(response.headers.items()), document)


def _needs_a_key(head: ObjectHead) -> bool:
    return head.headers.get("x-amz-server-side-encryption", "AES256") != "AES256"


class _RightsListing:
    """The question whether the caller may list what the request lists: in its words, but from behind the end on."""

    def __init__(self, context: RequestContext, pair: KeyPair) -> None:
        self._context = context
        self._pair = pair
        self._headers = judged_by_the_origin(context.request)
        request = context.request
        of_uploads = request.operation is Operation.LIST_MULTIPART_UPLOADS
        limit, begin = ("max-uploads", "key-marker") if of_uploads else ("max-keys", "start-after")
        said = [(name, value) for name, value in request.query if name in ("prefix", "delimiter", limit)]
        right_to: RightTo = "uploads" if of_uploads else "listing"
        scope = [part for pair in sorted(said, key=lambda one: one[0]) for part in pair]
        self._right = context.services.rights.right(pair.access_key_id, right_to, request.bucket, *scope)
        end = (request.parameter("prefix") or "") + _LAST_CHARACTER
        self._query: list[tuple[str, str | None]] = [("uploads", None) if of_uploads else ("list-type", "2"), *said]
        if len(end.encode()) <= KEY_SIZE_BYTES_MAX:
            self._query.append((begin, end))

    def is_remembered(self) -> bool:
        rights, slot = self._context.services.rights, self._context.slot
        refusal = rights.refusal(self._right)
        if refusal is not None:
            metrics.AUTHORIZATIONS.add(1, slot.name, "remembered")
            raise refusal
        if not rights.holds(self._right):
            return False
        metrics.AUTHORIZATIONS.add(1, slot.name, "remembered")
        return True

    async def ask(self) -> None:
        context, slot, asked = self._context, self._context.slot, _now(self._context)
        question = self._right, frozenset(self._headers.items()), self._pair
        rights, is_plain = context.services.rights, is_plainly_asked(self._headers)
        try:
            await context.services.catalog.joined_calls.ask(question, self._send)
        except OriginUnreachable:
            metrics.AUTHORIZATIONS.add(1, slot.name, "failed")
            raise
        except OriginAnswered as answer:
            metrics.AUTHORIZATIONS.add(1, slot.name, "denied" if answer.status == 403 else "other")
            if answer.status == 403 and is_plain:
                rights.refuse(self._right, answer, asked.generation)
            else:
                rights.revoke(self._right)
            raise
        metrics.AUTHORIZATIONS.add(1, slot.name, "allowed")
        if is_plain:
            rights.grant(self._right, asked.at_seconds + _least_ttl_seconds(context), asked.generation)

    async def _send(self) -> None:
        context = self._context
        request = OriginRequest(
            "GET",
            context.request.bucket,
            None,
            self._query,
            self._headers,
            slot=context.slot.name,
            signed_by=self._pair,
        )
        async with await context.services.origin.send(request) as response:
            if response.status == 200:
                return
            if response.status >= 500:
                raise _not_said(context.slot)
            document = await response.read(_ANSWER_BYTES_MAX)
            raise OriginAnswered(response.status, list(response.headers.items()), document)


def _least_ttl_seconds(context: RequestContext) -> float:
    request = context.request
    slots = context.services.slots.under(request.bucket or "", request.parameter("prefix") or "")
    return min((slot.authorization_ttl_seconds for slot in slots if _is_by_origin(slot)), default=0.0)
