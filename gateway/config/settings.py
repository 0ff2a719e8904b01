"""Settings as typed data: what can be set, its default, unit, range and help, all in one place.

TOML names are the contract with users (`server.head_timeout`); Python attributes carry the unit
(`server.head_timeout_seconds`). The models check each value by itself; `checks` looks at what concerns several
values or the machine; `loading` reads file and environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import AfterValidator, Field, SecretStr

from gateway.config.entries import (
    BucketSettings,
    CallerClassSettings,
    CredentialSettings,
    EventSourceSettings,
    OriginCredentialSettings,
    SlotSettings,
)
from gateway.config.fields import (
    AZURE_FORM,
    DIALECT_NAMES,
    PORT,
    BandwidthBytesPerSecond,
    BearerToken,
    DialectName,
    DurationSeconds,
    FileMode,
    HostName,
    HostPattern,
    LinkBandwidth,
    PemFileSetting,
    Port,
    Section,
    SizeBytes,
    SocketPath,
    Symlinks,
    is_store,
    origin_url,
    power_of_two,
    setting,
)
from gateway.core.model import Homes


class ServerSettings(Section):
    """The S3 port."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. An address that is not loopback needs `[[credentials]]`, or `insecure = true`.",
        allowed="an address or host name of this machine",
        min_length=1,
    )
    port: Port = setting(9000, "TCP port of the S3 endpoint.", allowed=PORT)
    workers: int = setting(1, "Processes that serve S3; one for each core, or for two.", allowed="1 to 256")
    base_domains: list[HostName] = setting(
        [],
        "Domains under which `bucket.domain` names a bucket (virtual-hosted style).",
        allowed="a list of host names in lower case, without port",
    )
    certificate_file: PemFileSetting | None = setting(
        None, "PEM certificate chain: https instead of http on the S3 port.", allowed="a readable file; needs key_file"
    )
    key_file: PemFileSetting | None = setting(
        None, "PEM private key of the certificate.", allowed="a readable file; needs certificate_file"
    )
    local_socket: SocketPath | None = setting(
        None,
        "Unix socket for local reads: clients of this machine read blocks without HTTP. Only its owner and group may "
        "connect (0660), with a key as on the S3 port. Omitted: none.",
        allowed="an absolute path of at most 107 bytes, in a directory that exists",
    )
    insecure: bool = setting(
        False,
        "Listen on any address, although there are no `[[credentials]]` to check requests against.",
        allowed="true or false",
    )
    allow_unsigned: bool = setting(
        False,
        "Serve requests that carry no signature, with the gateway's own rights.",
        allowed="true or false; must be false with `[[credentials]]`",
    )
    allow_signature_v2: bool = setting(
        True,
        "Accept Signature V2 in presigned URLs, as boto3 and the AWS CLI make by default.",
        allowed="true or false",
    )
    head_timeout_seconds: DurationSeconds = setting(
        "20s", "How long a request's head may take to arrive.", allowed="1s to 1h"
    )
    body_timeout_seconds: DurationSeconds = setting(
        "60s", "How long a request's body may pause before the connection is closed.", allowed="1s to 1h"
    )
    keep_alive_timeout_seconds: DurationSeconds = setting(
        "75s", "How long an idle connection stays open; SDK pools expect a minute or more.", allowed="1s to 1h"
    )
    shutdown_grace_seconds: DurationSeconds = setting(
        "30s", "How long requests in flight may go on after SIGTERM.", allowed="0s to 1h"
    )
    caller_wait_seconds: DurationSeconds = setting(
        "5s",
        "How long a request waits for room under the limits of its credential and class. After that it gets 503 "
        "SlowDown.",
        allowed="0s to 60s",
        toml="caller_wait_max",
    )
    max_header_bytes: SizeBytes = setting(
        "64KiB", "The longest head of a request that is accepted.", allowed="8KiB to 1MiB", toml="max_header_bytes"
    )


