"""What an answer says of the cache."""

from __future__ import annotations

from typing import Any, Protocol


class Answered(Protocol):
    """An answer's head, of any client."""

    @property
    def headers(self) -> Any: ...


def cache_label(answer: Answered) -> str:
    """Where the answer came from: hit, partial, miss, …; without the reason of a miss. Empty: it says nothing."""
    told: str = answer.headers.get("x-forebay-cache", "")
    return told.partition(";")[0]
