"""Reads in slots that a snapshot freezes: the snapshot alone names the objects and their versions.

No answer ever holds a byte of another version: requests to the origin are pinned to the frozen ETag. An object that the
origin has lost is served while all of it is cached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.core.errors import OriginAnswered, OriginBodyError, OriginError, OriginUnreachable
from gateway.core.model import ByteRange, ObjectKey
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead, is_down, is_plainly_asked
from gateway.metadata.snapshots.registry import OpenSnapshot, SnapshotObject
from gateway.operations.context import RequestContext, Response
from gateway.operations.current_versions import open_cached
from gateway.operations.passthrough import onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.read_object import VersionReader
from gateway.operations.read_wishes import get_must_bypass, head_must_bypass, judged_by_the_origin
from gateway.operations.version_answers import VersionAnswers, is_cacheable
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import (
    etag_matches,
    evaluate_read,
    filter_request_headers,
    format_http_date,
    is_same_version,
    parse_iso_date,
    plain_etag,
    strong_etag,
    unquote,
)
from gateway.s3.requests import parse_copy_source
from gateway.telemetry import metrics

_GONE = frozenset({404, 412})
"""The origin's statuses for a version that it does not have any more."""

_CONDITIONS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})
_SOURCE_IF_MATCH = "x-amz-copy-source-if-match"


