"""HeadObject (S3 API, "HeadObject"): from the catalog where the slot lets it answer, else the origin's own answer."""

from __future__ import annotations

from gateway.errors import OriginAnswered, OriginBodyError
from gateway.metadata.catalog import ObjectHead, is_remembered
from gateway.operations.exchange import Exchange
from gateway.operations.joined import forward_joined
from gateway.operations.passthrough import forward, no_body
from gateway.operations.reading import (
    HEADERS_OF_NOT_MODIFIED,
    current_head,
    judged_by_the_origin,
    needs_the_origin,
    remembered_head,
)
from gateway.operations.reply import Answer, CacheLabel, Reply
from gateway.s3.conditions import evaluate_read
from gateway.s3.forwarding import towards_client
from gateway.s3.requests import S3Request


def head_object(exchange: Exchange) -> Answer:
    """Answer a HEAD from what is remembered, or ask and remember; conditions are judged here."""
    headers = judged_by_the_origin(exchange.request)
    if not is_remembered(exchange.slot, headers) or is_special(exchange.request):
        return forward_joined(exchange)
    try:
        head = remembered_head(exchange, headers)
    except OriginAnswered as answer:
        return _refusal(answer)
    return head_reply(exchange, head) if head is not None else _asked(exchange, headers)


async def _asked(exchange: Exchange, headers: dict[str, str]) -> Reply:
    try:
        head = await current_head(exchange, headers)
    except OriginAnswered as answer:
        return _refusal(answer)
    except OriginBodyError:
        return await forward(exchange)
    return head_reply(exchange, head)


def _refusal(answer: OriginAnswered) -> Reply:
    return Reply(answer.status, towards_client(dict(answer.headers)), no_body())


def is_special(request: S3Request) -> bool:
    """Whether the answer is more than the object's metadata: of a part, a range, a version, with other headers."""
    if "range" in request.headers or request.parameter("partNumber") is not None or needs_the_origin(request):
        return True
    return bool(request.query) and any(name.startswith("response-") for name, _ in request.query)


def head_reply(exchange: Exchange, head: ObjectHead) -> Reply:
    now = exchange.services.clock.now()
    judged = evaluate_read(exchange.request.headers, etag=head.version.etag, last_modified=head.last_modified, now=now)
    cache: CacheLabel = "hit" if head.remembered else "miss"
    if judged == "not-modified":
        headers = towards_client(head.headers)
        return Reply(304, [pair for pair in headers if pair[0] in HEADERS_OF_NOT_MODIFIED], cache=cache)
    return Reply(200, (), b"", cache, encoded=head.of_whole, length_bytes=head.version.size_bytes)
