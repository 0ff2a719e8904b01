"""How a slot's index stands: for people, and for metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.api import documents as to

State = Literal["starting", "inventory", "crawling", "waiting", "failing"]


@dataclass(slots=True)
class IndexStatus:
    """Times are seconds since 1970.

    `complete`: LIST of the slot's prefix is answered from the index, all of it being known since `known_since` at
    least, until that is `fresh_seconds` ago. `keys` are those that the crawl under way, or the last one, has listed,
    and those that it need not list, being known from one that was broken off; `pages` are what it asked for, and
    `keys_before` the keys of the last crawl that came to its end: about what there is to list. `changed` counts what
    crawls have found changed or gone since the gateway started, `crawls` those that came to their end. `inventory` is
    where to begin from, and `inventory_error` why that could not be done.
    """

    slot: str
    prefix: str
    fresh_seconds: float
    refresh_seconds: float | None
    state: State = "starting"
    complete: bool = False
    known_since: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    next_at: float | None = None
    keys: int = 0
    pages: int = 0
    keys_before: int | None = None
    crawls: int = 0
    changed: int = 0
    error: str | None = None
    inventory: str | None = None
    inventory_error: str | None = None

    def document(self, now: float) -> to.Index:
        """Return the answer of the admin port; `now` is in seconds since 1970."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "fresh_seconds"}
        age_seconds = None if self.known_since is None else max(0.0, now - self.known_since)
        complete = self.complete and (age_seconds is None or age_seconds < self.fresh_seconds)
        return to.Index.model_validate(fields | {"complete": complete, "age_seconds": age_seconds})
