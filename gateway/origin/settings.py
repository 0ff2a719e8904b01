"""What the configuration says about an origin, in the units that this package works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AddressingStyle = Literal["auto", "path", "virtual"]


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """How to reach an origin.

    `endpoint_url` None is AWS's own endpoint of the region. `ca_bundle` is a PEM file; None trusts the system's
    authorities. `proxy` is an http:// URL, hidden because it may carry a password. `read_timeout_seconds` bounds the
    silence before and between bytes of an answer, and the time one piece of an upload may be stuck.
    `unreachable_after_seconds` bounds how long an origin that gives no answer at all is tried again.
    """

    endpoint_url: str | None = None
    region: str = "us-east-1"
    addressing_style: AddressingStyle = "auto"
    ca_bundle: str | None = None
    proxy: str | None = field(default=None, repr=False)
    connect_timeout_seconds: float = 3.0
    read_timeout_seconds: float = 60.0
    max_connections: int = 256
    max_attempts: int = 4
    backoff_base_seconds: float = 0.05
    backoff_cap_seconds: float = 5.0
    retry_after_cap_seconds: float = 10.0
    unreachable_after_seconds: float = 5.0
