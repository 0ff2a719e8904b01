"""What is meant by `s3://bucket/step-100`: that checkpoint, and not `step-1000`."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.policy.slots import Prefix
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.journal.view import JournalView


@dataclass(frozen=True, slots=True)
class Name(Prefix):
    """The object of a name, and all that lies under it as under a directory; no other key that begins so."""

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Of keys that begin with one of an object, the object's alone."""
        is_within = key_prefix == self.key_prefix or key_prefix.startswith(f"{self.key_prefix}/")
        return bucket == self.bucket and is_within


def may_be_name(prefix: Prefix) -> bool:
    """Whether it may be that of an object or a directory: with a slash behind it, it says all by itself."""
    return bool(prefix.bucket) and bool(prefix.key_prefix) and not prefix.key_prefix.endswith("/")


def name_of(prefix: Prefix) -> Name:
    return Name(prefix.bucket, prefix.key_prefix)


def is_known_here(tx: JournalView, prefix: Prefix) -> bool:
    """Whether something of that name is pending, or was a moment ago, or lies under it as under a directory."""
    return tx.has_any(prefix.bucket, prefix.key_prefix)


async def is_at_origin(requests: Requests, prefix: Prefix) -> bool:
    """Whether the origin has such an object, or anything under it; False also where it does not say."""
    first = await requests.first_key(prefix.bucket, prefix.key_prefix)
    if first == prefix.key_prefix:
        return True
    return await requests.first_key(prefix.bucket, f"{prefix.key_prefix}/") is not None
