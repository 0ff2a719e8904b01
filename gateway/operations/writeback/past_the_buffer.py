"""Requests that go past the buffer: they wait until the origin has what this node has acknowledged before them.

The journal notes that a write which went past the buffer has changed its key. Otherwise an older upload takes its
result for another writer's: a conflict, which is kept and reported. The same happens if the journal cannot be written
now (the buffer reports that): the origin has taken the write, so it is acknowledged all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from typing import Any, Protocol

import structlog

from gateway.core import cancellation
from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable, ForebayError, OriginBodyError, OutcomeUnknown, S3Error
from gateway.core.model import BodyStream, ObjectKey, PinnedFileSpan
from gateway.core.steps import Steps, each, in_steps
from gateway.metadata.listing.pages import key_successor, prefix_end
from gateway.operations.context import Answer, CacheLabel, RequestContext, Response, changed, s3_error_of
from gateway.operations.payload import announced_bytes
from gateway.operations.writeback.write_back_policy import Reason, has_conditions
from gateway.origin.client import OriginRequest, Purpose
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import NO_HEADERS, etag_matches, multipart_etag, unquote, without
from gateway.s3.requests import Operation, parse_copy_source
from gateway.s3.xml import (
    DELETE_RESULT_BYTES_MAX,
    RESULT_SIZE_BYTES_MAX,
    DeleteEntry,
    entries_left,
    etag_of_result,
    without_prolog,
)
from gateway.s3.xml_writer import PROLOG
from gateway.telemetry import metrics
from gateway.telemetry.logs import RateLimitedLog
from gateway.writeback.bounds import Bound
from gateway.writeback.checkpoints.manifests import NamedFiles, NotUnderstood, may_be_understood
from gateway.writeback.flushing.manifest_files import (
    AWAITED_PAUSE_SECONDS,
    FIRST_PAUSE_SECONDS,
    FilePresence,
    understood,
)
from gateway.writeback.flushing.state import LookedFor, WriteRefused
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.records import State, Write
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.order import is_marker, key_prefix_before, root_of

PATIENCE_SECONDS = 20.0
"""Clients give up after some 60 seconds; a 503 before that makes them try again."""

LOOK_SECONDS = 0.01
LOOK_SECONDS_MAX = 0.1
"""The shortest and longest pause between looks at the journal. Within these, a tenth of the wait so far: long waits end
a little later, and cost much less."""

_PATIENT_LOOKS = 2
"""Looks after which the wait asks for priority: much must be ahead of it."""

_KEYS_AT_A_LOOK = 100


class FlushWait:
    """One request's wait until the origin has what this node has acknowledged, of PATIENCE_SECONDS in all.

    Each method returns when the origin has what was pending at the call, or a later write in its place. S3Error
    ServiceUnavailable (503) when that takes too long, OperationAborted (409) when a conflict is in the way.
    """

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._buffer = context.buffer
        self._clock = context.services.clock
        self._deadline = self._clock.monotonic() + PATIENCE_SECONDS
        self._waited: list[str] = []
        """Prefixes with all earlier writes flushed: slots' own, or a marker's."""

    async def for_keys(self, keys: Iterable[ObjectKey]) -> None:
        """Wait for pending writes of these keys. Then the request's conditions name the origin's versions."""
        for found in [found for key in keys if (found := self._buffer.pending(key)) is not None]:
            await self.for_write(found.key, found.sequence)
        name_by_bucket_etags(self._context)

    def is_needed(self, bucket: str, prefix: str) -> bool:
        start = prefix.encode()
        return bool(self._buffer.look(lambda tx: tx.writes.listing(bucket, start, prefix_end(start), 1)))

    async def for_prefix(self, bucket: str, prefix: str = "", *, past_local: bool = True) -> None:
        """Wait for writes under a prefix but local objects, which without `past_local` raise S3Error NotImplemented."""
        newest = self._buffer.look(lambda tx: tx.writes.newest())
        start = prefix.encode()
        stop = prefix_end(start)
        while found := self._buffer.look(lambda tx: tx.writes.listing(bucket, start, stop, _KEYS_AT_A_LOOK)):  # noqa: B023
            for one in found:
                if one.state is State.LOCAL and not past_local:
                    raise s3_error(
                        "NotImplemented",
                        "This node keeps objects of the bucket that are never sent to the origin: delete them first.",
                    )
                if one.state is not State.LOCAL:  # those never leave this node
                    await self.for_write(one.key, min(one.sequence, newest), past=(State.LOCAL,))
            start = key_successor(found[-1].key.key.encode())

    async def for_turn(self, key: ObjectKey) -> None:
        """Wait for writes that must precede one of a key that goes past the buffer (writeback/order.py).

        Those are the key's own, for a marker or conditional write those under its directory, in a strict slot those
        under its prefix.
        """
        slot = self._context.services.slots.find(key.bucket, key.key)
        is_deletion = self._context.request.operation in (Operation.DELETE_OBJECT, Operation.DELETE_OBJECTS)
        if slot.write == "back" and (slot.order == "strict" or not is_deletion):
            prefix = key_prefix_before(key.key, slot, is_conditional=has_conditions(self._context.request.headers))
            if prefix is not None and prefix not in self._waited:
                await self.for_prefix(key.bucket, prefix)
                self._waited.append(prefix)
            await for_other_nodes(self._context, key)
        await self.for_keys([key])

    async def for_files(self, content: bytes | None) -> None:
        """Wait for everything that a manifest names under the request's key, whichever node writes it.

        `content` is the manifest, None if it is too long to be looked at while its client waits. A manifest that cannot
        be understood goes in the order of arrival, and the log says so. If the gateway may not look, as in a bucket
        whose writes it never absorbs, do not wait.
        """
        named = await _named_files(self._context, content)
        if not named:
            return
        origin, slot = self._context.services.origin, self._context.slot.name
        bucket, pause_seconds = self._context.object_key.bucket, FIRST_PAUSE_SECONDS
        presence = FilePresence(origin, bucket, named, slot=slot, purpose=Purpose.FORWARD, clock=self._clock)
        while True:
            found = await presence.look()
            if isinstance(found, WriteRefused) or (isinstance(found, LookedFor) and not found.missing):
                return
            if self._clock.monotonic() + pause_seconds >= self._deadline:
                raise s3_error(
                    "ServiceUnavailable",
                    "The origin does not have all the files yet that this manifest names: try again.",
                )
            with cancellation.turn():
                await self._clock.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, AWAITED_PAUSE_SECONDS)

    async def for_files_of_source(self) -> None:
        """Wait as `for_files` for what the source of a copy names; the origin refuses a copy that it does not give."""
        context = self._context
        source = parse_copy_source(context.request.headers.get("x-amz-copy-source", ""))
        query = [("versionId", source.version_id)] if source.version_id is not None else []
        request = OriginRequest("GET", *source.key, query, purpose=Purpose.FORWARD, slot=context.slot.name)
        async with await context.services.origin.send(request) as response:
            if response.status != 200:
                return
            length = response.headers.get("content-length", "")
            is_short = length.isdecimal() and int(length) <= CONTENT_BYTES_MAX
            content = await response.read(CONTENT_BYTES_MAX) if is_short else None
        await self.for_files(content)

    async def for_write(self, key: ObjectKey, sequence: int, past: Collection[State] = ()) -> None:
        """Wait for the writes of a key up to a sequence; a later one in a state of `past` ends the wait, too."""
        looks, hurried, began = 0, 0, self._clock.monotonic()
        while True:
            first = self._buffer.look(lambda tx: tx.writes.earliest(key, sequence))
            if first is None or (first.sequence > sequence and first.state in past):
                return
            if first.state is State.CONFLICT:
                raise conflict(self._name(key))
            if first.state is State.LOCAL:
                await self._send_after_all(first)
            if self._clock.monotonic() >= self._deadline:
                raise s3_error("ServiceUnavailable", f"{self._name(key)} is not at the origin yet: try again.")
            if looks >= _PATIENT_LOOKS and first.sequence != hurried:
                hurried = first.sequence
                with suppress(BufferUnavailable):  # then it comes in its turn
                    await self._buffer.prioritise(key)
            looks += 1
            await until_next_look(self._clock, began)

    async def _send_after_all(self, local: Write) -> None:
        """Send a local object that is needed at the origin, unless its slot sends none: S3Error NotImplemented."""
        if self._context.services.slots.find(local.key.bucket, local.key.key).write == "scratch":
            raise s3_error(
                "NotImplemented",
                f'{self._name(local.key)} is kept on this node only (write = "scratch"), and only the origin could '
                "answer this request.",
            )
        now = self._clock.now()
        await self._buffer.journal.change(lambda tx: tx.local.send_after_all(local.id, now))

    def _name(self, key: ObjectKey) -> str:
        """Name a key, but hide one that the caller may not touch, and that only comes before (for_turn)."""
        is_covered = self._context.grant.covers(key.bucket, key.key)
        return str(key) if is_covered else "A key that comes before, and is not among yours,"


async def for_other_nodes(context: RequestContext, key: ObjectKey) -> None:
    """Wait for what other nodes have pending, if a write comes last over all nodes. S3Error 503."""
    # A node that passes its client's request on does not wait: this one does.
    writes, slot = context.services.cluster_writes, context.services.slots.find(*key)
    if writes is None or slot.write != "back" or not writes.asks(slot):
        return
    if has_conditions(context.request.headers) or is_marker(key.key, slot.markers):
        await writes.earlier_flushed(key, root_of(key.key))


async def until_next_look(clock: Clock, began: float) -> None:
    """Pause between two looks at the journal of a wait that began at a monotonic time."""
    with cancellation.turn():
        await clock.sleep(min(max(LOOK_SECONDS, (clock.monotonic() - began) / 10), LOOK_SECONDS_MAX))


def conflict(name: str) -> S3Error:
    return s3_error(
        "OperationAborted",
        f"{name} was changed at the origin while a write of this node was on its way: somebody must decide which is to "
        "stay, before the origin can answer for it.",
    )


# Manifests: the origin shows one when the client has its 200, so the client waits for the files

_log = RateLimitedLog(structlog.get_logger("forebay.writeback"))

CONTENT_BYTES_MAX = 8 * 1024**2
"""The longest manifest that is received whole, in memory, before the origin hears of it."""


def names_files(context: RequestContext) -> bool:
    """Tell whether the request may write a manifest whose files are waited for.

    One in the caller's own name does not: such slots acknowledge nothing that the origin does not have.
    """
    slot, key = context.slot, context.object_key
    if slot.write != "back" or slot.manifests != "checked" or context.signed_by is not None:
        return False
    return is_marker(key.key, slot.markers) and may_be_understood(key)


async def _named_files(context: RequestContext, content: bytes | None) -> NamedFiles | None:
    """Return the files that an object with this content names under the request's key; None: unknown."""
    key = context.object_key
    named: NamedFiles | NotUnderstood = NotUnderstood("it is too long to be looked at while its client waits")
    if content is not None:
        named = await understood(key, content, context.buffer.threads)
    if isinstance(named, NotUnderstood):
        _log.warning(
            "a manifest's file names cannot be read: it goes to the origin in the order of arrival",
            "manifest",
            object=str(key),
            slot=context.slot.name,
            reason=named.reason,
        )
        return None
    return await in_steps(_covered(context, named))


