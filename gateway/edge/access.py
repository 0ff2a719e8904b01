"""Authenticate and authorise a request by its head alone: no body has been read.

Authentication: SigV4 in the header, SigV4 and SigV2 in the query, or none (S3 API, "Authenticating Requests"). A
keyring has the access key ids, their secrets, and what each may touch. `authorise` checks bucket and prefix before any
operation begins, for hits and misses alike.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from gateway.core.clock import Clock
from gateway.core.errors import S3Error
from gateway.origin.client import KeyPair
from gateway.policy.callers import OWN, UNSIGNED
from gateway.policy.slots import (
    EVERYTHING,
    Grant,
    Slots,
    refusal_of_any_write,
    refusal_of_bucket_operation,
    refusal_of_creation,
    refusal_of_listing,
    refusal_of_read,
    refusal_of_unknown_writes,
    refusal_of_write,
)
from gateway.s3.error_codes import s3_error
from gateway.s3.prepared_head import HeadValues, PreparedHead
from gateway.s3.presigned import (
    parse_presigned_v2,
    parse_presigned_v4,
    verify_presigned_v2,
    verify_presigned_v4,
)
from gateway.s3.requests import (
    Operation,
    S3Request,
    is_form,
    is_preflight,
    names_foreign_source,
    parse_copy_source,
    parse_query,
)
from gateway.s3.signature_v4 import (
    Authorization,
    SeedSignature,
    parse_authorization,
    remember_proved,
    verify_header,
)


@dataclass(slots=True)
class Key:
    """One key pair that callers may sign with. The secret never shows in a repr.

    `pair` is the same for requests to the origin in the caller's own name; None: it is the gateway's own anyway.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(repr=False)
    grant: Grant
    pair: KeyPair | None = None


class Keyring(Protocol):
    """Finds the key pair that a request claims to be signed with."""

    def find(self, access_key_id: str, session_token: str | None) -> Key:
        """Return the key pair; S3Error InvalidAccessKeyId or InvalidToken."""


class ConfiguredKeyring:
    """The key pairs of `[[credentials]]`. A session token goes with those that have one, and with no other."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {
            key.access_key_id: replace(key, pair=KeyPair(key.access_key_id, key.secret_access_key, key.session_token))
            for key in keys
        }

    def find(self, access_key_id: str, session_token: str | None) -> Key:
        key = self._keys.get(access_key_id)
        if key is None:
            raise unknown_key(access_key_id, "It is none of the gateway's [[credentials]].")
        if session_token is not key.session_token and not _same(key.session_token, session_token):
            if key.session_token is None:
                raise s3_error("InvalidToken", "This key of [[credentials]] has no session token; send none.")
            raise s3_error("InvalidToken", "The session token is not the one that [[credentials]] have for this key.")
        return key


class OwnKeyPair(Protocol):
    """A key pair that the gateway signs with towards the origin."""

    @property
    def access_key_id(self) -> str: ...
    @property
    def secret_access_key(self) -> str: ...
    @property
    def session_token(self) -> str | None: ...


class OwnKeyPairs(Protocol):
    """Source of the gateway's own key pairs: the current one and, after a rotation, the one before."""

    def known(self) -> Iterable[OwnKeyPair]: ...


class OriginKeyring:
    """Without `[[credentials]]`: callers sign with the very key pair that the gateway signs with towards the origin.

    Its holder could ask the origin for everything, so it covers everything.
    """

    def __init__(self, pairs: OwnKeyPairs) -> None:
        self._pairs = pairs

    def find(self, access_key_id: str, session_token: str | None) -> Key:
        for pair in self._pairs.known():
            is_of_session = pair.session_token is session_token or _same(pair.session_token, session_token)
            if is_of_session and pair.access_key_id == access_key_id:
                return Key(pair.access_key_id, pair.secret_access_key, pair.session_token, EVERYTHING)
        known = {pair.access_key_id for pair in self._pairs.known()}
        if access_key_id in known:
            raise s3_error(
                "InvalidToken",
                "The session token is not the one of the gateway's own credentials. "
                "To admit callers with credentials of their own, configure [[credentials]].",
            )
        if not known:
            advice = "The gateway has found no credentials for its origin, and no [[credentials]] are configured."
        elif session_token is not None:
            advice = "Session credentials of another role than the gateway's own need [[credentials]]."
        else:
            advice = "Without [[credentials]], sign with the key pair that the gateway itself uses towards the origin."
        raise unknown_key(access_key_id, advice)