class SnapshotVersions:
    """The version that a snapshot has of the request's object (versions.VersionSource).

    404 for an object that did not exist when the snapshot was made, 412 for a lost one.
    """

    def __init__(self, context: RequestContext, snapshot: OpenSnapshot) -> None:
        self.context = context
        self.headers = judged_by_the_origin(context.request)
        self._snapshot = snapshot
        self._frozen: SnapshotObject | None = None

    def must_forward(self) -> bool:
        request = self.context.request
        return head_must_bypass(request) if request.method == "HEAD" else get_must_bypass(request)

    async def forward(self) -> Response:
        """Return the origin's answer about the frozen version: the request is pinned, or refused."""
        context, frozen, etag = self.context, self._object(), strong_etag(self._object().version.etag)
        conditions = {name: value for name, value in context.request.headers.items() if name in _CONDITIONS}
        if conditions:  # `If-Match` is needed for the pinning, so the client's own are judged here
            now, modified = context.services.clock.now(), parse_iso_date(frozen.modified)
            evaluate_read(conditions, etag=unquote(frozen.version.etag), last_modified=modified, now=now)
        headers = filter_request_headers(context.request.headers) | {"if-match": etag}
        request = onward_request(context, await receive_payload(context), headers=headers)
        response = await context.services.origin.send(request)
        is_other = response.status in (200, 206) and plain_etag(response.headers.get("etag", "")) != plain_etag(etag)
        if response.status not in _GONE and not is_other:
            head_only = context.request.method == "HEAD"
            return streamed_reply(response, head_only=head_only, cache="forwarded" if head_only else "bypass")
        await response.aclose()
        raise await self._explained(OriginAnswered(response.status, [], b""))

    def known(self) -> ObjectHead | None:
        context, catalog = self.context, self.context.services.catalog
        if not is_plainly_asked(self.headers) or context.request.parameter("partNumber") is not None:
            return None
        with_checksums = CHECKSUM_MODE in self.headers
        head = self._snapshot.head(context.object_key.key, with_checksums=with_checksums)
        if head is None:
            known = catalog.of_version(self._object().version, with_checksums=with_checksums)
            if known is None:
                return None
            head = ObjectHead(known.version, known.headers, known.last_modified)  # not `remembered`: never out of date
            self._snapshot.keep(head, with_checksums=with_checksums)
        metrics.CATALOG_LOOKUPS.add(1, context.slot.name, "hit")
        return head

    async def ask(self, *, again: bool = False) -> ObjectHead:
        """Ask the origin for the frozen version, and only that; OriginAnswered 412 if it has another."""
        context, catalog = self.context, self.context.services.catalog
        part_number = context.request.parameter("partNumber")
        head = await catalog.ask(context.object_key, context.slot, headers=self.conditions(), part_number=part_number)
        if not is_same_version(head.version, self._object().version):
            raise OriginAnswered(412, [], b"")
        metrics.CATALOG_LOOKUPS.add(1, context.slot.name, "miss")
        if part_number is None:
            self._learn(head, with_checksums=CHECKSUM_MODE in self.headers)
        return head

    def last_known(self) -> None:
        """Return None: a frozen version is not compared with the current one."""

    async def stand_in(self, error: OriginError) -> ObjectHead | None:
        """Return the head once learned of the version, or one from the listing, if all requested bytes are cached.

        A HEAD is answered by the learned one.
        """
        is_gone = _says_gone(error)
        if not is_gone and not (isinstance(error, (OriginAnswered, OriginUnreachable)) and is_down(error)):
            return None
        request, frozen = self.context.request, self._object()
        head = self.context.services.catalog.of_version(frozen.version, with_checksums=False)
        if request.method == "HEAD":
            if head is not None:
                return head
        elif request.parameter("partNumber") is None:
            head = head or listed_head(frozen)
            if is_cacheable(self.context, head):
                judged = VersionAnswers(head).judge(request.headers, self.context.services.clock)
                if not judged.body_bytes or self._is_cached(head, judged.sent):
                    return head
        raise (await self._explained(error) if is_gone else error)

    async def refused(self) -> Response:
        return await self.forward()  # HEAD has no error document

    def is_served(self, head: ObjectHead) -> bool:
        return is_cacheable(self.context, head)

    def conditions(self) -> dict[str, str]:
        return self.headers | pin(self._object())

    def accept(self, head: ObjectHead, *, with_checksums: bool) -> bool:
        if not is_same_version(head.version, self._object().version):
            return False
        self._learn(head, with_checksums=with_checksums)
        return True

    async def open(self, head: ObjectHead, byte_range: ByteRange, answer: UnpinnedResponse | None) -> VersionReader:
        """Open a reader. Of an object that the origin has lost, begin no body that cannot be sent to its end."""
        if self.context.object_key.key in self._snapshot.lost and not self._is_cached(head, byte_range):
            await self.ask()
        return await open_cached(self.context, head, byte_range, self.headers, answer)

    async def is_outdated(self, head: ObjectHead, error: OriginAnswered | OriginBodyError) -> bool:
        """Return False: frozen versions do not change. Raise the client's answer for a lost version."""
        if _says_gone(error) or isinstance(error, OriginBodyError):
            raise await self._explained(error) from None
        return False

    def on_cut_body(self, head: ObjectHead) -> Callable[[OriginError], Awaitable[object]]:
        async def lose(_error: OriginError) -> None:
            self._snapshot.lose(self.context.object_key.key)

        return lose

    def _object(self) -> SnapshotObject:
        """Return the frozen object; S3Error NoSuchKey without one: the origin is not asked."""
        if self._frozen is None:
            key = self.context.object_key.key
            self._frozen = self._snapshot.find(key)
            if self._frozen is None:
                metrics.CATALOG_LOOKUPS.add(1, self.context.slot.name, "absent")
                raise s3_error("NoSuchKey", Key=key)
        return self._frozen

    def _learn(self, head: ObjectHead, *, with_checksums: bool) -> None:
        """Remember the origin's answer about the frozen version, for good if allowed."""
        if not is_plainly_asked(self.headers):
            return
        self._snapshot.lost.pop(head.version.key.key, None)
        self._snapshot.keep(head, with_checksums=with_checksums)
        self.context.services.catalog.learned_version(head, with_checksums=with_checksums)

    def _is_cached(self, head: ObjectHead, byte_range: ByteRange | None = None) -> bool:
        if head.version.size_bytes == 0:
            return True
        asked = byte_range or ByteRange(0, head.version.size_bytes - 1)
        return self.context.services.blocks.holds(head.version, asked, slot=self.context.slot.name)

    async def _explained(self, error: OriginError) -> Exception:
        """Return the client's answer after the origin has refused the frozen version: it says which version it has now.

        Return `error` itself if it was about something else.
        """
        context, frozen = self.context, self._object()
        try:
            head = await context.services.catalog.ask(context.object_key, context.slot, headers=self.headers)
        except OriginError as refusal:
            is_absent = isinstance(refusal, OriginAnswered) and refusal.status == 404
            if not is_absent and not _says_gone(error):
                return error
            reason = "gone" if is_absent else "changed"
            has = "has no such object any more" if is_absent else "does not have that version any more"
        else:
            if is_same_version(head.version, frozen.version):  # perhaps LIST writes its ETag otherwise than HEAD
                self._learn(head, with_checksums=CHECKSUM_MODE in self.headers)
                return s3_error(
                    "ServiceUnavailable", "The origin refused to send a version that it has. Please try again."
                )
            reason, has = "changed", f"has ETag {strong_etag(head.version.etag)}"
        self._snapshot.lose(context.object_key.key)
        metrics.SNAPSHOT_REFUSALS.add(1, context.slot.name, reason)
        return s3_error(
            "PreconditionFailed",
            f"{_frozen_as(context.object_key, self._snapshot, frozen)}, and the origin {has}. "
            "This node has not cached the requested bytes of the frozen version.",
            Condition="If-Match",
            Snapshot=self._snapshot.manifest.name,
        )


