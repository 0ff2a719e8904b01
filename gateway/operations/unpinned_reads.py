"""The first GET of an unknown object: the origin gives version and first bytes in one answer.

If checksums are wanted, which come only with the whole, this is so if similar objects fit in one block. If anything in
the answer is unusual, a HEAD finds out what to answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from gateway.blocks.origin_gets import UnpinnedGet, UnpinnedResponse
from gateway.core.errors import OriginAnswered, OriginBodyError
from gateway.core.model import ByteRange, ObjectKey
from gateway.metadata.catalog import CHECKSUM_MODE, is_plainly_asked, may_be_remembered
from gateway.metadata.entries import ObjectHead, ObservedAt, object_head_of_get
from gateway.operations.context import AppContext, RequestContext
from gateway.operations.read_wishes import first_bytes_asked, vary_headers
from gateway.origin.client import ERROR_DOCUMENT_BYTES_MAX, OriginHead, OriginRequest, Purpose, age_of, from_peer
from gateway.origin.peer_protocol import COPY
from gateway.origin.retry import asks_for_retry
from gateway.policy.slots import Slot
from gateway.s3.origin_habits import OriginHabits
from gateway.s3.requests import S3Request


class Refused(OriginAnswered):
    """The origin has answered the GET with an error; its document was read if it says "later"."""


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
    bounds = first_bytes_asked(asked)
    if bounds is None:
        return None
    blocks, catalog = services.blocks, services.catalog
    wanted = blocks.first_fetched(*bounds, slot.name)
    whole = CHECKSUM_MODE in headers and "range" not in asked.headers  # an answer to a range has no checksums
    if whole and not catalog.sizes_seen.are_within(key, wanted.length):
        return None  # the whole would be asked for, and all behind the first block discarded
    habits = catalog.habits(key.bucket)
    if habits.weak_etags or habits.no_ranges or habits.withheld_etags:
        return None  # the answer could not be continued
    fields: Mapping[str, str] = vary_headers(headers)
    roles = services.roles
    is_plain = "cache-control" not in asked.headers and is_plainly_asked(fields)
    by_nodes = roles is not None and is_plain and may_be_remembered(slot, fields)
    # A frozen version is the same wherever it comes from. Its owner asks the bucket, with a HEAD if it has the block.
    if roles is not None and not of_peer and (by_nodes or (is_plain and "if-match" in conditions and not whole)):
        fields = roles.headers(key, wanted.first // blocks.block_size_of(slot.name), fields, slot.name)
        if COPY in fields and whole:
            return None  # the checksums come with the HEAD, and the bytes from each block's owner
        if COPY in fields:
            conditions = {**conditions, COPY: fields[COPY]}
    if COPY not in fields and services.reads_near(key, slot.name):
        return None  # the source names the version, and a replica gives its bytes
    get = blocks.begin_unpinned_get(key, wanted.first, fields)
    if get is None:
        return None
    onward = {**conditions, "accept-encoding": "identity"}
    if not whole:
        onward["range"] = f"bytes={wanted.first}-{wanted.last}"
    request = OriginRequest(
        "GET",
        key.bucket,
        key.key,
        headers=onward,
        purpose=Purpose.LIVE,
        slot=slot.name,
        ages=catalog.ages(key, slot) if by_nodes else None,
    )
    return UnpinnedQuestion(get, wanted, request, since or catalog.now(key), headers, fields, whole)


async def ask_unpinned(
    context: RequestContext, question: UnpinnedQuestion
) -> tuple[ObjectHead | None, UnpinnedResponse]:
    """Ask for the bytes; remember the answer's facts of the object if allowed. Raises Refused, OriginUnreachable.

    No head: the answer alone makes no sense. The caller closes the answer.
    """
    catalog, key = context.services.catalog, context.object_key
    response = await context.services.origin.send(question.request)
    answer = UnpinnedResponse(question.get, question.wanted, response)
    try:
        if asks_for_retry(response.status):
            document = await response.read(ERROR_DOCUMENT_BYTES_MAX)
            raise Refused(response.status, list(response.headers.items()), document)
        head, wanted = understood_answer(key, response, answer, question), question.wanted
        question.get.known_empty = head is None
        if head is not None:
            head = replace(head, of_peer=from_peer(response) is not None)
            is_whole = not question.whole and response.status == 200 and not head.of_peer
            if is_whole and (wanted.first or head.version.size_bytes > wanted.length):
                catalog.learn_habits(key.bucket, OriginHabits(no_ranges=True))
            since, whole = question.since.before(age_of(response)), question.whole
            catalog.learned(head, context.slot, since, headers=question.headers, with_checksums=whole)
        return head, answer
    except BaseException:
        await answer.aclose()
        raise


def understood_answer(
    key: ObjectKey, response: OriginHead, answer: UnpinnedResponse, question: UnpinnedQuestion
) -> ObjectHead | None:
    """Return what the answer to a question says of the object, and set its `range`; None: HEAD tells. Raises Refused.

    The whole object, or the range under a wrong status, is such an answer.
    """
    first, status, headers = answer.range.first, response.status, response.headers
    if status in (400, 405, 416, 501):
        return None  # of an empty object, behind the end, or from an origin that refuses ranges: HEAD tells which
    if status not in (200, 206):
        raise Refused(status, list(headers.items()), b"")
    try:
        head, body = object_head_of_get(key, status, headers)
    except OriginBodyError:
        return None
    if body is None or not body.first <= first < body.stop:
        return None
    answer.range = body
    return None if not question.whole and status == 200 and body == question.wanted else head