def _covered(context: RequestContext, named: NamedFiles) -> Steps[NamedFiles]:
    bucket, grant = context.object_key.bucket, context.grant
    are_covered = yield from each(lambda key: grant.covers(bucket, key), named.keys)
    keys = tuple(compress(named.keys, are_covered))
    return NamedFiles(keys, tuple(one for one in named.directories if grant.covers(bucket, one)))


# A client that reads an object in ranges names in each the version of the first answer (`If-Match`), and the flush may
# come in between, with another ETag. So the journal remembers both ETags of the last flushed write of a key.

_OF_SOURCE = "x-amz-copy-source"
_CONDITIONS = ("if-match", "if-none-match", "if-range", f"{_OF_SOURCE}-if-match", f"{_OF_SOURCE}-if-none-match")


def name_by_bucket_etags(context: RequestContext) -> LastOwnWrite | None:
    """Put the bucket's ETags in place of this node's in the request's conditions; return the write meant."""
    found, headers = None, context.request.headers
    if context.request.key is None:
        return None
    for name in _CONDITIONS:
        value = headers.get(name)
        if value is None or value.strip() == "*":
            continue
        key = context.object_key
        if name.startswith(_OF_SOURCE) and _OF_SOURCE in headers:
            key = parse_copy_source(headers[_OF_SOURCE]).key
        own = context.buffer.look(lambda tx: tx.buckets.last_own_write(key))  # noqa: B023 - called at once
        if own is None or own.answered is None or own.etag is None or not etag_matches(value, own.answered):
            continue
        found, named = own, value.replace(unquote(own.answered), unquote(own.etag))
        context.request = replace(context.request, headers={**context.request.headers, name: named})
    return found