def unknown_key(access_key_id: str, advice: str) -> S3Error:
    """InvalidAccessKeyId with the way out."""
    message = f"The AWS access key Id you provided does not exist in our records. {advice}"
    return s3_error("InvalidAccessKeyId", message, AWSAccessKeyId=access_key_id)


def _same(left: str | None, right: str | None) -> bool:
    return hmac.compare_digest((left or "").encode(), (right or "").encode("latin-1", "replace"))


@dataclass(slots=True)
class Caller:
    """The sender of a request. `pair` is as of `Key`.

    Signed chunks of its body build on `seed`; `authorization` belongs to a request that is signed in its header.
    """

    access_key_id: str
    grant: Grant
    seed: SeedSignature | None = None
    anonymous: bool = False
    authorization: Authorization | None = None
    pair: KeyPair | None = None


ANONYMOUS = Caller(UNSIGNED, EVERYTHING, anonymous=True)


class Authenticator:
    """Verifies every request's signature anew: keys are cached, a verdict never is."""

    def __init__(
        self, keyring: Keyring, clock: Clock, *, allow_unsigned: bool = False, allow_signature_v2: bool = True
    ) -> None:
        self._keyring = keyring
        self._has_own_keys = isinstance(keyring, OriginKeyring)
        self._clock = clock
        self._allow_unsigned = allow_unsigned
        self._allow_signature_v2 = allow_signature_v2

    def apply_settings(self, keyring: Keyring) -> None:
        """Callers sign with these from now on."""
        self._keyring = keyring

    def credential_of(self, access_key_id: str) -> str:
        """Return a caller's name in metrics and limits: the gateway's own keys change, and are one credential."""
        return OWN if self._has_own_keys and access_key_id != UNSIGNED else access_key_id

    def authenticate(self, request: S3Request) -> Caller:
        """Return the caller of a request with a valid signature, else S3Error. Preflights are always anonymous."""
        if is_preflight(request):
            return ANONYMOUS
        header = request.headers.get("authorization")
        presigned = parse_presigned_v4(request) if request.raw_query else None
        if header is not None and presigned is not None:
            raise s3_error("InvalidArgument", "Only one auth mechanism allowed.", ArgumentName="Authorization")
        if header is not None:
            return self._by_header(request, header)
        if presigned is not None:
            key = self._keyring.find(presigned.access_key_id, presigned.session_token)
            seed = verify_presigned_v4(request, presigned, key.secret_access_key, self._clock.now())
            return Caller(key.access_key_id, key.grant, seed, pair=key.pair)
        return self._by_old_query(request)

    def _by_header(self, request: S3Request, header: str) -> Caller:
        authorization = parse_authorization(header)
        key = self._keyring.find(authorization.access_key_id, request.headers.get("x-amz-security-token"))
        seed = verify_header(request, authorization, key.secret_access_key, self._clock.now())
        if authorization.unproved:
            remember_proved(authorization)
        return Caller(key.access_key_id, key.grant, seed, authorization=authorization, pair=key.pair)

    def key_named(self, access_key_id: str, session_token: str | None) -> Key:
        """Return a key pair whose use is proved in another way than by a signature; S3Error."""
        return self._keyring.find(access_key_id, session_token)

    def key_of(self, head: PreparedHead, values: HeadValues) -> Key | None:
        """Return the key that signed a request with such a head; None: the full check says what is wrong."""
        authorization = head.authorization
        try:
            if authorization is None:
                return self._key_of_presigned(head, values)
            key = self._keyring.find(authorization.access_key_id, head.request.headers.get("x-amz-security-token"))
        except S3Error:
            return None
        return key if head.verified(values, key.secret_access_key, self._clock.now()) else None

    def _key_of_presigned(self, head: PreparedHead, values: HeadValues) -> Key | None:
        request = replace(
            head.request,
            raw_path=values.raw_path,
            raw_query=values.raw_query,
            headers=head.headers(values),
            query=parse_query(values.raw_query),
        )
        presigned = parse_presigned_v4(request)
        if presigned is None:
            return None
        key = self._keyring.find(presigned.access_key_id, presigned.session_token)
        verify_presigned_v4(request, presigned, key.secret_access_key, self._clock.now())
        return key

    def _by_old_query(self, request: S3Request) -> Caller:
        presigned = parse_presigned_v2(request) if request.raw_query else None
        if presigned is None:
            if self._allow_unsigned:
                return ANONYMOUS
            if is_form(request):
                raise s3_error(
                    "NotImplemented",
                    "This gateway does not read the signature in a form's body. Have the browser send a presigned PUT.",
                )
            raise s3_error("AccessDenied", "The request is not signed, and this gateway serves signed requests only.")
        if not self._allow_signature_v2:
            raise s3_error(
                "InvalidRequest",
                "Signature version 2 is switched off here (server.allow_signature_v2). Please use AWS4-HMAC-SHA256.",
            )
        key = self._keyring.find(presigned.access_key_id, presigned.session_token)
        verify_presigned_v2(request, presigned, key.secret_access_key, self._clock.now())
        return Caller(key.access_key_id, key.grant, pair=key.pair)


