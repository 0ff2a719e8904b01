"""The origins that the settings name: the homes of buckets, and the key that signs each request.

Of several keys that cover a request the most specific signs: of the slots in its bucket, that of the one with the
longest prefix, else that of the bucket, else that of a slot for every bucket, else that of `[origin]`. A request
without a key is the bucket's, except listings, which their prefix's slot signs, and DeleteObjects, which one slot signs
if it has all the keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

from gateway.config import OriginCredentialSettings, Settings
from gateway.config import OriginSettings as OriginSettingsTable
from gateway.core.clock import Clock
from gateway.origin.client import KeyPair, Origin, OriginCredentials, OriginRequest, OriginSettings, RoutedOrigin
from gateway.origin.signing import ChainCredentials, StaticCredentials
from gateway.policy.slots import Prefix, PrefixMap


class _Named(NamedTuple):
    """One of `[[origin_credentials]]` in use. `lender` has the key that assumes its role, if nothing else uses it."""

    settings: OriginCredentialSettings
    credentials: OriginCredentials
    lender: OriginCredentials | None = None


class OriginKeys:
    """Every key pair that the gateway signs with towards its origins, except those that no bucket or slot names."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self.own: OriginCredentials = _own(settings, clock)
        """The pair of `[origin]`: callers may sign with it if there are no `[[credentials]]`, and with no other."""

        self._named: dict[str, _Named] = {}
        self._by_prefix: PrefixMap[OriginCredentials] = PrefixMap(())
        self._settings = settings

    async def start(self) -> None:
        """Begin to look for all pairs, without waiting."""
        await self.own.start()
        await self._follow_named(self._settings)

    async def apply_settings(self, settings: Settings) -> None:
        """Follow these settings from now on. Only what has changed begins anew."""
        if isinstance(self.own, StaticCredentials):
            self.own.apply_settings(_pair_of(settings.origin))
        else:
            self.own.renew()
        await self._follow_named(settings)

    async def aclose(self) -> None:
        for one in self._named.values():
            await _close(one)
        await self.own.aclose()

    def of(self, request: OriginRequest) -> OriginCredentials:
        bucket = request.bucket
        if bucket is None:
            return self.own
        if request.key is not None:
            return self._covering(bucket, request.key)
        if request.keys:
            found = {id(source): source for source in (self._covering(bucket, key) for key in request.keys)}
            if len(found) == 1:
                return next(iter(found.values()))
        prefix = next((value for name, value in request.query if name == "prefix"), None)
        return self._covering(bucket, (prefix or "") if request.method == "GET" else "")

    def refused(self, request: OriginRequest) -> None:
        """Renew the key of a request that a home has refused."""
        self.of(request).renew()

    def problem(self, name: str) -> str | None:
        """Return why one of `[[origin_credentials]]`, perhaps still good, is not renewed; None without a problem."""
        found = self._named.get(name)
        return found.credentials.problem if found is not None else None

    def _covering(self, bucket: str, key: str) -> OriginCredentials:
        return self._by_prefix.longest(bucket, key) or self.own

    async def _follow_named(self, settings: Settings) -> None:
        signers = list(_signers(settings))
        used = {name for _, name in signers}
        wanted = {one.name: one for one in settings.origin_credentials if one.name in used}
        if any(one.access_key_id is None for one in wanted.values()):
            await asyncio.to_thread(import_module, "gateway.origin.sts")  # brings botocore with it: half a second
        named = {name: await self._begun(self._named.get(name), one, settings) for name, one in wanted.items()}
        before, self._named = self._named, named
        self._by_prefix = PrefixMap((prefix, named[name].credentials) for prefix, name in signers)
        kept = {id(one.credentials) for one in named.values()}
        for ended in before.values():
            if id(ended.credentials) not in kept:
                await _close(ended)

    async def _begun(self, before: _Named | None, one: OriginCredentialSettings, settings: Settings) -> _Named:
        if before is not None and before.settings == one:
            if one.role_arn is None:
                before.credentials.renew()
            return before
        if before is not None and isinstance(before.credentials, StaticCredentials) and one.access_key_id is not None:
            before.credentials.apply_settings(_pair_of(one))
            return before._replace(settings=one)
        begun = self._new(one, settings)
        if before is not None and one.role_arn is not None and before.settings.role_arn == one.role_arn:
            from gateway.origin.sts import RoleCredentials

            if isinstance(begun.credentials, RoleCredentials) and isinstance(before.credentials, RoleCredentials):
                begun.credentials.inherit(before.credentials)
        for credentials in (begun.lender, begun.credentials):
            if credentials is not None:
                await credentials.start()
        return begun

    def _new(self, one: OriginCredentialSettings, settings: Settings) -> _Named:
        if one.role_arn is None:
            if one.access_key_id is not None:
                return _Named(one, StaticCredentials(_pair_of(one)))
            return _Named(one, ChainCredentials(self._clock, profile=one.profile))
        from gateway.origin.sts import Role, RoleCredentials

        role = Role(
            one.name,
            one.role_arn,
            settings.origin.region,
            session_name=one.role_session_name or "forebay",
            external_id=one.external_id.get_secret_value() if one.external_id is not None else None,
            duration_seconds=one.role_duration_seconds,
            token_file=one.web_identity_token_file,
            endpoint_url=one.sts_endpoint_url or None,
        )
        if one.web_identity_token_file is not None:
            return _Named(one, RoleCredentials(role, None, self._clock))
        if one.source_profile is None:
            return _Named(one, RoleCredentials(role, self.own, self._clock))
        lender = ChainCredentials(self._clock, profile=one.source_profile)
        return _Named(one, RoleCredentials(role, lender, self._clock), lender)


