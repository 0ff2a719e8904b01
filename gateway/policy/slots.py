"""The rules for a prefix on this node: slots, the longest prefix counts, and callers' rights there.

Rights of the credential and of the slot are judged in one answer: the reason for a refusal, or None. The client sees it
in the AccessDenied (docs/semantics.md, clause 7).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from gateway.core.model import LOCAL_EXPIRY_SECONDS, MARKERS

T = TypeVar("T")

_SCHEME = "s3://"


@dataclass(frozen=True, slots=True)
class Prefix:
    """All keys of `bucket` that begin with `key_prefix`; an empty bucket stands for every bucket.

    >>> str(Prefix.parse("s3://train/imagenet/"))
    's3://train/imagenet/'
    """

    bucket: str
    key_prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> Prefix:
        """Parse `s3://` (everything), `s3://b` or `s3://b/` (the whole bucket), or a prefix. Raises ValueError."""
        if not text.startswith(_SCHEME):
            raise ValueError(f"{text!r} does not begin with s3://")
        bucket, _, key_prefix = text[len(_SCHEME) :].partition("/")
        if not bucket and key_prefix:
            raise ValueError(f"{text!r} names a key but no bucket")
        return cls(bucket, key_prefix)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.key_prefix}" if self.bucket else _SCHEME

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Return whether every key of `bucket` that begins with `key_prefix` lies within."""
        return not self.bucket or (bucket == self.bucket and key_prefix.startswith(self.key_prefix))


class PrefixMap(Generic[T]):
    """Values (none of them None) by prefix; of several with the same prefix the first counts. It never changes.

    A look-up is one binary search in the sorted prefixes of the bucket, then a walk outwards through the prefixes that
    enclose each other. So its cost grows with the depth of their nesting, and with their number only by the search.
    """

    def __init__(self, entries: Iterable[tuple[Prefix, T]]) -> None:
        by_bucket: dict[str, dict[str, T]] = {}
        for prefix, value in entries:
            # A prefix without a bucket covers every bucket, whatever else it says.
            key_prefix = prefix.key_prefix if prefix.bucket else ""
            by_bucket.setdefault(prefix.bucket, {}).setdefault(key_prefix, value)
        self._everywhere = by_bucket.pop("", {}).get("")
        self._buckets = {bucket: _PrefixesOfBucket(values) for bucket, values in by_bucket.items()}

    def longest(self, bucket: str, key: str) -> T | None:
        """Return the value of the longest prefix that covers `key`, or all keys that begin with it; None: none does."""
        prefixes = self._buckets.get(bucket)
        found = prefixes.longest(key) if prefixes is not None else None
        return self._everywhere if found is None else found

    def within(self, bucket: str, key_prefix: str) -> Iterator[T]:
        """Yield the values of all longer prefixes of `bucket` that begin with `key_prefix`, in order."""
        prefixes = self._buckets.get(bucket)
        if prefixes is not None:
            yield from prefixes.within(key_prefix)


class _PrefixesOfBucket(Generic[T]):
    """The prefixes of one bucket in order, each with the number of the next shorter one that encloses it (-1: none).

    All strings between a prefix and a key that begins with it begin with that prefix too. So the greatest prefix that
    is not greater than the key is either a prefix of the key, or lies within all those that are.
    """

    def __init__(self, values: dict[str, T]) -> None:
        self._prefixes = sorted(values)
        self._values = [values[prefix] for prefix in self._prefixes]
        self._enclosing: list[int] = []
        open_ones: list[int] = []
        for number, prefix in enumerate(self._prefixes):
            while open_ones and not prefix.startswith(self._prefixes[open_ones[-1]]):
                open_ones.pop()
            self._enclosing.append(open_ones[-1] if open_ones else -1)
            open_ones.append(number)

    def longest(self, key: str) -> T | None:
        number = bisect_right(self._prefixes, key) - 1
        while number >= 0:
            if key.startswith(self._prefixes[number]):
                return self._values[number]
            number = self._enclosing[number]
        return None

    def within(self, key_prefix: str) -> Iterator[T]:
        first = bisect_right(self._prefixes, key_prefix)
        end = bisect_left(self._prefixes, True, key=lambda prefix: not prefix.startswith(key_prefix), lo=first)
        return iter(self._values[first:end])


