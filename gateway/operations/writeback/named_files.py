"""The files named by a manifest that goes past the buffer: by its body, or by that of a copy's source.

The origin shows it when the client has its 200: so the client waits for the files (flush_wait.py). A manifest that
cannot be understood goes in the order of arrival, and the log says so.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import structlog

from gateway.core.steps import Steps, each, in_steps
from gateway.operations.context import RequestContext
from gateway.operations.payload import Payload, receive_payload
from gateway.origin.client import OriginRequest, Purpose
from gateway.s3.requests import parse_copy_source
from gateway.telemetry.logs import RateLimitedLog
from gateway.writeback.checkpoints.manifests import NamedFiles, NotUnderstood, may_be_understood
from gateway.writeback.flushing.manifest_files import understood
from gateway.writeback.order import is_marker

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

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


async def receive_manifest(context: RequestContext, buffer: WritebackBuffer) -> tuple[Payload, NamedFiles | None]:
    """Return the body of a PutObject, and the files that it names; None: unknown."""
    payload = await receive_payload(context, buffered_bytes_max=CONTENT_BYTES_MAX)
    if not isinstance(payload.body, bytes):
        return payload, _told(context, NotUnderstood("it is too long to be looked at while its client waits"))
    return payload, await named_by_bytes(context, buffer, payload.body)


async def named_by_bytes(context: RequestContext, buffer: WritebackBuffer, content: bytes) -> NamedFiles | None:
    """Return the files that an object of these bytes names under the request's key."""
    named = _told(context, await understood(context.object_key, content, buffer.threads))
    return await in_steps(_covered(context, named)) if named is not None else None


async def named_by_copy(context: RequestContext, buffer: WritebackBuffer) -> NamedFiles | None:
    if not names_files(context):
        return None
    source = parse_copy_source(context.request.headers.get("x-amz-copy-source", ""))
    query = [("versionId", source.version_id)] if source.version_id is not None else []
    request = OriginRequest(
        "GET", source.key.bucket, source.key.key, query, purpose=Purpose.FORWARD, slot=context.slot.name
    )
    async with await context.services.origin.send(request) as response:
        length = response.headers.get("content-length", "")
        if response.status != 200:
            return None  # the origin refuses the copy
        if not length.isdecimal() or int(length) > CONTENT_BYTES_MAX:
            return _told(context, NotUnderstood("it is too long to be looked at while its client waits"))
        content = await response.read(CONTENT_BYTES_MAX)
    return await named_by_bytes(context, buffer, content)


def _told(context: RequestContext, named: NamedFiles | NotUnderstood) -> NamedFiles | None:
    if isinstance(named, NamedFiles):
        return named
    _log.warning(
        "a manifest's file names cannot be read: it goes to the origin in the order of arrival",
        "manifest",
        object=str(context.object_key),
        slot=context.slot.name,
        reason=named.reason,
    )
    return None


def _covered(context: RequestContext, named: NamedFiles) -> Steps[NamedFiles]:
    bucket, grant = context.object_key.bucket, context.grant
    are_covered = yield from each(lambda key: grant.covers(bucket, key), named.keys)
    keys = tuple(compress(named.keys, are_covered))
    return NamedFiles(keys, tuple(one for one in named.directories if grant.covers(bucket, one)))
