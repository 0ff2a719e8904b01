"""The S3 port as a raw ASGI application: parse, authenticate, authorise, dispatch, stream.

    scope → s3.requests → authentication → authorisation → operations.dispatch → Reply → send

One function call per step, no middleware. Whatever goes wrong before the head of the answer is out becomes an S3 error;
afterwards the connection is closed, because a short body is the only way to tell the client.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from structlog.typing import FilteringBoundLogger

from gateway.edge.authentication import Authenticator
from gateway.edge.authorisation import authorise
from gateway.edge.body import AsgiRequestBody, Receive
from gateway.edge.failures import reply_to
from gateway.edge.foreign_services import foreign_service_reply
from gateway.edge.replies import send_reply
from gateway.errors import ClientDisconnected
from gateway.operations.dispatch import perform
from gateway.operations.exchange import Exchange, Services
from gateway.operations.reply import Reply
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import S3Request, another_service, parse_request

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HOP_HEADER = "x-forebay-hop"

CLIENT_LEFT = "client-left"
BROKEN_OFF = "broken-off"
"""Ends without a status: the client left before its answer was complete, or the answer failed behind its head."""

NO_SLOT = "none"
"""The slot of requests that were refused before it was looked up."""


def _bound_log() -> FilteringBoundLogger:
    """Bound once, as logs are configured now: the lazy proxy would bind one for every request."""
    log: FilteringBoundLogger = structlog.get_logger("forebay.requests").bind()
    return log


class RequestObserver(Protocol):
    """What happens to requests, for metrics."""

    def began(self) -> None:
        """A request head has arrived."""

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

    def began(self) -> None:
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
        visit = _Visit(scope)
        self.observer.began()
        try:
            await self._answer(visit, receive, send)
        except ClientDisconnected:
            visit.status = CLIENT_LEFT
        finally:
            self._report(visit)

    def _report(self, visit: _Visit) -> None:
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

    async def _answer(self, visit: _Visit, receive: Receive, send: Send) -> None:
        try:
            reply = await self._perform(visit, receive)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer and the log a line
            reply = reply_to(error, visit.request_id, visit.path)
        visit.status, visit.cache = str(reply.status), reply.cache
        try:
            visit.sent_bytes = await send_reply(
                reply, visit.scope, send, request_id=visit.request_id, close=not visit.body_complete
            )
        except ClientDisconnected:
            raise
        except Exception as error:
            # The head is out: all that can still be said is a body that ends early, so the connection is closed.
            visit.status = BROKEN_OFF
            reply.failed(error)
            self.log.warning("answer broken off", request_id=visit.request_id, exc_info=error)
        finally:
            await reply.aclose()

    async def _perform(self, visit: _Visit, receive: Receive) -> Reply:
        scope = visit.scope
        request = parse_request(
            scope["method"], scope["raw_path"], scope["query_string"], scope["headers"], self.base_domains
        )
        visit.body = AsgiRequestBody(receive, request.headers)
        visit.operation = request.operation.value
        if self.instance_id in request.headers.get(HOP_HEADER, ""):
            raise s3_error("LoopDetected")
        service = another_service(request)
        if service is not None:
            return foreign_service_reply(request, service)
        caller = self.authenticator.authenticate(request)
        authorise(request, caller.grant, self.services.slots)
        slot = self._slot(request)
        visit.slot = slot.name
        exchange = Exchange(
            self.services, request, visit.body, caller.grant, caller.seed, slot, anonymous=caller.anonymous
        )
        return await perform(exchange)

    def _slot(self, request: S3Request) -> Slot:
        named = request.key if request.key is not None else request.parameter("prefix")
        return self.services.slots.find(request.bucket or "", named or "")


_request_numbers = itertools.count(int.from_bytes(os.urandom(8), "big"))
_SPREAD = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: multiplied by it, no two of 2**64 numbers in a row give the same id."""


def _next_request_id() -> str:
    """16 hexadecimal digits, another for every request: a system call for each would cost more than all the rest."""
    return f"{next(_request_numbers) * _SPREAD & 0xFFFFFFFFFFFFFFFF:016X}"


class _Visit:
    """One request while it is here: what the log line, the metrics and the error answer need to know of it."""

    __slots__ = ("body", "cache", "operation", "request_id", "scope", "sent_bytes", "slot", "started", "status")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.request_id = _next_request_id()
        self.operation = "Unknown"
        self.slot = NO_SLOT
        self.status = BROKEN_OFF
        self.started = time.perf_counter()
        self.sent_bytes = 0
        self.cache: str | None = None
        self.body: AsgiRequestBody | None = None

    @property
    def path(self) -> str:
        raw_path: bytes = self.scope["raw_path"]
        return raw_path.decode("latin-1")

    @property
    def body_complete(self) -> bool:
        """Whether the connection can carry another request. A head that could not be parsed settles nothing."""
        return self.body is not None and self.body.complete