def as_named(answer: Answer, own: LastOwnWrite) -> Answer:
    """Return the answer to a read whose condition named a write: with the client's name of the version."""

    def named(response: Response) -> Response:
        pairs = [*response.encoded.pairs, *response.headers]
        etag = next((value for name, value in pairs if name == "etag"), None)
        if etag is None or unquote(etag) != unquote(own.etag or ""):
            return response
        return replace(response, headers=[*without(pairs, "etag"), ("etag", own.answered or "")], encoded=NO_HEADERS)

    return changed(answer, named)


# Writes


def goes_through(context: RequestContext, reason: Reason | Bound) -> None:
    """Set the answer's header that says why a write is not absorbed, and count it."""
    context.not_absorbed = reason.value
    if context.services.writeback is not None:
        metrics.WRITEBACK_THROUGH.add(1, context.slot.name, reason.value)


async def written_through(context: RequestContext, write: Awaitable[Response]) -> Response:
    """Carry out a write of the request's key at the origin, answered or not."""
    clock = context.services.clock

    async def note(etag: str | None, *, known: bool) -> None:
        with suppress(BufferUnavailable):
            own = LastOwnWrite.now(Moment.of(clock), etag, known=known)
            is_put = context.request.operation is Operation.PUT_OBJECT
            await context.buffer.record_own_write(context.object_key, own, announced_bytes(context) if is_put else 0)
            if etag is not None and context.request.operation is Operation.COMPLETE_MULTIPART_UPLOAD:
                await _learn_of_parts(context, etag)

    try:
        reply = await write
    except BaseException:
        await note(None, known=False)
        raise
    if 400 <= reply.status < 500:  # it has refused, and nothing has changed
        return reply
    match context.request.operation, reply.status:
        case ((Operation.COPY_OBJECT | Operation.COMPLETE_MULTIPART_UPLOAD), 200):
            return await retried_until_final_document(
                reply, note, clock, may_be_repeated=not has_conditions(context.request.headers)
            )
        case Operation.PUT_OBJECT, 200:
            etag = dict(reply.headers).get("etag")
            await note(etag, known=etag is not None)
        case Operation.DELETE_OBJECT, 204 if context.request.parameter("versionId") is None:
            await note(None, known=True)
        case _:
            await note(None, known=False)
    return reply