@dataclass(frozen=True, slots=True)
class Slot:
    """A prefix and its rules; `name` labels metrics and messages.

    `consistency` is when others' changes at the origin are seen: `strict` at once, `ttl` within `metadata_ttl_seconds`,
    `immutable` never after an object's first look-up, `snapshot` never: the snapshot named `snapshot` says what exists.
    Absence is believed for `negative_ttl_seconds`, unless `strict`. While the origin does not answer, `ttl` goes on for
    `stale_if_unreachable_seconds` more.

    The slot is guaranteed `capacity_bytes` of the cache directory, and takes at most `capacity_limit_bytes` (None: all
    that is idle). Its objects are cached in blocks of `block_size_bytes` (None: the cache's size). `eviction` decides
    which blocks leave first; objects larger than `kept_object_bytes_max` are not kept.

    `write` is when a write is acknowledged: `through`, when the origin has it; `back`, when this node's disk has it;
    `scratch`, likewise, and the origin never gets it. Local objects are removed after `local_expiry_seconds`. Writes
    take at most `buffer_bytes` of the disk until the origin has them (None: all there is); `when_buffer_full` decides
    about those without room. While this node alone has more than `unflushed_bytes_max`, or something for longer than
    `unflushed_age_seconds_max`, writes go through. Objects whose names match `markers` reach the origin after all that
    was acknowledged before them under their directory, and with the `order` `strict` every write after all before it;
    with `manifests` `checked`, after all that they name, whichever node writes it. If a bucket's ETags cannot be
    foretold, writes go through, or, with the `etag` `local`, have one of this node's. An upload without a part for
    `upload_expiry_seconds` is ended.

    `checkpoints` are patterns of keys that make one checkpoint (checkpoint_patterns.py); None: the known layouts;
    empty: no checkpoints. `flush` decides which are sent once a newer one is at the origin: `all`, none (`latest`), or
    every n-th (`every-5th`). The newest `keep_last` stay in the cache.

    `authorization` is who judges a caller, besides the gateway's own rules: none (`gateway`), or the origin (`origin`),
    asked in the caller's own name; a yes counts for `authorization_ttl_seconds`.
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
    write: Literal["through", "back", "scratch"] = "through"
    buffer_bytes: int | None = None
    when_buffer_full: Literal["through", "slow-down"] = "through"
    unflushed_bytes_max: int | None = None
    unflushed_age_seconds_max: float | None = None
    order: Literal["markers", "strict"] = "markers"
    markers: tuple[str, ...] = MARKERS
    manifests: Literal["checked", "in-order"] = "checked"
    etag: Literal["bucket", "local"] = "bucket"
    upload_expiry_seconds: float = 86_400.0
    authorization: Literal["gateway", "origin"] = "gateway"
    authorization_ttl_seconds: float = 60.0
    checkpoints: tuple[str, ...] | None = None
    flush: str = "all"
    local_expiry_seconds: float = LOCAL_EXPIRY_SECONDS
    keep_last: int | None = None

    @property
    def is_buffered(self) -> bool:
        """Return whether writes are acknowledged when this node's disk has them."""
        return self.write != "through"


DEFAULT_SLOT = Slot("default", Prefix(""))