class AdminSettings(Section):
    """The admin port: health, metrics, status."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. An address that is not loopback needs `token`, or `insecure = true`.",
        allowed="an address or host name of this machine",
        min_length=1,
    )
    port: Port = setting(9001, "TCP port of the admin endpoint.", allowed=PORT)
    token: BearerToken | None = setting(
        None,
        "Bearer token that every admin request must carry, except /healthz and /readyz.",
        allowed="at least 16 printable ASCII characters, no space first or last; this or token_file, not both",
    )
    token_file: Path | None = setting(
        None, "File that holds the token.", allowed="a readable file; this or token, not both"
    )
    insecure: bool = setting(False, "Listen on any address without a token.", allowed="true or false")


class OriginSettings(Section):
    """The bucket's home: any S3, a directory, or Azure Blob."""

    endpoint_url: Annotated[str, AfterValidator(origin_url)] = setting(
        "",
        "Where the origin is. Omitted: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else AWS for the region. With "
        "file:///mnt/nas or webhdfs://namenode:9870/data, each directory there is a bucket; with azure://…, each "
        "container of the account.",
        allowed="http://host[:port] or https://host[:port], without user, path or query; file:///path of a "
        f"directory; webhdfs://[user@]host:port[/path]; or {AZURE_FORM}",
    )
    region: str = setting(
        "",
        "Region that requests are signed for. Omitted: AWS_REGION, AWS_DEFAULT_REGION, else us-east-1.",
        allowed="a region name such as us-east-1",
        pattern=r"^[A-Za-z0-9-]*$",
    )
    addressing_style: Literal["auto", "path", "virtual"] = setting(
        "auto",
        "Bucket in the path or in the host name. `auto`: as the dialect needs it, and virtual for amazonaws.com; else "
        "path.",
        allowed="auto, path or virtual",
    )
    dialect: DialectName = setting(
        "auto",
        "How the origin differs from S3. `auto`: by the host of endpoint_url, else S3 as it is.",
        allowed=DIALECT_NAMES,
    )
    datanodes: list[HostPattern] = setting(
        [],
        "Hosts to which a webhdfs:// namenode may send reads. Empty: the namenode's own host, and those of its domain.",
        allowed="host names or addresses, or *.domain",
    )
    symlinks: Symlinks | None = setting(
        None,
        "Symbolic links in a file:// origin that stay in their bucket. read: reads follow them. follow: listings "
        "enter linked directories, too. Omitted: read.",
        allowed='"read" or "follow"',
    )
    file_mode: FileMode | None = setting(
        None,
        "Rights of new files in a file:// origin; directories may also be entered by those who may read. Omitted: what "
        "the umask leaves of 0666 and 0777.",
        allowed='octal digits as text, "0600" to "0777", with 6 or 7 for the owner',
    )
    access_key_id: str | None = setting(
        None,
        "Key id for the origin. Omitted: the usual AWS chain (environment, profile, web identity, instance).",
        allowed="a key id; needs secret_access_key or secret_access_key_file",
        min_length=1,
    )
    secret_access_key: SecretStr | None = setting(
        None, "Secret of the key id.", allowed="a secret; this or secret_access_key_file, not both", min_length=1
    )
    secret_access_key_file: Path | None = setting(
        None, "File that holds the secret.", allowed="a readable file; this or secret_access_key, not both"
    )
    session_token: SecretStr | None = setting(
        None, "Session token of temporary credentials.", allowed="a token; needs access_key_id", min_length=1
    )
    profile: str | None = setting(
        None,
        "Profile of the AWS configuration files.",
        allowed="a profile name; this or access_key_id, not both",
        min_length=1,
    )
    require_credentials: bool = setting(
        True,
        "Refuse to start without a key for the origin. false: start without one, and continue to look for it.",
        allowed="true or false",
    )
    ca_bundle: PemFileSetting | None = setting(
        None, "PEM certificates that Forebay trusts for the origin, instead of the system's.", allowed="a readable file"
    )
    proxy: SecretStr | None = setting(
        None,
        "HTTP proxy to the origin. Forebay never shows it, because it may contain a password.",
        allowed="http://[user:password@]host:port",
    )
    read_bandwidth_bytes_per_second: LinkBandwidth | None = setting(
        None,
        "Ceiling on reads of all slots together: what the link bears. `auto`: Forebay finds it out. Omitted: no limit.",
        allowed='at least 64KiB/s, such as "10GiB/s", or "auto"',
    )
    write_bandwidth_bytes_per_second: LinkBandwidth | None = setting(
        None,
        "Ceiling on writes of all slots together: what the link bears. `auto`: Forebay finds it out. Omitted: no "
        "limit.",
        allowed='at least 64KiB/s, such as "1.25GiB/s", or "auto"',
    )
    connect_timeout_seconds: DurationSeconds = setting(
        "5s",
        "How long connecting to the origin may take; at most six tenths of `first_byte_timeout` count.",
        allowed="100ms to 5m",
    )
    first_byte_timeout_seconds: DurationSeconds = setting(
        "8s",
        "How long a HEAD, or a GET of an object, waits for its answer to begin. Within this time Forebay also finds "
        "out that an origin accepts connections and says nothing, whatever the request.",
        allowed="500ms to 60s",
    )
    stall_timeout_seconds: DurationSeconds = setting(
        "5s",
        "Forebay gives up reading a body, also of a LIST, when less than 1 KiB of it comes in this time.",
        allowed="500ms to 60s",
    )
    read_timeout_seconds: DurationSeconds = setting(
        "60s", "How long an origin that answers other requests may be silent during a write.", allowed="100ms to 1h"
    )
    slow_timeout_seconds: DurationSeconds = setting(
        "5m",
        "The same for requests that take S3 minutes: CompleteMultipartUpload, copies, LIST, DeleteObjects.",
        allowed="1s to 1h",
    )
    connection_wait_seconds: DurationSeconds = setting(
        "20s",
        "How long a request waits for a free connection, or for its turn when the origin refuses requests because "
        "there are too many. After that it gets 503 SlowDown.",
        allowed="100ms to 5m",
    )
    max_connections: int = setting(
        256,
        "Connections to the origin in use, per worker. One access key gets at most three quarters of them, and half of "
        "them for uploads.",
        allowed="1 to 10000",
    )
    max_attempts: int = setting(
        4, "How often Forebay tries a request that may be repeated, the first time included.", allowed="1 to 20"
    )

    @property
    def needs_key(self) -> bool:
        """Return whether the gateway refuses to start without a key."""
        return self.require_credentials and not is_store(self.endpoint_url)


