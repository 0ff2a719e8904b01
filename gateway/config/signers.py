"""The gateway's signing keys by bucket and slot, in words: for the start's banner, the status, and checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gateway.config.settings import Settings


class Signer(NamedTuple):
    """A bucket or slot that differs from `[origin]`; `credentials` says whose key signs, without a secret.

    `slot` is the slot's name; None: it is a bucket's. `name` is that of the credentials, if they have one.
    """

    prefix: str
    slot: str | None
    endpoint_url: str
    region: str
    credentials: str
    name: str | None

    @property
    def used_by(self) -> str:
        bucket = self.prefix.removeprefix("s3://").partition("/")[0]
        return f"bucket:{bucket}" if self.slot is None else f"slot:{self.slot}"


def signers(settings: Settings) -> Iterator[Signer]:
    """Every one of `[[buckets]]`, then the slots with a key of their own."""
    names = {
        one.name: f"{one.name} ({_way(one.access_key_id, one.profile, one.role_arn)})"
        for one in settings.origin_credentials
    }
    own = "the key of [origin]"
    regions = {bucket.name: bucket.region for bucket in settings.buckets}
    for bucket in settings.buckets:
        signed = names[bucket.origin_credentials] if bucket.origin_credentials is not None else own
        yield Signer(
            f"s3://{bucket.name}/", None, bucket.endpoint_url, bucket.region, signed, bucket.origin_credentials
        )
    for slot in settings.slots:
        if slot.origin_credentials is not None:
            name = slot.prefix.bucket
            region, home = regions.get(name, settings.origin.region), settings.homes.of(name)
            signed = names[slot.origin_credentials]
            yield Signer(str(slot.prefix), slot.name, home, region, signed, slot.origin_credentials)


def _way(access_key_id: str | None, profile: str | None, role_arn: str | None) -> str:
    if role_arn is not None:
        return f"role {role_arn}"
    return f"profile {profile}" if access_key_id is None else f"key {access_key_id}"
