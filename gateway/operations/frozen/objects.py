"""An object of a snapshot: finding it, asking the origin for that version of it, and saying why it is not to be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.errors import ForebayError, OriginAnswered, OriginError
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead, is_plainly_asked
from gateway.metadata.snapshots.registry import OpenSnapshot, SnapshotObject
from gateway.operations.exchange import Exchange
from gateway.operations.passthrough import onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.reply import Answer, CacheLabel, Reply
from gateway.s3.conditions import evaluate_read
from gateway.s3.error_codes import s3_error
from gateway.s3.etags import quote, unquote
from gateway.s3.forwarding import towards_origin
from gateway.s3.http_dates import format_http_date, parse_iso_date

CHANGED = frozenset({404, 412})
"""What the origin answers who asks for a version that it does not have any more."""

_FROZEN = ("frozen", "")
_CONDITIONS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})


class Changed(ForebayError):
    """The origin has another version than the frozen one, or no object of that key."""


def with_snapshot(exchange: Exchange, then: Callable[[Exchange, OpenSnapshot], Answer]) -> Answer:
    """Answer by the snapshot of the request's slot: in the call itself where it is open, as it is but for the first."""
    shelved = exchange.services.snapshots.of(exchange.slot)
    return then(exchange, shelved) if shelved is not None else _when_opened(exchange, then)


async def _when_opened(exchange: Exchange, then: Callable[[Exchange, OpenSnapshot], Answer]) -> Reply:
    answer = then(exchange, await exchange.services.snapshots.opened(exchange.slot))
    return answer if isinstance(answer, Reply) else await answer


def found(exchange: Exchange, shelved: OpenSnapshot) -> SnapshotObject:
    """The object that the request is about; S3Error NoSuchKey where there was none, and the origin is not asked."""
    key = exchange.object_key.key
    frozen = shelved.find(key)
    if frozen is None:
        exchange.services.catalog.observer.looked_up(exchange.slot.name, "absent")
        raise s3_error("NoSuchKey", Key=key)
    return frozen


def known_head(exchange: Exchange, shelved: OpenSnapshot, headers: Mapping[str, str]) -> ObjectHead | None:
    """The frozen version's head, where it is known and the catalog may answer; S3Error as `found`."""
    if not is_plainly_asked(headers) or exchange.request.parameter("partNumber") is not None:
        return None
    services, with_checksums = exchange.services, CHECKSUM_MODE in headers
    head = shelved.head(exchange.object_key.key, with_checksums=with_checksums)
    if head is None:
        frozen = found(exchange, shelved)
        known = services.catalog.of_version(frozen.version, with_checksums=with_checksums)
        if known is None:
            return None
        head = ObjectHead(known.version, known.headers, known.last_modified)  # not `remembered`: never out of date
        shelved.keep(head, with_checksums=with_checksums)
    services.catalog.observer.looked_up(exchange.slot.name, "hit")
    return head


async def ask(
    exchange: Exchange, shelved: OpenSnapshot, frozen: SnapshotObject, headers: Mapping[str, str]
) -> ObjectHead:
    """What the origin says of the frozen version, and only of that; kept for good where it may be.

    Raises Changed, OriginAnswered for every other error status, OriginUnreachable, and OriginBodyError.
    """
    part_number = exchange.request.parameter("partNumber")
    try:
        head = await exchange.services.catalog.ask(
            exchange.object_key, exchange.slot, headers=pinned(headers, frozen), part_number=part_number
        )
    except OriginAnswered as answer:
        if answer.status in CHANGED:
            raise Changed from answer
        raise
    if not is_frozen(head, frozen):
        raise Changed
    exchange.services.catalog.observer.looked_up(exchange.slot.name, "miss")
    if part_number is None and is_plainly_asked(headers):
        learn(exchange, shelved, head, with_checksums=CHECKSUM_MODE in headers)
    return head


def learn(exchange: Exchange, shelved: OpenSnapshot, head: ObjectHead, *, with_checksums: bool) -> None:
    """The origin has said this of the frozen version."""
    shelved.lost.pop(head.version.key.key, None)
    shelved.keep(head, with_checksums=with_checksums)
    exchange.services.catalog.learned_version(head, with_checksums=with_checksums)


