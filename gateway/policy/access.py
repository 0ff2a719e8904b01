"""May this caller do this to that key? Rights of the credential and of the slot, in one answer.

An answer is the reason for a refusal, or None: the reason goes into the AccessDenied that the client sees
(docs/semantics.md, clause 7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.policy.slots import Prefix, PrefixMap, Slots


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of one caller: the prefixes it may touch, and whether it may change anything there."""

    prefixes: Sequence[Prefix]
    read_only: bool = False
    covers_everything: bool = field(init=False, repr=False, compare=False)
    """Whether service-level operations (ListBuckets) are allowed."""
    _covering: PrefixMap[Prefix] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "covers_everything", any(not prefix.bucket for prefix in self.prefixes))
        object.__setattr__(self, "_covering", PrefixMap((prefix, prefix) for prefix in self.prefixes))

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Whether every key of `bucket` beginning with `key_prefix` is allowed; "" asks for the whole bucket."""
        return self.covers_everything or self._covering.longest(bucket, key_prefix) is not None

    def prefixes_in(self, bucket: str) -> Iterator[str]:
        """With which prefixes the keys of `bucket` begin that are allowed."""
        return (prefix.key_prefix if prefix.bucket else "" for prefix in self.prefixes if prefix.bucket in ("", bucket))


EVERYTHING = Grant((Prefix(""),))


def refusal_of_read(grant: Grant, bucket: str, key: str) -> str | None:
    """Why the object may not be read."""
    if not grant.covers(bucket, key):
        return "The credential does not cover this key."
    return None


def refusal_of_write(grant: Grant, slots: Slots, bucket: str, key: str) -> str | None:
    """Why the object may not be changed."""
    if not grant.covers(bucket, key):
        return "The credential does not cover this key."
    if grant.read_only:
        return "The credential is read-only."
    slot = slots.find(bucket, key)
    if slot.mode == "read-only":
        return f"The slot {slot.name!r} ({slot.prefix}) is read-only."
    return None


def refusal_of_any_write(grant: Grant, slots: Slots, bucket: str) -> str | None:
    """Why no key of the bucket at all may be changed."""
    if grant.read_only:
        return "The credential is read-only."
    prefixes = list(grant.prefixes_in(bucket))
    if not prefixes:
        return "The credential covers no key of this bucket."
    if all(slot.mode == "read-only" for prefix in prefixes for slot in slots.under(bucket, prefix)):
        return "All that the credential covers in this bucket is read-only."
    return None


def refusal_of_listing(grant: Grant, bucket: str, prefix: str) -> str | None:
    """Why keys that begin with `prefix` may not be listed."""
    if not grant.covers(bucket, prefix):
        return "The credential does not cover this prefix: ask for a prefix that it covers."
    return None


def refusal_of_bucket_operation(grant: Grant, slots: Slots, bucket: str | None, *, is_read: bool) -> str | None:
    """Why an operation on a whole bucket (or, with None, on the service) is refused."""
    if not (grant.covers_everything if bucket is None else grant.covers(bucket, "")):
        return "Operations on a bucket or on the service need a credential that covers all of it."
    return None if is_read else refusal_of_unknown_writes(grant, slots, bucket or "")


def refusal_of_unknown_writes(grant: Grant, slots: Slots, bucket: str) -> str | None:
    """Why a bucket may not be changed by what does not say which keys it changes: rules, forms, renames."""
    if not grant.covers(bucket, ""):
        return "What may change any key of a bucket needs a credential that covers all of it."
    if grant.read_only:
        return "The credential is read-only."
    for slot in slots.under(bucket, ""):
        if slot.mode == "read-only":
            return f"It may change any key of the bucket, and the slot {slot.name!r} ({slot.prefix}) is read-only."
    return None
