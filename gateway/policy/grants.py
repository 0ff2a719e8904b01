"""What a credential may touch (docs/semantics.md, clause 7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.policy.prefixes import Prefix, PrefixMap


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
