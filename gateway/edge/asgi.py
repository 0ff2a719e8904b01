"""The S3 port as a raw ASGI application: parse, authenticate, authorise, dispatch, stream.

    scope → s3.requests → authentication → authorisation → operations.router → Reply → send

One function call per step, no middleware, and no await before an operation has to wait for something. Whatever goes
wrong before the head of the answer is out becomes an S3 error; afterwards the connection is closed, because a short
body is the only way to tell the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog
from structlog.typing import FilteringBoundLogger

from gateway import cancellation
from gateway.edge.authentication import Authenticator, Caller
from gateway.edge.authorisation import authorise
from gateway.edge.body import AsgiRequestBody, Receive
from gateway.edge.failures import reply_to
from gateway.edge.foreign_services import foreign_service_reply
from gateway.edge.replies import START_AGAIN, content_length, own_fields, ready_lines, send_reply
from gateway.edge.server.immediate import BEGUN, ImmediateResponse
from gateway.edge.server.receiving import RECEIVE_INTO
from gateway.edge.visit import BROKEN_OFF, CLIENT_LEFT, NO_BODY, CountedBody, Visit
from gateway.errors import ClientDisconnected, S3Error
from gateway.objects import HeldSpan
from gateway.operations.exchange import Exchange, Services
from gateway.operations.passthrough import READ_METHODS
from gateway.operations.reply import Answer, Reply
from gateway.operations.router import perform
from gateway.origin.client import ACCOUNT
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import S3Request, another_service, parse_request

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Fields = Sequence[tuple[bytes, bytes]]
BodyOf = Callable[[Mapping[str, str]], CountedBody]

HOP_HEADER = "x-forebay-hop"


def _bound_log() -> FilteringBoundLogger:
    """Bound once, as logs are configured now: the lazy proxy would bind one for every request."""
    log: FilteringBoundLogger = structlog.get_logger("forebay.requests").bind()
    return log


class RequestObserver(Protocol):
    """What happens to requests, for metrics."""

    def in_flight(self, change: int) -> None:
        """A request waits for its answer from now on (1), or no more (-1). What is answered at once never does."""

    def ended(
        self,
        operation: str,
        slot: str,
        status: str,
        cache: str | None,
        seconds: float,
        sent_bytes: int,
        received_bytes: int,
    ) -> None:
        """It is over. `status` is the HTTP status, CLIENT_LEFT or BROKEN_OFF; bytes are those of the bodies."""


class SilentRequestObserver:
    """Counts nothing."""

    def in_flight(self, change: int) -> None:
        return

    def ended(
        self,
        operation: str,
        slot: str,
        status: str,
        cache: str | None,
        seconds: float,
        sent_bytes: int,
        received_bytes: int,
    ) -> None:
        return


@dataclass(frozen=True, slots=True)
class S3App:
    """The S3 port's ASGI application.

    `instance_id` marks requests that this node sends to its origin: one that comes round is refused (508).
    """

    services: Services
    authenticator: Authenticator
    base_domains: tuple[str, ...]
    instance_id: str
    observer: RequestObserver
    log: FilteringBoundLogger = field(default_factory=_bound_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the S3 port speaks HTTP only, not {scope['type']}")
        visit = scope.get(BEGUN) or self._begin_with(scope, receive)
        self.observer.in_flight(1)
        try:
            cancellation.register_request(anywhere=scope["method"] in READ_METHODS)
            await self._answer(visit, scope, send)
        except ClientDisconnected:
            visit.status = CLIENT_LEFT
        except asyncio.CancelledError:
            if cancellation.is_current_left():
                visit.status = CLIENT_LEFT
            raise
        finally:
            self.observer.in_flight(-1)
            self._report(visit)

    # What our own server asks before it starts a task for a request that has no body (server/immediate.py).

    def begin(self, method: str, raw_path: bytes, raw_query: bytes, headers: Fields) -> Visit:
        """Take a request as far as it goes without waiting; given `BEGUN` in its scope, `__call__` goes on."""
        visit = Visit(raw_path, NO_BODY)
        self._begin(visit, method, raw_query, headers)
        return visit

    def immediate(self, visit: Visit) -> ImmediateResponse | None:
        """The whole response, if it can be sent now; then it counts as sent, and `end` must be called."""
        reply = visit.answer
        if not isinstance(reply, Reply) or not isinstance(reply.body, (bytes, HeldSpan)):
            return None
        visit.status, visit.cache = str(reply.status), reply.cache
        body = reply.body if isinstance(reply.body, bytes) else reply.body.span
        return ImmediateResponse(
            reply.status, own_fields(reply), ready_lines(reply, visit.request_id), body, content_length(reply)
        )

    def end(self, visit: Visit, sent_bytes: int, error: Exception | None = None) -> None:
        """An immediate response is over: `error` is what kept it from being sent to its end."""
        reply = visit.answer
        if not isinstance(reply, Reply):
            raise RuntimeError("only an immediate response ends so")
        visit.sent_bytes = sent_bytes
        if isinstance(error, ClientDisconnected):
            visit.status = CLIENT_LEFT
        elif error is not None:
            self._broken_off(visit, reply, error)
        if isinstance(reply.body, HeldSpan):
            reply.body.close()
        self._report(visit)

    def _report(self, visit: Visit) -> None:
        seconds = time.perf_counter() - visit.started
        received_bytes = visit.body.received_bytes if visit.body is not None else 0
        self.observer.ended(
            visit.operation, visit.slot, visit.status, visit.cache, seconds, visit.sent_bytes, received_bytes
        )
        if not self.log.is_enabled_for(logging.DEBUG):
            return
        self.log.debug(
            "request",
            request_id=visit.request_id,
            operation=visit.operation,
            slot=visit.slot,
            status=visit.status,
            cache=visit.cache,
            seconds=round(seconds, 6),
            sent_bytes=visit.sent_bytes,
            received_bytes=received_bytes,
        )

    async def _answer(self, visit: Visit, scope: Scope, send: Send) -> None:
        reply = await self._reply(visit)
        visit.status, visit.cache = str(reply.status), reply.cache
        try:
            visit.sent_bytes = await send_reply(
                reply, scope, send, request_id=visit.request_id, close=not visit.body_complete
            )
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - it is logged, and the client sees it, or a body that ends early
            if not await self._told(visit, reply, error, scope, send):
                self._broken_off(visit, reply, error)
        finally:
            await reply.aclose()

    async def _told(self, visit: Visit, reply: Reply, error: Exception, scope: Scope, send: Send) -> bool:
        """Answer with what has gone wrong, where nothing of the answer is out yet; False where some is."""
        if START_AGAIN not in (scope.get("extensions") or {}):
            return False
        try:
            await send({"type": START_AGAIN})
        except RuntimeError:
            return False
        reply.failed(error)
        failure = reply_to(error, visit.request_id, visit.path)
        visit.status, visit.cache = str(failure.status), failure.cache
        visit.sent_bytes = await send_reply(
            failure, scope, send, request_id=visit.request_id, close=not visit.body_complete
        )
        return True

    async def _reply(self, visit: Visit) -> Reply:
        if isinstance(visit.answer, Reply):
            return visit.answer
        try:
            return await visit.answer
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer and the log a line
            return reply_to(error, visit.request_id, visit.path)

    def _broken_off(self, visit: Visit, reply: Reply, error: Exception) -> None:
        """The head is out: all that can still be said is a body that ends early, so the connection is closed."""
        visit.status = BROKEN_OFF
        reply.failed(error)
        self.log.warning("answer broken off", request_id=visit.request_id, exc_info=error)

    def _begin_with(self, scope: Scope, receive: Receive) -> Visit:
        visit = Visit(scope["raw_path"], None)
        body_of = partial(AsgiRequestBody, receive, receive_into=scope.get(RECEIVE_INTO))
        self._begin(visit, scope["method"], scope["query_string"], scope["headers"], body_of)
        return visit

    def _begin(
        self, visit: Visit, method: str, raw_query: bytes, headers: Fields, body_of: BodyOf | None = None
    ) -> None:
        try:
            visit.answer = self._perform(visit, method, raw_query, headers, body_of)
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer and the log a line
            visit.answer = reply_to(error, visit.request_id, visit.path)

    def _perform(self, visit: Visit, method: str, raw_query: bytes, headers: Fields, body_of: BodyOf | None) -> Answer:
        request = parse_request(method, visit.raw_path, raw_query, headers, self.base_domains)
        body = visit.body
        if body is None:
            body = visit.body = body_of(request.headers) if body_of is not None else NO_BODY
        visit.operation = request.operation  # a string itself
        if self.instance_id in request.headers.get(HOP_HEADER, ""):
            raise s3_error("LoopDetected")
        caller = self._caller(request)
        if not isinstance(caller, Caller):
            return caller
        ACCOUNT.set(caller.access_key_id)
        authorise(request, caller.grant, self.services.slots)
        slot = self._slot(request)
        visit.slot = slot.name
        credential = caller.access_key_id
        return perform(
            Exchange(self.services, request, body, caller.grant, caller.seed, slot, caller.anonymous, credential)
        )

    def _caller(self, request: S3Request) -> Caller | Reply:
        """Who sent the request, or what to answer to one that was meant for another service than S3."""
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

    def _slot(self, request: S3Request) -> Slot:
        named = request.key if request.key is not None else request.parameter("prefix")
        return self.services.slots.find(request.bucket or "", named or "")
