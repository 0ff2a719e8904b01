"""The peer port as a raw ASGI application: it answers the other nodes of the cluster alone.

    scope → s3.requests → peer_access → operations.peer_reads → the proof → send

A question is S3's GET or HEAD of an object, `GET /-/hello`, or about this node's buffer (operations/peer_writes.py).
Each answer proves that this node knows the cluster's secret. It carries checksums of its body, except for pending
objects (origin/peer_protocol.py).
"""

from __future__ import annotations

import math
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway.core import cancellation
from gateway.core.errors import ClientDisconnected, OriginBodyError, OriginBusy, OriginUnreachable
from gateway.edge.asgi import RequestRecord, say_if_not_absorbed, send_reply, whole_response
from gateway.edge.cycle import RESPONSE, in_task
from gateway.edge.peer_access import Asker, PeerAccess
from gateway.edge.receiving import AsgiRequestBody, Receive
from gateway.edge.sending import PlainSend, Scope, Send
from gateway.operations.context import NO_BODY, AppContext, RequestContext, Response, reply_to
from gateway.operations.peer_reads import PeerQuestion, PeerReads, misdirected
from gateway.operations.peer_writes import is_for_store, of_store
from gateway.operations.router import perform
from gateway.origin import peer_protocol as peer
from gateway.origin.client import ACCOUNT
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import parse_request
from gateway.shared.peer_bytes import PeerBytes
from gateway.telemetry import metrics

HELLO = b"/-/hello"

_OUTCOMES = {204: "verified", 303: "named", 404: "absent", 421: "misdirected", 503: "busy"}
_OUTCOMES |= dict.fromkeys((200, 201, 206, 304), "served") | dict.fromkeys((412, 416), "changed")
_OUTCOMES |= dict.fromkeys((400, 403, 405, 501), "refused")


_log = structlog.get_logger("forebay.cluster")


@dataclass(slots=True, eq=False)
class _Exchange:
    record: RequestRecord
    asker: Asker | None = None
    """The node that has proved to know the secret; None: the answer proves nothing either."""

    question: PeerQuestion | None = None


@dataclass(eq=False)
class PeerApp:
    """The application of one worker."""

    services: AppContext
    access: PeerAccess
    sent: PeerBytes = field(default_factory=PeerBytes)
    reads: PeerReads = field(init=False)

    def __post_init__(self) -> None:
        self.reads = PeerReads(self.services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the peer port speaks HTTP only, not {scope['type']}")
        if RESPONSE not in (scope.get("extensions") or {}):
            send = PlainSend(send, scope["method"])
        exchange, outcome = _Exchange(RequestRecord(scope["raw_path"])), "broken-off"
        try:
            with suppress(ClientDisconnected):
                reply = await self._answered(exchange, scope, receive)
                if await self._is_sent(exchange, reply, scope, send):
                    outcome = _OUTCOMES.get(reply.status, "failed")
        finally:
            question = exchange.question
            if question is not None and question.sent is not None:
                metrics.CLUSTER_PEER_BYTES.add(exchange.record.sent_bytes, question.slot.name, "sent")
                self.sent.add(question.asker, exchange.record.sent_bytes)
            metrics.CLUSTER_PEER_REQUESTS.add(1, outcome)

    async def _answered(self, exchange: _Exchange, scope: Scope, receive: Receive) -> Response:
        record = exchange.record
        try:
            answer = self._perform(exchange, scope, receive)
            reply = answer if isinstance(answer, Response) else await _awaited(answer)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - whatever happened, the asker gets an answer and the log a line
            reply = reply_to(error, record.request_id, record.path)
            if isinstance(error, OriginUnreachable | OriginBodyError) and not isinstance(error, OriginBusy):
                reply.status = peer.BUCKET_AWAY
        say_if_not_absorbed(record, reply)
        if exchange.asker is not None:
            reply.headers = [*reply.headers, (peer.BY, self.access.address)]
            _prove(reply, exchange.asker, exchange.question, scope["method"])
        return reply

    def _perform(self, exchange: _Exchange, scope: Scope, receive: Receive) -> Response | Coroutine[Any, Any, Response]:
        record = exchange.record
        request = parse_request(scope["method"], record.raw_path, scope["query_string"], scope["headers"], ())
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        record.body = AsgiRequestBody(receive, request.headers, None) if has_body else NO_BODY
        exchange.asker = self.access.admit(request)
        if request.headers.get(peer.TO, self.access.address) != self.access.address:
            raise misdirected("The request is for another node.")
        if is_for_store(request):
            asked = of_store(self.services, request, record.body)
            if not isinstance(asked, RequestContext):
                return asked
            record.context = asked
            return perform(asked)
        if has_body:
            raise s3_error("NotImplemented", "Such a request to this port has no body.")
        if request.raw_path == HELLO and request.method == "GET" and not request.query:
            return Response(200, [("content-type", "application/json")], self.services.hello())
        question = exchange.question = self.reads.question(request)
        ACCOUNT.set(question.asker)
        return self.reads.answer(question)

    async def _is_sent(self, exchange: _Exchange, reply: Response, scope: Scope, send: Send) -> bool:
        """Send the answer; return False if it broke off."""
        record, question = exchange.record, exchange.question
        if question is not None and question.sent is not None:
            self.reads.handouts.begin(question.sent)
        try:
            whole = whole_response(reply, scope, record)
            if whole is not None:
                await send({"type": RESPONSE, "response": whole})
                record.sent_bytes = whole.sent_bytes
            else:
                await in_task()
                await send_reply(reply, scope, send, record)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - the head is out: a body that ends early tells the asker
            reply.failed(error)
            _log.warning("answer to another node broken off", request_id=record.request_id, exc_info=error)
            return False
        finally:
            if question is not None and question.sent is not None:
                is_taken = record.sent_bytes == reply.length_bytes
                self.reads.handouts.end(question.sent, question.asker if is_taken else "")
            if not reply.close_now():
                await reply.aclose()
        return True


async def _awaited(answer: Coroutine[Any, Any, Response]) -> Response:
    try:
        await in_task()
        cancellation.register_request(anywhere=True)
        return await answer
    finally:
        answer.close()


def _prove(reply: Response, asker: Asker, question: PeerQuestion | None, method: str) -> None:
    """Give an answer its length, its checksums, the age of its facts, and proof of all its headers."""
    body, own = reply.body, dict(reply.headers)
    told_length = own.pop("content-length", "")
    if question is None:  # its cache is not asked
        reply.cache = reply.reason = None
    if reply.length_bytes is None and told_length.isdecimal():
        reply.length_bytes = int(told_length)
    if isinstance(body, (bytes, memoryview)):
        if body and method != "HEAD" and peer.CRC32C not in own:
            own[peer.CRC32C] = peer.encode_checksums(peer.chunk_checksums(body))
        if reply.length_bytes is None and reply.status not in (204, 304):
            reply.length_bytes = len(body)
    if question is not None and question.age_seconds is not None:
        own[peer.AGE] = f"{math.ceil(question.age_seconds * 1000) / 1000:.3f}"
        if question.date is not None:
            own[peer.DATE] = question.date
    proved = own | dict(reply.encoded.pairs)
    if reply.length_bytes is not None:
        proved["content-length"] = str(reply.length_bytes)
    if reply.cache is not None:
        proved["x-forebay-cache"] = reply.cache
    own[peer.PROOF] = peer.proof(asker.secret, asker.nonce, reply.status, proved)
    reply.headers = list(own.items())
