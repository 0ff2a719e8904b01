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
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from structlog.typing import FilteringBoundLogger

from gateway import cancellation
from gateway.counting import RequestMetrics
from gateway.edge.access import Authenticator, Caller, authorise
from gateway.edge.failures import reply_to
from gateway.edge.foreign_services import foreign_service_reply
from gateway.edge.messages import (
    BROKEN_OFF,
    CLIENT_LEFT,
    Receive,
    RequestRecord,
    request_body,
    send_reply,
    whole_response,
)
from gateway.edge.server.cycle import RESPONSE, in_task
from gateway.edge.server.request_body import RECEIVE_INTO
from gateway.errors import ClientDisconnected, S3Error
from gateway.operations.context import Answer, AppContext, RequestContext, Response
from gateway.operations.passthrough import READ_METHODS
from gateway.operations.router import perform
from gateway.origin.client import ACCOUNT
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import S3Request, another_service, parse_request

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HOP_HEADER = "x-forebay-hop"


def _bound_log() -> FilteringBoundLogger:
    """Bound once, as logs are configured now: the lazy proxy would bind one for every request."""
    log: FilteringBoundLogger = structlog.get_logger("forebay.requests").bind()
    return log


@dataclass(frozen=True, slots=True)
class S3App:
    """The S3 port's ASGI application.

    `instance_id` marks requests that this node sends to its origin: one that comes round is refused (508).
    """

    services: AppContext
    authenticator: Authenticator
    base_domains: tuple[str, ...]
    instance_id: str
    observer: RequestMetrics
    log: FilteringBoundLogger = field(default_factory=_bound_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the S3 port speaks HTTP only, not {scope['type']}")
        record = RequestRecord(scope["raw_path"])
        try:
            answer = self._perform(record, scope, receive)
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer and the log a line
            answer = reply_to(error, record.request_id, record.path)
        try:
            reply = answer if isinstance(answer, Response) else await self._awaited(record, answer, scope)
            record.status, record.cache = str(reply.status), reply.cache
            whole = whole_response(reply, scope, record)
            try:
                if whole is not None:
                    await send({"type": RESPONSE, "response": whole})
                else:
                    await self._stream(record, reply, scope, send)
            except ClientDisconnected:
                raise
            except Exception as error:  # noqa: BLE001 - it is logged, and the client sees it, or a body that ends early
                if not await self._told(record, reply, error, scope, send):
                    self._broken_off(record, reply, error)
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
                self.observer.in_flight(-1)
            self._report(record)

    async def _wait(self, record: RequestRecord, scope: Scope) -> None:
        """To be called before anything is waited for: until then the server has no task for the request."""
        await in_task()
        record.waits = True
        self.observer.in_flight(1)
        cancellation.register_request(anywhere=scope["method"] in READ_METHODS)

    def _report(self, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.started
        received_bytes = record.body.received_bytes if record.body is not None else 0
        self.observer.ended(
            record.operation, record.slot, record.status, record.cache, seconds, record.sent_bytes, received_bytes
        )
        if not self.log.is_enabled_for(logging.DEBUG):
            return
        self.log.debug(
            "request",
            request_id=record.request_id,
            operation=record.operation,
            slot=record.slot,
            status=record.status,
            cache=record.cache,
            seconds=round(seconds, 6),
            sent_bytes=record.sent_bytes,
            received_bytes=received_bytes,
        )

    async def _stream(self, record: RequestRecord, reply: Response, scope: Scope, send: Send) -> None:
        if not record.waits:
            await self._wait(record, scope)
        await send_reply(reply, scope, send, record)

    async def _awaited(self, record: RequestRecord, answer: Coroutine[Any, Any, Response], scope: Scope) -> Response:
        try:
            await self._wait(record, scope)
            return await answer
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer and the log a line
            return reply_to(error, record.request_id, record.path)
        finally:
            answer.close()

    async def _told(self, record: RequestRecord, reply: Response, error: Exception, scope: Scope, send: Send) -> bool:
        """Answer with what has gone wrong, where nothing of the answer is out yet; False where some is."""
        if RESPONSE not in (scope.get("extensions") or {}):
            return False
        failure = reply_to(error, record.request_id, record.path)
        try:
            await send_reply(failure, scope, send, record)
        except RuntimeError:  # a part of the answer is out
            return False
        reply.failed(error)
        record.status, record.cache = str(failure.status), failure.cache
        return True

    def _broken_off(self, record: RequestRecord, reply: Response, error: Exception) -> None:
        """The head is out: all that can still be said is a body that ends early, so the connection is closed."""
        record.status = BROKEN_OFF
        reply.failed(error)
        self.log.warning("answer broken off", request_id=record.request_id, exc_info=error)

    def _perform(self, record: RequestRecord, scope: Scope, receive: Receive) -> Answer:
        headers = scope["headers"]
        request = parse_request(scope["method"], record.raw_path, scope["query_string"], headers, self.base_domains)
        body = record.body = request_body(request.headers, receive, scope.get(RECEIVE_INTO))
        record.operation = request.operation  # a string itself
        if self.instance_id in request.headers.get(HOP_HEADER, ""):
            raise s3_error("LoopDetected")
        caller = self._caller(request)
        if not isinstance(caller, Caller):
            return caller
        ACCOUNT.set(caller.access_key_id)  # of this connection's context, too, where every request sets its own
        authorise(request, caller.grant, self.services.slots)
        slot = self._slot(request)
        record.slot = slot.name
        credential = caller.access_key_id
        return perform(
            RequestContext(self.services, request, body, caller.grant, caller.seed, slot, caller.anonymous, credential)
        )

    def _caller(self, request: S3Request) -> Caller | Response:
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