async def _close(one: _Named) -> None:
    await one.credentials.aclose()
    if one.lender is not None:
        await one.lender.aclose()


def _signers(settings: Settings) -> Iterator[tuple[Prefix, str]]:
    """Yield slots first: of several with the same prefix the first counts."""
    for slot in settings.slots:
        if slot.origin_credentials is not None:
            yield slot.prefix, slot.origin_credentials
    for bucket in settings.buckets:
        if bucket.origin_credentials is not None:
            yield Prefix(bucket.name), bucket.origin_credentials


def routed_origin(settings: Settings, connect: Callable[[OriginSettings], Origin]) -> Origin:
    """Return all origins as one; `connect` makes each. Buckets reached in the same way share connections and facts."""
    main = _origin_settings(settings)
    found: dict[OriginSettings, Origin] = {main: connect(main)}
    by_bucket: dict[str, Origin] = {}
    for bucket in settings.buckets:
        own = replace(
            main,
            endpoint_url=bucket.endpoint_url,
            region=bucket.region,
            addressing_style=bucket.addressing_style or main.addressing_style,
            ca_bundle=bucket.ca_bundle,
        )
        if own not in found:
            found[own] = connect(own)
        by_bucket[bucket.name] = found[own]
    return RoutedOrigin(found[main], by_bucket) if len(found) > 1 else found[main]


def _own(settings: Settings, clock: Clock) -> OriginCredentials:
    origin = settings.origin
    if origin.access_key_id is None or origin.secret_access_key is None:
        return ChainCredentials(clock, profile=origin.profile)
    return StaticCredentials(_pair_of(settings.origin))


def _pair_of(one: OriginSettingsTable | OriginCredentialSettings) -> KeyPair:
    if one.access_key_id is None or one.secret_access_key is None:
        raise ValueError("there is no key pair in the settings")
    token = one.session_token.get_secret_value() if one.session_token else None
    return KeyPair(one.access_key_id, one.secret_access_key.get_secret_value(), token)


def _origin_settings(settings: Settings) -> OriginSettings:
    origin = settings.origin
    return OriginSettings(
        endpoint_url=origin.endpoint_url,
        region=origin.region,
        addressing_style=origin.addressing_style,
        ca_bundle=origin.ca_bundle,
        proxy=origin.proxy.get_secret_value() if origin.proxy else None,
        connect_timeout_seconds=origin.connect_timeout_seconds,
        first_byte_timeout_seconds=origin.first_byte_timeout_seconds,
        stall_timeout_seconds=origin.stall_timeout_seconds,
        read_timeout_seconds=origin.read_timeout_seconds,
        slow_timeout_seconds=origin.slow_timeout_seconds,
        connection_wait_seconds=origin.connection_wait_seconds,
        max_connections=origin.max_connections,
        max_attempts=origin.max_attempts,
    )
