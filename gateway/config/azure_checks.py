"""Rules for origins that are Azure Blob."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Protocol

from pydantic import SecretStr

from gateway.config.fields import azure_url
from gateway.config.problems import Hidden
from gateway.config.settings import Settings
from gateway.core.errors import ConfigError

_OF_S3 = "remove this: the origin is Azure Blob, which has nothing of the kind"
_KEY = "the name of the storage account as access_key_id, and its key (base64) as secret_access_key or in a file"


class _Pair(Protocol):
    access_key_id: str | None
    secret_access_key: SecretStr | None
    session_token: SecretStr | None


def azure_problems(settings: Settings) -> Iterator[ConfigError]:
    origin = settings.origin
    named = {one.name: (f"origin_credentials[{i}]", one) for i, one in enumerate(settings.origin_credentials)}
    used: dict[str, _Pair] = {}

    def use(name: str | None) -> None:
        if name is None:
            used["origin"] = origin
        elif name in named:
            used[named[name][0]] = named[name][1]

    if azure_url(origin.endpoint_url) is not None:
        use(None)
        for name, inherited in (("addressing_style", "auto"), ("dialect", "auto")):
            if getattr(origin, name) != inherited:
                yield ConfigError(f"origin.{name}", getattr(origin, name), _OF_S3)
    for i, bucket in enumerate(settings.buckets):
        if azure_url(bucket.endpoint_url) is None:
            continue
        use(bucket.origin_credentials)
        for name in ("addressing_style", "dialect"):
            if getattr(bucket, name) not in (None, "auto", getattr(origin, name)):
                yield ConfigError(f"buckets[{i}].{name}", getattr(bucket, name), _OF_S3)
    for i, slot in enumerate(settings.slots):
        bucket_name = slot.prefix.bucket
        homes = [settings.homes.of(bucket_name)] if bucket_name else settings.homes.by_bucket.values()
        if not any(azure_url(home) for home in [*homes, *([] if bucket_name else [origin.endpoint_url])]):
            continue
        if slot.authorization == "origin":
            yield ConfigError(
                f"slots[{i}].authorization", "origin", "gateway: the origin is Azure Blob, and knows no keys of callers"
            )
        if bucket_name and slot.origin_credentials is not None:
            use(slot.origin_credentials)
    for key, pair in used.items():
        yield from _of_key(key, pair)


def _of_key(key: str, pair: _Pair) -> Iterator[ConfigError]:
    if pair.access_key_id is None or pair.secret_access_key is None:
        yield ConfigError(f"{key}.access_key_id", None, f"Azure Blob needs it: {_KEY}. Roles and profiles are AWS's")
        return
    if pair.session_token is not None:
        yield ConfigError(f"{key}.session_token", Hidden(), _OF_S3)
    try:
        base64.b64decode(pair.secret_access_key.get_secret_value(), validate=True)
    except binascii.Error:
        yield ConfigError(f"{key}.secret_access_key", Hidden(), f"{_KEY}; what is given is not base64")
