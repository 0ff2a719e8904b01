"""W3C Trace Context in request headers (https://www.w3.org/TR/trace-context-2/). Drops what does not parse."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

STATE_CHARACTERS_MAX = 512
STATE_MEMBERS_MAX = 32
_LONG_MEMBER_CHARACTERS = 128
"""Members longer than this go first where a state is too long (3.3.1.5)."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/@]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class RemoteSpan(NamedTuple):
    """The client's, as it says. `state` is its `tracestate`."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str


def remote_span(headers: Iterable[tuple[bytes, bytes]]) -> RemoteSpan | None:
    """Return the span that a request belongs to by its headers; None: they name none, or none that is valid."""
    parents, states = list[str](), list[str]()
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.decode("latin-1"))
        elif name == b"tracestate":
            states.append(value.decode("latin-1"))
    found = _TRACEPARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return RemoteSpan(trace_id, span_id, bool(int(found[4], 16) & 1), passed_on_state(",".join(states)))


def passed_on_state(state: str) -> str:
    """Return the valid part of a `tracestate` within its limits: whole members, and of one name the youngest.

    Nothing if it does not parse or has too many members.
    """
    members = [member for one in state.split(",") if (member := one.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members[: STATE_MEMBERS_MAX + 1]]
    if len(members) > STATE_MEMBERS_MAX or None in found:
        return ""
    kept = list({one[1]: one[0] for one in reversed(found) if one is not None}.values())  # the last one first
    excess = sum(len(member) + 1 for member in kept) - 1 - STATE_CHARACTERS_MAX
    for member in [one for one in kept if len(one) > _LONG_MEMBER_CHARACTERS] + kept:
        if excess > 0 and member in kept:
            kept.remove(member)
            excess -= len(member) + 1
    return ",".join(reversed(kept))
