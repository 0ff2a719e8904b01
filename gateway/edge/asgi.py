"""The S3 port as a raw ASGI application: parse, authenticate, authorise, dispatch, stream.

    scope → s3.requests → authentication → authorisation → operations.router → Response → send

One function call per step, no middleware, and no await before an operation has to wait for something. Whatever goes
wrong before the head of the answer is out becomes an S3 error; afterwards the connection is closed, because a short
body is the only way to tell the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import orjson
import structlog
from structlog.typing import FilteringBoundLogger

from gateway.core import cancellation
from gateway.core.errors import ClientDisconnected, S3Error
from gateway.core.model import BorrowedBuffer, FileSpan, MissReason, PinnedFileSpan, size_of
from gateway.edge.access import Authenticator, Caller, authorise
from gateway.edge.cycle import CONTINUE, LEARN, LENT, RESPONSE, SPAN, TOLD, in_task
from gateway.edge.receiving import RECEIVE_INTO, AsgiRequestBody, CountedBody, Receive
from gateway.edge.response import EncodedResponse, answer_lines, next_request_id
from gateway.edge.sending import PacedSend, PlainSend, Scope, Send, direction_of, enter, expected_bytes
from gateway.operations.context import (
    NO_BODY,
    Answer,
    AppContext,
    CacheLabel,
    RequestContext,
    Response,
    reply_to,
)
from gateway.operations.router import perform
from gateway.origin.client import ACCOUNT
from gateway.origin.peer_protocol import NOT_ABSORBED
from gateway.policy.callers import Admission, CallerLimits, Callers, Direction
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import without
from gateway.s3.requests import READ_METHODS, Operation, S3Request, another_service, parse_request
from gateway.s3.xml_writer import document, element
from gateway.shared.recent_requests import MINUTE_SECONDS, FinishedRequest, RecentRequests
from gateway.telemetry import metrics
from gateway.telemetry.access_log import AccessLog, AuditLog
from gateway.telemetry.request_counts import BROKEN_OFF, CLIENT_LEFT, count_request
from gateway.telemetry.tracing import RequestSpan, Tracer

NOBODY = "none"
"""The credential of requests whose signature does not hold."""

NO_SLOT = "none"
"""The slot of requests that were refused before it was looked up."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The facts of a request, told when it is over. `body` is None until the head has told how long it is."""

    raw_path: bytes
    request_id: str = field(default_factory=next_request_id)
    started: float = field(default_factory=time.perf_counter)
    body: CountedBody | None = None
    waits: bool = False
    operation: str = "Unknown"
    slot: str = NO_SLOT
    status: str = BROKEN_OFF
    sent_bytes: int = 0
    cache: str | None = None
    reason: MissReason | None = None
    error_code: str | None = None
    context: RequestContext | None = None
    request: S3Request | None = None
    answered: Mapping[str, str] | None = None
    """Header fields of the answer that describe the written object."""

    file: bytes | None = None
    """The checkpoint file whose sent bytes are counted as read, once they are being sent."""

    trace: RequestSpan | None = None
    credential: str = NOBODY
    admission: Admission | None = None
    """The place that it holds, where its caller is limited."""

    def answer(self, reply: Response) -> None:
        self.status, self.cache, self.reason = str(reply.status), reply.cache, reply.reason
        self.error_code = reply.error_code

    @property
    def path(self) -> str:
        return self.raw_path.decode("latin-1")

    @property
    def body_complete(self) -> bool:
        """True if the connection can carry another request. After a head that could not be parsed it cannot."""
        return self.body is not None and self.body.complete


CACHE_LINES: Mapping[tuple[CacheLabel, MissReason | None], bytes] = {
    (name, reason): f"x-forebay-cache: {name}{'' if reason is None else f'; reason={reason}'}\r\n".encode()
    for name in get_args(CacheLabel)
    for reason in (None, *get_args(MissReason))
}
"""Lines of `x-forebay-cache`."""


def whole_response(reply: Response, scope: Scope, record: RequestRecord) -> EncodedResponse | None:
    """Return the answer if the server may take all of it at once, without waiting before it is sent."""
    body: Any = reply.body
    if isinstance(body, (bytes, memoryview)):
        length_bytes = 0 if scope["method"] == "HEAD" else len(body)
    elif isinstance(body, PinnedFileSpan):
        body = body.span
        length_bytes = body.count
    else:
        return None
    return _encoded(reply, record, body) if passes_at_once(record.admission, length_bytes) else None


