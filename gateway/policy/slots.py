"""Slots: which prefix has which rights on this node. The longest matching prefix wins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.policy.prefixes import Prefix, PrefixMap


@dataclass(frozen=True, slots=True)
class Slot:
    """A prefix and what may be done under it; `name` labels metrics and messages.

    `consistency` says when changes that others make at the origin are seen: `strict` at once, `ttl` within
    `metadata_ttl_seconds`, `immutable` never, once an object has been looked at, `snapshot` never at all: what there is
    says the snapshot named `snapshot`. Absence is believed for
    `negative_ttl_seconds`, where not strict. While the origin does not answer, `ttl` goes on for
    `stale_if_unreachable_seconds` more.

    Of the cache directory, `capacity_bytes` are guaranteed to the slot, and it takes at most `capacity_limit_bytes`
    (None: all that is idle). Its objects are cached in blocks of `block_size_bytes` (None: of the cache's size).
    `eviction` says which blocks leave first; of objects larger than `kept_object_bytes_max` none are kept.

    `write` says when a write is acknowledged: `through`, when the origin has it; `back`, when this node's disk has.
    Then writes take at most `buffer_bytes` of the disk until the origin has them (None: what there is); `buffer_full`
    says what becomes of those for which there is no room. While this node alone has more than `exposure_bytes_max`, or
    something for longer than `exposure_age_seconds_max`, writes go through.
    """

    name: str
    prefix: Prefix
    mode: Literal["read-only", "read-write"] = "read-write"
    consistency: Literal["strict", "ttl", "immutable", "snapshot"] = "strict"
    metadata_ttl_seconds: float = 60.0
    negative_ttl_seconds: float = 0.0
    stale_if_unreachable_seconds: float = 0.0
    capacity_bytes: int = 0
    capacity_limit_bytes: int | None = None
    block_size_bytes: int | None = None
    eviction: Literal["epoch", "lru"] = "epoch"
    kept_object_bytes_max: int | None = None
    snapshot: str = ""
    write: Literal["through", "back"] = "through"
    buffer_bytes: int | None = None
    buffer_full: Literal["through", "slow-down"] = "through"
    exposure_bytes_max: int | None = None
    exposure_age_seconds_max: float | None = None


DEFAULT_SLOT = Slot("default", Prefix(""))


class Slots:
    """All slots of this node, with `default` behind them.

    Keys under `s3://train/imagenet/` belong to the slot of that prefix even when another slot has `s3://train/`.
    """

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        self._all = tuple(slots)
        self._by_prefix = PrefixMap((slot.prefix, slot) for slot in self._all)
        self._of_bucket: dict[str, list[Slot]] = {}
        for slot in sorted(self._all, key=lambda slot: len(slot.prefix.key_prefix), reverse=True):
            self._of_bucket.setdefault(slot.prefix.bucket, []).append(slot)
        self.any_frozen = any(slot.consistency == "snapshot" for slot in self._all)

    def __iter__(self) -> Iterator[Slot]:
        """The slots that are configured, without `default`."""
        return iter(self._all)

    def find(self, bucket: str, key: str) -> Slot:
        """The slot that `key` belongs to."""
        return self._by_prefix.longest(bucket, key) or DEFAULT_SLOT

    def of_bucket(self, bucket: str) -> Sequence[Slot]:
        """The slots that keys of a bucket may belong to, besides `default`; the first that fits a key has it."""
        return (*self._of_bucket.get(bucket, ()), *self._of_bucket.get("", ()))

    def under(self, bucket: str, key_prefix: str) -> Iterator[Slot]:
        """Every slot that a key may belong to which begins with `key_prefix`."""
        yield self.find(bucket, key_prefix)
        yield from self._by_prefix.within(bucket, key_prefix)
