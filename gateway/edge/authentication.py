"""Who is calling: SigV4 in the header, SigV4 and SigV2 in the query, or nobody (S3 API, "Authenticating Requests")."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.clock import Clock
from gateway.edge.keyring import Keyring
from gateway.policy.access import EVERYTHING, Grant
from gateway.s3.error_codes import s3_error
from gateway.s3.presigned import (
    parse_presigned_v2,
    parse_presigned_v4,
    verify_presigned_v2,
    verify_presigned_v4,
)
from gateway.s3.requests import S3Request
from gateway.s3.signature_v4 import SeedSignature, parse_authorization, remember_proved, verify_header


@dataclass(slots=True)
class Caller:
    """Who sent the request. `seed` is what signed chunks of its body build on."""

    access_key_id: str
    grant: Grant
    seed: SeedSignature | None = None
    anonymous: bool = False


ANONYMOUS = Caller("anonymous", EVERYTHING, anonymous=True)


class Authenticator:
    """Verifies every request's signature anew: keys are cached, a verdict never is."""

    def __init__(
        self, keyring: Keyring, clock: Clock, *, allow_unsigned: bool = False, allow_signature_v2: bool = True
    ) -> None:
        self._keyring = keyring
        self._clock = clock
        self._allow_unsigned = allow_unsigned
        self._allow_signature_v2 = allow_signature_v2

    def authenticate(self, request: S3Request) -> Caller:
        """The caller of a request whose signature holds; raises S3Error otherwise."""
        header = request.headers.get("authorization")
        presigned = parse_presigned_v4(request) if request.raw_query else None
        if header is not None and presigned is not None:
            raise s3_error("InvalidArgument", "Only one auth mechanism allowed.", ArgumentName="Authorization")
        if header is not None:
            return self._by_header(request, header)
        if presigned is not None:
            key = self._keyring.find(presigned.access_key_id, presigned.session_token)
            seed = verify_presigned_v4(request, presigned, key.secret_access_key, self._clock.now())
            return Caller(key.access_key_id, key.grant, seed)
        return self._by_old_query(request)

    def _by_header(self, request: S3Request, header: str) -> Caller:
        authorization = parse_authorization(header)
        key = self._keyring.find(authorization.access_key_id, request.headers.get("x-amz-security-token"))
        seed = verify_header(request, authorization, key.secret_access_key, self._clock.now())
        if authorization.unproved:
            remember_proved(authorization)
        return Caller(key.access_key_id, key.grant, seed)

    def _by_old_query(self, request: S3Request) -> Caller:
        presigned = parse_presigned_v2(request) if request.raw_query else None
        if presigned is None:
            if self._allow_unsigned:
                return ANONYMOUS
            raise s3_error("AccessDenied", "The request is not signed, and this gateway serves signed requests only.")
        if not self._allow_signature_v2:
            raise s3_error(
                "InvalidRequest",
                "Signature version 2 is switched off here (server.allow_signature_v2). Please use AWS4-HMAC-SHA256.",
            )
        key = self._keyring.find(presigned.access_key_id, presigned.session_token)
        verify_presigned_v2(request, presigned, key.secret_access_key, self._clock.now())
        return Caller(key.access_key_id, key.grant)
