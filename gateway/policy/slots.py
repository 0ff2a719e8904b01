"""The rules for a prefix on this node: slots, the longest prefix counts, and callers' rights there.

Rights of the credential and of the slot are judged in one answer: the reason for a refusal, or None. The client sees it
in the AccessDenied (docs/semantics.md, clause 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.config.entries import SlotSettings as Slot
from gateway.core.prefixes import Prefix, PrefixMap

__all__ = ["DEFAULT_SLOT", "EVERYTHING", "Grant", "Prefix", "PrefixMap", "Slot", "Slots"]

DEFAULT_SLOT = Slot(name="default", prefix=Prefix(""))


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