async def _learn_of_parts(context: RequestContext, etag: str) -> None:
    """Note that the ETag of this object of parts could have been foretold, after others could not."""
    bucket = context.object_key.bucket
    capabilities = context.buffer.look(lambda tx: tx.buckets.capabilities(bucket))
    is_foretold = unquote(multipart_etag(context.made_of) or "") == unquote(etag)
    if capabilities is not None and not capabilities.multipart_etags and is_foretold:
        await context.buffer.journal.change(lambda tx: tx.buckets.amend(bucket, multipart_etags=True))


class Note(Protocol):
    """Records the origin's present version of a key (None: nothing), or, not `known`, that it is unknown."""

    async def __call__(self, etag: str | None, *, known: bool) -> None: ...


async def retried_until_final_document(
    reply: Response, note: Note, clock: Clock, *, may_be_repeated: bool = True
) -> Response:
    """Return an answer whose document tells the result: noted before the client has it, or closes the answer.

    OriginBodyError if it breaks off; OutcomeUnknown if the request may not be repeated.
    """

    async def noted() -> Response:
        etag = None
        try:
            document = await whole_document(reply)
            etag = etag_of_result(document)
        except OriginBodyError as error:
            if not may_be_repeated:
                raise OutcomeUnknown(f"the origin's answer to a write is not whole: {error}") from error
            raise
        finally:
            await note(etag, known=etag is not None)
        return replace(reply, headers=headers, body=document, resource=None)

    headers = without(reply.headers, "content-length")
    return await with_retries(noted(), clock, headers=headers)