class CacheSettings(Section):
    """This node's disk."""

    directory: Path = setting(
        Path(),
        "Where the cache lies. Forebay works in a directory of its own, `forebay`, below one that holds other files or "
        "that others can enter. Omitted: $XDG_CACHE_HOME/forebay or ~/.cache/forebay.",
        allowed="a directory on a local disk",
    )
    capacity_bytes: SizeBytes = setting(
        0,
        "Bytes that cached blocks may take. Omitted: half of what the file system has free or the cache already holds.",
        allowed='at least 8 blocks, such as "1TiB"',
    )
    block_size_bytes: Annotated[SizeBytes, AfterValidator(power_of_two)] = setting(
        "8MiB", "Forebay caches objects in blocks of this size.", allowed="a power of two, 64KiB to 64MiB"
    )
    small_object_bytes_max: SizeBytes = setting(
        "1MiB",
        "Forebay packs blocks of at most this size, mostly small objects, into segment files of up to 16 MiB. 0 gives "
        "every block a file of its own.",
        allowed="0 to 1MiB",
        toml="small_object_max",
    )
    daily_writes_bytes: SizeBytes | None = setting(
        None,
        "Bytes that Forebay may write to the disk in a day (UTC) to cache what was missing: the disk's endurance. "
        "Beyond it, Forebay serves objects and does not cache them. Omitted: no limit.",
        allowed='at least 8 blocks, such as "2TiB"',
        gt=0,
    )
    persistent: bool = setting(
        False,
        "You state that the directory outlives the pod and a restart of the machine. Write-back needs that.",
        allowed="true or false",
    )
    readahead_bytes: SizeBytes = setting(
        "256MiB",
        "How far Forebay fetches ahead of one sequential reader at most; the window grows up to it. 0: not at all.",
        allowed="0 to 4GiB",
    )
    scrub_period_seconds: DurationSeconds = setting(
        "7d",
        "How often the scrubber reads all blocks on the disk and drops damaged ones. 0s: never.",
        allowed="0s to 365d",
    )
    scrub_bandwidth_bytes_per_second: BandwidthBytesPerSecond = setting(
        "16MiB/s", "How fast the scrubber reads from the disk at most.", allowed='at least 64KiB/s, such as "16MiB/s"'
    )
    bucket_metadata_ttl_seconds: DurationSeconds = setting(
        "60s",
        "How long Forebay remembers answers about buckets: HeadBucket, location, versioning, encryption, tags, object "
        "lock. 0s: it asks the origin each time.",
        allowed="0s to 1d",
    )


