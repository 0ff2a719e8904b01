"""The document by which a node introduces itself to another, on its peer port (`GET /-/hello`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from gateway.core.model import Homes
from gateway.origin.peer_protocol import VERSION, home_digest

HELLO_BYTES_MAX: Final = 64 * 1024
SILENT_TOLD: Final = 100
SLOTS_TOLD: Final = 1000

Name = Annotated[str, Field(max_length=256)]


def digests_of(homes: Homes) -> tuple[str, ...]:
    return tuple(sorted({*map(home_digest, (homes.main, *homes.by_bucket.values()))}))


def block_sizes_of(slots: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return sizes of blocks by digests of the slots' prefixes, which may be long."""
    told = islice(slots, SLOTS_TOLD)
    return {hashlib.blake2b(prefix.encode(), digest_size=6).hexdigest(): size for prefix, size in told}


class Hello(BaseModel):
    """A node's word on itself; fields of later versions are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Name
    address: Name
    version: Name
    """Forebay's version."""

    protocol: Name = VERSION
    zone: Name = ""
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    caches: bool
    homes: Annotated[tuple[Name, ...], Field(max_length=1024)] = ()
    """Digests of the homes of its buckets (`home_digest`), sorted."""

    block_sizes: Annotated[Mapping[Name, int], Field(max_length=SLOTS_TOLD)] = {}
    """By slot, as `block_sizes_of`; those of later slots are left out."""

    age_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds for which it has been a member without a gap."""

    store: Name = ""
    """The name of its write-back buffer."""

    silent: Annotated[tuple[Name, ...], Field(max_length=1024)] = ()
    """Addresses of members that do not answer it, SILENT_TOLD at most."""

    at: Annotated[float, Field(allow_inf_nan=False)]
    """Its wall clock, in seconds since 1970."""

    @classmethod
    def read(cls, content: bytes) -> Hello:
        """Return the document that a peer has sent; ValueError if it is none."""
        if len(content) > HELLO_BYTES_MAX:
            raise ValueError(f"a hello of more than {HELLO_BYTES_MAX} bytes")
        return cls.model_validate_json(content)

    def content(self) -> bytes:
        return self.model_dump_json().encode()
