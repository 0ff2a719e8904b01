"""What an answer says of the cache."""

from __future__ import annotations

from typing import Any, Protocol, get_args

from gateway.core.model import MissReason


class Answered(Protocol):
    """An answer's head, of any client."""

    @property
    def headers(self) -> Any: ...


def cache_label(answer: Answered) -> str:
    """Where the answer came from: hit, partial, miss, …; without the reason of a miss. Empty: it says nothing.

    AssertionError where a miss has no reason, or something else has one.
    """
    told: str = answer.headers.get("x-forebay-cache", "")
    label, _, reason = told.partition("; ")
    assert (label in ("miss", "partial")) == bool(reason), told
    assert not reason or reason.removeprefix("reason=") in get_args(MissReason), told
    return label
