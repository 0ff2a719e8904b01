"""How old another node's answer about an object may be, so that this node never goes back behind what it has shown.

An answer counts as if this node had asked the origin when the other one did. So it is too old if the slot's bound is
over, if the key was forgotten since, or if a listing since then says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from gateway.core.model import ObjectKey, immutable
from gateway.metadata.listing.index import ListingIndex
from gateway.metadata.listing.ranges import KeyBound
from gateway.policy.slots import Slot
from gateway.s3.headers import plain_etag
from gateway.s3.list_result import ListedEntry


class Shown(Protocol):
    def __call__(self, key: ObjectKey, age_seconds: float) -> bool:
        """Return True if an object may have been shown under the key in the last `age_seconds`."""


@immutable
class AnswerAges:
    """`gateway.origin.client.AnswerAges` of one question. `unchanged_seconds`: how long the key was not forgotten."""

    key: ObjectKey
    slot: Slot
    unchanged_seconds: float
    listing: ListingIndex
    is_shown: Shown

    @property
    def seconds_max(self) -> float:
        bound = math.inf if self.slot.consistency == "immutable" else self.slot.metadata_ttl_seconds
        return max(0.0, min(bound, self.unchanged_seconds))

    def allow(self, status: int, headers: Mapping[str, str], age_seconds: float) -> bool:
        is_absent = status == 404
        bound = min(self.slot.negative_ttl_seconds, self.unchanged_seconds) if is_absent else self.seconds_max
        if not age_seconds <= bound:
            return False
        if is_absent and self.is_shown(self.key, age_seconds):
            return False
        listed = self.listing.entry(*self.key, KeyBound(age_seconds, age_seconds))
        if listed is None:
            return True
        return is_absent if listed.entry is None else not is_absent and _is_as_listed(status, headers, listed.entry)


def _is_as_listed(status: int, headers: Mapping[str, str], listed: ListedEntry) -> bool:
    size = headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "")
    if status in (200, 206) and size != str(listed.size_bytes):
        return False
    return not listed.etag or plain_etag(headers.get("etag", "")) == plain_etag(listed.etag)
