"""Requests that other nodes' writes may concern.

A read: pending here? → as ever. Else the registry is asked: pending on another node → that node answers; changed since
this process has heard of the key last → all that is remembered of it is void; then as ever.

A write waits until no other node has anything pending under its keys. Then it goes through, between two notes that they
change (write_scope.py), or this node claims the key and acknowledges the write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from gateway.core.errors import BufferRefused, BufferUnavailable
from gateway.core.model import Claim, Known, ObjectKey
from gateway.metadata.listing.pages import ListRequest
from gateway.metadata.listing.records import pack
from gateway.operations.cluster_writes import ClusterWrites
from gateway.operations.context import Answer, RequestContext, Response, awaited
from gateway.operations.list_sources import Listing, ObjectRow, ObjectRows, SourceEntry
from gateway.operations.merged_page import Kind, PageRow, Rows
from gateway.operations.passthrough import onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.read_wishes import response_overrides, wants_revalidation
from gateway.policy.registry import WHOLE_BUCKET, Registry, StoreEntry, StoreQuestion, Stores
from gateway.s3.error_codes import s3_error
from gateway.s3.list_result import EntryTemplate, ListedEntry
from gateway.s3.requests import (
    CHANGES_NO_OBJECT,
    READ_METHODS,
    Operation,
    is_about_objects,
    is_form,
    parse_copy_source,
)
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import token_of

LOOKS_MAX: Final = 4
"""Looks of one read that finds something pending on another node, and then not there."""

_READS = frozenset({Operation.GET_OBJECT, Operation.HEAD_OBJECT})
_OF_UPLOADS = CHANGES_NO_OBJECT | {Operation.LIST_PARTS, Operation.COMPLETE_MULTIPART_UPLOAD}

Handler = Callable[[RequestContext], Answer]


def of_other_nodes(context: RequestContext, here: Handler) -> Answer | None:
    """Answer a request that other nodes' writes may concern; None: none may. `here` answers as a node that is alone."""
    request = context.request
    # Another node sends this one a request about an upload that is here. Any node may have the source of the copy.
    is_copied_here = request.operation is Operation.UPLOAD_PART_COPY
    writes = context.services.cluster_writes if is_copied_here else context.cluster_writes
    if writes is None or request.bucket is None:
        return None
    if context.signed_by is None and (store := _store_of_upload(request.parameter("uploadId"), writes.stores)):
        return _at_store(context, writes, store)
    if request.key is None and is_about_objects(request):
        under = context.services.slots.under(request.bucket, request.parameter("prefix") or "")
        return _of_bucket(context, writes, here) if any(map(writes.asks, under)) else None
    if "x-amz-rename-source" in request.headers or is_form(request):  # names a key in a way not read here
        slots = context.services.slots.under(request.bucket, "")
        return _of_bucket(context, writes, here) if any(map(writes.asks, slots)) else None
    if request.operation in _READS:
        is_fresh, asks = wants_revalidation(context), writes.asks(context.slot)
        buffer = context.services.writeback
        is_here = buffer is not None and buffer.pending(context.object_key) is not None
        if is_here or not (asks or is_fresh):
            return None
        return _asked_anew(context, writes, here) if is_fresh else _read(context, writes, here)
    # DeleteObjects and other writes that go through look as they begin, LIST as it goes on.
    keys = [key for key in _keys(context) if writes.asks(context.services.slots.find(*key))]
    return _when_free(context, writes, keys, here) if keys else None


def _store_of_upload(upload_id: str | None, stores: Stores) -> str | None:
    """Return the store that an upload id names, if it is another node's."""
    store, dash, _ = (upload_id or "").partition("-")
    return store if dash and stores.is_known(store) else None


def _keys(context: RequestContext) -> list[ObjectKey]:
    """Return the keys whose other writes must be known first: of what is read, and of what may be absorbed."""
    request, keys = context.request, list[ObjectKey]()
    is_of_object = request.key is not None and request.operation not in _OF_UPLOADS
    if is_of_object and (request.method in READ_METHODS or context.slot.is_buffered):
        keys.append(context.object_key)
    source = request.headers.get("x-amz-copy-source")
    return keys if source is None else [*keys, parse_copy_source(source).key]


async def _read(context: RequestContext, writes: ClusterWrites, here: Handler) -> Response:
    key = context.object_key
    claim: int | None = None
    for _ in range(LOOKS_MAX):
        [known] = await writes.look([key])
        context.past_memory |= known.stamp is None
        if known.store is None:
            return await awaited(here(context))
        if claim and known.claim == claim:  # acknowledged by nobody yet, or flushed by now
            context.past_memory = True
            return await awaited(here(context))
        claim = known.claim
        if context.signed_by is not None and not context.may_read:
            await writes.free([key])
            continue
        # Refuse headers that this caller may not choose: the other node does not know the caller.
        response_overrides(context)
        reply = await _sent(context, writes, known.store)
        if reply is not None:
            return reply
    raise s3_error("ServiceUnavailable", "Other nodes change this object again and again: try again.")


async def _asked_anew(context: RequestContext, writes: ClusterWrites, here: Handler) -> Response:
    """Answer a read with `Cache-Control: no-cache`; afterwards no node remembers another version."""
    reply = await (_read(context, writes, here) if writes.asks(context.slot) else awaited(here(context)))
    try:
        await writes.stores.forget(context.object_key.bucket, [context.object_key.key])
    except BaseException:
        await reply.aclose()
        raise
    return reply