class Slots:
    """All slots of this node, with `default` behind them.

    Keys under `s3://train/imagenet/` belong to the slot of that prefix even when another slot has `s3://train/`.
    Changes while the gateway runs appear here; a `Slot` found before stays as it was.
    """

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        self.apply_settings(slots)

    def apply_settings(self, slots: Iterable[Slot]) -> None:
        """Set all slots. Event loop only."""
        self._all = tuple(slots)
        self._by_prefix = PrefixMap((slot.prefix, slot) for slot in self._all)
        self._of_bucket: dict[str, list[Slot]] = {}
        for slot in sorted(self._all, key=lambda slot: len(slot.prefix.key_prefix), reverse=True):
            self._of_bucket.setdefault(slot.prefix.bucket, []).append(slot)
        self.any_frozen = any(slot.consistency == "snapshot" for slot in self._all)
        self.any_by_origin = any(slot.authorization == "origin" for slot in self._all)

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over the configured slots, without `default`."""
        return iter(self._all)

    def find(self, bucket: str, key: str) -> Slot:
        """Return the slot that `key` belongs to."""
        return self._by_prefix.longest(bucket, key) or DEFAULT_SLOT

    def of_bucket(self, bucket: str) -> Sequence[Slot]:
        """Return the slots that keys of a bucket may belong to, besides `default`; the first that fits a key has it."""
        return (*self._of_bucket.get(bucket, ()), *self._of_bucket.get("", ()))

    def under(self, bucket: str, key_prefix: str) -> Iterator[Slot]:
        """Yield every slot that a key with the prefix `key_prefix` may belong to."""
        yield self.find(bucket, key_prefix)
        yield from self._by_prefix.within(bucket, key_prefix)


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of one caller: the prefixes it may touch, and whether it may change anything there."""

    prefixes: Sequence[Prefix]
    read_only: bool = False
    covers_everything: bool = field(init=False, repr=False, compare=False)
    """Service-level operations (ListBuckets) are allowed."""
    _covering: PrefixMap[Prefix] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "covers_everything", any(not prefix.bucket for prefix in self.prefixes))
        object.__setattr__(self, "_covering", PrefixMap((prefix, prefix) for prefix in self.prefixes))

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Return whether every key of `bucket` beginning with `key_prefix` is allowed; "" asks for the whole bucket."""
        return self.covers_everything or self._covering.longest(bucket, key_prefix) is not None

    def prefixes_in(self, bucket: str) -> Iterator[str]:
        """Yield the prefixes of the allowed keys of `bucket`."""
        return (prefix.key_prefix if prefix.bucket else "" for prefix in self.prefixes if prefix.bucket in ("", bucket))


EVERYTHING = Grant((Prefix(""),))


def refusal_of_read(grant: Grant, bucket: str, key: str) -> str | None:
    if not grant.covers(bucket, key):
        return "The credential does not cover this key."
    return None


def refusal_of_write(grant: Grant, slots: Slots, bucket: str, key: str) -> str | None:
    if not grant.covers(bucket, key):
        return "The credential does not cover this key."
    if grant.read_only:
        return "The credential is read-only."
    slot = slots.find(bucket, key)
    if slot.mode == "read-only":
        return f"The slot {slot.name!r} ({slot.prefix}) is read-only."
    return None


def refusal_of_any_write(grant: Grant, slots: Slots, bucket: str) -> str | None:
    """Return why no key of the bucket at all may be changed."""
    if grant.read_only:
        return "The credential is read-only."
    prefixes = list(grant.prefixes_in(bucket))
    if not prefixes:
        return "The credential covers no key of this bucket."
    if all(slot.mode == "read-only" for prefix in prefixes for slot in slots.under(bucket, prefix)):
        return "All that the credential covers in this bucket is read-only."
    return None


def refusal_of_creation(grant: Grant, bucket: str) -> str | None:
    """Return why a caller may not create a bucket, even one that exists: then nothing is changed."""
    if grant.read_only:
        return "The credential is read-only."
    return None if any(True for _ in grant.prefixes_in(bucket)) else "The credential covers no key of this bucket."


def refusal_of_listing(grant: Grant, bucket: str, prefix: str) -> str | None:
    """Return why keys that begin with `prefix` may not be listed."""
    if not grant.covers(bucket, prefix):
        return "The credential does not cover this prefix: ask for a prefix that it covers."
    return None


def refusal_of_bucket_operation(grant: Grant, slots: Slots, bucket: str | None, *, is_read: bool) -> str | None:
    """Return why an operation on a whole bucket (or, with None, on the service) is refused."""
    if not (grant.covers_everything if bucket is None else grant.covers(bucket, "")):
        return "Operations on a bucket or on the service need a credential that covers all of it."
    return None if is_read else refusal_of_unknown_writes(grant, slots, bucket or "")


def refusal_of_unknown_writes(grant: Grant, slots: Slots, bucket: str) -> str | None:
    """Return why requests that do not name the keys they change (rules, forms, renames) are refused."""
    if not grant.covers(bucket, ""):
        return "What may change any key of a bucket needs a credential that covers all of it."
    if grant.read_only:
        return "The credential is read-only."
    for slot in slots.under(bucket, ""):
        if slot.mode == "read-only":
            return f"It may change any key of the bucket, and the slot {slot.name!r} ({slot.prefix}) is read-only."
    return None
