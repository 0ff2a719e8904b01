"""`x-forebay-durable`: whether the origin has a checkpoint, for readers of the object that marks it complete.

On GET and HEAD of a marker in a slot with `write = "back"`, and of every object in one with `write = "scratch"`.
`true`: the origin has it, had before it all that this node had acknowledged under its directory by then (order.py), and
has all of its checkpoint that has come since. `false`: some of these are only here.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from gateway.operations.context import Answer, RequestContext, Response
from gateway.writeback.order import is_marker

HEADER = "x-forebay-durable"


def tells_durability(context: RequestContext) -> bool:
    slot = context.slot
    return slot.write == "scratch" or (slot.is_buffered and is_marker(context.request.key or "", slot.markers))


def with_durability(answer: Answer, *, is_durable: bool) -> Answer:
    """Add the header to the answer if there is an object."""
    return _told(answer, is_durable) if isinstance(answer, Response) else _told_later(answer, is_durable)


async def _told_later(answer: Coroutine[Any, Any, Response], is_durable: bool) -> Response:
    return _told(await answer, is_durable)


def _told(response: Response, is_durable: bool) -> Response:
    if response.status >= 400:
        return response
    told = [value for name, value in response.headers if name == HEADER]  # the origin may be a gateway, too
    is_durable = is_durable and "false" not in told
    others = [pair for pair in response.headers if pair[0] != HEADER]
    return replace(response, headers=[*others, (HEADER, "true" if is_durable else "false")])
