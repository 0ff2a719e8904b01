"""The configuration of an origin, in the units that this package works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gateway.disk.pem import PemFile

AddressingStyle = Literal["auto", "path", "virtual"]


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """How to reach an origin.

    `endpoint_url` None is AWS's own endpoint of the region. `ca_bundle` are certificates; None trusts the system's
    authorities. `proxy` is an http:// URL, hidden because it may carry a password.

    `first_byte_timeout_seconds`: a GET of an object or a HEAD is given up when its answer has not begun; and what else
    waits is given up when the origin does not answer a simple question either. `stall_timeout_seconds`: a body that is
    read and does not come forward is given up. `read_timeout_seconds`: other requests of an origin that lives, until
    they are answered; `slow_timeout_seconds`: those that take S3 minutes (CompleteMultipartUpload, copies, LIST, …).
    `connection_wait_seconds` bounds the wait for a free connection, `unreachable_after_seconds` how long an origin that
    gives no answer at all is tried again.
    """

    endpoint_url: str | None = None
    region: str = "us-east-1"
    addressing_style: AddressingStyle = "auto"
    ca_bundle: PemFile | None = None
    proxy: str | None = field(default=None, repr=False)
    connect_timeout_seconds: float = 3.0
    first_byte_timeout_seconds: float = 8.0
    stall_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 60.0
    slow_timeout_seconds: float = 300.0
    connection_wait_seconds: float = 20.0
    max_connections: int = 256
    max_attempts: int = 4
    backoff_base_seconds: float = 0.05
    backoff_cap_seconds: float = 5.0
    retry_after_cap_seconds: float = 10.0
    unreachable_after_seconds: float = 5.0