def pinned(headers: Mapping[str, str], frozen: SnapshotObject) -> dict[str, str]:
    """The headers, and that nothing but the frozen version is wanted."""
    return {**headers, "if-match": strong(frozen.version.etag)}


def strong(etag: str) -> str:
    """As `If-Match` takes it: some servers list ETags without quotes, or as weak ones."""
    return quote(etag.removeprefix("W/"))


def is_frozen(head: ObjectHead, frozen: SnapshotObject) -> bool:
    """Whether the origin spoke of the frozen version: some ignore `If-Match`."""
    version = head.version
    return strong(version.etag) == strong(frozen.version.etag) and version.size_bytes == frozen.version.size_bytes


def listed_head(frozen: SnapshotObject) -> ObjectHead:
    """What the snapshot alone says of an object, where nobody else says anything any more."""
    headers = {
        "etag": strong(frozen.version.etag),
        "content-length": str(frozen.version.size_bytes),
        "content-type": "binary/octet-stream",
    }
    modified = parse_iso_date(frozen.modified)
    if modified is not None:
        headers["last-modified"] = format_http_date(modified)
    return ObjectHead(replace(frozen.version, etag=headers["etag"]), headers, modified)


async def explained(exchange: Exchange, shelved: OpenSnapshot, frozen: SnapshotObject, error: Exception) -> Exception:
    """What to tell a client to whom the origin has refused the frozen version with `error`: what it has now.

    `error` itself where that was about something else.
    """
    key = exchange.object_key
    present = await _present(exchange, frozen)
    if present is None and not _is_refusal(error):
        return error
    if present == _FROZEN:
        return s3_error("ServiceUnavailable", "The origin has refused a version that it has. Please try again.")
    reason, has = present or ("changed", "the origin does not have that version any more")
    shelved.lose(key.key)
    exchange.services.snapshots.observer.refused(exchange.slot.name, reason)
    return s3_error(
        "PreconditionFailed",
        f"{key} is frozen by the snapshot {shelved.manifest.name!r} with ETag {strong(frozen.version.etag)}, "
        f"and {has}. What is asked for of the frozen version is not cached on this node.",
        Condition="If-Match",
        Snapshot=shelved.manifest.name,
    )


async def _present(exchange: Exchange, frozen: SnapshotObject) -> tuple[str, str] | None:
    """What has become of the frozen version at the origin, in a word and in words; None: it does not say."""
    try:
        head = await exchange.services.catalog.ask(exchange.object_key, exchange.slot, headers={})
    except OriginAnswered as answer:
        return ("gone", "the origin has no such object any more") if answer.status == 404 else None
    except OriginError:
        return None
    return _FROZEN if is_frozen(head, frozen) else ("changed", f"the origin has ETag {strong(head.version.etag)}")


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, Changed) or (isinstance(error, OriginAnswered) and error.status in CHANGED)


async def forward_frozen(exchange: Exchange, shelved: OpenSnapshot, *, cache: CacheLabel = "bypass") -> Reply:
    """The origin's own answer about the frozen version: the request goes there pinned, and is refused otherwise."""
    frozen = found(exchange, shelved)
    _judge_conditions(exchange, frozen)
    headers = {name: value for name, value in towards_origin(exchange.request.headers).items() if name != "if-match"}
    payload = await receive_payload(exchange)
    request = onward_request(exchange, payload, headers=pinned(headers, frozen))
    response = await exchange.services.origin.send(request)
    is_other = response.status in (200, 206) and strong(response.headers.get("etag", "")) != strong(frozen.version.etag)
    if response.status not in CHANGED and not is_other:
        return streamed_reply(response, head_only=exchange.request.method == "HEAD", cache=cache)
    await response.aclose()
    raise await explained(exchange, shelved, frozen, OriginAnswered(response.status, [], b""))


def _judge_conditions(exchange: Exchange, frozen: SnapshotObject) -> None:
    """The client's own conditions, where they fail already: `If-Match` is needed for the pinning."""
    headers = {name: value for name, value in exchange.request.headers.items() if name in _CONDITIONS}
    if headers:
        modified, now = parse_iso_date(frozen.modified), exchange.services.clock.now()
        evaluate_read(headers, etag=unquote(frozen.version.etag), last_modified=modified, now=now)
