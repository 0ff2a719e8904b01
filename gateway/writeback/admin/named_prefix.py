"""The meaning of `s3://bucket/step-100` as a name: that checkpoint, and not `step-1000`."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.policy.slots import Prefix
from gateway.writeback.flushing.requests import Requests


@dataclass(frozen=True, slots=True)
class Name(Prefix):
    """The object of a name, and all that lies under it as under a directory; no other key that begins so."""

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Return whether `key_prefix` is the name itself, taken as a key, or lies under it."""
        is_within = key_prefix == self.key_prefix or key_prefix.startswith(f"{self.key_prefix}/")
        return bucket == self.bucket and is_within


def may_be_name(prefix: Prefix) -> bool:
    """Return whether the prefix may name an object or a directory; one with a final slash is unambiguous."""
    return bool(prefix.bucket) and bool(prefix.key_prefix) and not prefix.key_prefix.endswith("/")


def name_of(prefix: Prefix) -> Name:
    return Name(prefix.bucket, prefix.key_prefix)


async def is_at_origin(requests: Requests, prefix: Prefix) -> bool:
    """Return whether the origin has an object of this name, or any under it. False also if the origin does not say."""
    first = await requests.first_key(prefix.bucket, prefix.key_prefix)
    if first == prefix.key_prefix:
        return True
    return await requests.first_key(prefix.bucket, f"{prefix.key_prefix}/") is not None
