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
from typing import Any, NamedTuple

from gateway.config import OriginCredentialSettings, Settings
from gateway.config import OriginSettings as OriginSettingsTable
from gateway.config.entries import BucketSettings, ReplicaSettings
from gateway.config.fields import azure_url, directory_of, is_webhdfs
from gateway.core.clock import Clock
from gateway.core.model import ObjectKey
from gateway.origin.client import KeyPair, Origin, OriginCredentials, OriginRequest, OriginSettings, RoutedOrigin
from gateway.origin.dialects import AZURE
from gateway.origin.replicas import QUIET_SECONDS_MAX, Replica, ReplicaOrigin
from gateway.origin.s3 import OwnKeyOrigin, S3Origin
from gateway.origin.signing import ChainCredentials, CredentialsOf, StaticCredentials, origin_name
from gateway.origin.stores.azure.shared_key import SharedKeySigner
from gateway.origin.stores.azure.store import AzureOrigin
from gateway.origin.stores.directory.origin import DirectoryOrigin
from gateway.origin.stores.directory.store import DirectoryStore
from gateway.origin.stores.face import StoreOrigin
from gateway.origin.stores.webhdfs.store import WebHdfsStore
from gateway.origin.traffic_meter import Attempt
from gateway.policy.slots import Prefix, PrefixMap
from gateway.telemetry import metrics


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

    def named(self, name: str | None) -> OriginCredentials:
        """Return the pair of `[[origin_credentials]]` of this name, which a bucket or slot uses; None: `own`."""
        return self._named[name].credentials if name is not None else self.own

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
        used = {name for _, name in signers} | {one.origin_credentials for one in settings.event_sources}
        used |= {one.origin_credentials for bucket in settings.buckets for one in bucket.replicas}
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


Connect = Callable[[OriginSettings, CredentialsOf | None], Origin]
"""Makes the origin at one home; the second says whose key signs each request. None: as `OriginKeys.of` says."""


class Replicas:
    """The replicas of buckets, as one process uses them."""

    def __init__(self, settings: Settings, keys: OriginKeys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._by_bucket: dict[str, ReplicaOrigin] = {}
        self._found: dict[tuple[OriginSettings, str | None], Origin] = {}
        self.apply_settings(settings)

    def apply_settings(self, settings: Settings) -> None:
        """Follow what slots prefer. Where replicas are changes with a new start only."""
        self._preferring_source = frozenset(slot.name for slot in settings.slots if slot.prefer == "source")

    @property
    def origins(self) -> list[Origin]:
        return list(self._found.values())

    def reads_near(self, key: ObjectKey, slot: str) -> bool:
        """As `ReplicaOrigin`, of all buckets."""
        origin = self._by_bucket.get(key.bucket)
        return origin is not None and origin.reads_near(key.key, slot)

    def before(self, source: Origin, bucket: BucketSettings, main: OriginSettings, connect: Connect) -> Origin:
        """Return a bucket's origin: `source`, with its replicas before it if it has any."""
        if not bucket.replicas:
            return source
        replicas = [Replica(self._replica(one, main, connect), one.name, self._clock) for one in bucket.replicas]
        made = ReplicaOrigin(source, replicas, lambda slot: slot in self._preferring_source)
        self._by_bucket[bucket.name] = made
        return made

    def _replica(self, one: ReplicaSettings, main: OriginSettings, connect: Connect) -> Origin:
        """Return how to reach a replica, which is tried once: the source is asked sooner than it again."""
        name, impatient = one.origin_credentials, replace(main, max_attempts=1, quiet_seconds_max=QUIET_SECONDS_MAX)
        key = _at(one, impatient), name
        if key not in self._found:
            origin = connect(key[0], lambda _: self._keys.named(name))
            self._found[key] = OwnKeyOrigin(origin, lambda _: self._keys.named(name).renew())
        return self._found[key]


def _of_directory(one: BucketSettings | OriginSettingsTable) -> dict[str, Any]:
    return {"symlinks": one.symlinks or "read", "file_mode": one.file_mode}


def _at(one: BucketSettings | ReplicaSettings, like: OriginSettings) -> OriginSettings:
    return replace(
        like,
        endpoint_url=one.endpoint_url,
        region=one.region,
        addressing_style=one.addressing_style or like.addressing_style,
        dialect=one.dialect or like.dialect,
        ca_bundle=one.ca_bundle,
    )


def routed_origin(settings: Settings, connect: Connect, replicas: Replicas) -> Origin:
    """Return all origins as one; `connect` makes each. Buckets reached in the same way share connections and facts."""
    main = origin_settings(settings)
    found: dict[OriginSettings, Origin] = {main: connect(main, None)}
    by_bucket: dict[str, Origin] = {}
    for bucket in settings.buckets:
        own = replace(_at(bucket, main), datanodes=tuple(bucket.datanodes))
        if directory_of(bucket.endpoint_url) is not None:  # nothing else matters there
            own = replace(main, endpoint_url=bucket.endpoint_url, **_of_directory(bucket))
        elif is_webhdfs(bucket.endpoint_url):
            own = replace(own, region=main.region, addressing_style=main.addressing_style, dialect=main.dialect)
        if own not in found:
            found[own] = connect(own, None)
        by_bucket[bucket.name] = replicas.before(found[own], bucket, main, connect)
    is_one = all(one is found[main] for one in by_bucket.values())
    return found[main] if is_one else RoutedOrigin(found[main], by_bucket, [*found.values(), *replicas.origins])


def store_origin(
    home: OriginSettings, clock: Clock, on_attempt: Callable[[Attempt], None] | None = None
) -> StoreOrigin | None:
    """Return the origin that is a directory, here or of HDFS; None: the home is an S3."""
    endpoint_url = home.endpoint_url or ""
    if is_webhdfs(endpoint_url):
        return StoreOrigin(WebHdfsStore(home, clock), clock, name=origin_name(endpoint_url), on_attempt=on_attempt)
    directory = directory_of(endpoint_url)
    if directory is None:
        return None
    store = DirectoryStore(directory, home, lambda reason: metrics.DIRECTORY_SKIPPED_NAMES.add(1, reason))
    return DirectoryOrigin(store, clock, name=str(directory), on_attempt=on_attempt)


def http_origin(home: OriginSettings, clock: Clock, connect: Callable[..., S3Origin]) -> tuple[S3Origin, Origin]:
    """Return what sends requests to a home, made by `connect` as an `S3Origin` is, and the origin over it."""
    url = azure_url(home.endpoint_url or "")
    if url is None:
        made = connect(home)
        return made, made
    azure = replace(home, endpoint_url=url, addressing_style="path", dialect=AZURE.name)
    made = connect(azure, signer=SharedKeySigner)
    return made, AzureOrigin(made, clock, name=origin_name(home.endpoint_url or ""))


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


def origin_settings(settings: Settings) -> OriginSettings:
    """Return how `[origin]` is reached, and how patiently."""
    origin = settings.origin
    return OriginSettings(
        endpoint_url=origin.endpoint_url,
        region=origin.region,
        addressing_style=origin.addressing_style,
        dialect=origin.dialect,
        datanodes=tuple(origin.datanodes),
        **_of_directory(origin),
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
