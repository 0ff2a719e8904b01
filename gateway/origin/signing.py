"""Signs requests to the origin, and learns what it needs for that: regions of buckets, the origin's time."""

from __future__ import annotations

import structlog

from gateway.clock import Clock
from gateway.origin.addressing import Target
from gateway.origin.client import OriginRequest
from gateway.origin.credentials import CredentialSource
from gateway.origin.request_body import RequestBody
from gateway.s3.signature_v4 import sign_headers

HOP_HEADER = "x-forebay-hop"
"""Resolver every gateway that a request came through, so that a gateway recognises one of its own."""

_LEARNED_REGIONS_MAX = 10_000
_CLOCK_TOLERANCE_SECONDS = 240.0
_SENT_BY_US = frozenset(
    {
        "host",
        "authorization",
        "x-amz-date",
        "x-amz-content-sha256",
        "x-amz-security-token",
        "content-length",
        "transfer-encoding",
        "connection",
        "expect",
    }
)

log = structlog.get_logger(__name__)


class RequestSigner:
    """Knows the key pair, the region of each bucket and how far the origin's clock is from ours."""

    def __init__(self, credentials: CredentialSource, region: str, clock: Clock, instance_id: str) -> None:
        self._credentials = credentials
        self._region = region
        self._clock = clock
        self._instance_id = instance_id
        self._regions: dict[str, str] = {}
        self._clock_offset = 0.0

    def region_of(self, bucket: str | None) -> str:
        return self._regions.get(bucket or "", self._region)

    async def headers(self, request: OriginRequest, target: Target, body: RequestBody) -> dict[str, str]:
        """Every header of one attempt, signature and framing included."""
        pair = await self._credentials.current()
        headers = {"host": target.host}
        headers.update([field for field in request.headers.items() if field[0] not in _SENT_BY_US])
        hops = headers.get(HOP_HEADER)
        headers[HOP_HEADER] = self._instance_id if hops is None else f"{hops}, {self._instance_id}"
        headers.update(body.signed_headers)
        signature = sign_headers(
            request.method,
            target.path,
            request.query,
            headers,
            payload_hash=body.payload_hash,
            access_key_id=pair.access_key_id,
            secret=pair.secret_access_key,
            session_token=pair.session_token,
            region=self.region_of(request.bucket),
            now=self._clock.now() + self._clock_offset,
        )
        headers.update(signature)
        headers.update(body.framing_headers)
        return headers

    def learn_region(self, bucket: str | None, region: str | None) -> bool:
        """Sign for `region` from now on; False when that is what was signed for already."""
        if bucket is None or region is None or region == self.region_of(bucket):
            return False
        if len(self._regions) >= _LEARNED_REGIONS_MAX:
            self._regions.clear()
        self._regions[bucket] = region
        log.info("origin_region_learned", bucket=bucket, region=region)
        return True

    def learn_time(self, origin_now: float | None) -> bool:
        """Take the origin's time for ours; False when it is what we signed with, give or take."""
        if origin_now is None or abs(origin_now - self._clock.now() - self._clock_offset) < _CLOCK_TOLERANCE_SECONDS:
            return False
        self._clock_offset = origin_now - self._clock.now()
        log.warning("origin_clock_differs", offset_seconds=round(self._clock_offset, 1))
        return True