def _says_gone(error: OriginError) -> bool:
    return isinstance(error, OriginAnswered) and error.status in _GONE


def _frozen_as(key: ObjectKey, snapshot: OpenSnapshot, frozen: SnapshotObject) -> str:
    return f"{key} is frozen by the snapshot {snapshot.manifest.name!r} with ETag {strong_etag(frozen.version.etag)}"


def pin(frozen: SnapshotObject) -> dict[str, str]:
    """Return the header that asks the origin for the frozen version or nothing."""
    return {"if-match": strong_etag(frozen.version.etag)}


def listed_head(frozen: SnapshotObject) -> ObjectHead:
    """Return a head from the snapshot alone, for an object that nothing else knows any more."""
    headers = {
        "etag": strong_etag(frozen.version.etag),
        "content-length": str(frozen.version.size_bytes),
        "content-type": "binary/octet-stream",
    }
    modified = parse_iso_date(frozen.modified)
    if modified is not None:
        headers["last-modified"] = format_http_date(modified)
    return ObjectHead(replace(frozen.version, etag=headers["etag"]), headers, modified)


# Copies out of a frozen slot


def frozen_source(context: RequestContext) -> Slot | None:
    """Return the slot that freezes the source of a CopyObject or UploadPartCopy, or None."""
    text = context.request.headers.get("x-amz-copy-source")
    if text is None:
        return None
    source = parse_copy_source(text).key
    slot = context.services.slots.find(source.bucket, source.key)
    return slot if slot.consistency == "snapshot" else None


async def pin_source(context: RequestContext) -> None:
    """Pin a copy to the frozen version of its source: 412 if the origin does not have it any more.

    Some servers ignore conditions on a copy's source: the origin is asked for its version just before.
    """
    request, services = context.request, context.services
    key = parse_copy_source(request.headers["x-amz-copy-source"]).key
    slot = services.slots.find(key.bucket, key.key)
    snapshot = await services.snapshots.opened(slot)
    frozen = snapshot.find(key.key)
    if frozen is None:
        raise s3_error("NoSuchKey", Key=key.key)
    etag = strong_etag(frozen.version.etag)
    if not etag_matches(request.headers.get(_SOURCE_IF_MATCH, "*"), etag):
        raise s3_error("PreconditionFailed", Condition=_SOURCE_IF_MATCH)
    try:
        head = await services.catalog.ask(frozen.version.key, slot, headers=pin(frozen))
        is_there = is_same_version(head.version, frozen.version)
    except OriginAnswered as answer:
        if answer.status not in _GONE:
            raise
        is_there = False
    if not is_there:
        raise s3_error(
            "PreconditionFailed",
            f"{_frozen_as(frozen.version.key, snapshot, frozen)}, and the origin does not have that version any more.",
            Condition=_SOURCE_IF_MATCH,
        )
    request.headers = {**request.headers, _SOURCE_IF_MATCH: etag}