def passes_at_once(admission: Admission | None, length_bytes: int) -> bool:
    if admission is None or not length_bytes or (piece_bytes := admission.piece_bytes("read")) is None:
        return True
    return length_bytes <= piece_bytes and admission.passes("read", length_bytes)


async def send_reply(reply: Response, scope: Scope, send: Send, record: RequestRecord) -> None:
    """Send the whole answer, and count its body in `record.sent_bytes`. The caller closes the reply."""
    await send({"type": RESPONSE, "response": _encoded(reply, record, None)})
    body = reply.body
    if isinstance(body, (bytes, memoryview)):
        body = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": body})
        record.sent_bytes = len(body)
        return
    if isinstance(body, PinnedFileSpan):
        await send({"type": SPAN, "span": body.span, "more_body": True})
        record.sent_bytes = body.span.count
    else:
        async for piece in body:
            if isinstance(piece, FileSpan):
                await send({"type": SPAN, "span": piece, "more_body": True})
            elif isinstance(piece, BorrowedBuffer):
                await send({"type": LENT, "bytes": piece})
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            record.sent_bytes += size_of(piece)
    await send({"type": "http.response.body", "body": b""})


def _encoded(reply: Response, record: RequestRecord, body: Any) -> EncodedResponse:
    own = reply.headers  # most often there are none, and even an empty comprehension costs something
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in own] if own else []
    if not record.body_complete:
        headers.append((b"connection", b"close"))
    cache = CACHE_LINES[reply.cache, reply.reason] if reply.cache is not None else b""
    lines = answer_lines(reply.encoded.lines, record.request_id, cache)
    length_bytes, whole = reply.length_bytes, reply.body
    if length_bytes is None and isinstance(whole, (bytes, memoryview)) and reply.status not in (204, 304):
        length_bytes = None if any(name == "content-length" for name, _ in own) else len(whole)
    return EncodedResponse(reply.status, headers, lines, body, length_bytes)


HOP_HEADER = "x-forebay-hop"


def _bound_log() -> FilteringBoundLogger:
    """Bound once, as logs are configured now: the lazy proxy would bind one for every request."""
    log: FilteringBoundLogger = structlog.get_logger("forebay.requests").bind()
    return log


def say_if_not_absorbed(record: RequestRecord, reply: Response) -> None:
    """Say in the answer why a write goes through."""
    if record.context is not None and record.context.not_absorbed is not None:
        onward = without(reply.headers, NOT_ABSORBED)  # another gateway's, behind this one
        reply.headers = [*onward, (NOT_ABSORBED, record.context.not_absorbed)]


_OF_WHAT_WAS_WRITTEN = frozenset({"etag", "x-amz-version-id", "x-amz-delete-marker", "x-amz-copy-source-version-id"})


def _audited(audit: AuditLog, record: RequestRecord, scope: Scope) -> None:
    request, client = record.request, scope.get("client")
    keys: Sequence[str | None] = [request.key if request is not None else None]
    if record.context is not None and record.context.named_keys:
        keys = record.context.named_keys
    audit.request(
        caller=record.credential,
        remote=str(client[0]) if client else None,
        operation=record.operation,
        bucket=request.bucket if request is not None else None,
        keys=keys,
        status=record.status,
        request_id=record.request_id,
        received_bytes=record.body.received_bytes if record.body is not None else 0,
        answer=record.answered or {},
    )


