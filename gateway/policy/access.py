"""May this caller do this to that key? Rights of the credential and of the slot, in one answer.

An answer is the reason for a refusal, or None: the reason goes into the AccessDenied that the client sees.
"""

from __future__ import annotations

from gateway.policy.grants import Grant
from gateway.policy.slots import Slots


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
