"""What a credential may touch (docs/semantics.md, clause 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.policy.prefixes import Prefix


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of one caller: the prefixes it may touch, and whether it may change anything there."""

    prefixes: Sequence[Prefix]
    read_only: bool = False

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Whether every key of `bucket` beginning with `key_prefix` is allowed; "" asks for the whole bucket."""
        return any(prefix.covers(bucket, key_prefix) for prefix in self.prefixes)

    @property
    def covers_everything(self) -> bool:
        """Whether service-level operations (ListBuckets) are allowed."""
        return any(not prefix.bucket for prefix in self.prefixes)


EVERYTHING = Grant((Prefix(""),))
