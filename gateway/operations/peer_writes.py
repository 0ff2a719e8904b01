"""Answers to other nodes about what this node's buffer has pending.

A client's request comes here from the node that the client asked, which has checked its rights and its body: a read of
what is pending here, or a request about an upload that was begun here. No other node is asked for it.
"""

from __future__ import annotations

from dataclasses import replace

import orjson

from gateway.core.model import ObjectKey
from gateway.core.prefixes import Prefix
from gateway.operations.context import Answer, AppContext, ClientBody, RequestContext, Response
from gateway.operations.list_sources import pending_entry
from gateway.operations.list_uploads import listed_upload
from gateway.operations.payload import receive_document
from gateway.operations.peer_reads import check_addressed, misdirected
from gateway.operations.write_scope import WriteScope, invalidate
from gateway.origin import peer_protocol as peer
from gateway.policy.registry import KEYS_MAX, MEMBERS_TOLD_MAX, StoreAnswer, StoreEntry, StoreQuestion, StoreUpload
from gateway.policy.slots import EVERYTHING
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import S3Request
from gateway.writeback.admin.checkpoint_parts import PartsPage
from gateway.writeback.admin.writeback_admin import NoWriteback
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.transaction import JournalTransaction

QUESTION_BYTES_MAX = 4 * 1024**2
UPLOADS_TOLD_MAX = 1000
"""Open uploads in one answer, unless one key has more."""

PARTS_MAX = 100
"""Checkpoints in one answer."""


def is_for_store(request: S3Request) -> bool:
    """Tell whether another node asks about this node's buffer."""
    return peer.STORE in request.headers


def of_store(services: AppContext, request: S3Request, body: ClientBody) -> Answer | RequestContext:
    """Answer a question, or return a client's request, to be performed. S3Error; 421: it means another buffer."""
    store = request.headers[peer.STORE]
    buffer = services.writeback
    if store not in (peer.ANY_STORE, buffer.node_id if buffer is not None else ""):
        raise misdirected("This node has another buffer.")
    if request.raw_path == peer.STORE_PATH and request.method == "PUT":
        return _told(services, request, body)
    if buffer is None or request.bucket is None or request.key is None:
        raise s3_error("NotImplemented", "This port answers requests about pending objects and uploads.")
    check_addressed(services, request, request.bucket)
    key, upload_id = ObjectKey(request.bucket, request.key), request.parameter("uploadId")
    if upload_id is None and (request.method not in ("GET", "HEAD") or buffer.pending(key) is None):
        return Response(404, [(peer.STORE, peer.NOT_PENDING)])
    slot = services.slots.find(*key)
    headers = {name: value for name, value in request.headers.items() if not name.startswith("x-forebay-")}
    return RequestContext(services, replace(request, headers=headers), body, EVERYTHING, None, slot, of_peer=True)


async def _told(services: AppContext, request: S3Request, body: ClientBody) -> Response:
    asking = RequestContext(services, request, body, EVERYTHING, None, services.slots.find("", ""), of_peer=True)
    try:
        question = StoreQuestion.model_validate_json(await receive_document(asking, QUESTION_BYTES_MAX))
    except ValueError as error:
        raise s3_error("InvalidRequest", f"No question of a node: {error}") from None
    check_addressed(services, request, question.bucket)
    answer, writes = await _answer(services, question), services.cluster_writes
    digest, members = writes.stores.members() if writes is not None else ("", ())
    if question.members not in ("", digest):
        answer = answer.model_copy(update={"members": tuple(members[:MEMBERS_TOLD_MAX])})
    return Response(200, [("content-type", "application/json")], answer.model_dump_json().encode())