_LISTINGS = frozenset({Operation.LIST_OBJECTS, Operation.LIST_OBJECTS_V2, Operation.LIST_MULTIPART_UPLOADS})

_OVERRIDES = frozenset(
    {
        "x-http-method",
        "x-http-method-override",
        "x-method",
        "x-method-override",
        "x-original-uri",
        "x-original-url",
        "x-rewrite-url",
    }
)
"""By these, some servers carry out another method, or on another path, than what is authorised here."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})

_SELECT = frozenset({"select", "select-type", "x-id"})


def authorise(request: S3Request, grant: Grant, slots: Slots) -> None:
    """Raise AccessDenied (403) unless the caller may do what the request asks (docs/semantics.md, clause 7).

    InvalidRequest (400) when the origin might do something else than what is judged here.
    """
    if not _OVERRIDES.isdisjoint(request.headers):
        name = min(_OVERRIDES.intersection(request.headers))
        raise s3_error("InvalidRequest", f"The header {name} is not accepted: send the request itself.")
    reason = _refusal(request, grant, slots)
    if reason is None and not grant.covers_everything:
        reason = _refusal_of_sources(request, grant)
    # RenameObject takes a key away that its header names; a form holds its own.
    if reason is None and ("x-amz-rename-source" in request.headers or is_form(request)):
        reason = refusal_of_unknown_writes(grant, slots, request.bucket or "")
    if reason is not None:
        raise s3_error("AccessDenied", f"Access Denied. {reason}")


def _refusal(request: S3Request, grant: Grant, slots: Slots) -> str | None:
    bucket, key = request.bucket, request.key
    if bucket is not None and key is not None:
        if is_read(request):
            return refusal_of_read(grant, bucket, key)
        return refusal_of_write(grant, slots, bucket, key)
    if bucket is not None and request.operation in _LISTINGS:
        return refusal_of_listing(grant, bucket, request.parameter("prefix") or "")
    if request.operation is Operation.CREATE_BUCKET:
        return refusal_of_creation(grant, bucket or "")  # a creation with an effect is checked further then
    if request.operation is Operation.DELETE_OBJECTS:
        return refusal_of_any_write(grant, slots, bucket or "")  # each key is checked once the body has named it
    return refusal_of_bucket_operation(grant, slots, bucket, is_read=is_read(request))


def _refusal_of_sources(request: S3Request, grant: Grant) -> str | None:
    """Rights to what a copy reads, and to what a rename takes away."""
    copied = request.headers.get("x-amz-copy-source")
    if copied is not None:
        # Servers disagree on whether `+` stands for a space here: both readings must be allowed.
        sources = [parse_copy_source(text).key for text in {copied, copied.replace("+", "%2B")}]
        if not all(grant.covers(source.bucket, source.key) for source in sources):
            return "The credential does not cover the copy source."
    if names_foreign_source(request.headers):
        return "A copy source in a header other than x-amz-copy-source needs a credential that covers everything."
    return None


def is_read(request: S3Request) -> bool:
    """Return True if the request changes nothing and gives its caller no means to.

    SelectObjectContent reads, though it is a POST. CreateSession hands out the origin's own keys, though it is a GET.
    """
    if request.method in _READING and not request.query:
        return True
    if request.method not in _READING and (request.method != "POST" or is_form(request)):
        return False
    names = {name for name, _ in request.query}
    if request.method in _READING:
        return "session" not in names
    return request.method == "POST" and "select" in names and names <= _SELECT