class LoggingSettings(Section):
    """Structured logs on standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Forebay writes events of this severity and above.", allowed="debug, info, warning or error"
    )
    format: Literal["auto", "json", "console"] = setting(
        "auto", "`auto`: console on a terminal, JSON lines elsewhere.", allowed="auto, json or console"
    )
    audit_file: Path | None = setting(
        None,
        "File for a JSON line about every request that changed something or was not allowed to, and about every change "
        "over the admin port. You may rename it while the gateway runs, as logrotate does. Omitted: none.",
        allowed="a file, which may be missing, in a directory that exists and is writable",
    )
    access_file: Path | None = setting(
        None,
        "File for a JSON line about every request to the S3 port that is over. Another file than `audit_file`; you may "
        "rename it as that one. Omitted: none.",
        allowed="a file, which may be missing, in a directory that is there and can be written to",
    )


class TracingSettings(Section):
    """Traces, by OpenTelemetry (docs/tracing.md). They need `pip install '.[otel]'` in a clone."""

    endpoint_url: str | None = setting(
        None,
        "Where a collector takes spans, by OTLP over HTTP. Headers and certificates: the SDK's variables "
        "(`OTEL_EXPORTER_OTLP_HEADERS`, …). Omitted: nothing is traced.",
        allowed='http:// or https://, host and path, such as "http://127.0.0.1:4318/v1/traces"',
        pattern=r"^https?://[^/?#@\s]+/[^?#\s]*$",
    )
    sample_ratio: float = setting(
        0.01,
        "Share of requests without a `traceparent` header that are traced. With the header, the client decides.",
        allowed="0 to 1",
    )
    service_name: str = setting(
        "forebay", "What spans are named after (`service.name`).", allowed="a name", min_length=1, max_length=200
    )


class ClusterSettings(Section):
    """Several nodes that read from each other (docs/cluster.md)."""

    name: str = setting(
        help="Name of the cluster; it is the same on all nodes.",
        allowed="letters, digits, `-`, `_`, `.`; at most 64, the first a letter or a digit",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    secret_file: PemFileSetting = setting(
        help="File with the cluster's secret: one or two lines, at least 32 characters each. The first signs; Forebay "
        "accepts both, so that you can change it node by node.",
        allowed="a readable file with one or two lines of at least 32 characters",
    )
    node: str = setting(
        "",
        "This node's name, in `forebay cluster status`. Omitted: the name of the host.",
        allowed="a name: at most 256 printable characters, no spaces around it",
    )
    listen: str = setting(
        "0.0.0.0:9002",
        "Address and port for the other nodes: the peer port.",
        allowed="host:port, or [address]:port; ports are 1 to 65535",
    )
    advertise: str = setting(
        "",
        "Address under which the other nodes reach the peer port. Omitted: that of `listen` if it names one, else the "
        "address of the default route with its port; or this node's entry in `members`, by `node` or loopback.",
        allowed="host:port, or [address]:port; no 0.0.0.0, and a loopback address only if all members have one",
    )
    members: list[str] = setting(
        [],
        "The peer ports of all nodes, this one included; or `dns://name:port`: all addresses of a name, which "
        "Forebay resolves again every few seconds.",
        allowed='a list such as ["10.0.3.17:9002", "10.0.3.18:9002"] or ["dns://forebay-peers:9002"]; this or redis',
    )
    redis: str = setting(
        "",
        "Redis 7.0 or Valkey 7.2, or later, in which the nodes find each other, instead of in `members`; or its "
        "Sentinels. It needs `pip install 'forebay[cluster]'`.",
        allowed="redis://host[:port][/database], or sentinel://host[:port],…/name[/database]; rediss:// or "
        "sentinels:// for TLS; this or members",
    )
    redis_user: str | None = setting(None, "User at Redis. Omitted: the default one.", allowed="a name", min_length=1)
    redis_password: SecretStr | None = setting(
        None, "Password at Redis.", allowed="a password; this or redis_password_file, not both", min_length=1
    )
    redis_password_file: Path | None = setting(
        None, "File that holds the password.", allowed="a readable file; this or redis_password, not both"
    )
    sentinel_password: SecretStr | None = setting(
        None,
        "Password at the Sentinels, if they want one. It may be another than at Redis.",
        allowed="a password; this or sentinel_password_file, not both",
        min_length=1,
    )
    sentinel_password_file: Path | None = setting(
        None, "File that holds the password.", allowed="a readable file; this or sentinel_password, not both"
    )
    zone: str = setting(
        "",
        "Nodes of other zones are not asked: the bucket is asked once for each zone. Omitted: there are no zones.",
        allowed="a name: at most 64 printable characters, no spaces around it",
        max_length=64,
    )
    weight: int | None = setting(
        None,
        "This node's share of the blocks, in proportion to the weights of the others. Omitted: cache.capacity in GiB, "
        "to two digits.",
        allowed="1 to 1000000",
    )
    fallback_requests: int = setting(
        16,
        "How many blocks at once this node reads from the bucket although another node looks after them: when that "
        "node and the one after it cannot be asked. More wait their turn.",
        allowed="1 to 1000",
    )
    tls: bool = setting(
        False,
        "The peer port speaks TLS, with `server.certificate_file` and `server.key_file`. Peers are verified by "
        "`origin.ca_bundle`, or the system's authorities. So is what `redis` reaches by TLS, whatever this says.",
        allowed="true or false; true needs server.certificate_file",
    )

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The secrets; the first signs."""
        return tuple(line.strip() for line in (self.secret_file.content or b"").splitlines() if line.strip())


