"""The origin's current version of a request's object, as the catalog has it within the bound of the key's slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.core.errors import OriginAnswered, OriginBodyError, OriginError
from gateway.core.model import ByteRange, ObjectVersion
from gateway.metadata.catalog import is_remembered
from gateway.metadata.entries import ObjectHead
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward, forward_joined, handed_on, onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.read_object import VersionReader
from gateway.operations.read_wishes import (
    get_must_bypass,
    head_must_bypass,
    judged_by_the_origin,
    vary_headers,
    wants_revalidation,
)
from gateway.operations.version_answers import is_cacheable
from gateway.operations.visibility import changed_by
from gateway.operations.write_scope import invalidate
from gateway.origin.client import ERROR_DOCUMENT_BYTES_MAX
from gateway.s3.headers import MD5_OF_NOTHING, filter_response_headers, first_and_last, plain_etag, without
from gateway.s3.origin_habits import NO_HABITS, OriginHabits, RangeIgnored, is_refusal


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
            document = await response.read(ERROR_DOCUMENT_BYTES_MAX)
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
        if not head.remembered and not head.of_peer:
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