@dataclass(eq=False)
class S3App:
    """The S3 port's ASGI application.

    `instance_id` marks requests that this node sends to its origin: one that comes back is refused (508). `callers`
    are the limits of callers; None: no limits.
    """

    services: AppContext
    authenticator: Authenticator
    base_domains: tuple[str, ...]
    instance_id: str
    log: FilteringBoundLogger = field(default_factory=_bound_log)
    callers: Callers | None = None
    audit: AuditLog | None = None
    recent: RecentRequests = field(default_factory=partial(RecentRequests, None, 0))
    access: AccessLog | None = None
    tracer: Tracer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the S3 port speaks HTTP only, not {scope['type']}")
        if RESPONSE not in (scope.get("extensions") or {}):
            send = PlainSend(send, scope["method"])
        record = RequestRecord(scope["raw_path"])
        if TOLD in scope:
            record.started = scope[TOLD].began
        if self.tracer is not None:
            record.trace = self.tracer.begin(scope["headers"])
        try:
            answer = self._perform(record, scope, receive)
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer and the log a line
            answer = reply_to(error, record.request_id, record.path)
        try:
            reply = answer if isinstance(answer, Response) else await self._awaited(record, answer, scope)
            say_if_not_absorbed(record, reply)
            record.answer(reply)
            if self.audit is not None:
                record.answered = {name: value for name, value in reply.headers if name in _OF_WHAT_WAS_WRITTEN}
            if record.context is not None and record.operation == Operation.GET_OBJECT and reply.status in (200, 206):
                record.file = record.context.begin_reading()
            whole = whole_response(reply, scope, record)
            try:
                if whole is not None:
                    await send({"type": RESPONSE, "response": whole})
                else:
                    await self._stream(record, reply, scope, send)
            except ClientDisconnected:
                raise
            except Exception as error:
                if not await self._told(record, reply, error, scope, send):
                    # The head is out: only a body that ends early can tell the client of the error.
                    record.status = BROKEN_OFF
                    reply.failed(error)
                    self.log.warning("answer broken off", request_id=record.request_id, exc_info=error)
            finally:
                if whole is not None and not record.sent_bytes:
                    record.sent_bytes = whole.sent_bytes
                if not reply.close_now():
                    await reply.aclose()
        except ClientDisconnected:
            record.status = CLIENT_LEFT
        except asyncio.CancelledError:
            if cancellation.is_current_left():
                record.status = CLIENT_LEFT
            raise
        finally:
            if record.waits:
                metrics.REQUESTS_IN_FLIGHT.add(-1)
            if record.admission is not None:
                record.admission.leave()
            if record.file is not None and self.services.reads is not None:
                self.services.reads.end(record.file, record.sent_bytes)
            self._report(record, scope)
            if self.audit is not None and scope["method"] not in READ_METHODS:
                _audited(self.audit, record, scope)

    async def _wait(self, record: RequestRecord, scope: Scope) -> None:
        """To be called before anything is waited for: until then the server has no task for the request."""
        await in_task()
        record.waits = True
        metrics.REQUESTS_IN_FLIGHT.add(1)
        cancellation.register_request(anywhere=scope["method"] in READ_METHODS)

    def _report(self, record: RequestRecord, scope: Scope) -> None:
        seconds = time.perf_counter() - record.started
        received_bytes = record.body.received_bytes if record.body is not None else 0
        sizes = record.sent_bytes, received_bytes
        count_request(record.operation, record.slot, record.status, record.cache, seconds, *sizes, record.credential)
        if record.reason is not None:
            metrics.MISSES.add(1, record.operation, record.slot, record.reason)
        if int(time.time()) // MINUTE_SECONDS != self.recent.minute:
            self.recent.look()
        if record.trace is not None or self.is_told_of(seconds, record.status):
            request, client = record.request, scope.get("client")
            bucket, key = (request.bucket, request.key) if request is not None else (None, None)
            finished = FinishedRequest(
                record.operation,
                bucket,
                key,
                record.slot,
                record.status,
                record.cache,
                record.reason,
                record.error_code,
                seconds,
                *sizes,
                record.credential,
                record.request_id,
                str(client[0]) if client else None,
            )
            self.tell(finished)
            if record.trace is not None:
                record.trace.end(finished)

    def is_told_of(self, seconds: float, status: str) -> bool:
        """Return whether a request that is over must be given to `tell`."""
        is_unusual = seconds > self.recent.slow_seconds or status[0] > "3"  # words are behind all digits
        return is_unusual or self.access is not None or self.log.is_enabled_for(logging.DEBUG)

    def tell(self, finished: FinishedRequest) -> None:
        """Tell of a request that is over: among recent ones, in the access log, and in a debug log."""
        if finished.seconds > self.recent.slow_seconds or finished.status[0] > "3":
            self.recent.add(finished)
        if self.access is not None:
            self.access.add(finished)
        if self.log.is_enabled_for(logging.DEBUG):
            self.log.debug(
                "request",
                request_id=finished.request_id,
                operation=finished.operation,
                slot=finished.slot,
                status=finished.status,
                cache=finished.cache,
                reason=finished.reason,
                seconds=round(finished.seconds, 6),
                sent_bytes=finished.sent_bytes,
                received_bytes=finished.received_bytes,
            )

    async def _stream(self, record: RequestRecord, reply: Response, scope: Scope, send: Send) -> None:
        if not record.waits:
            await self._wait(record, scope)
        if record.admission is not None and (piece_bytes := record.admission.piece_bytes("read")) is not None:
            send = PacedSend(send, record.admission, piece_bytes)
        await send_reply(reply, scope, send, record)

    async def _awaited(self, record: RequestRecord, answer: Coroutine[Any, Any, Response], scope: Scope) -> Response:
        try:
            await self._wait(record, scope)
            reply = await answer
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer and the log a line
            reply = reply_to(error, record.request_id, record.path)
        finally:
            answer.close()
        return reply

    async def _told(self, record: RequestRecord, reply: Response, error: Exception, scope: Scope, send: Send) -> bool:
        """Answer with what has gone wrong, where nothing of the answer is out yet; False where some is."""
        failure = reply_to(error, record.request_id, record.path)
        try:
            await send_reply(failure, scope, send, record)
        except RuntimeError:  # a part of the answer is out
            return False
        reply.failed(error)
        record.answer(failure)
        return True

    def _perform(self, record: RequestRecord, scope: Scope, receive: Receive) -> Answer:
        headers = scope["headers"]
        request = parse_request(scope["method"], record.raw_path, scope["query_string"], headers, self.base_domains)
        body: CountedBody = NO_BODY
        if "content-length" in request.headers or "transfer-encoding" in request.headers:
            body = AsgiRequestBody(receive, request.headers, scope.get(RECEIVE_INTO))
        record.body = body
        record.operation = request.operation  # a string itself
        record.request = request
        if self.instance_id in request.headers.get(HOP_HEADER, ""):
            raise s3_error("LoopDetected")
        caller = self._caller(request)
        if not isinstance(caller, Caller):
            return caller
        record.credential = self.authenticator.credential_of(caller.access_key_id)
        limits = None
        if self.callers is not None:
            limits = self.callers.find(record.credential, request.headers.get("user-agent", ""))
        if limits is None and LEARN in scope:  # limited requests always go the whole way
            scope[LEARN](request, caller)
        ACCOUNT.set(caller.access_key_id)  # the connection's context has it, too: every request sets its own
        authorise(request, caller.grant, self.services.slots)
        named = request.key if request.key is not None else request.parameter("prefix")
        slot = self.services.slots.find(request.bucket or "", named or "")
        record.slot = slot.name
        credential = caller.access_key_id
        context = record.context = RequestContext(
            self.services, request, body, caller.grant, caller.seed, slot, caller.anonymous, credential
        )
        context.pair = caller.pair
        if TOLD in scope:
            context.told = scope[TOLD]
        if limits is None:
            return perform(context)
        direction = direction_of(body.length_bytes)
        expected = expected_bytes(request.method, direction, body.length_bytes)
        admission = limits.enter_now(direction, expected)
        if admission is not None:
            record.admission = admission
            body.pace(admission)
            return perform(context)
        return self._limited(record, body, context, limits, direction, expected, scope.get(CONTINUE))

    async def _limited(
        self,
        record: RequestRecord,
        body: CountedBody,
        context: RequestContext,
        limits: CallerLimits,
        direction: Direction,
        expected: int | None,
        send_continue: Callable[[], None] | None,
    ) -> Response:
        record.admission = await enter(limits, direction, expected, send_continue)
        body.pace(record.admission)
        answer = perform(context)
        return answer if isinstance(answer, Response) else await answer

    def _caller(self, request: S3Request) -> Caller | Response:
        """Return the caller of the request, or the answer if it was meant for another service than S3."""
        if request.bucket is not None:
            try:
                return self.authenticator.authenticate(request)
            except S3Error:
                service = another_service(request)
                if service is None:
                    raise
                return foreign_service_reply(request, service)
        service = another_service(request)
        if service is not None:
            return foreign_service_reply(request, service)
        return self.authenticator.authenticate(request)


