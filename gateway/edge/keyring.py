"""Who may call: access key ids, their secrets, and what each may touch."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.errors import S3Error
from gateway.policy.access import EVERYTHING, Grant
from gateway.s3.error_codes import s3_error


@dataclass(slots=True)
class Key:
    """One key pair that callers may sign with. The secret never shows in a repr."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(repr=False)
    grant: Grant


class Keyring(Protocol):
    """Finds the key pair that a request claims to be signed with."""

    def find(self, access_key_id: str, session_token: str | None) -> Key:
        """The key pair; raises S3Error InvalidAccessKeyId or InvalidToken."""


class ConfiguredKeyring:
    """The key pairs of `[[credentials]]`. They are long-lived: a session token never goes with them."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {key.access_key_id: key for key in keys}

    def find(self, access_key_id: str, session_token: str | None) -> Key:
        key = self._keys.get(access_key_id)
        if key is None:
            raise unknown_key(access_key_id, "It is none of the gateway's [[credentials]].")
        if session_token is not None:
            raise s3_error("InvalidToken", "Keys of [[credentials]] have no session token; send none.")
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
    """Where the gateway's own key pairs come from: the current one and, after a rotation, the one before."""

    def known(self) -> Iterable[OwnKeyPair]: ...


class OriginKeyring:
    """Without `[[credentials]]`: callers sign with the very key pair that the gateway signs with towards the origin.

    Whoever holds it could ask the origin for everything himself, so it covers everything.
    """

    def __init__(self, pairs: OwnKeyPairs) -> None:
        self._pairs = pairs

    def find(self, access_key_id: str, session_token: str | None) -> Key:
        for pair in self._pairs.known():
            if pair.access_key_id == access_key_id and _same(pair.session_token, session_token):
                return Key(pair.access_key_id, pair.secret_access_key, pair.session_token, EVERYTHING)
        raise self._refusal(access_key_id, session_token)

    def _refusal(self, access_key_id: str, session_token: str | None) -> S3Error:
        if not any(pair.access_key_id == access_key_id for pair in self._pairs.known()):
            return self._not_ours(access_key_id, session_token)
        return s3_error(
            "InvalidToken",
            "The session token is not the one of the gateway's own credentials. "
            "To admit callers with credentials of their own, configure [[credentials]].",
        )

    def _not_ours(self, access_key_id: str, session_token: str | None) -> S3Error:
        if not list(self._pairs.known()):
            return unknown_key(
                access_key_id,
                "The gateway has found no credentials for its origin, and no [[credentials]] are configured.",
            )
        if session_token is not None:
            return unknown_key(
                access_key_id, "Session credentials of another role than the gateway's own need [[credentials]]."
            )
        return unknown_key(
            access_key_id,
            "Without [[credentials]], sign with the key pair that the gateway itself uses towards the origin.",
        )


def unknown_key(access_key_id: str, advice: str) -> S3Error:
    """InvalidAccessKeyId with the way out."""
    message = f"The AWS access key Id you provided does not exist in our records. {advice}"
    return s3_error("InvalidAccessKeyId", message, AWSAccessKeyId=access_key_id)


def _same(left: str | None, right: str | None) -> bool:
    return hmac.compare_digest((left or "").encode(), (right or "").encode("latin-1", "replace"))