async def _answer(services: AppContext, question: StoreQuestion) -> StoreAnswer:
    keys = [ObjectKey(question.bucket, key) for key in question.keys]
    if question.verb == "forget":
        is_all = any(not key.key for key in keys)
        await invalidate(
            WriteScope(services.catalog, services.slots, question.bucket, None if is_all else question.keys)
        )
        return StoreAnswer()
    buffer = services.writeback
    if buffer is None and services.buffer_closed:
        raise s3_error("ServiceUnavailable", "The disk of the write-back buffer cannot be used.")
    if buffer is None:
        return StoreAnswer(entries=(None,) * len(keys), document=await _nothing(services, question))
    store = buffer.node_id
    match question.verb:
        case "entries":
            return StoreAnswer(store=store, entries=tuple(_entry(buffer, key) for key in keys))
        case "names":
            start, stop = (key.encode("latin-1") for key in question.keys)
            listed = buffer.look(lambda tx: tx.writes.listing(question.bucket, start, stop, KEYS_MAX))
            return StoreAnswer(store=store, names=tuple(one.key.key for one in listed))
        case "earlier":
            found = buffer.look(lambda tx: tx.writes.earlier(*keys[0], question.order, KEYS_MAX))
            return StoreAnswer(store=store, names=tuple(dict.fromkeys(key.key for key in found)))
        case "behind":
            behind = buffer.look(
                lambda tx: [one.key for one in keys[1:] if tx.writes.is_behind(one, keys[0], question.order)]
            )
            return StoreAnswer(store=store, names=tuple(behind))
        case "left":
            left = buffer.look(lambda tx: [key.key for key in keys if tx.checkpoints.is_left(*key)])
            return StoreAnswer(store=store, names=tuple(left))
        case "flush" | "checkpoints" | "reads":
            return StoreAnswer(store=store, document=await _document(services, question))
        case "uploads":
            uploads, end = _uploads(buffer, question.bucket, *question.keys[:2])
            return StoreAnswer(store=store, uploads=uploads, end=end)
        case "at-origin":
            ids = buffer.look(lambda tx: {one for key in keys for one in tx.uploads.origin_upload_ids(key)})
            return StoreAnswer(store=store, names=tuple(sorted(filter(None, ids))))
        case "hurry":
            for key in keys:
                await buffer.prioritise(key)
    return StoreAnswer()


async def _document(services: AppContext, question: StoreQuestion) -> str:
    report = services.flush_report()
    if report is None:
        raise s3_error("ServiceUnavailable", "The buffer of this node cannot be used.")
    if question.verb == "reads":
        return orjson.dumps(await report.reads_of(question.bucket, question.keys)).decode()
    prefix = Prefix.parse(question.keys[0])
    if question.verb == "checkpoints":
        return (await report.parts(prefix, question.keys[1], PARTS_MAX)).model_dump_json()
    if question.through is None:
        return (await report.flush(prefix)).model_dump_json()
    return (await report.progress(prefix, question.through, is_name=question.is_name)).model_dump_json()


async def _nothing(services: AppContext, question: StoreQuestion) -> str:
    """Return the report of a node that keeps no writes."""
    match question.verb:
        case "flush":
            return (await NoWriteback().flush(Prefix.parse(question.keys[0]))).model_dump_json()
        case "checkpoints":
            return PartsPage(now=services.clock.now()).model_dump_json()
    return ""


def _entry(buffer: WritebackBuffer, key: ObjectKey) -> StoreEntry | None:
    pending = buffer.pending(key)
    if pending is None or pending.deleted:
        return None if pending is None else StoreEntry(is_deleted=True)
    entry = pending_entry(pending)
    return StoreEntry(modified=entry.modified, etag=entry.etag, size_bytes=entry.size_bytes, template=entry.template)


def _uploads(
    buffer: WritebackBuffer, bucket: str, prefix: str, start: str
) -> tuple[tuple[StoreUpload, ...], str | None]:
    """Return open uploads, all of a key or none, and the key at which the others begin."""

    def look(tx: JournalTransaction) -> tuple[list[Write], str | None]:
        found = list[Write]()
        for one in tx.uploads.under(bucket, prefix, (start, "")):
            if len(found) >= UPLOADS_TOLD_MAX and found[-1].key != one.key:
                return found, one.key.key
            found.append(one)
        return found, None

    found, end = buffer.look(look)
    listed = [listed_upload(one) for one in found]
    return tuple(
        StoreUpload(key=one.key, upload_id=one.upload_id, initiated=one.initiated, rest=one.rest) for one in listed
    ), end