async def whole_document(reply: Response, size_bytes_max: int = RESULT_SIZE_BYTES_MAX) -> bytes:
    """Return the document of an origin's answer, less white space before it, and close the answer. OriginBodyError."""
    try:
        if isinstance(reply.body, bytes):
            return reply.body
        document = bytearray()
        if not isinstance(reply.body, (memoryview, PinnedFileSpan)):
            async for piece in reply.body:
                assert isinstance(piece, (bytes, memoryview))  # noqa: S101 - the origin's bytes, and no file's
                document += piece if document else bytes(piece).lstrip()
                if len(document) > size_bytes_max:
                    raise OriginBodyError("the origin's answer is too long for the result of a write")
        return bytes(document)
    finally:
        await reply.aclose()


async def deleted_through(
    context: RequestContext, entries: Iterable[DeleteEntry], delete: Awaitable[Response]
) -> Response:
    """Carry out a DeleteObjects at the origin, answered or not. OriginBodyError for an incomplete answer.

    Keys reported as deleted leave their checkpoints, except those with a version: others may remain.
    """
    bucket, slots = context.request.bucket or "", context.services.slots
    noted = [one for one in entries if slots.find(bucket, one.key).is_buffered]
    left: Collection[DeleteEntry] = noted
    try:
        reply = await delete
        if reply.status == 200 and noted:
            document = await whole_document(reply, DELETE_RESULT_BYTES_MAX)
            left = await in_steps(entries_left(document, noted))
            reply = replace(reply, headers=without(reply.headers, "content-length"), body=document, resource=None)
        return reply
    finally:
        own = LastOwnWrite.now(Moment.of(context.services.clock), known=False)

        def note(tx: JournalTransaction) -> None:
            for one in noted:
                key = ObjectKey(bucket, one.key)
                tx.buckets.record_own_write(key, own)
                if one not in left and one.version_id is None:
                    tx.writes.leave_checkpoint(key)

        if noted:
            with suppress(BufferUnavailable):
                await context.buffer.journal.change(note)


# An answer that may take longer than clients wait without a byte: head and white space first, the outcome when known

QUIET_SECONDS = 10.0

_PROLOG = PROLOG.encode()


async def with_retries(
    answering: Coroutine[Any, Any, Response],
    clock: Clock,
    cache: CacheLabel = "forwarded",
    headers: Sequence[tuple[str, str]] = (("content-type", "application/xml"),),
) -> Response:
    """Return an answer whose body is an XML document in memory. If the client leaves, the work ends.

    S3 does so with CompleteMultipartUpload (S3 API, "CompleteMultipartUpload"): a 200 whose document may be an
    `<Error>`, which SDKs treat as one. `headers` are those of a 200 whose document is not known yet.
    """
    wait = _Wait(asyncio.create_task(answering), clock)
    try:
        if await wait.is_over():
            return await wait.answering
    except BaseException:
        await wait.aclose()
        raise
    return Response(200, headers, wait.body(), cache, wait)


class _Wait:
    def __init__(self, answering: asyncio.Task[Response], clock: Clock) -> None:
        self.answering = answering
        self._clock = clock

    async def is_over(self) -> bool:
        pause = asyncio.ensure_future(self._clock.sleep(QUIET_SECONDS))
        try:
            await asyncio.wait({self.answering, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
        return self.answering.done()

    async def body(self) -> BodyStream:
        yield _PROLOG
        while not await self.is_over():
            yield b" "
        try:
            reply = await self.answering
            assert isinstance(reply.body, bytes)  # noqa: S101 - as `with_retries` says
            document = reply.body
        except ForebayError as error:
            document = error_document(s3_error_of(error), resource="", request_id="", host_id="")
        yield without_prolog(document)

    async def aclose(self) -> None:
        self.answering.cancel()
        await asyncio.gather(self.answering, return_exceptions=True)