_QUERY_API = "application/x-www-form-urlencoded"

_CODE = "InvalidRequest"


def foreign_service_reply(request: S3Request, service: str) -> Response:
    """Return the refusal of a request for another AWS service, in the form of the protocol that the request speaks.

    `AWS_ENDPOINT_URL` moves every AWS client of a process to this port, STS among them, and each family of services
    reads errors in a form of its own; S3's would be shown as "Unknown".
    """
    message = (
        f"This request is meant for {service}, and this is an S3 gateway (Forebay). AWS_ENDPOINT_URL moves every AWS "
        "service here: set AWS_ENDPOINT_URL_S3 instead."
    )
    if request.headers.get("content-type", "").startswith(_QUERY_API):
        fields = element("Type", "Sender") + element("Code", _CODE) + element("Message", message)
        return Response(400, [("content-type", "text/xml")], document("ErrorResponse", f"<Error>{fields}</Error>"))
    if "x-amz-target" in request.headers or "json" in request.headers.get("content-type", ""):
        body = orjson.dumps({"__type": _CODE, "message": message})
        return Response(400, [("content-type", "application/x-amz-json-1.1"), ("x-amzn-errortype", _CODE)], body)
    fields = element("Code", _CODE) + element("Message", message)
    return Response(400, [("content-type", "application/xml")], document("Error", fields))