class Settings(Section):
    """Everything that can be set. `loading.load_settings` fills in what was omitted and cross-checks."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    admin: AdminSettings = Field(default_factory=AdminSettings)
    origin: OriginSettings = Field(default_factory=OriginSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    cluster: ClusterSettings | None = None
    credentials: list[CredentialSettings] = Field(default_factory=list)
    caller_classes: list[CallerClassSettings] = Field(default_factory=list, max_length=64)
    origin_credentials: list[OriginCredentialSettings] = Field(default_factory=list)
    buckets: list[BucketSettings] = Field(default_factory=list)
    event_sources: list[EventSourceSettings] = Field(default_factory=list, max_length=16)
    slots: list[SlotSettings] = Field(default_factory=list)

    @property
    def homes(self) -> Homes:
        main = self.origin.endpoint_url
        return Homes(main, {one.name: one.endpoint_url for one in self.buckets if one.endpoint_url not in ("", main)})

    @property
    def block_sizes(self) -> list[tuple[str, str, int]]:
        """Return name, prefix and block size of each slot, that of what is in no slot first."""
        usual = self.cache.block_size_bytes
        return [("default", "", usual)] + [
            (one.name, str(one.prefix), one.block_size_bytes or usual) for one in self.slots
        ]


def settings_to_json(settings: Settings) -> bytes:
    """Everything, secrets included: for the pipe to a child process and nothing else."""
    return orjson.dumps(settings.model_dump(by_alias=True), default=_plain)


def settings_from_json(document: bytes) -> Settings:
    """Return the settings that `settings_to_json` wrote."""
    return Settings.model_validate(orjson.loads(document), by_alias=True)


def _plain(value: object) -> object:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def public_settings(settings: Settings) -> dict[str, Any]:
    """Effective settings under their TOML names, secrets hidden, ready for JSON."""
    return settings.model_dump(mode="json", by_alias=True)


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
    replica: int | None = None
    """Which of the bucket's replicas it is; None: it is its home."""

    @property
    def used_by(self) -> str:
        bucket = self.prefix.removeprefix("s3://").partition("/")[0]
        if self.replica is not None:
            return f"replica:{bucket}/{self.replica}"
        return f"bucket:{bucket}" if self.slot is None else f"slot:{self.slot}"

    @property
    def place(self) -> str:
        """The prefix, and whether it is a replica, in words."""
        return self.prefix if self.replica is None else f"{self.prefix} (replica)"


def signers(settings: Settings) -> Iterator[Signer]:
    """Every one of `[[buckets]]`, each with its replicas, then the slots with a key of their own."""
    names = {
        one.name: f"{one.name} ({_way(one.access_key_id, one.profile, one.role_arn)})"
        for one in settings.origin_credentials
    }
    own = "the key of [origin]"
    regions = {bucket.name: bucket.region for bucket in settings.buckets}
    for bucket in settings.buckets:
        signed = names[bucket.origin_credentials] if bucket.origin_credentials is not None else own
        signed = "no key" if is_store(bucket.endpoint_url) else signed
        yield Signer(
            f"s3://{bucket.name}/", None, bucket.endpoint_url, bucket.region, signed, bucket.origin_credentials
        )
        for i, one in enumerate(bucket.replicas):
            signed = names[one.origin_credentials] if one.origin_credentials is not None else own
            yield Signer(f"s3://{bucket.name}/", None, one.endpoint_url, one.region, signed, one.origin_credentials, i)
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
