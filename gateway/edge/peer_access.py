"""Authenticate requests of other nodes, by their heads alone: the cluster's secret signs each, and each comes once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gateway.core.clock import Clock
from gateway.core.errors import S3Error
from gateway.origin.peer_protocol import NONCE
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import S3Request
from gateway.s3.signature_v4 import (
    UNSIGNED_BETWEEN_NODES,
    parse_authorization,
    parse_timestamp,
    remember_proved,
    verify_header,
)
from gateway.shared.seen_nonces import SeenNonces

CLOCK_SECONDS_MAX = 60
"""The greatest difference between the clocks of two nodes."""

_NONCE = re.compile("[0-9a-f]{32}")


class Asker(NamedTuple):
    """The proof of an answer is made with the secret that signed the request."""

    nonce: str
    secret: bytes


class PeerAccess:
    """Verifies that another node of the cluster has signed a request, and that it was not sent before."""

    def __init__(
        self, nonces: SeenNonces, clock: Clock, name: str, secrets: Sequence[bytes], address: str = ""
    ) -> None:
        """`address` is what this node calls itself."""
        self.address = address
        self._nonces = nonces
        self._clock = clock
        self.apply_settings(name, secrets)

    def apply_settings(self, name: str, secrets: Sequence[bytes]) -> None:
        """Accept these secrets of the cluster of this name from now on."""
        self._access_key_id = f"forebay-{name}"
        self._secrets = [secret.decode() for secret in secrets]

    def admit(self, request: S3Request) -> Asker:
        """Return the asking node; S3Error AccessDenied, or SlowDown if the table of nonces cannot be read now."""
        headers, now = request.headers, self._clock.now()
        try:
            secret = self._signer(request, now)
        except S3Error as error:
            raise _refusal(error.message) from None
        signed_at = parse_timestamp(headers.get("x-amz-date", ""))
        if signed_at is None or abs(now - signed_at) > CLOCK_SECONDS_MAX:
            raise _refusal(f"The clocks of the two nodes differ by more than {CLOCK_SECONDS_MAX} seconds.")
        nonce = headers.get(NONCE, "")
        if _NONCE.fullmatch(nonce) is None:
            raise _refusal(f"The request has no {NONCE}.")
        try:
            is_new = self._nonces.accept(bytes.fromhex(nonce), int(signed_at), int(now) - CLOCK_SECONDS_MAX)
        except TimeoutError:
            raise s3_error("SlowDown", headers={"Retry-After": "1"}) from None
        if not is_new:
            raise _refusal("The request came before.")
        return Asker(nonce, secret.encode())

    def _signer(self, request: S3Request, now: float) -> str:
        """Return the secret that has signed the request, all of it."""
        authorization = parse_authorization(request.headers.get("authorization", ""))
        if authorization.access_key_id != self._access_key_id:
            raise s3_error("AccessDenied", "This port is for the nodes of the cluster.")
        unsigned = request.headers.keys() - UNSIGNED_BETWEEN_NODES - set(authorization.signed_headers)
        if unsigned:
            raise s3_error("AccessDenied", f"The header {min(unsigned)} must be signed.")
        refusal = s3_error("AccessDenied", "This node has no secret of the cluster.")
        for secret in self._secrets:
            try:
                verify_header(request, authorization, secret, now)
            except S3Error as error:
                refusal = error
            else:
                if authorization.unproved:
                    remember_proved(authorization)
                return secret
        raise refusal


def _refusal(why: str) -> S3Error:
    return s3_error("AccessDenied", f"Access Denied. {why}")