async def _of_bucket(context: RequestContext, writes: ClusterWrites, here: Handler) -> Response:
    """Answer once the bucket has what other nodes have pending in it."""
    await writes.free_under(context.request.bucket or "", context.request.parameter("prefix") or "")
    return await awaited(here(context))


async def _when_free(context: RequestContext, writes: ClusterWrites, keys: list[ObjectKey], here: Handler) -> Response:
    known = await writes.free(keys)
    context.past_memory |= any(told.stamp is None for told in known)
    context.stamps = {key: told.stamp for key, told in zip(keys, known, strict=True)}
    return await awaited(here(context))


async def _at_store(context: RequestContext, writes: ClusterWrites, store: str) -> Response:
    """Send the request to the node that has its upload."""
    reply = await _sent(context, writes, store)
    if reply is None:
        raise s3_error("NoSuchUpload", UploadId=context.request.parameter("uploadId") or "")
    return reply


async def _sent(context: RequestContext, writes: ClusterWrites, store: str) -> Response | None:
    request = onward_request(context, await receive_payload(context))
    response = await writes.stores.send(store, request)
    if response is None:
        return None
    return streamed_reply(response, head_only=context.request.method == "HEAD", cache="peer")


# LIST


async def seek_elsewhere(writes: ClusterWrites, listing: Listing, wanted: ListRequest) -> ObjectRows:
    """Return the rows of what other nodes have pending, a source of a LIST.

    What has changed on its stretch of keys is void in the index from then on.
    """
    bucket = listing.bucket
    [of_bucket] = await writes.look([ObjectKey(bucket, WHOLE_BUCKET)])
    found = await writes.registry.rows(bucket, wanted.start, wanted.stop)
    listing.context.past_memory |= of_bucket.stamp is None or not found.has_changes
    names = [(ObjectKey(bucket, name.decode()), known) for name, known in found.rows if name]
    await writes.apply(names)
    by_store: dict[str, list[str]] = defaultdict(list)
    for key, known in names:
        if known.store is not None:
            by_store[known.store].append(key.key)
    entries: dict[str, StoreEntry] = {}
    for store, keys in by_store.items():
        answer = await writes.stores.tell(store, StoreQuestion(verb="entries", bucket=bucket, keys=tuple(keys)))
        told = dict(zip(keys, answer.entries, strict=True))
        await writes.forget(bucket, [key for key, entry in told.items() if entry is None])  # flushed by now
        entries |= {key: entry for key, entry in told.items() if entry is not None}
    rows = [_row(wanted, name.encode(), entries[name]) for name in sorted(entries, key=str.encode)]
    return Rows([row for row in rows if row is not None], found.end)


def _row(wanted: ListRequest, name: bytes, entry: StoreEntry) -> ObjectRow | None:
    common = wanted.rolled_up(name)
    if common is not None:
        kind = Kind.DOUBTFUL_PREFIX if entry.is_deleted else Kind.PREFIX
        return PageRow(common, kind) if wanted.is_behind(common) else None
    if entry.is_deleted:
        return PageRow(name, Kind.TOMBSTONE)
    template = EntryTemplate(*entry.template)
    record = pack(ListedEntry(name, entry.modified, entry.etag, entry.size_bytes, template), 0)
    return PageRow(name, Kind.ENTRY, content=SourceEntry(record, template))


# Acknowledging


@dataclass(frozen=True, slots=True)
class Claimed:
    """This node's word to the others that it is about to acknowledge a write of a key: as a context, it does.

    `is_changed`: other nodes may have changed the key since the request came, or an upload began. Release one that is
    not entered.
    """

    registry: Registry | None = None
    claim: Claim | None = None
    known: Known | None = None
    claimed_at: float = 0.0
    is_changed: bool = False
    buffer: WritebackBuffer | None = None

    @property
    def order(self) -> int:
        """Return the place of the write among those of all nodes."""
        return self.known.order if self.known is not None else 0

    async def release(self) -> None:
        """Take the claim back, unless its write is pending all the same."""
        if self.registry is None or self.claim is None or self.buffer is None:
            return
        pending = self.buffer.pending(self.claim.key)
        if pending is None or pending.token != self.claim.token:
            await self.registry.release(self.claim)

    async def __aenter__(self) -> None:
        """Acknowledge now."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.registry is None or self.claim is None or self.known is None:
            return
        if kind is None:
            is_anew = await self.registry.confirm(self.claim, self.known, self.claimed_at)
            if is_anew and self.buffer is not None and self.buffer.pending(self.claim.key) is None:
                await self.registry.release(self.claim)  # the write was flushed before
        elif not isinstance(error, BufferUnavailable) or isinstance(error, BufferRefused):
            await self.release()  # else it may be acknowledged all the same


async def claimed(context: RequestContext, acknowledged_at: float, key: ObjectKey | None = None) -> Claimed:
    """Claim a key, or the request's, once no other node has a write of it pending. S3Error, RegistryAway."""
    writes, key = context.services.cluster_writes, key or context.object_key
    if writes is None or not writes.must_know(key):
        return Claimed()
    claim, claimed_at = Claim(key, token_of(acknowledged_at)), context.services.clock.monotonic()
    known = await writes.claim(claim)
    is_changed = known.stamp is None or context.stamps.get(key) != known.stamp
    return Claimed(writes.registry, claim, known, claimed_at, is_changed, context.services.writeback)
